"""A linear layer for a few rows: it reads a weight as fast as memory gives it, and takes norm and gate along.

With so few rows a product is the reading of its weight, and a decode step a chain of short readings between
which a GPU starts anew. So every program has its rows of the weight under way before it waits for the kernel
in front, if nothing writes that weight any more (`launch.py`), and what stands before and after a product
in a decoder is done by the product: the RMS norm of the sum of activations and residual stream, whose scale
can be multiplied in at the end, and `silu(gate) * up`. One output is one sum over K, by lanes and then across
them, whatever the row count.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.few_rows import FEW_ROWS
from octavo.kernels.known_calls import KnownCalls
from octavo.kernels.triton import launch, tuning
from octavo.kernels.triton.tuning import Parameters

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FEW_COLUMNS = 2048
"""Columns up to which a program takes one of them, so that there are programs for a whole GPU."""

_known = KnownCalls()


@triton.jit
def _weights(at, start, DEPTH: tl.constexpr, BLOCK_K: tl.constexpr):
    """(outputs, BLOCK_K) of the weight, from `start` along K; read once, so not worth a place in a cache."""
    if DEPTH % BLOCK_K == 0:
        return tl.load(at + start, eviction_policy="evict_first")
    inside = (start + tl.arange(0, BLOCK_K) < DEPTH)[None, :]
    return tl.load(at + start, mask=inside, other=0.0, eviction_policy="evict_first")


@launch.direct
@triton.jit(do_not_specialize=["width", "num_rows"])
def _few_rows_linear(
    x, weight, bias, residual, norm_weight, out, new_residual, width, num_rows, eps,
    DEPTH: tl.constexpr, ROWS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr,
    IS_GATED: tl.constexpr, AT_REST: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if not AT_REST:
            tl.extra.cuda.gdc_wait()
    # An output is a row's sum for a column; the rows of a column read its weights from the nearest cache.
    outputs = tl.arange(0, ROWS * BLOCK_N)
    row = outputs // BLOCK_N
    columns = tl.program_id(0) * BLOCK_N + outputs % BLOCK_N
    is_live = (row < num_rows) & (columns < width)
    # Dead outputs read something that exists, and are not written.
    row = tl.where(row < num_rows, row, 0)
    column = tl.where(columns < width, columns, 0).to(tl.int64)
    dims = tl.arange(0, BLOCK_K)[None, :]
    weight_at = weight + (column * DEPTH)[:, None] + dims
    up_at = weight_at + width.to(tl.int64) * DEPTH
    first = _weights(weight_at, 0, DEPTH, BLOCK_K)
    first_up = _weights(up_at, 0, DEPTH, BLOCK_K) if IS_GATED else first
    if PDL and AT_REST:
        tl.extra.cuda.gdc_wait()

    sums = tl.zeros((ROWS * BLOCK_N, BLOCK_K), dtype=tl.float32)
    up_sums = tl.zeros((ROWS * BLOCK_N, BLOCK_K), dtype=tl.float32)
    squares = tl.zeros((1 if ROWS == 1 else ROWS * BLOCK_N, BLOCK_K), dtype=tl.float32)
    # The sum of x and residual, which every program has, is written by one: by its first output of each row.
    writes = outputs % BLOCK_N == tl.where(tl.program_id(0) == 0, 0, -1)
    for start in tl.static_range(0, DEPTH, BLOCK_K):
        inside = start + dims < DEPTH
        place = start + dims if ROWS == 1 else tl.zeros_like(row)[:, None] + (start + dims)
        at = place if ROWS == 1 else (row * DEPTH)[:, None] + place
        values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        if HAS_NORM:
            added = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
            rounded = (values + added).to(x.dtype.element_ty)
            to = (row * DEPTH)[:, None] + (start + dims)
            tl.store(new_residual + to, tl.broadcast_to(rounded, to.shape), mask=writes[:, None] & inside)
            values = rounded.to(tl.float32)
            squares += values * values
            values *= tl.load(norm_weight + place, mask=inside, other=0.0).to(tl.float32)
        part = first if start == 0 else _weights(weight_at, start, DEPTH, BLOCK_K)
        sums += part.to(tl.float32) * values
        if IS_GATED:
            part = first_up if start == 0 else _weights(up_at, start, DEPTH, BLOCK_K)
            up_sums += part.to(tl.float32) * values
    found = tl.sum(sums, 1)
    up = tl.sum(up_sums, 1)
    if HAS_NORM:
        rms = tl.rsqrt(tl.sum(squares, 1) * (1.0 / DEPTH) + eps)
        found *= rms
        up *= rms
    if HAS_BIAS:
        found += tl.load(bias + column).to(tl.float32)
        if IS_GATED:
            up += tl.load(bias + width + column).to(tl.float32)
    if IS_GATED:
        found = found / (1.0 + tl.exp(-found)) * up
    tl.store(out + row * width + columns, found.to(out.dtype.element_ty), mask=is_live)


def supports(x_dtype: torch.dtype) -> str | None:
    """None when the kernel can do it, else why not."""
    return None if x_dtype in _DTYPES else f"no Triton kernel for {x_dtype}"


def unfit_for_many_rows(
    device: torch.device, dtype: torch.dtype, depth: int, *, has_norm: bool
) -> str | None:
    """Why more than FEW_ROWS rows are not for tensor cores, in `rows_linear.py`; None when they are."""
    module = _rows_linear()
    if isinstance(module, str):
        return module
    reason: str | None = module.unfit_reason(device, dtype, depth, has_norm=has_norm)
    return reason


@functools.cache
def _rows_linear() -> Any:
    """The module of the kernel for more rows, or why there is none."""
    try:
        from octavo.kernels.triton import rows_linear
    except (ImportError, AttributeError) as error:  # it is written in Gluon, which moves with every release
        return f"rows_linear does not import ({error})"
    return rows_linear


def few_rows_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    is_gated: bool,
    at_rest: bool,
    *,
    parameters: Parameters | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`(out, x + residual)`; see the reference. `parameters` take the place of those of this GPU's table."""
    tensors = (x, weight, bias, residual, norm_weight)
    call = _known.get(tensors, eps, is_gated, at_rest) if parameters is None else None
    if call is None:
        call = _prepare(*tensors, eps, is_gated, at_rest, parameters)
        if parameters is None:
            _known.keep(call, tensors, eps, is_gated, at_rest)
    made: tuple[Tensor, Tensor | None] = call(*tensors)
    return made


