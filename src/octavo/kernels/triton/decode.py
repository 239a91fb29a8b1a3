"""Attention of few query rows (1 to SHORT) over many keys: decoding, and verifying a draft.

Reading the cache is all the work, and the aim is that every multiprocessor reads all the time. The plan gives
each of a fixed number of programs an equal range of keys (`decode_plan.py`). A program walks the items in it:
one that lies wholly inside is written at once; of one that is cut it leaves a *piece*, the partial of its
keys there::

      item 0                  item 1        item 2
    | . . . . . . . . . . . | . . . . . . | . . . . . . . . . .      tiles of BLOCK_N keys
    '----- rank 0 -----''------ rank 1 ------''----- rank 2 ---
           piece         pc.     whole     pc.      piece            items 0 and 2 are merged afterwards

A range cuts at most its first and its last item, so that two slots per program hold all pieces, whatever the
batch. `_merge_pieces` is a second small launch: program p merges the item that program p of the first was the
first to cut, in the order of the keys, row by row. Same lengths, same cuts, same bits.

The GROUP query heads of a KV head, and the rows of a draft, are packed into the BLOCK_M rows of one matrix
product: row r is head ``r % GROUP`` of token ``r // GROUP``. What becomes of a range of keys is in
`decode_by_query.py`, and for few rows over a one-byte cache in `decode_by_key.py`; BY_KEY is then the number
of warps, and BLOCK_M 8.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton import decode_by_key, decode_by_query, decode_plan, is_interpreted, tiles
from octavo.kernels.triton.attention_arguments import (
    MERGE_FACTS,
    UNALIGNED,
    UNSPECIALISED,
    arguments,
    num_processors,
    tensors_of,
)
from octavo.kernels.triton.decode_invariant import decode_invariant
from octavo.kernels.triton.decode_parameters import key_and_defaults, query_rows
from octavo.kernels.triton.decode_tiles import NOTHING
from octavo.kernels.triton.launch import Prepared, direct, part
from octavo.kernels.triton.launch import options as launch_options
from octavo.kernels.triton.tuning import Parameters, parameters

_PLAN = ("ranks", "least")


@direct
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
    K_SCALES: tl.constexpr, V_SCALES: tl.constexpr, SAME_STRIDES: tl.constexpr, ASSEMBLY: tl.constexpr,
    PIN: tl.constexpr, BY_KEY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_B: tl.constexpr, ONE_BLOCK: tl.constexpr, ONE_ITEM: tl.constexpr,
    ALIGN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if PDL:
        # In this order: `_merge_pieces` reads the lengths before it waits, and must not be let go before they
        # are there.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
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
    IS_CUT: tl.constexpr = left is not None or leftpad is not None

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

            rows = (q_begin + token).to(tl.int64)
            q_rows = rows * q_stride_token + heads.to(tl.int64) * q_stride_head
            q_mask = real[:, None] & (dims < HEAD_DIM)[None, :]
            q_tile = tl.load(q + q_rows[:, None] + dims[None, :], mask=q_mask, other=0.0).to(COMPUTE)
            position = k_len - q_len + token
            # Keys from_key .. to_key - 1 of the item are this range's; a row sees low .. above - 1 of them.
            from_key = (first // BLOCK_N + done) * BLOCK_N
            to_key = tl.minimum(from_key + count * BLOCK_N, k_len)
            low = tl.zeros_like(position)
            above = tl.zeros_like(position) + to_key
            if left is not None:
                low = tl.maximum(low, position - left)
            if leftpad is not None:
                low = tl.maximum(low, tl.load(leftpad + b))
            if right is not None:
                above = tl.minimum(above, position + right + 1)
            slopes = None
            if alibi_slopes is not None:
                slopes = tl.load(alibi_slopes + b * slopes_stride + heads, mask=real, other=0.0)

            k_head = k + part(head, k_stride_head, ALIGN)
            v_head = v + part(head, v_stride_head, ALIGN)
            k_scale_head = None
            v_scale_head = None
            if K_SCALES == 2:
                k_scale_head = k_scale + head * k_scale_stride_head
            if V_SCALES == 2:
                v_scale_head = v_scale + head * v_scale_stride_head
            table_row = None
            run = None
            base = None
            if BLOCK_SIZE > 0:
                table_row = block_table + b.to(tl.int64) * table_stride
            elif block_table is not None:
                run = tl.load(block_table + b.to(tl.int64) * table_stride, mask=k_len > first, other=0)
                run = run.to(tl.int64)
                base = tl.zeros([], tl.int64)
            else:
                run = tl.zeros([], tl.int64)
                base = k_begin.to(tl.int64)
            strides = (
                k_stride_block, k_stride_slot, v_stride_block, v_stride_slot,
                k_scale_stride_block, k_scale_stride_slot, v_scale_stride_block, v_scale_stride_slot,
            )  # fmt: skip
            bounds = (from_key, to_key, first, low, above)
            if BY_KEY:
                acc, high, total = decode_by_key.absorb(
                    q_tile, k_head, v_head, k_scale_head, v_scale_head, strides, table_row, bounds, scale,
                    IS_CUT, HEAD_DIM, BLOCK_D, BLOCK_SIZE, COMPUTE, SAME_STRIDES, ASSEMBLY, BY_KEY,
                    BLOCK_M, BLOCK_N,
                )  # fmt: skip
            else:
                acc, high, total = decode_by_query.absorb(
                    q_tile, k_head, v_head, k_scale_head, v_scale_head, strides, table_row, bounds, scale,
                    run, base, offsets, k_within, v_within, softcap, slopes, position,
                    PLAIN, IS_CUT, HEAD_DIM, BLOCK_D, BLOCK_SIZE, COMPUTE, SAME_STRIDES, ASSEMBLY, PIN,
                    BLOCK_M, BLOCK_N,
                )  # fmt: skip

            if count == per_item:
                tiles.store_rows(
                    acc, high, total, out, lse, sinks, value_scale, rows, heads, real,
                    out_stride_token, out_stride_head, lse_stride, HEAD_DIM, BLOCK_D,
                )  # fmt: skip
            else:
                at = (2 * program + (done == 0).to(tl.int32)) * ROWS + local
                tl.store(piece_sums + at * 2, high, mask=local < ROWS)
                tl.store(piece_sums + at * 2 + 1, total, mask=local < ROWS)
                tl.store(piece_acc + at[:, None] * BLOCK_D + dims[None, :], acc, mask=(local < ROWS)[:, None])
            unit += tl.maximum(count, 1)  # rows that max_seqlen_q denies have no units: go on all the same


@direct
@triton.jit(do_not_specialize=(*UNSPECIALISED, *_PLAN), do_not_specialize_on_alignment=UNALIGNED)
def _merge_pieces(
    out, lse, piece_acc, piece_sums, cu_seqlens_q, cu_seqlens_k, leftpad, sinks, v_scale,
    out_stride_token, out_stride_head, lse_stride, value_scale, left, batch, ranks, least,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    V_SCALES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_B: tl.constexpr, ONE_BLOCK: tl.constexpr, ONE_ITEM: tl.constexpr, PDL: tl.constexpr,
    PIECES: tl.constexpr, ROWS_EACH: tl.constexpr,
):  # fmt: skip
    """Merge, of the item that a rank was the first to cut, every row that falls to this program.

    Those are ROWS_EACH at most. PIECES of each at a time.
    """
    if PDL:
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
    if PDL:  # nothing else was read so far, and nothing written
        tl.extra.cuda.gdc_wait()
    if (end < total_units) & (begin >= start) & (begin + per_item > end):
        count = (begin + per_item - 1) // per - rank + 1
        dims = tl.arange(0, BLOCK_D)
        beside = tl.num_programs(1)
        num_rows = 1
        if ROWS_EACH > 1:
            rows_left = tl.minimum(q_len * GROUP - item * BLOCK_M, BLOCK_M) - tl.program_id(1)
            num_rows = tl.cdiv(rows_left, beside)
        for i in range(num_rows):
            row = tl.program_id(1) + i * beside
            acc = tl.zeros([BLOCK_D], tl.float32)
            high = tl.full([], NOTHING, tl.float32)
            total = tl.zeros([], tl.float32)
            for first in range(0, count, PIECES):
                piece = first + tl.arange(0, PIECES)
                there = piece < count
                # An item begins in the second slot of its first rank, and goes on in the first of the next.
                at = (2 * (program + piece * NUM_KV_HEADS) + (piece == 0).to(tl.int32)) * ROWS + row
                highs = tl.load(piece_sums + at * 2, mask=there, other=NOTHING)
                sums = tl.load(piece_sums + at * 2 + 1, mask=there, other=0.0)
                acc_at = piece_acc + at[:, None] * BLOCK_D + dims[None, :]
                accs = tl.load(acc_at, mask=there[:, None], other=0.0)
                new_high = tl.maximum(high, tl.max(highs, 0))
                weights = tl.exp2(highs - new_high)
                shrink = tl.exp2(high - new_high)
                acc = acc * shrink + tl.sum(accs * weights[:, None], 0)
                total = total * shrink + tl.sum(sums * weights, 0)
                high = new_high
            scale = value_scale
            if V_SCALES == 1:
                scale *= tl.load(v_scale)
            r = item * BLOCK_M + row + tl.arange(0, 1)
            one = tl.zeros([1], tl.float32)
            tiles.store_rows(
                acc[None, :], one + high, one + total, out, lse, sinks, scale,
                (q_begin + r // GROUP).to(tl.int64), kv_head * GROUP + r % GROUP, r // GROUP < q_len,
                out_stride_token, out_stride_head, lse_stride, HEAD_DIM, BLOCK_D,
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
    if batch_invariant:
        longest = min(max_seqlen_q, tiles.SHORT)
        decode_invariant(facts, longest, max_seqlen_k, 2 * num_processors(q.device))
        return
    prepare(facts, max_seqlen_q, max_seqlen_k)(*tensors_of(facts))


def prepare(facts: dict[str, Any], max_seqlen_q: int, max_seqlen_k: int) -> Callable[..., None]:
    """Both launches, as `prepare_launches` makes them, for the bounds of a call, not batch-invariant."""
    longest = min(max_seqlen_q, tiles.SHORT)
    # Beside prompts, sequences of this kernel mostly have one row, and tiles for more would be slower.
    together = longest if max_seqlen_q <= tiles.SHORT else 1
    given = parameters("decode_attention", facts["q"].device, *key_and_defaults(facts, together))
    return prepare_launches(facts, longest, together, max_seqlen_k, given)


def launch(facts: dict[str, Any], longest: int, together: int, max_seqlen_k: int, given: Parameters) -> None:
    """Both launches, on the `arguments` of a call."""
    prepare_launches(facts, longest, together, max_seqlen_k, given)(*tensors_of(facts))


def prepare_launches(
    facts: dict[str, Any], longest: int, together: int, max_seqlen_k: int, given: Parameters
) -> Callable[..., None]:
    """Both launches, for calls like that of these `arguments`, with their `tensors_of`.

    `longest`: query rows of a sequence, at most; `together`: for how many of them a tile of rows is made.
    """
    device, batch, num_kv_heads = facts["q"].device, facts["batch"], facts["NUM_KV_HEADS"]
    packed = longest * facts["GROUP"]
    by_key, block_n = given["num_warps"] if given["BY_KEY"] else 0, given["BLOCK_N"]
    block_m = decode_by_key.COLUMNS if by_key else query_rows(facts, together)
    rows = min(triton.next_power_of_2(packed), block_m)
    least = max(1, given["LEAST_KEYS"] // block_n)
    # No more programs than there can be work for, by the caller's bounds.
    most = batch * triton.cdiv(packed, block_m) * max(1, triton.cdiv(max_seqlen_k, block_n))
    ranks = max(1, num_processors(device) * given["PROGRAMS"] // num_kv_heads)
    ranks = min(ranks, triton.cdiv(most, least))
    programs = ranks * num_kv_heads
    block_b = decode_plan.sequences_at_once(batch)
    nvidia = device.type != "xpu" and torch.version.hip is None and not is_interpreted()
    chained = launch_options({"PDL": given["PDL"]}, device)
    acc_shape, sums_shape = (2 * programs, rows, facts["BLOCK_D"]), (2 * programs, rows, 2)
    shared = {
        "piece_acc": torch.empty(acc_shape, dtype=torch.float32, device=device),
        "piece_sums": torch.empty(sums_shape, dtype=torch.float32, device=device),
        "ranks": ranks, "least": least, "BLOCK_M": block_m, "BLOCK_N": block_n, "ROWS": rows,
        "BLOCK_B": block_b, "ONE_BLOCK": batch <= block_b, "ONE_ITEM": packed <= block_m, **chained,
    }  # fmt: skip
    same_strides = all(
        facts[f"k_{of}"] == facts[f"v_{of}"]
        for of in ("stride_block", "stride_slot", "scale_stride_block", "scale_stride_slot")
    )
    registers = {"maxnreg": given["maxnreg"]} if nvidia and given["maxnreg"] else {}
    decode = Prepared(
        _decode, (programs,),
        {
            **facts, **shared, "SAME_STRIDES": same_strides,
            # Heads of 120 begin at multiples of 8, which the compiler is not told of an argument.
            "ALIGN": math.gcd(16, facts["k_stride_head"], facts["v_stride_head"]),
            "ASSEMBLY": nvidia and facts["k"].element_size() == 1 and facts["COMPUTE"] == tl.float16,
            "PIN": given["PIN"], "BY_KEY": by_key, "num_warps": given["num_warps"],
            "num_stages": given["num_stages"], **registers,
        },
    )  # fmt: skip
    merged = {name: facts[name] for name in facts if name in MERGE_FACTS}
    # Each program makes the plan anew, which takes it longer than a row: none for rows that few items have.
    most_rows, side_by_side = min(packed, block_m), min(together * facts["GROUP"], block_m)
    merge = Prepared(
        _merge_pieces, (programs, side_by_side),
        {
            **merged, **shared, "PIECES": max(1, given["MERGED"] // facts["BLOCK_D"]),
            "ROWS_EACH": triton.cdiv(most_rows, side_by_side), "num_warps": 4,
        },
    )  # fmt: skip
    names = [name for name, x in facts.items() if isinstance(x, Tensor)]
    places = [place for place, name in enumerate(names) if name in merged]

    def call(*tensors: Tensor) -> None:
        acc = torch.empty(acc_shape, dtype=torch.float32, device=device)
        sums = torch.empty(sums_shape, dtype=torch.float32, device=device)
        decode(*tensors, acc, sums)
        merge(*[tensors[place] for place in places], acc, sums)

    return call
