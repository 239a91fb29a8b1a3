"""Batch-invariant decode attention: the bits of a row depend on its query, its keys and nothing else.

Keys are cut into chunks at absolute positions. Each chunk becomes a partial by the very function, tile shape
and masks that `prefill.py` uses in this mode, whichever program does it, and the partials of an item are
merged one after the other in the order of the keys, as prefill does in registers. So a token's row has the
same bits alone or in a batch, in a draft of eight, or in a prompt of thousands.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from octavo.kernels.triton import decode_plan, tiles
from octavo.kernels.triton.attention_arguments import (
    MERGE_FACTS,
    UNALIGNED,
    UNSPECIALISED,
    invariant_tile,
    with_scales_applied,
)
from octavo.kernels.triton.launch import direct

_CHUNK: tl.constexpr = tl.constexpr(tiles.INVARIANT_CHUNK)


@direct
@triton.jit(do_not_specialize=(*UNSPECIALISED, "most_chunks"), do_not_specialize_on_alignment=UNALIGNED)
def _decode_chunks(
    q, k, v, out, lse, partial_acc, partial_sums,
    cu_seqlens_q, cu_seqlens_k, block_table, leftpad, alibi_slopes, sinks, k_scale, v_scale,
    q_stride_token, q_stride_head,
    k_stride_block, k_stride_slot, k_stride_head, v_stride_block, v_stride_slot, v_stride_head,
    out_stride_token, out_stride_head, lse_stride, table_stride, slopes_stride,
    k_scale_stride_block, k_scale_stride_slot, k_scale_stride_head,
    v_scale_stride_block, v_scale_stride_slot, v_scale_stride_head,
    scale, softcap, value_scale, left, right, batch, most_chunks,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, COMPUTE: tl.constexpr, PLAIN: tl.constexpr,
    K_SCALES: tl.constexpr, V_SCALES: tl.constexpr,
    ROWS: tl.constexpr, ROW_TILES: tl.constexpr, BLOCK_B: tl.constexpr, ONE_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    rank = tl.program_id(0) // NUM_KV_HEADS
    ranks = tl.num_programs(0) // NUM_KV_HEADS
    per, total_units = decode_plan.divide(
        cu_seqlens_q, cu_seqlens_k, leftpad, left, batch, ranks, 1,
        GROUP, BLOCK_M, _CHUNK, BLOCK_B, ONE_BLOCK,
    )  # fmt: skip
    unit = rank * per
    end = tl.minimum(unit + per, total_units)
    b, begin = decode_plan.sequence_of(
        cu_seqlens_q, cu_seqlens_k, leftpad, left, batch, unit, GROUP, BLOCK_M, _CHUNK, BLOCK_B, ONE_BLOCK
    )
    dims = tl.arange(0, BLOCK_D)
    if K_SCALES == 1:
        scale *= tl.load(k_scale)
    if V_SCALES == 1:
        value_scale *= tl.load(v_scale)
    while unit < end:
        q_begin, q_len, k_begin, k_len, item_first, chunks, units = decode_plan.work(
            cu_seqlens_q, cu_seqlens_k, leftpad, left, batch, b, GROUP, BLOCK_M, _CHUNK
        )
        if unit >= begin + units:
            begin += units
            b += 1
        else:
            row_tile = (unit - begin) // chunks
            chunk = (unit - begin) % chunks
            local = tl.arange(0, BLOCK_M)
            r = row_tile * BLOCK_M + local
            token = r // GROUP
            heads = kv_head * GROUP + r % GROUP
            in_sequence = token < q_len
            rows = (q_begin + token).to(tl.int64)
            positions = k_len - q_len + token
            first = item_first
            last = k_len
            if left is not None:
                first = tl.maximum(first, k_len - q_len + row_tile * BLOCK_M // GROUP - left)
            if right is not None:
                top = tl.minimum((row_tile * BLOCK_M + BLOCK_M - 1) // GROUP, q_len - 1)
                last = tl.minimum(last, k_len - q_len + top + right + 1)

            q_rows = rows * q_stride_token + heads.to(tl.int64) * q_stride_head
            q_mask = in_sequence[:, None] & (dims < HEAD_DIM)[None, :]
            q_tile = tl.load(q + q_rows[:, None] + dims[None, :], mask=q_mask, other=0.0).to(COMPUTE)
            table_row = block_table
            run_block = tl.zeros([], tl.int64)
            run_slot = k_begin
            if block_table is not None:
                table_row = block_table + b.to(tl.int64) * table_stride
                run_slot = 0
                if BLOCK_SIZE == 0:
                    run_block = tl.load(table_row, mask=last > first, other=0).to(tl.int64)
            head = kv_head.to(tl.int64)
            k_scale_head = None
            v_scale_head = None
            if K_SCALES == 2:
                k_scale_head = k_scale + head * k_scale_stride_head
            if V_SCALES == 2:
                v_scale_head = v_scale + head * v_scale_stride_head
            slopes = None
            if alibi_slopes is not None:
                slopes = tl.load(alibi_slopes + b * slopes_stride + heads, mask=in_sequence, other=0.0)
            keys_of = (
                k + head * k_stride_head, k_stride_block, k_stride_slot,
                v + head * v_stride_head, v_stride_block, v_stride_slot, run_block, run_slot,
                k_scale_stride_block, k_scale_stride_slot, v_scale_stride_block, v_scale_stride_slot,
            )  # fmt: skip
            from_tile = (item_first // _CHUNK + chunk) * (_CHUNK // BLOCK_N)
            to_tile = tl.minimum(from_tile + _CHUNK // BLOCK_N, (last + BLOCK_N - 1) // BLOCK_N)
            from_tile = tl.maximum(from_tile, first // BLOCK_N)
            acc, high, total = tiles.absorb_tiles(
                q_tile, tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
                tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32),
                from_tile, tl.where(last > first, to_tile, from_tile), 0, 0, keys_of,
                (positions, first, last, scale), table_row, k_scale_head, v_scale_head,
                left, right, softcap, slopes,
                True, PLAIN, HEAD_DIM, BLOCK_D, BLOCK_SIZE, COMPUTE, BLOCK_N,
            )  # fmt: skip
            if chunks == 1:
                tiles.store_rows(
                    acc, high, total, out, lse, sinks, value_scale, rows, heads, in_sequence,
                    out_stride_token, out_stride_head, lse_stride, HEAD_DIM, BLOCK_D,
                )  # fmt: skip
            else:
                slot = (
                    (b.to(tl.int64) * NUM_KV_HEADS + kv_head) * ROW_TILES + row_tile
                ) * most_chunks + chunk
                at = slot * ROWS + local
                # Bounds that do not hold must not write outside the workspace.
                room = tl.where((chunk < most_chunks) & (row_tile < ROW_TILES), ROWS, 0)
                kept = in_sequence & (local < room)
                tl.store(partial_acc + at[:, None] * BLOCK_D + dims[None, :], acc, mask=kept[:, None])
                tl.store(partial_sums + at * 2, high, mask=kept)
                tl.store(partial_sums + at * 2 + 1, total, mask=kept)
            unit += 1


@direct
@triton.jit(do_not_specialize=(*UNSPECIALISED, "most_chunks"), do_not_specialize_on_alignment=UNALIGNED)
def _merge_chunks(
    out, lse, partial_acc, partial_sums, cu_seqlens_q, cu_seqlens_k, leftpad, sinks, v_scale,
    out_stride_token, out_stride_head, lse_stride, value_scale, left, batch, most_chunks,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    V_SCALES: tl.constexpr, ROWS: tl.constexpr, ROW_TILES: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Fold the partials of BLOCK_R rows of one item, in the order of the keys."""
    row_tile = tl.program_id(0) % ROW_TILES
    kv_head = tl.program_id(0) // ROW_TILES % NUM_KV_HEADS
    b = tl.program_id(0) // (ROW_TILES * NUM_KV_HEADS)
    q_begin, q_len, _, _, _, chunks, units = decode_plan.work(
        cu_seqlens_q, cu_seqlens_k, leftpad, left, batch, b, GROUP, BLOCK_M, _CHUNK
    )
    if (units > 0) & (chunks > 1) & (row_tile * BLOCK_M < q_len * GROUP):
        local = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
        r = row_tile * BLOCK_M + local
        token = r // GROUP
        heads = kv_head * GROUP + r % GROUP
        seen = token < q_len
        dims = tl.arange(0, BLOCK_D)
        acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
        high = tl.full([BLOCK_R], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_R], tl.float32)
        slot = (b.to(tl.int64) * NUM_KV_HEADS + kv_head) * ROW_TILES + row_tile
        for chunk in tl.range(0, tl.minimum(chunks, most_chunks), num_stages=4):
            at = (slot * most_chunks + chunk) * ROWS + local
            chunk_high = tl.load(partial_sums + at * 2, mask=seen, other=float("-inf"))
            chunk_total = tl.load(partial_sums + at * 2 + 1, mask=seen, other=0.0)
            chunk_acc = tl.load(
                partial_acc + at[:, None] * BLOCK_D + dims[None, :], mask=seen[:, None], other=0.0
            )
            acc, high, total = tiles.merge(acc, high, total, chunk_acc, chunk_high, chunk_total)
        if V_SCALES == 1:
            value_scale *= tl.load(v_scale)
        tiles.store_rows(
            acc, high, total, out, lse, sinks, value_scale, (q_begin + token).to(tl.int64), heads, seen,
            out_stride_token, out_stride_head, lse_stride, HEAD_DIM, BLOCK_D,
        )  # fmt: skip


