"""Attention of sequences with more than SHORT query rows, in plain Triton.

A *tile* is BLOCK_M rows of one sequence and one KV head: row r is query head ``r % GROUP`` of the head's
group at token ``r // GROUP``, so that few tokens fill a tile and all its rows end at nearly the same key.
Keys that every row sees go through a loop without masks, the others (the diagonal, a window's edge) through
a second one.

The grid is known from shapes; what is in it is found on the device, from cu_seqlens. Where it would leave
most of the GPU idle, a tile's keys are split and `_combine` merges the partials. Batch-invariant: one loop,
which masks every tile and merges a partial per chunk of keys; see `tiles.py`.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton import is_interpreted, tiles
from octavo.kernels.triton.attention_arguments import (
    UNALIGNED,
    UNSPECIALISED,
    arguments,
    compute_dtype,
    invariant_tile,
    num_processors,
    shape_key,
    with_scales_applied,
)
from octavo.kernels.triton.launch import direct
from octavo.kernels.triton.tuning import parameters

_SHORT: tl.constexpr = tl.constexpr(tiles.SHORT)
_CHUNK: tl.constexpr = tl.constexpr(tiles.INVARIANT_CHUNK)
_SEQUENCES: tl.constexpr = tl.constexpr(128)  # looked through at a time for the one a tile belongs to
_SECTION_BYTES = 32 << 20  # keys and values that the tiles of one section may share in the L2 cache


@triton.jit
def _find_tile(cu_seqlens_q, batch, wanted, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """The sequence that the `wanted` tile is of, and how many tiles of it come after; `batch` past the last.

    Tiles are counted from the end of each sequence: with a causal mask those are the longest.
    """
    sequence = 0
    num_tiles = 0
    ends_at = 0
    for first in range(0, batch, _SEQUENCES):
        b = first + tl.arange(0, _SEQUENCES)
        begin = tl.load(cu_seqlens_q + b, mask=b < batch, other=0)
        rows = tl.load(cu_seqlens_q + b + 1, mask=b < batch, other=0) - begin
        own = tl.where(rows > _SHORT, (rows * GROUP + BLOCK_M - 1) // BLOCK_M, 0)
        ends = num_tiles + tl.cumsum(own, 0)
        sequence += tl.sum(((ends <= wanted) & (b < batch)).to(tl.int32), 0)
        ends_at += tl.sum(tl.where((ends > wanted) & (ends - own <= wanted), ends, 0), 0)
        num_tiles += tl.sum(own, 0)
    return sequence, ends_at - 1 - wanted


@direct
@triton.jit(do_not_specialize=UNSPECIALISED, do_not_specialize_on_alignment=UNALIGNED)
def _prefill(
    q, k, v, out, lse, partial_acc, partial_sums,
    cu_seqlens_q, cu_seqlens_k, block_table, leftpad, alibi_slopes, sinks, k_scale, v_scale,
    q_stride_token, q_stride_head,
    k_stride_block, k_stride_slot, k_stride_head, v_stride_block, v_stride_slot, v_stride_head,
    out_stride_token, out_stride_head, lse_stride, table_stride, slopes_stride,
    k_scale_stride_block, k_scale_stride_slot, k_scale_stride_head,
    v_scale_stride_block, v_scale_stride_slot, v_scale_stride_head,
    scale, softcap, value_scale, left, right, batch, num_rows, num_tiles, num_splits, section,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, COMPUTE: tl.constexpr, PLAIN: tl.constexpr,
    K_SCALES: tl.constexpr, V_SCALES: tl.constexpr, INVARIANT: tl.constexpr, SPLIT: tl.constexpr,
    SAME_STRIDES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Section by section of KV heads; in each of them tile by tile, the same tile of all its heads together.
    program = tl.program_id(0)
    split = 0
    if SPLIT:
        split = program % num_splits
        program = program // num_splits
    per_section = num_tiles * section
    kv_head = program // per_section * section + program % section
    sequence, tile = _find_tile(cu_seqlens_q, batch, program % per_section // section, GROUP, BLOCK_M)
    if sequence < batch:
        q_begin = tl.load(cu_seqlens_q + sequence)
        q_len = tl.load(cu_seqlens_q + sequence + 1) - q_begin
        k_begin = tl.load(cu_seqlens_k + sequence)
        k_len = tl.load(cu_seqlens_k + sequence + 1) - k_begin
        r = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        token = r // GROUP
        heads = kv_head * GROUP + r % GROUP
        in_sequence = token < q_len
        rows = (q_begin + token).to(tl.int64)
        positions = k_len - q_len + token
        low = k_len - q_len + tile * BLOCK_M // GROUP
        top = k_len - q_len + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, q_len - 1)

        # Keys [first, last) are seen by some row of the tile, keys [open_first, open_last) by every row.
        first = 0
        if leftpad is not None:
            first = tl.load(leftpad + sequence)
        open_first = first
        last = k_len
        open_last = k_len
        if left is not None:
            open_first = tl.maximum(first, top - left)
            first = tl.maximum(first, low - left)
        if right is not None:
            last = tl.minimum(last, top + right + 1)
            open_last = tl.minimum(last, tl.maximum(low + right + 1, 0))
        from_tile = first // BLOCK_N
        to_tile = tl.where(last > first, (last + BLOCK_N - 1) // BLOCK_N, from_tile)
        if SPLIT:
            num_all = to_tile - from_tile
            to_tile = from_tile + num_all * (split + 1) // num_splits
            from_tile += num_all * split // num_splits
        open_from = tl.minimum(tl.maximum((open_first + BLOCK_N - 1) // BLOCK_N, from_tile), to_tile)
        open_to = tl.minimum(tl.maximum(open_last // BLOCK_N, open_from), to_tile)

        dims = tl.arange(0, BLOCK_D)
        q_mask = in_sequence[:, None] & (dims < HEAD_DIM)[None, :]
        q_rows = rows * q_stride_token + heads.to(tl.int64) * q_stride_head
        q_tile = tl.load(q + q_rows[:, None] + dims[None, :], mask=q_mask, other=0.0).to(COMPUTE)

        table_row = block_table
        run_block = tl.zeros([], tl.int64)
        run_slot = k_begin
        if block_table is not None:
            table_row = block_table + sequence.to(tl.int64) * table_stride
            run_slot = 0
            if BLOCK_SIZE == 0:
                run_block = tl.load(table_row).to(tl.int64)
        head = kv_head.to(tl.int64)
        k_scale_head = None
        v_scale_head = None
        if K_SCALES == 1:
            scale *= tl.load(k_scale)
        if K_SCALES == 2:
            k_scale_head = k_scale + head * k_scale_stride_head
        if V_SCALES == 1:
            value_scale *= tl.load(v_scale)
        if V_SCALES == 2:
            v_scale_head = v_scale + head * v_scale_stride_head
        slopes = None
        if alibi_slopes is not None:
            slopes = tl.load(alibi_slopes + sequence * slopes_stride + heads, mask=in_sequence, other=0.0)
        keys_of = (
            k + head * k_stride_head, k_stride_block, k_stride_slot,
            v + head * v_stride_head, v_stride_block, v_stride_slot, run_block, run_slot,
            k_scale_stride_block, k_scale_stride_slot, v_scale_stride_block, v_scale_stride_slot,
        )  # fmt: skip
        rows_of = (positions, first, last, scale)

        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        high = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if INVARIANT:
            PER_CHUNK: tl.constexpr = _CHUNK // BLOCK_N
            for chunk in range(from_tile // PER_CHUNK, (to_tile + PER_CHUNK - 1) // PER_CHUNK):
                chunk_acc, chunk_high, chunk_total = tiles.absorb_tiles(
                    q_tile, tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
                    tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32),
                    tl.maximum(from_tile, chunk * PER_CHUNK), tl.minimum(to_tile, (chunk + 1) * PER_CHUNK),
                    0, 0, keys_of, rows_of, table_row, k_scale_head, v_scale_head,
                    left, right, softcap, slopes,
                    True, PLAIN, HEAD_DIM, BLOCK_D, BLOCK_SIZE, COMPUTE, BLOCK_N, SAME_STRIDES,
                )  # fmt: skip
                acc, high, total = tiles.merge(acc, high, total, chunk_acc, chunk_high, chunk_total)
        else:
            acc, high, total = tiles.absorb_tiles(
                q_tile, acc, high, total, open_from, open_to, 0, 0, keys_of, rows_of,
                table_row, k_scale_head, v_scale_head, left, right, softcap, slopes,
                False, PLAIN, HEAD_DIM, BLOCK_D, BLOCK_SIZE, COMPUTE, BLOCK_N, SAME_STRIDES,
            )  # fmt: skip
            num_open = open_to - open_from
            acc, high, total = tiles.absorb_tiles(
                q_tile, acc, high, total, from_tile, to_tile - num_open, open_from, num_open,
                keys_of, rows_of, table_row, k_scale_head, v_scale_head, left, right, softcap, slopes,
                True, PLAIN, HEAD_DIM, BLOCK_D, BLOCK_SIZE, COMPUTE, BLOCK_N, SAME_STRIDES,
            )  # fmt: skip

        if SPLIT:  # partial_acc (splits, Tq, H, HEAD_DIM), partial_sums (splits, Tq, H, 2)
            flat = (split * num_rows.to(tl.int64) + rows) * (NUM_KV_HEADS * GROUP) + heads
            tl.store(partial_acc + flat[:, None] * HEAD_DIM + dims[None, :], acc, mask=q_mask)
            tl.store(partial_sums + flat * 2, high, mask=in_sequence)
            tl.store(partial_sums + flat * 2 + 1, total, mask=in_sequence)
        else:
            tiles.store_rows(
                acc, high, total, out, lse, sinks, value_scale, rows, heads, in_sequence,
                out_stride_token, out_stride_head, lse_stride, HEAD_DIM, BLOCK_D,
            )  # fmt: skip


@direct
@triton.jit(do_not_specialize=UNSPECIALISED, do_not_specialize_on_alignment=UNALIGNED)
def _combine(
    out, lse, partial_acc, partial_sums, cu_seqlens_q, sinks, v_scale,
    out_stride_token, out_stride_head, lse_stride, value_scale, batch, num_rows, num_tiles, num_splits,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    V_SCALES: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0) // num_tiles
    sequence, tile = _find_tile(cu_seqlens_q, batch, tl.program_id(0) % num_tiles, GROUP, BLOCK_M)
    if sequence < batch:
        q_begin = tl.load(cu_seqlens_q + sequence)
        q_len = tl.load(cu_seqlens_q + sequence + 1) - q_begin
        r = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        rows = (q_begin + r // GROUP).to(tl.int64)
        heads = kv_head * GROUP + r % GROUP
        in_sequence = r // GROUP < q_len
        dims = tl.arange(0, BLOCK_D)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        high = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        for split in tl.range(0, num_splits, num_stages=4):
            flat = (split * num_rows.to(tl.int64) + rows) * (NUM_KV_HEADS * GROUP) + heads
            split_high = tl.load(partial_sums + flat * 2, mask=in_sequence, other=float("-inf"))
            split_total = tl.load(partial_sums + flat * 2 + 1, mask=in_sequence, other=0.0)
            mask = in_sequence[:, None] & (dims < HEAD_DIM)[None, :]
            split_acc = tl.load(partial_acc + flat[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
            acc, high, total = tiles.merge(acc, high, total, split_acc, split_high, split_total)
        if V_SCALES == 1:
            value_scale *= tl.load(v_scale)
        tiles.store_rows(
            acc, high, total, out, lse, sinks, value_scale, rows, heads, in_sequence,
            out_stride_token, out_stride_head, lse_stride, HEAD_DIM, BLOCK_D,
        )  # fmt: skip


def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    block_table: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    leftpad: Tensor | None = None,
    batch_invariant: bool = False,
) -> None:
    """Fill the rows of `out` (Tq, H, D) and `lse` (H, Tq) of sequences with more than SHORT query rows."""
    facts = arguments(
        q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
        block_table=block_table, out=out, lse=lse, k_scale=k_scale, v_scale=v_scale, leftpad=leftpad,
    )  # fmt: skip
    token_scales = tiles.TOKEN_SCALES in (facts["K_SCALES"], facts["V_SCALES"])
    given = None if batch_invariant else _parameters(q, k, facts["BLOCK_SIZE"], token_scales)
    launch(facts, max_seqlen_k, given)


def launch(facts: dict[str, Any], max_seqlen_k: int, given: Mapping[str, int] | None) -> None:
    """Both launches, on the `arguments` of a call; `given` None: batch-invariant."""
    facts = with_scales_applied(facts)
    q, num_kv_heads = facts["q"], facts["NUM_KV_HEADS"]
    num_rows, _, head_dim = q.shape
    num_long = most_long(num_rows, facts["batch"])
    if num_long == 0:
        return
    chosen = given or invariant_tile(facts)
    options = {name: value for name, value in chosen.items() if value}  # no maxnreg is no option, not 0
    num_tiles = most_tiles(num_rows * facts["GROUP"], num_long, chosen["BLOCK_M"])
    seen = most_keys(max_seqlen_k, chosen["BLOCK_M"], facts["left"], facts["right"])
    splits = _splits(num_tiles * num_kv_heads, seen, chosen, q.device) if given else 1
    partial_acc = partial_sums = None
    if splits > 1:
        partial_acc, partial_sums = partials(q, splits)
    _prefill[(num_tiles * num_kv_heads * splits,)](
        **facts, partial_acc=partial_acc, partial_sums=partial_sums,
        num_rows=num_rows, num_tiles=num_tiles, num_splits=splits,
        section=_section(num_kv_heads, max_seqlen_k * head_dim * 2 * facts["k"].element_size()),
        INVARIANT=given is None, SPLIT=splits > 1,
        SAME_STRIDES=facts["k"].stride() == facts["v"].stride(), **options,
    )  # fmt: skip
    if partial_acc is not None and partial_sums is not None:
        combine(facts, partial_acc, partial_sums)


def partials(q: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """Memory for what `combine` takes."""
    shape = (splits, *q.shape[:2])
    return (
        torch.empty((*shape, q.shape[2]), dtype=torch.float32, device=q.device),
        torch.empty((*shape, 2), dtype=torch.float32, device=q.device),
    )


def combine(facts: dict[str, Any], partial_acc: Tensor, partial_sums: Tensor) -> None:
    """Fill `out` and `lse` from the partials of each split: of a row's keys those that it saw.

    partial_acc: (splits, Tq, H, D) float32, sums of weights times values.
    partial_sums: (splits, Tq, H, 2) float32, the largest score, in base 2, and the sum of the weights; -inf
        and 0 where a split has no key of the row. Sequences of at most SHORT rows are left out.
    """
    splits, num_rows = partial_acc.shape[:2]
    num_long = most_long(num_rows, facts["batch"])
    num_tiles = most_tiles(num_rows * facts["GROUP"], num_long, _COMBINED_ROWS)
    _combine[(num_tiles * facts["NUM_KV_HEADS"],)](
        **{name: facts[name] for name in _COMBINE_FACTS}, partial_acc=partial_acc,
        partial_sums=partial_sums, num_rows=num_rows, num_tiles=num_tiles, num_splits=splits,
        BLOCK_M=_COMBINED_ROWS, num_warps=2,
    )  # fmt: skip


_COMBINED_ROWS = 4
_COMBINE_FACTS = (
    "out", "lse", "cu_seqlens_q", "sinks", "v_scale", "out_stride_token", "out_stride_head", "lse_stride",
    "value_scale", "batch", "NUM_KV_HEADS", "GROUP", "HEAD_DIM", "BLOCK_D", "V_SCALES",
)  # fmt: skip


def _parameters(q: Tensor, k: Tensor, block_size: int, token_scales: bool) -> Mapping[str, int]:
    default = default_parameters(q, k, block_size, token_scales, is_hopper(q.device))
    key = shape_key(q, k, block_size) + (" scaled" if token_scales else "")
    return parameters("prefill_attention", q.device, key, default)


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether that is an NVIDIA GPU of compute capability 9.0."""
    if is_interpreted() or device.type == "xpu" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device.index) == (9, 0)


