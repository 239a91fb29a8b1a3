"""What the entries of a decode step have in common, and one attention of two parts: a launch each.

A program of the first looks at one octet and adds its length to the prefix sums behind it. A program of the
second joins the parts of one entry, some heads at a time.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton import SHORT
from octavo.kernels.triton.launch import begin, block_for, direct, options

_FAR: tl.constexpr = tl.constexpr(2**30)
_ELEMENTS = 4096  # of a part that a program joins at once, at most
_COLUMNS = 512


@direct
@triton.jit(
    do_not_specialize=["batch", "num_octets", "table_stride", "block_size", "least"],
    do_not_specialize_on_alignment=["block_table", "cu_seqlens_k", "lens", "octets_q", "octets_k"],
)
def _find_shared_prefixes(
    block_table, cu_seqlens_k, lens, octets_q, octets_k,
    batch, num_octets, table_stride, block_size, least,
    OCTET: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    octet = tl.program_id(0)
    b = octet * OCTET + tl.arange(0, OCTET)
    there = b < batch
    begins = tl.load(cu_seqlens_k + b, mask=there, other=0)
    lens_k = tl.load(cu_seqlens_k + b + 1, mask=there, other=0) - begins
    takes_part = lens_k > 0
    shares = tl.sum(takes_part.to(tl.int32), 0) > 1
    shortest = tl.min(tl.where(takes_part, lens_k, _FAR), 0)
    num = tl.where(shares, (shortest - 1) // block_size, 0)
    num = tl.where(num * block_size < least, 0, num)
    first_row = block_table + (octet * OCTET).to(tl.int64) * table_stride
    rows = block_table + b.to(tl.int64) * table_stride
    start = num * 0
    while start < num:  # `num` falls to the first column in which they differ
        columns = start + tl.arange(0, BLOCK_C)
        mask = takes_part[:, None] & (columns < num)[None, :]
        expected = tl.load(first_row + columns, mask=columns < num, other=0)
        found = tl.load(rows[:, None] + columns[None, :], mask=mask, other=0)
        differ = tl.where(mask & (found != expected[None, :]), columns[None, :], num)
        num = tl.min(tl.min(differ, 1), 0)
        start += BLOCK_C
    num *= block_size
    num = tl.where(num < least, 0, num)
    tl.store(lens + b, tl.where(takes_part, num, 0), mask=there)
    tl.store(octets_q + 1 + octet, tl.minimum((octet + 1) * OCTET, batch))
    for first in range(0, num_octets, BLOCK_O):
        later = first + tl.arange(0, BLOCK_O)
        tl.atomic_add(
            octets_k + 1 + later, num + later * 0, sem="relaxed",
            mask=(later >= octet) & (later < num_octets) & (num > later * 0),
        )  # fmt: skip


@direct
@triton.jit(
    do_not_specialize=["lse_stride"],
    do_not_specialize_on_alignment=["common_lse", "own_lse", "lens"],
)
def _merge_shared_prefixes(
    common, common_lse, own, own_lse, lens, out, lse_stride,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    b = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    there = heads < NUM_HEADS
    dims = tl.arange(0, BLOCK_D)
    mask = there[:, None] & (dims < HEAD_DIM)[None, :]
    at = b * (NUM_HEADS * HEAD_DIM) + heads[:, None] * HEAD_DIM + dims[None, :]
    lse_at = heads.to(tl.int64) * lse_stride + b
    shares = tl.load(lens + b) > heads * 0  # Triton 3.9 interprets no mask of a vector and a scalar
    # An entry that shares nothing loads nothing of the common part.
    a = tl.load(common_lse + lse_at, mask=there & shares, other=float("-inf"))
    c = tl.load(own_lse + lse_at, mask=there, other=float("-inf"))
    high = tl.maximum(a, c)
    base = tl.where(high == float("-inf"), 0.0, high)
    a = tl.exp(a - base)
    c = tl.exp(c - base)
    total = tl.where(high == float("-inf"), 1.0, a + c)
    together = tl.load(common + at, mask=mask & shares[:, None], other=0.0)
    alone = tl.load(own + at, mask=mask, other=0.0)
    result = together * (a / total)[:, None] + alone * (c / total)[:, None]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=mask)


def supports() -> str | None:
    """It has nothing to refuse."""
    return None


def find_shared_prefixes(
    block_table: Tensor, cu_seqlens_k: Tensor, block_size: int, least: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(lens, cu_seqlens_q, cu_seqlens_k), as `octavo.kernels.shared_prefixes` explains them."""
    batch, device = block_table.shape[0], block_table.device
    num_octets = -(-batch // SHORT)
    lens = torch.empty(batch, dtype=torch.int32, device=device)
    octets_q, octets_k = torch.zeros((2, num_octets + 1), dtype=torch.int32, device=device)
    if batch:
        _find_shared_prefixes[num_octets,](
            block_table, cu_seqlens_k, lens, octets_q, octets_k,
            batch, num_octets, block_table.stride(0), block_size, least,
            OCTET=SHORT, BLOCK_C=_COLUMNS, BLOCK_O=128, num_warps=4,
        )  # fmt: skip
    return lens, octets_q, octets_k


def merge_shared_prefixes(
    common: Tensor, common_lse: Tensor, own: Tensor, own_lse: Tensor, lens: Tensor, out: Tensor
) -> None:
    """Fill `out`, contiguous like both parts; see the reference."""
    batch, num_heads, head_dim = out.shape
    if not out.numel():
        return
    block_d = block_for(head_dim)
    block_h = min(block_for(num_heads), max(1, _ELEMENTS // block_d))
    _merge_shared_prefixes[batch, triton.cdiv(num_heads, block_h)](
        common, common_lse, own, own_lse, lens, out, own_lse.stride(0),
        NUM_HEADS=num_heads, HEAD_DIM=head_dim, BLOCK_H=block_h, BLOCK_D=block_d,
        num_warps=4, **options({"PDL": 1}, out.device),
    )  # fmt: skip