def decode_invariant(facts: dict[str, Any], max_seqlen_q: int, max_seqlen_k: int, programs: int) -> None:
    """Launch on the `attention_arguments.arguments` of a call; the number of programs changes no bit."""
    facts = with_scales_applied(facts)
    tile = invariant_tile(facts)
    device, batch = facts["q"].device, facts["batch"]
    packed = max_seqlen_q * facts["GROUP"]  # query rows of an item
    row_tiles = triton.cdiv(packed, tile["BLOCK_M"])
    rows = min(triton.next_power_of_2(packed), tile["BLOCK_M"])
    most_chunks = triton.cdiv(max_seqlen_k, tiles.INVARIANT_CHUNK)
    if most_chunks == 1:
        most_chunks = 0  # one is no partial: there is no workspace
    slots = batch * facts["NUM_KV_HEADS"] * row_tiles * most_chunks
    partial_acc = torch.empty((slots, rows, facts["BLOCK_D"]), dtype=torch.float32, device=device)
    partial_sums = torch.empty((slots, rows, 2), dtype=torch.float32, device=device)
    sizes = {"most_chunks": most_chunks, "ROWS": rows, "ROW_TILES": row_tiles}
    block_b = decode_plan.sequences_at_once(batch)
    heads = facts["NUM_KV_HEADS"]
    _decode_chunks[(max(1, programs // heads) * heads,)](
        **facts, **sizes, partial_acc=partial_acc, partial_sums=partial_sums,
        BLOCK_B=block_b, ONE_BLOCK=batch <= block_b, **tile,
    )  # fmt: skip
    if most_chunks:
        block_r = min(rows, 4)
        shared = {name: facts[name] for name in MERGE_FACTS}
        _merge_chunks[(batch * facts["NUM_KV_HEADS"] * row_tiles, rows // block_r)](
            **shared, **sizes, partial_acc=partial_acc, partial_sums=partial_sums,
            BLOCK_M=tile["BLOCK_M"], BLOCK_R=block_r, num_warps=2,
        )  # fmt: skip