def default_parameters(
    q: Tensor, k: Tensor, block_size: int, token_scales: bool, hopper: bool
) -> Mapping[str, int]:
    """Launch parameters that fit every GPU from compute capability 8.0; some are better on a Hopper.

    There a limit on registers lets several programs share a multiprocessor, and one multiplies while the
    others are at their softmax: worth more than the few numbers that then no longer fit in registers.
    """
    wide = q.shape[2] > 128
    if compute_dtype(q.dtype, k.dtype) == torch.float32:
        return _point(16 if wide else 32, 32, 8 if wide or k.dtype != q.dtype else 4, 2)
    if not hopper:
        return _point(64, 32, 8, 3) if wide else _point(128, 64, 8, 3)
    if wide:
        return _point(128, 32, 8, 3)
    if k.dtype != q.dtype and not token_scales:
        return _point(64, 64, 4, 3, 168)
    if q.shape[2] <= 64 and not token_scales:
        return _point(64, 64, 4, 3, 128)
    return _point(128, 64, 8, 2 if block_size == 0 else 3, 128)


def _point(block_m: int, block_n: int, num_warps: int, num_stages: int, maxnreg: int = 0) -> dict[str, int]:
    return {
        "BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": num_warps, "num_stages": num_stages,
        "maxnreg": maxnreg,
    }  # fmt: skip


