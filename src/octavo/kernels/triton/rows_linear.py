"""A linear layer for 5 to 32 rows in Gluon: from memory into tensor cores, and norm and gate along.

What `few_rows_linear.py` says of a few rows holds here, too: reading the weight is what takes time. The warps
of a program share out K, every warp has all its rows and columns, and nobody reads what another reads: so
nothing has to go through shared memory before the end, where the warps' sums are added in their order::

    warp 0   K   0 ..  63, 512 .. 575, ...       (BLOCK_N columns of the weight) x (ROWS rows) in mma's layout
    warp 1   K  64 .. 127, ...                   AHEAD blocks of the weight are under way before the wait for
    ...                                          the kernel in front

The columns of the weight are the rows of an mma (16), the rows of x its columns (8), which wastes least. A
thread reads 16 bytes along K, of the weight as of x. That is not the order in which an mma wants them; but
both are in the same order, and a sum over K does not mind.

A row's output depends on the row, the weight, and the launch parameters of its class (`launch_class`).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated"
# ruff: noqa: RUF005  (Gluon has no starred tuples)

import functools

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels.few_rows import is_large
from octavo.kernels.triton import is_interpreted, launch
from octavo.kernels.triton.launch import direct
from octavo.kernels.triton.tuning import Parameters

_OLDEST, _NEWEST = (3, 6), (3, 9)  # of Triton, that the tests compile it with: Gluon's names still move
_FEW_COLUMNS = 2048
NO_RESIDUAL, IN_FRONT, BEHIND = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)


@gluon.jit
def _block(at, start: gl.constexpr, inner, DEPTH: gl.constexpr, BLOCK_K: gl.constexpr, POLICY: gl.constexpr):
    """What lies `start` further along K than `at`; 0 behind the end. inner: the places along K in a block."""
    if start + BLOCK_K <= DEPTH:
        return gl.load(at + start, eviction_policy=POLICY)
    return gl.load(at + start, mask=start + inner < DEPTH, other=0.0, eviction_policy=POLICY)


@gluon.jit
def _ahead(at, step: gl.constexpr, inner, DEPTH: gl.constexpr, BLOCK_K: gl.constexpr):
    """A block of the weight; read once, so not worth a place in a cache."""
    return _block(at, step * BLOCK_K, inner, DEPTH, BLOCK_K, "evict_first")


@direct
@gluon.jit(do_not_specialize=["width", "num_rows"])
def rows_linear(
    x, weight, bias, residual, norm_weight, out, new_residual, width, num_rows, eps,
    DEPTH: gl.constexpr, ROWS: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_NORM: gl.constexpr,
    IS_GATED: gl.constexpr, RESIDUAL: gl.constexpr, AT_REST: gl.constexpr, IS_WHOLE: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, AHEAD: gl.constexpr, PDL: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """RESIDUAL: where it is added. IS_WHOLE: BLOCK_N divides width. BLOCK_K: a multiple of 32 per warp."""
    if PDL:
        gdc_launch_dependents()
        if not AT_REST:
            gdc_wait()
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [num_warps, 1, 1], [1, 16, 8])
    W: gl.constexpr = gl.DotOperandLayout(0, MMA, 8)  # (warps, BLOCK_N, K of a warp)
    X: gl.constexpr = gl.DotOperandLayout(1, MMA, 8)  # (warps, K of a warp, ROWS)
    SHARE: gl.constexpr = BLOCK_K // num_warps
    STEPS: gl.constexpr = (DEPTH + BLOCK_K - 1) // BLOCK_K
    HELD: gl.constexpr = min(AHEAD, STEPS)

    first = gl.program_id(0) * BLOCK_N
    columns = first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, gl.SliceLayout(2, W)))
    if not IS_WHOLE:
        columns = gl.minimum(columns, width - 1)  # dead ones read something that exists, and are not written
    warp = gl.arange(0, num_warps, layout=gl.SliceLayout(1, gl.SliceLayout(2, W)))
    share = gl.arange(0, SHARE, layout=gl.SliceLayout(0, gl.SliceLayout(1, W)))
    w_inner = (warp * SHARE)[:, None, None] + share[None, None, :]
    weight_at = weight + (columns.to(gl.int64) * DEPTH)[None, :, None] + w_inner
    up_at = weight_at + width.to(gl.int64) * DEPTH
    held = ()
    for i in gl.static_range(HELD):
        held = held + (_ahead(weight_at, i, w_inner, DEPTH, BLOCK_K),)
        if IS_GATED:
            held = held + (_ahead(up_at, i, w_inner, DEPTH, BLOCK_K),)

    warp = gl.arange(0, num_warps, layout=gl.SliceLayout(1, gl.SliceLayout(2, X)))
    share = gl.arange(0, SHARE, layout=gl.SliceLayout(0, gl.SliceLayout(2, X)))
    x_inner = (warp * SHARE)[:, None, None] + share[None, :, None]
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(1, X)))
    x_place = (gl.minimum(rows, num_rows - 1) * DEPTH)[None, None, :] + x_inner
    if PDL and AT_REST:
        gdc_wait()

    sums = gl.zeros([num_warps, BLOCK_N, ROWS], gl.float32, layout=MMA)
    up_sums = gl.zeros([num_warps, BLOCK_N, ROWS], gl.float32, layout=MMA)
    squares = gl.zeros([num_warps, ROWS], gl.float32, layout=gl.SliceLayout(1, X))
    for step in gl.static_range(STEPS):
        values = _block(x + x_place, step * BLOCK_K, x_inner, DEPTH, BLOCK_K, "")
        if RESIDUAL == IN_FRONT:
            values = values + _block(residual + x_place, step * BLOCK_K, x_inner, DEPTH, BLOCK_K, "")
            # Every program has the sum of x and residual; each block of it is written by one.
            is_mine = gl.program_id(0) == step % gl.num_programs(0)
            writes = (rows < num_rows * is_mine.to(gl.int32))[None, None, :]
            if (step + 1) * BLOCK_K > DEPTH:
                writes = writes & (step * BLOCK_K + x_inner < DEPTH)
            gl.store(new_residual + x_place + step * BLOCK_K, values, mask=writes)
        if HAS_NORM:
            wide = values.to(gl.float32)
            squares += gl.sum(wide * wide, 1)
            values = values * _block(norm_weight + x_inner, step * BLOCK_K, x_inner, DEPTH, BLOCK_K, "")
        part = held[step * (2 if IS_GATED else 1)]
        sums = mma_v2(part, values, sums)
        if IS_GATED:
            up_part = held[step * 2 + 1]
            up_sums = mma_v2(up_part, values, up_sums)
        if step + HELD < STEPS:
            held = held + (_ahead(weight_at, step + HELD, w_inner, DEPTH, BLOCK_K),)
            if IS_GATED:
                held = held + (_ahead(up_at, step + HELD, w_inner, DEPTH, BLOCK_K),)

    # A thread adds up what the warps have of an output.
    ADD: gl.constexpr = gl.BlockedLayout([num_warps, 1, 1], [1, 16, 2], [1, 1, num_warps], [1, 2, 0])
    OUT: gl.constexpr = gl.SliceLayout(0, ADD)
    found = gl.sum(gl.convert_layout(sums, ADD), 0)
    up = found
    if IS_GATED:
        up = gl.sum(gl.convert_layout(up_sums, ADD), 0)
    if HAS_NORM:
        total = gl.convert_layout(gl.sum(squares, 0), gl.SliceLayout(0, OUT))
        rms = gl.rsqrt(total * (1.0 / DEPTH) + eps)[None, :]
        found *= rms
        up *= rms
    columns = first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, OUT))
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(0, OUT))
    if HAS_BIAS:
        found += gl.load(bias + columns, mask=columns < width, other=0.0).to(gl.float32)[:, None]
        if IS_GATED:
            up += gl.load(bias + width + columns, mask=columns < width, other=0.0).to(gl.float32)[:, None]
    if IS_GATED:
        found = found / (1.0 + gl.exp(-found)) * up
    is_live = (columns < width)[:, None] & (rows < num_rows)[None, :]
    place = rows[None, :] * width + columns[:, None]
    rounded = found.to(out.dtype.element_ty)
    if RESIDUAL == BEHIND:
        rounded += gl.load(residual + place, mask=is_live, other=0.0)
    gl.store(out + place, rounded, mask=is_live)


def unfit_reason(device: torch.device, dtype: torch.dtype, depth: int, *, has_norm: bool) -> str | None:
    """Why the kernel does not do it, whatever the rows; None when it does."""
    reason = _unfit_device(device)
    if reason is not None:
        return reason
    if dtype not in (torch.bfloat16, torch.float16):
        return f"activations of {dtype}"
    if has_norm and dtype == torch.float16:
        return "a norm in float16: what is not yet divided by the root may be too large"
    if depth % 8 or depth == 0:
        return f"rows of {depth} numbers, which are not aligned to 16 bytes"
    return None


@functools.cache
def _unfit_device(device: torch.device) -> str | None:
    major, minor = triton.__version__.split(".")[:2]
    if not _OLDEST <= (int(major), int(minor)) <= _NEWEST:
        return f"not proven on Triton {triton.__version__}"
    if is_interpreted():
        return "Gluon is not interpreted"
    if device.type not in ("cuda", "cpu") or torch.version.hip is not None:
        return "not an NVIDIA GPU"
    if torch.cuda.get_device_capability(device.index) != (9, 0):
        return "not a Hopper GPU"
    return None


def launch_class(x: Tensor, width: int, is_gated: bool) -> tuple[str, Parameters]:
    """The class of a call in the table of tuned launch parameters, and those that are right on any GPU."""
    rows, depth = rows_class(x.shape[0]), x.shape[1]
    large = is_large(width * (1 + is_gated), depth)
    # As many programs as a GPU has processors, or more; the fewer there are, the more is under way in each.
    size = "few" if width <= _FEW_COLUMNS else "some" if large and width <= 2 * _FEW_COLUMNS else "many"
    key = f"M{rows} K{depth} {size} columns {x.element_size()} bytes{' gated' if is_gated else ''}"
    block_n, block_k, ahead, num_warps = 32, 256, 2, 8
    if size == "few" and rows == 32 and depth % 1024 == 0:  # what is left of a block spills registers there
        block_n, block_k, ahead, num_warps = 16, 1024, 3, 16
    elif size == "few" and rows == 16 and depth <= 2048:
        block_n, ahead = 16, 8
    elif size == "few":
        block_n, block_k, ahead, num_warps = 16, 512, 4, 16
    elif size == "some" and not is_gated:
        block_k, ahead = 512, 3
    elif is_gated and large:
        ahead = 3
    elif rows == 8 and not is_gated:
        ahead = 4
    return key, {
        "BLOCK_N": block_n, "BLOCK_K": block_k, "AHEAD": ahead, "num_warps": num_warps, "PDL": 1
    }  # fmt: skip


def rows_class(num_rows: int) -> int:
    """8, 16 or 32: the rows that are computed, of which the last ones may be for nothing."""
    return max(8, launch.block_for(num_rows))


def prepare(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    is_gated: bool,
    at_rest: bool,
    parameters: Parameters,
) -> launch.Prepared:
    """The launch for calls of this signature; its tensors are (x, weight, bias, residual, norm_weight, out,
    new_residual), without those that there are not."""
    num_rows, depth = x.shape
    width = weight.shape[0] // 2 if is_gated else weight.shape[0]
    place = NO_RESIDUAL if residual is None else IN_FRONT if norm_weight is not None else BEHIND
    return launch.Prepared(
        rows_linear, (-(-width // parameters["BLOCK_N"]),),
        {
            "x": x, "weight": weight, "bias": bias, "residual": residual, "norm_weight": norm_weight,
            "out": x.new_empty((num_rows, width)),
            "new_residual": torch.empty_like(x) if place.value == IN_FRONT.value else None,
            "width": width, "num_rows": num_rows, "eps": float(eps), "DEPTH": depth,
            "ROWS": rows_class(num_rows), "HAS_BIAS": bias is not None,
            "HAS_NORM": norm_weight is not None, "IS_GATED": is_gated, "RESIDUAL": place.value,
            "AT_REST": at_rest, "IS_WHOLE": width % parameters["BLOCK_N"] == 0,
            **launch.options(parameters, x.device),
        },
    )  # fmt: skip