def _prepare(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    is_gated: bool,
    at_rest: bool,
    parameters: Parameters | None,
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The function for calls of this signature."""
    num_rows = x.shape[0]
    width = weight.shape[0] // 2 if is_gated else weight.shape[0]
    depth, has_norm = x.shape[1], norm_weight is not None
    if num_rows > FEW_ROWS and unfit_for_many_rows(x.device, x.dtype, depth, has_norm=has_norm) is None:
        rows_linear = _rows_linear()
        name, key_and_default = "rows_linear", rows_linear.launch_class(x, width, is_gated)
        make = rows_linear.prepare
    else:
        name, key_and_default = "few_rows_linear", launch_class(x, width, is_gated)
        make = _prepare_few
    parameters = parameters or tuning.parameters(name, x.device, *key_and_default)
    launched = make(x, weight, bias, residual, norm_weight, eps, is_gated, at_rest, parameters)
    is_in_front = residual is not None and has_norm

    def call(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        norm_weight: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        out = x.new_empty((num_rows, width))
        new_residual = torch.empty_like(x) if is_in_front else None
        tensors = (x, weight, bias, residual, norm_weight, out, new_residual)
        launched(*[one for one in tensors if one is not None])
        return out, new_residual

    return call


def _prepare_few(
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
    assert (residual is None) == (norm_weight is None)
    num_rows, depth = x.shape
    width = weight.shape[0] // 2 if is_gated else weight.shape[0]
    return launch.Prepared(
        _few_rows_linear, (-(-width // parameters["BLOCK_N"]),),
        {
            "x": x, "weight": weight, "bias": bias, "residual": residual, "norm_weight": norm_weight,
            "out": x.new_empty((num_rows, width)),
            "new_residual": None if residual is None else torch.empty_like(x),
            "width": width, "num_rows": num_rows, "eps": float(eps), "DEPTH": depth,
            "ROWS": launch.block_for(num_rows), "HAS_BIAS": bias is not None,
            "HAS_NORM": residual is not None, "IS_GATED": is_gated, "AT_REST": at_rest,
            **launch.options(parameters, x.device),
        },
    )  # fmt: skip


def launch_class(x: Tensor, width: int, is_gated: bool) -> tuple[str, Parameters]:
    """The class of a call in the table of tuned launch parameters, and those that are right on any GPU."""
    rows, depth = launch.block_for(x.shape[0]), x.shape[1]
    size = "few" if width <= FEW_COLUMNS else "many"
    key = f"M{rows} K{depth} {size} columns {x.element_size()} bytes{' gated' if is_gated else ''}"
    # Enough programs for a GPU, and enough of the weight under way in each.
    block_n = 1 if size == "few" else 2 if is_gated else 4
    block_k = 1024 if size == "many" and not is_gated else 2048
    num_warps = 4 if depth > 1024 and (is_gated or size == "few") else 2
    if rows == 1 and depth > 4096 and not is_gated:
        block_n, block_k, num_warps = 1, 2048, 4
    elif rows == 1 and depth % 4096 == 0 and is_gated:
        block_n, block_k, num_warps = 1, 4096, 4
    block_k = block_k * 2 // x.element_size() // rows
    if is_gated and rows == 4:
        block_k //= 2  # or its sums do not fit into the registers
    block_k = min(launch.block_for(depth), max(128, block_k))
    return key, {"BLOCK_N": block_n, "BLOCK_K": block_k, "num_warps": num_warps, "PDL": 1}
