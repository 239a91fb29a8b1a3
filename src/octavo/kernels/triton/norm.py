"""Root-mean-square normalisation: each row is read once and stays in registers."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.known_calls import prepared_by
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


def prepare(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None,
    *,
    parameters: Parameters | None = None,
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """`rms_norm` for calls of this signature."""
    rows = _rows(x)
    added = rows if residual is None else _rows(residual)
    if rows is None or added is None or added.shape != rows.shape:  # with gaps, not one grid of rows
        return _of_copies(x, weight, eps, residual, parameters)
    depth, inner = rows.shape[2], rows.shape[1]
    num_rows = rows.shape[0] * inner
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    parameters = parameters or tuning.parameters("rms_norm", x.device, *launch_class(x, residual))
    launched = launch.Prepared(
        _norm, (-(-num_rows // parameters["BLOCK_ROWS"]),),
        {
            "x": x, "weight": weight, "out": out, "residual": x if residual is None else residual,
            "new_residual": None if residual is None else out, "eps": float(eps),
            "num_rows": num_rows, "inner": inner, "x_outer": rows.stride(0), "x_inner": rows.stride(1),
            "residual_outer": added.stride(0), "residual_inner": added.stride(1),
            "DEPTH": depth, "BLOCK_D": launch.block_for(depth), "HAS_RESIDUAL": residual is not None,
            "IS_GRID": rows.shape[0] > 1, "ALIGN": launch.alignment(rows, added),
            **launch.options(parameters, x.device),
        },
    )  # fmt: skip
    is_empty = x.numel() == 0

    def call(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if residual is None:
            if not is_empty:
                launched(x, weight, out, x)
            return out, None
        new_residual = torch.empty_like(out)
        if not is_empty:
            launched(x, weight, out, residual, new_residual)
        return out, new_residual

    return call


@prepared_by(prepare)
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
    return prepare(x, weight, eps, residual, parameters=parameters)(x, weight, eps, residual)


def _of_copies(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, parameters: Parameters | None
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    def contiguous(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.contiguous()

    call = prepare(x.contiguous(), weight, eps, contiguous(residual), parameters=parameters)
    return lambda x, weight, eps, residual: call(x.contiguous(), weight, eps, contiguous(residual))


def _rows(x: Tensor) -> Tensor | None:
    """x as (outer, inner, D), a view; None where its rows do not lie on a grid of two strides."""
    depth = x.shape[-1]
    if x.is_contiguous():
        return x.view(1, -1 if depth else 0, depth)
    if x.dim() == 2:
        return x[None]
    return x if x.dim() == 3 else None


def launch_class(x: Tensor, residual: Tensor | None) -> tuple[str, Parameters]:
    """The class of a call in the table of tuned launch parameters, and those that are right on any GPU."""
    depth = x.shape[-1]
    block = launch.block_for(depth)
    key = f"D{depth} {x.element_size()} bytes{'' if residual is None else ' residual'}"
    return key, {"BLOCK_ROWS": max(1, 1024 // block), "num_warps": min(16, max(2, block // 512)), "PDL": 1}
