"""Root-mean-square normalisation: each row is read once and stays in registers."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton import launch, tuning
from octavo.kernels.triton.tuning import Parameters

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@triton.jit
def _begin(row, inner, stride_outer, stride_inner, IS_GRID: tl.constexpr, ALIGN: tl.constexpr):
    """Elements (R, 1) at which rows begin."""
    if IS_GRID:
        at = launch.part(row // inner, stride_outer, ALIGN) + launch.part(row % inner, stride_inner, ALIGN)
    else:
        at = launch.part(row, stride_inner, ALIGN)
    return at[:, None]


@launch.direct
@triton.jit(do_not_specialize=["num_rows", "inner", "x_outer", "x_inner", "residual_outer", "residual_inner"])
def _norm(
    x, weight, out, residual, new_residual, eps,
    num_rows, inner, x_outer, x_inner, residual_outer, residual_inner,
    DEPTH: tl.constexpr, BLOCK_D: tl.constexpr, HAS_RESIDUAL: tl.constexpr, IS_GRID: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch.begin(PDL)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    live = (row < num_rows)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    mask = live & (dims < DEPTH)
    w = tl.load(weight + dims, mask=dims < DEPTH, other=0.0, eviction_policy="evict_last").to(tl.float32)
    at = _begin(row, inner, x_outer, x_inner, IS_GRID, ALIGN)
    wide = tl.load(x + (at + dims), mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    to = (row.to(tl.int64) * DEPTH)[:, None] + dims
    if HAS_RESIDUAL:
        at = _begin(row, inner, residual_outer, residual_inner, IS_GRID, ALIGN)
        added = tl.load(residual + (at + dims), mask=mask, other=0.0, eviction_policy="evict_first")
        summed = (wide + added.to(tl.float32)).to(x.dtype.element_ty)
        tl.store(new_residual + to, summed, mask=mask)
        wide = summed.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) * (1.0 / DEPTH) + eps)
    tl.store(out + to, (wide * scale[:, None] * w).to(x.dtype.element_ty), mask=mask)


def supports(x_dtype: torch.dtype, weight_dtype: torch.dtype) -> str | None:
    """None when the kernel can do it, else why not."""
    for dtype in (x_dtype, weight_dtype):
        if dtype not in _DTYPES:
            return f"no Triton kernel for {dtype}"
    return None


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None,
    *,
    parameters: Parameters | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`(out, new_residual)`; the sum is rounded to the dtype of `x` before it is normalised.

    `parameters` take the place of those of this GPU's table.
    """
    depth = x.shape[-1]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    new_residual = None if residual is None else torch.empty_like(out)
    if x.numel() == 0:
        return out, new_residual
    x, inner = _rows(x)
    added, added_inner = (x, inner) if residual is None else _rows(residual)
    if added_inner != inner:  # laid out differently, and one of them with gaps
        x, added = x.reshape(1, -1, depth), added.reshape(1, -1, depth)
        inner = x.shape[1]
    num_rows = x.shape[0] * inner
    parameters = parameters or tuning.parameters("rms_norm", x.device, *launch_class(x, residual))
    options = launch.options(parameters, x.device)
    _norm[-(-num_rows // parameters["BLOCK_ROWS"]),](
        x, weight, out, added, new_residual, float(eps),
        num_rows, inner, *x.stride()[:2], *added.stride()[:2],
        DEPTH=depth, BLOCK_D=launch.block_for(depth), HAS_RESIDUAL=residual is not None,
        IS_GRID=x.shape[0] > 1, ALIGN=launch.alignment(x, added), **options,
    )  # fmt: skip
    return out, new_residual


def _rows(x: Tensor) -> tuple[Tensor, int]:
    """x as (outer, inner, D), and inner: a view where the rows lie on a grid of two strides, else a copy."""
    depth = x.shape[-1]
    if x.dim() == 2:
        x = x[None]
    elif x.is_contiguous():
        x = x.view(1, -1, depth)
    elif x.dim() != 3:
        x = x.reshape(1, -1, depth)
    return x, x.shape[1]


def launch_class(x: Tensor, residual: Tensor | None) -> tuple[str, Parameters]:
    """The class of a call in the table of tuned launch parameters, and those that are right on any GPU."""
    depth = x.shape[-1]
    block = launch.block_for(depth)
    key = f"D{depth} {x.element_size()} bytes{'' if residual is None else ' residual'}"
    return key, {"BLOCK_ROWS": max(1, 1024 // block), "num_warps": min(16, max(2, block // 512)), "PDL": 1}