def most_long(num_rows: int, batch: int) -> int:
    """How many sequences of more than SHORT rows there can be."""
    return min(batch, num_rows // (tiles.SHORT + 1))


def most_tiles(rows: int, sequences: int, block_m: int) -> int:
    """The number of tiles of `rows` in `sequences`, whatever their lengths."""
    return (rows + sequences * (block_m - 1)) // block_m


def most_keys(max_seqlen_k: int, rows: int, left: int | None, right: int | None) -> int:
    """How many keys so many rows of a sequence see together, at most. The window: None where it is open."""
    return max_seqlen_k if left is None or right is None else min(max_seqlen_k, left + rows + right)


def _section(num_kv_heads: int, bytes_per_head: int) -> int:
    """How many KV heads run side by side: a divisor of their number."""
    section = max(1, min(num_kv_heads, _SECTION_BYTES // max(1, bytes_per_head)))
    while num_kv_heads % section:
        section -= 1
    return section


def _splits(programs: int, num_keys: int, given: Mapping[str, int], device: torch.device) -> int:
    """Among how many programs the keys of a tile are divided, so that they fill the GPU twice over."""
    most = num_keys // (_LEAST_TILES * given["BLOCK_N"])
    return max(1, min(2 * num_processors(device) // programs, most))


_LEAST_TILES = 4  # of keys, in a split: fewer are done before the partials are merged
