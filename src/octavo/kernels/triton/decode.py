"""Attention of few query rows (1 to SHORT) over many keys: decoding, and verifying a draft.

Reading the cache is all the work, and the aim is that every multiprocessor reads all the time. The plan gives
each of a fixed number of programs an equal stretch of key tiles (`decode_plan.py`). A program walks the items in
it: one that lies wholly inside is written at once; of one that is cut it leaves a *piece*, the partial of its
keys there::

      | . . . . . . . . . . . | . . . . . . . . . . | . . .      tiles, item by item
      '--- program 0 -----''--- program 1 ---''--- program 2
      |        0           | 1  |     1       | 2  |             pieces: item 0 has two, item 1 has two

A range cuts at most its first and its last item, so that two slots per program hold all pieces, whatever the
batch. `_merge_pieces` is a second small launch: program p merges the item that program p of the first was the
first to cut, in the order of the keys. Same lengths, same cuts, same bits.

The GROUP query heads of a KV head, and the rows of a draft, are packed into the BLOCK_M rows of one matrix
product: row r is head ``r % GROUP`` of token ``r // GROUP``.
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

from octavo.kernels.triton import decode_plan, tiles
from octavo.kernels.triton.attention_arguments import UNALIGNED, UNSPECIALISED, arguments, shape_key
from octavo.kernels.triton.decode_invariant import decode_invariant
from octavo.kernels.triton.tuning import parameters

_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_NOTHING: tl.constexpr = tl.constexpr(-1.0e30)  # the highest score of no keys: finite, so that it subtracts
_PLAN = ("ranks", "least")


@triton.jit
def _blocks(table_row, start, first, last, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Block ids of the tile of keys at `start`: one, or one per key. Only those of keys first .. last - 1."""
    if BLOCK_N <= BLOCK_SIZE:
        blocks = tl.load(table_row + start // BLOCK_SIZE, mask=start < last, other=0)
    else:
        keys = start + tl.arange(0, BLOCK_N)
        needed = (keys >= first) & (keys < last)
        blocks = tl.load(table_row + keys.to(tl.uint32) // BLOCK_SIZE, mask=needed, other=0)
    return blocks


@triton.jit
def _load(
    addresses, seen, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, COMPUTE: tl.constexpr, PIN: tl.constexpr
):
    """A tile (BLOCK_N, BLOCK_D) of keys or values in the dtype COMPUTE, 0 where not `seen`.

    PIN: convert it as it lies in memory, 16 bytes at a time. Left to itself the compiler takes the tile apart
    for the matrix unit first, and reads single bytes from shared memory for that. Its layout pass moves nothing
    across assembly that may have side effects.
    """
    if HEAD_DIM == BLOCK_D:
        tile = tl.load(addresses, mask=seen[:, None], other=0.0)
    else:
        dims = tl.arange(0, BLOCK_D)
        tile = tl.load(addresses, mask=seen[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    tile = tile.to(COMPUTE)
    if PIN:
        tile = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [tile], dtype=tile.dtype, is_pure=False, pack=2
        )
    return tile


@triton.jit
def _store(
    acc, high, total, out, lse, sinks, value_scale, r, kv_head, q_begin, q_len,
    out_stride_token, out_stride_head, lse_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Output and LSE of the rows r (M,) of an item from the partials of all their keys."""
    token = r // GROUP
    heads = kv_head * GROUP + r % GROUP
    real = token < q_len
    rows = (q_begin + token).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    sink = None
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=real, other=0.0)
    result, lse_rows = tiles.finish(acc, high, total, sink, value_scale)
    at = rows * out_stride_token + heads.to(tl.int64) * out_stride_head
    mask = real[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(out + at[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=mask)
    if lse is not None:
        tl.store(lse + heads.to(tl.int64) * lse_stride + rows, lse_rows, mask=real)


@triton.jit(do_not_specialize=(*UNSPECIALISED, *_PLAN), do_not_specialize_on_alignment=UNALIGNED)
def _decode(
    q, k, v, out, lse, piece_acc, piece_sums,
    cu_seqlens_q, cu_seqlens_k, block_table, leftpad, alibi_slopes, sinks, k_scale, v_scale,
    q_stride_token, q_stride_head,
    k_stride_block, k_stride_slot, k_stride_head, v_stride_block, v_stride_slot, v_stride_head,
    out_stride_token, out_stride_head, lse_stride, table_stride, slopes_stride,
    k_scale_stride_block, k_scale_stride_slot, k_scale_stride_head,
    v_scale_stride_block, v_scale_stride_slot, v_scale_stride_head,
    scale, softcap, value_scale, left, right, batch, ranks, least,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, COMPUTE: tl.constexpr, PLAIN: tl.constexpr,
    K_SCALES: tl.constexpr, V_SCALES: tl.constexpr, SAME_STRIDES: tl.constexpr, PIN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_B: tl.constexpr, ONE_BLOCK: tl.constexpr, ONE_ITEM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL == 2:
        tl.extra.cuda.gdc_wait()
    if PDL > 0:
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    kv_head = program % NUM_KV_HEADS
    rank = program // NUM_KV_HEADS
    per, total_units = decode_plan.divide(
        cu_seqlens_q, cu_seqlens_k, leftpad, left, batch, ranks, least,
        GROUP, BLOCK_M, BLOCK_N, BLOCK_B, ONE_BLOCK,
    )  # fmt: skip
    unit = rank * per
    end = tl.minimum(unit + per, total_units)
    b, begin = decode_plan.sequence_of(
        cu_seqlens_q, cu_seqlens_k, leftpad, left, batch, unit, GROUP, BLOCK_M, BLOCK_N, BLOCK_B, ONE_BLOCK
    )
    if K_SCALES == 1:
        scale *= tl.load(k_scale)
    if V_SCALES == 1:
        value_scale *= tl.load(v_scale)
    head = kv_head.to(tl.int64)
    local = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    offsets = tl.arange(0, BLOCK_N)
    # Inside one block or run: where a tile's keys are relative to its first.
    k_within = offsets.to(tl.int64) * k_stride_slot
    v_within = offsets.to(tl.int64) * v_stride_slot

    while unit < end:
        q_begin, q_len, k_begin, k_len, first, per_item, units = decode_plan.work(
            cu_seqlens_q, cu_seqlens_k, leftpad, left, batch, b, GROUP, BLOCK_M, BLOCK_N
        )
        if unit >= begin + units:
            begin += units
            b += 1
        else:
            item = 0
            done = unit - begin
            if not ONE_ITEM:
                item = done // per_item
                done = done % per_item
            count = tl.minimum(per_item - done, end - unit)
            r = item * BLOCK_M + local
            token = r // GROUP
            heads = kv_head * GROUP + r % GROUP
            real = token < q_len

            q_rows = (q_begin + token).to(tl.int64) * q_stride_token + heads.to(tl.int64) * q_stride_head
            q_mask = real[:, None] & (dims < HEAD_DIM)[None, :]
            q_tile = tl.load(q + q_rows[:, None] + dims[None, :], mask=q_mask, other=0.0).to(COMPUTE)
            position = k_len - q_len + token
            # Each row sees keys low .. above - 1.
            low = tl.zeros_like(position)
            above = tl.zeros_like(position) + k_len
            if left is not None:
                low = tl.maximum(low, position - left)
            if leftpad is not None:
                low = tl.maximum(low, tl.load(leftpad + b))
            if right is not None:
                above = tl.minimum(above, position + right + 1)
            slopes = None
            if alibi_slopes is not None:
                slopes = tl.load(alibi_slopes + b * slopes_stride + heads, mask=real, other=0.0)

            k_head = k + head * k_stride_head
            v_head = v + head * v_stride_head
            if BLOCK_SIZE == 0:
                if block_table is not None:
                    run = tl.load(block_table + b.to(tl.int64) * table_stride, mask=k_len > first, other=0)
                    run = run.to(tl.int64)
                    base = tl.zeros([], tl.int64)
                else:
                    run = tl.zeros([], tl.int64)
                    base = k_begin.to(tl.int64)
            from_key = (first // BLOCK_N + done) * BLOCK_N
            if BLOCK_SIZE > 0:
                table_row = block_table + b.to(tl.int64) * table_stride
                next_blocks = _blocks(table_row, from_key, first, k_len, BLOCK_SIZE, BLOCK_N)

            acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            high = tl.full([BLOCK_M], _NOTHING, tl.float32)
            # Summed over the keys at the end: one exchange between warps less in every tile.
            totals = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for start in range(from_key, from_key + count * BLOCK_N, BLOCK_N):
                keys = start + offsets
                seen = keys < k_len
                if left is not None or leftpad is not None:
                    seen = seen & (keys >= first)
                if BLOCK_SIZE == 0:
                    block = run
                    slot = base + start
                else:
                    # Looked up one tile ahead, so that keys and values wait for no table.
                    block = next_blocks.to(tl.int64)
                    next_blocks = _blocks(table_row, start + BLOCK_N, first, k_len, BLOCK_SIZE, BLOCK_N)
                    if BLOCK_N <= BLOCK_SIZE:
                        slot = tl.zeros([], tl.int64) + (start & (BLOCK_SIZE - 1))
                    else:
                        slot = (keys & (BLOCK_SIZE - 1)).to(tl.int64)
                k_places = block * k_stride_block + slot * k_stride_slot
                v_places = k_places
                if not SAME_STRIDES:
                    v_places = block * v_stride_block + slot * v_stride_slot
                if BLOCK_SIZE == 0 or BLOCK_N <= BLOCK_SIZE:
                    k_places = k_places + k_within
                    v_places = v_places + v_within
                    slot = slot + offsets
                k_at = k_head + k_places[:, None] + dims[None, :]
                v_at = v_head + v_places[:, None] + dims[None, :]
                k_scales = None
                v_scales = None
                if K_SCALES == 2:
                    k_scales = tiles.load_token_scales(
                        k_scale + head * k_scale_stride_head, block, slot, seen,
                        k_scale_stride_block, k_scale_stride_slot,
                    )  # fmt: skip
                if V_SCALES == 2:
                    v_scales = tiles.load_token_scales(
                        v_scale + head * v_scale_stride_head, block, slot, seen,
                        v_scale_stride_block, v_scale_stride_slot,
                    )  # fmt: skip

                k_tile = _load(k_at, seen, HEAD_DIM, BLOCK_D, COMPUTE, PIN == 2)
                products = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
                s = tiles.scores(products, scale, softcap, slopes, position, keys, k_scales, v_scales, PLAIN)
                visible = keys[None, :] < above[:, None]
                if left is not None or leftpad is not None:
                    visible = visible & (keys[None, :] >= low[:, None])
                s = tl.where(visible, s, float("-inf"))
                if PLAIN:
                    new_high = tl.maximum(high, tl.max(s, 1) * (scale * _LOG2_E))
                    p = tl.exp2(tl.fma(s, scale * _LOG2_E, -new_high[:, None]))
                else:
                    new_high = tl.maximum(high, tl.max(s, 1))
                    p = tl.exp2(s - new_high[:, None])
                shrink = tl.exp2(high - new_high)
                high = new_high
                if V_SCALES == 2:
                    totals = totals * shrink[:, None] + p / v_scales[None, :]
                else:
                    totals = totals * shrink[:, None] + p
                v_tile = _load(v_at, seen, HEAD_DIM, BLOCK_D, COMPUTE, PIN > 0)
                acc = tl.dot(p.to(COMPUTE), v_tile, acc * shrink[:, None], input_precision="ieee")
            total = tl.sum(totals, 1)

            if count == per_item:
                _store(
                    acc, high, total, out, lse, sinks, value_scale, r, kv_head, q_begin, q_len,
                    out_stride_token, out_stride_head, lse_stride, GROUP, HEAD_DIM, BLOCK_D,
                )  # fmt: skip
            else:
                at = (2 * program + (done == 0).to(tl.int32)) * ROWS + local
                tl.store(piece_sums + at * 2, high, mask=local < ROWS)
                tl.store(piece_sums + at * 2 + 1, total, mask=local < ROWS)
                tl.store(piece_acc + at[:, None] * BLOCK_D + dims[None, :], acc, mask=(local < ROWS)[:, None])
            unit += count


@triton.jit(do_not_specialize=(*UNSPECIALISED, *_PLAN), do_not_specialize_on_alignment=UNALIGNED)
def _merge_pieces(
    out, lse, piece_acc, piece_sums, cu_seqlens_q, cu_seqlens_k, leftpad, sinks, v_scale,
    out_stride_token, out_stride_head, lse_stride, value_scale, left, batch, ranks, least,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    V_SCALES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_B: tl.constexpr, ONE_BLOCK: tl.constexpr, ONE_ITEM: tl.constexpr, PDL: tl.constexpr,
    BLOCK_R: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Merge BLOCK_R rows of the item that a rank was the first to cut, if there is one, PIECES at a time."""
    if PDL == 2:
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    kv_head = program % NUM_KV_HEADS
    rank = program // NUM_KV_HEADS
    per, total_units = decode_plan.divide(
        cu_seqlens_q, cu_seqlens_k, leftpad, left, batch, ranks, least,
        GROUP, BLOCK_M, BLOCK_N, BLOCK_B, ONE_BLOCK,
    )  # fmt: skip
    start = rank * per
    end = start + per
    # Its last item, when that goes on after it and did not come from before it.
    b, begin = decode_plan.sequence_of(
        cu_seqlens_q, cu_seqlens_k, leftpad, left, batch, end - 1,
        GROUP, BLOCK_M, BLOCK_N, BLOCK_B, ONE_BLOCK,
    )  # fmt: skip
    q_begin, q_len, _, _, _, per_item, _ = decode_plan.work(
        cu_seqlens_q, cu_seqlens_k, leftpad, left, batch, b, GROUP, BLOCK_M, BLOCK_N
    )
    item = 0
    if not ONE_ITEM:
        item = (end - 1 - begin) // per_item
        begin += item * per_item
    if PDL > 0:
        tl.extra.cuda.gdc_wait()
    if (end < total_units) & (begin >= start) & (begin + per_item > end):
        count = (begin + per_item - 1) // per - rank + 1
        local = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
        dims = tl.arange(0, BLOCK_D)
        acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
        high = tl.full([BLOCK_R], _NOTHING, tl.float32)
        total = tl.zeros([BLOCK_R], tl.float32)
        for first in range(0, count, PIECES):
            piece = first + tl.arange(0, PIECES)
            there = piece < count
            # An item begins in the second slot of its first rank, and goes on in the first of the next.
            slot = 2 * (program + piece * NUM_KV_HEADS) + (piece == 0).to(tl.int32)
            at = slot[:, None] * ROWS + local[None, :]
            acc_at = at[:, :, None] * BLOCK_D + dims[None, None, :]
            highs = tl.load(piece_sums + at * 2, mask=there[:, None], other=_NOTHING)
            sums = tl.load(piece_sums + at * 2 + 1, mask=there[:, None], other=0.0)
            accs = tl.load(piece_acc + acc_at, mask=there[:, None, None], other=0.0)
            new_high = tl.maximum(high, tl.max(highs, 0))
            shrink = tl.exp2(high - new_high)
            weights = tl.exp2(highs - new_high[None, :])
            acc = acc * shrink[:, None] + tl.sum(accs * weights[:, :, None], 0)
            total = total * shrink + tl.sum(sums * weights, 0)
            high = new_high
        if V_SCALES == 1:
            value_scale *= tl.load(v_scale)
        _store(
            acc, high, total, out, lse, sinks, value_scale, item * BLOCK_M + local, kv_head, q_begin, q_len,
            out_stride_token, out_stride_head, lse_stride, GROUP, HEAD_DIM, BLOCK_D,
        )  # fmt: skip


def decode_attention(
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
    """Fill the rows of `out` (Tq, H, D) and `lse` (H, Tq) of sequences with 1 to SHORT query rows."""
    facts = arguments(
        q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
        block_table=block_table, out=out, lse=lse, k_scale=k_scale, v_scale=v_scale, leftpad=leftpad,
    )  # fmt: skip
    if facts["batch"] == 0:
        return
    longest = min(max_seqlen_q, tiles.SHORT)
    if batch_invariant:
        decode_invariant(facts, longest, max_seqlen_k, 2 * num_processors(q.device))
        return
    key = f"M{_rows(longest * facts['GROUP'])} {shape_key(q, k, facts['BLOCK_SIZE'])}"
    given = parameters("decode_attention", q.device, key, default_parameters(q, k, longest))
    launch(facts, longest, max_seqlen_k, given)


def launch(facts: dict[str, Any], longest: int, max_seqlen_k: int, given: Mapping[str, int]) -> None:
    """Both launches, on the `arguments` of a call; `longest`: query rows of a sequence, at most."""
    device, batch = facts["q"].device, facts["batch"]
    nvidia = device.type == "cuda" and torch.version.hip is None
    quantised = facts["k"].element_size() == 1
    packed = longest * facts["GROUP"]
    rows = min(triton.next_power_of_2(packed), 64)
    block_m, block_n = max(rows, 16), given["BLOCK_N"]
    heads = facts["NUM_KV_HEADS"]
    least = max(1, given["LEAST_KEYS"] // block_n)
    # The most units that a head can have, by what the caller promised.
    most = batch * triton.cdiv(packed, block_m) * max(1, triton.cdiv(max_seqlen_k, block_n))
    ranks = max(1, num_processors(device) * given["PROGRAMS"] // heads)
    ranks = min(ranks, triton.cdiv(most, least))
    programs = ranks * heads
    block_b = decode_plan.sequences_at_once(batch)
    pdl = given["PDL"] if nvidia else 0
    shared = {
        "piece_acc": torch.empty((2 * programs, rows, facts["BLOCK_D"]), dtype=torch.float32, device=device),
        "piece_sums": torch.empty((2 * programs, rows, 2), dtype=torch.float32, device=device),
        "ranks": ranks, "least": least, "PDL": pdl,
        "BLOCK_M": block_m, "BLOCK_N": block_n, "ROWS": rows,
        "BLOCK_B": block_b, "ONE_BLOCK": batch <= block_b, "ONE_ITEM": packed <= block_m,
    }  # fmt: skip
    options = {"maxnreg": given["maxnreg"]} if nvidia and given["maxnreg"] else {}
    if pdl == 2:
        options["launch_pdl"] = True
    _decode[(programs,)](
        **facts, **shared,
        SAME_STRIDES=facts["k"].stride() == facts["v"].stride(),
        PIN=given["PIN"] if nvidia and quantised and facts["COMPUTE"] == tl.float16 else 0,
        num_warps=given["num_warps"], num_stages=given["num_stages"], **options,
    )  # fmt: skip
    block_r = min(rows, given["MERGE_ROWS"])
    options = {"launch_pdl": True} if pdl else {}
    _merge_pieces[(programs, rows // block_r)](
        **{name: facts[name] for name in _MERGE_FACTS}, **shared, BLOCK_R=block_r,
        PIECES=max(1, 32 * given["MERGE_WARPS"] * 32 // (block_r * facts["BLOCK_D"])), num_warps=given["MERGE_WARPS"], **options,
    )  # fmt: skip


_MERGED_AT_ONCE = 8192  # numbers of pieces in the registers of a program of 256 threads
_MERGE_FACTS = (
    "out", "lse", "cu_seqlens_q", "cu_seqlens_k", "leftpad", "sinks", "v_scale", "out_stride_token",
    "out_stride_head", "lse_stride", "value_scale", "left", "batch", "NUM_KV_HEADS", "GROUP", "HEAD_DIM",
    "BLOCK_D", "V_SCALES",
)  # fmt: skip


def _rows(packed: int) -> int:
    return min(max(triton.next_power_of_2(packed), 16), 64)


def default_parameters(q: Tensor, k: Tensor, longest: int) -> Mapping[str, int]:
    """Launch parameters that compile without spills and fit every GPU from compute capability 8.0."""
    wide = q.shape[2] > 128
    large = _rows(longest * q.shape[1] // k.shape[-2]) > 16
    exact = q.dtype == torch.float32 or k.dtype == torch.float32
    return {
        "BLOCK_N": 32 if wide or large or exact else 64, "num_warps": 4, "num_stages": 2 if exact else 3,
        "PROGRAMS": 2, "LEAST_KEYS": 128, "maxnreg": 0, "PDL": 2, "PIN": 1, "MERGE_ROWS": 1, "MERGE_WARPS": 4,
    }  # fmt: skip


@functools.cache
def num_processors(device: torch.device) -> int:
    """The multiprocessors of a GPU; a handful for the interpreter."""
    if device.type == "cpu":
        return 2
    found = torch.get_device_module(device).get_device_properties(device)
    return int(getattr(found, "multi_processor_count", 0) or getattr(found, "gpu_subslice_count", 64))
