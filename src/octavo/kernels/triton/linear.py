"""A matrix product whose rows have the same bits in every batch: all tiles are computed in one way.

Libraries choose another kernel, and with it another order of additions, for other numbers of rows. Here the
tile, the instruction and the order along K follow from the weight alone; a row is one of the 64 of its tile
and never meets another. What that costs is in docs/performance.md.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton import is_interpreted, launch

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_BLOCK_M = 64
_K_BYTES = 128
_FEW_TILES = 256
"""Columns of tiles below which narrower ones keep more of a GPU busy."""


@launch.direct
@triton.jit(do_not_specialize=["num_rows"])
def _linear(
    x, w, bias, out, num_rows, depth,
    N: tl.constexpr, IS_WHOLE: tl.constexpr, HAS_BIAS: tl.constexpr, IN_FLOAT32: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch.begin(PDL)
    # Tiles of the same columns follow each other, so that a weight comes from memory once.
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_K)
    # Dead rows and columns read something that exists, and are not written.
    row = tl.where(rows < num_rows, rows, 0).to(tl.int64)
    column = tl.where(columns < N, columns, 0).to(tl.int64)
    x_at = x + (row * depth)[:, None] + dims[None, :]
    w_at = w + (column * depth)[None, :] + dims[:, None]
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, depth, BLOCK_K):
        if IS_WHOLE:
            a = tl.load(x_at + k)
            b = tl.load(w_at + k)
        else:
            a = tl.load(x_at + k, mask=(dims < depth - k)[None, :], other=0.0)
            b = tl.load(w_at + k, mask=(dims < depth - k)[:, None], other=0.0)
        if IN_FLOAT32:
            a, b = a.to(tl.float32), b.to(tl.float32)
        sums = tl.dot(a, b, sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias + column).to(tl.float32)[None, :]
    to = out + (row * N)[:, None] + columns[None, :]
    tl.store(to, sums.to(out.dtype.element_ty), mask=(rows < num_rows)[:, None] & (columns < N)[None, :])


def supports(x_dtype: torch.dtype) -> str | None:
    """None when the kernel can do it, else why not."""
    return None if x_dtype in _DTYPES else f"no Triton kernel for {x_dtype}"


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias`; a row's bits depend on the row, the weight and the bias alone."""
    num_rows, depth = x.shape
    width = weight.shape[0]
    out = x.new_empty((num_rows, width))
    if out.numel() == 0:
        return out
    if depth == 0:
        return out.zero_() if bias is None else out.copy_(bias)
    block_n = next((n for n in (128, 64, 32) if width >= n * _FEW_TILES), 32)
    block_k = min(_K_BYTES // x.element_size(), max(16, launch.block_for(depth)))
    _linear[-(-num_rows // _BLOCK_M), -(-width // block_n)](
        x, weight, bias, out, num_rows, depth,
        N=width, IS_WHOLE=depth % block_k == 0, HAS_BIAS=bias is not None,
        # The interpreter multiplies the bits of a bfloat16 as if they were an integer.
        IN_FLOAT32=is_interpreted(),
        BLOCK_M=_BLOCK_M, BLOCK_N=block_n, BLOCK_K=block_k,
        **launch.options({"num_warps": 4, "num_stages": 4, "PDL": 1}, x.device),
    )  # fmt: skip
    return out
