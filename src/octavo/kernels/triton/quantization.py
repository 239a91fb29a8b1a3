"""Rounding to the one-byte numbers of a quantised cache; `reference/quantization.py` is the specification.

A kernel sees a quantised cache as bytes. How a value becomes what is stored is its *form*:

- AS_IS: converted to the dtype of the cache.
- E4M3: by the GPU's own instruction (NVIDIA, from compute capability 8.9).
- E4M3_BITS: the same bits by integer arithmetic, on any GPU.
- INT8.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import triton as room
from octavo.kernels.triton.tiles import NO_SCALE, ONE_SCALE, ONE_VALUE, TOKEN_SCALES

AS_IS, E4M3, E4M3_BITS, INT8 = range(4)

_ONE_SCALE: tl.constexpr = tl.constexpr(ONE_SCALE)
_ONE_VALUE: tl.constexpr = tl.constexpr(ONE_VALUE)
_TOKEN_SCALES: tl.constexpr = tl.constexpr(TOKEN_SCALES)

# Added to a float32, 1.5 * 2^23 rounds it to an integer, a tie to the even one; 2^14 to a multiple of 2^-9,
# float8's smallest number.
_MAGIC_INT: tl.constexpr = tl.constexpr(12582912.0)
_MAGIC_TINY: tl.constexpr = tl.constexpr(16384.0)
_MAGIC_TINY_BITS: tl.constexpr = tl.constexpr(0x46800000)
_SMALLEST_SCALE: tl.constexpr = tl.constexpr(2.0**-126)


@triton.jit
def magnitude(x):
    """|x| where it is finite, else 0: what a row's scale is taken from."""
    m = tl.abs(x)
    return tl.where(m < float("inf"), m, 0.0)


@triton.jit
def scale_of(highest, FORM: tl.constexpr):
    """A row's scale from its highest magnitude."""
    LARGEST: tl.constexpr = 127.0 if FORM == 3 else 448.0
    return tl.maximum(highest * (1.0 / LARGEST), _SMALLEST_SCALE)


@triton.jit
def inverse(scale):
    """1 / scale, correctly rounded: the reference divides, and a GPU's plain division does not round so."""
    return tl.div_rn(1.0, scale)


@triton.jit
def encode(x, FORM: tl.constexpr):
    """The byte that stands for x (float32, already divided by its scale)."""
    if FORM == 1:
        code = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)  # saturates, and keeps a NaN
    elif FORM == 2:
        m = tl.minimum(tl.abs(x), 448.0)
        bits = m.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
        tiny = (m + _MAGIC_TINY).to(tl.int32, bitcast=True) - _MAGIC_TINY_BITS
        number = tl.where(x != x, 0x7F, tl.where(m < 0.015625, tiny, normal))
        code = (number | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)
    else:
        m = tl.minimum(tl.maximum(x, -127.0), 127.0)
        number = (m + _MAGIC_INT).to(tl.int32, bitcast=True) & 0xFF
        code = tl.where(x != x, 0, number).to(tl.uint8)
    return code


@triton.jit
def factor(
    highest, scale, at, mask, value, FORM: tl.constexpr, SCALE: tl.constexpr, AXIS: tl.constexpr
):  # fmt: skip
    """What numbers are multiplied with before they are encoded: the inverse of their scale.

    With TOKEN_SCALES the scales are made here, of each row's `highest` magnitude, and stored at `scale + at`.
    """
    if SCALE == _TOKEN_SCALES:
        of_row = scale_of(highest, FORM)
        tl.store(scale + at, of_row, mask=mask)
        result = tl.expand_dims(inverse(of_row), AXIS)
    elif SCALE == _ONE_SCALE:
        result = inverse(tl.load(scale))
    elif SCALE == _ONE_VALUE:
        result = inverse(value)
    else:
        result = 1.0
    return result


@triton.jit
def store(cache, at, x, mask, factor, FORM: tl.constexpr):
    """Numbers into the cache, in its form."""
    if FORM == 0:
        tl.store(cache + at, x.to(cache.dtype.element_ty), mask=mask)
    else:
        tl.store(cache + at, encode(x.to(tl.float32) * factor, FORM), mask=mask)


@functools.cache
def form_of(dtype: torch.dtype, device: torch.device) -> int:
    """How values become numbers of a cache of that dtype there."""
    if dtype == torch.int8:
        return INT8
    if dtype != torch.float8_e4m3fn:
        return AS_IS
    has_instruction = (
        device.type == "cuda"
        and torch.version.hip is None
        and not room.is_interpreted()
        and torch.cuda.get_device_capability(device) >= (8, 9)
    )
    return E4M3 if has_instruction else E4M3_BITS


def as_stored(cache: Tensor) -> Tensor:
    """The cache as its kernel sees it."""
    return cache.view(torch.uint8) if cache.element_size() == 1 else cache


def scale_arguments(
    scale: Tensor | float | None, form: int
) -> tuple[int, Tensor | None, float, tuple[int, ...]]:
    """(kind, tensor, number, three strides) as the kernels take them."""
    if form == AS_IS:
        return NO_SCALE, None, 1.0, (0, 0, 0)
    if not isinstance(scale, Tensor):
        return ONE_VALUE, None, 1.0 if scale is None else float(scale), (0, 0, 0)
    if scale.dim() < 3:
        return ONE_SCALE, scale, 1.0, (0, 0, 0)
    return TOKEN_SCALES, scale, 1.0, scale.stride()
