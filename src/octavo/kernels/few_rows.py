"""Which products with dense weights are ours on a GPU, those of few rows, and how their kernel is called."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from octavo.kernels import backend, checks

if TYPE_CHECKING:
    from octavo.kernels.linear import PackedWeight

FEW_ROWS = 4  # up to which a GPU's time for a product is that of reading the weight, and ours to save
_MOST_NUMBERS = 1 << 16  # of x, as of the most rows of its class, that the kernel for few rows takes
MANY_ROWS = 32
_ROWS_OF_LARGE = 8
_LARGE = 1 << 23  # numbers; also what sets the launch parameters apart
_MOST_COLUMNS = 1 << 15
_DEEPEST = 1 << 14  # there is code for every part of K


def most_rows(width: int, depth: int) -> int:
    """Rows up to which Hopper's kernel in tensor cores is worth it for a weight of that shape; 0 = never.

    What it saves is launches (norm, gate and residual are along) and the start of each, which a large weight
    does not feel: from 9 rows on the library reads that faster. The more rows, the more often x, which every
    program reads whole, weighs as much as the program's part of the weight: beyond 32 always. A weight of
    many columns, as a head is, keeps a library busy from the first row on.
    """
    if not 0 < width <= _MOST_COLUMNS or not 0 < depth <= _DEEPEST:
        return 0
    return _ROWS_OF_LARGE if is_large(width, depth) else MANY_ROWS


def is_large(width: int, depth: int) -> bool:
    """Whether reading a weight of that shape is most of the time of a product."""
    return width * depth > _LARGE


def suits(x: Tensor, w: PackedWeight, *, has_norm: bool = False) -> bool:
    """Whether one of the two kernels takes it."""
    return suits_few_rows(x, w) or suits_many_rows(x, w, has_norm=has_norm)


def suits_few_rows(x: Tensor, w: PackedWeight) -> bool:
    """Whether Triton's kernel for few rows takes it. It is for GPUs; on a CPU only where Triton is forced.

    It has no gradients, and code for every part of K: a deep weight would take long to compile.
    """
    return (
        w.form == "dense"
        and x.dim() == 2
        and 0 < x.shape[0] <= FEW_ROWS
        and 0 < x.shape[1] << (x.shape[0] - 1).bit_length() <= _MOST_NUMBERS
        and (not x.is_cpu or backend.forced() == "triton")
        and _is_for_triton(x, w)
    )


def suits_many_rows(x: Tensor, w: PackedWeight, *, has_norm: bool = False) -> bool:
    """Whether the kernel for more than a few rows takes it. It has no gradients, either."""
    return (
        w.form == "dense"
        and x.dim() == 2
        and FEW_ROWS < x.shape[0] <= MANY_ROWS
        and not x.is_cpu
        and _is_for_triton(x, w)
        and is_for_many_rows(x.shape[0], w.shape, x.device, x.dtype, has_norm=has_norm)
    )


def _is_for_triton(x: Tensor, w: PackedWeight) -> bool:
    return (
        not x.requires_grad
        and w.data.is_contiguous()
        and backend.implementation_of("few_rows_linear", x.device.type, x.dtype) == "triton"
    )


def is_for_many_rows(
    rows: int, shape: tuple[int, int], device: torch.device, dtype: torch.dtype, *, has_norm: bool
) -> bool:
    """Whether that kernel is for so many rows of a weight of that shape there."""
    return FEW_ROWS < rows <= most_rows(*shape) and _does_many_rows(device, dtype, shape[1], has_norm)


@functools.cache
def _does_many_rows(device: torch.device, dtype: torch.dtype, depth: int, has_norm: bool) -> bool:
    from octavo.kernels.triton import few_rows_linear

    return few_rows_linear.unfit_for_many_rows(device, dtype, depth, has_norm=has_norm) is None


def product(
    name: str,
    x: Tensor,
    w: PackedWeight,
    bias: Tensor | None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    *,
    gated: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`(out, new_residual)` of the kernel, as `reference/few_rows_linear.py` says; `name` is who is asked.

    Raises:
        KernelArgumentError: a shape, dtype, device or stride is wrong.
    """
    columns, depth = w.shape
    rows = x.shape[0]
    checks.exactly(name, "x", x, (rows, depth), w.data.device, (w.data.dtype,))
    if bias is not None:
        checks.exactly(name, "bias", bias, (columns,), w.data.device, (w.data.dtype,))
    if residual is not None:
        onto = (rows, columns if norm_weight is None else depth)
        checks.exactly(name, "residual", residual, onto, x.device, (x.dtype,))
        residual = residual.contiguous()
    if norm_weight is not None:
        checks.exactly(name, "norm_weight", norm_weight, (depth,), x.device, (x.dtype,))
        if not 0.0 <= eps <= checks.FLOAT32_MAX:
            raise checks.wrong(name, "eps", "0 or positive", eps)
    kernel = backend.select("few_rows_linear", x.device.type, x.dtype)
    made: tuple[Tensor, Tensor | None] = kernel(
        x.contiguous(), w.data, bias, residual, norm_weight, eps, gated, w.at_rest
    )
    return made
