"""Prefill on Hopper: one warp copies, two warpgroups multiply."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

SHORT = 8
copy_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def find_sequence(cu_seqlens_q, batch, tile, BLOCK_M: gl.constexpr, WARPS: gl.constexpr):
    """The sequence of this tile: the last b with cu_seqlens_q[b] // BLOCK_M + b <= tile."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    found = -1
    for start in range(0, batch, 128):
        b = start + gl.arange(0, 128, layout=layout)
        first = gl.load(cu_seqlens_q + b, mask=b < batch, other=0) // BLOCK_M + b
        found += gl.sum(((b < batch) & (first <= tile)).to(gl.int32), 0)
    return found


@gluon.jit
def find_work(
    work, cu_seqlens_q, cu_seqlens_k, batch, num_tiles, left, right,
    H: gl.constexpr, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, SHORT: gl.constexpr, WARPS: gl.constexpr,
):
    """Work item -> (sequence, head, first row, first key tile, end key tile, lowest key, lengths)."""
    head = work % H
    tile = num_tiles - 1 - work // H
    b = find_sequence(cu_seqlens_q, batch, tile, BLOCK_M, WARPS)
    q_start = gl.load(cu_seqlens_q + b)
    q_len = gl.load(cu_seqlens_q + b + 1) - q_start
    k_start = gl.load(cu_seqlens_k + b)
    k_len = gl.load(cu_seqlens_k + b + 1) - k_start
    row = (tile - q_start // BLOCK_M - b) * BLOCK_M
    is_live = (q_len > SHORT) & (row < q_len)
    position = row + k_len - q_len  # of the first row
    end = k_len
    low = 0
    if HAS_RIGHT:
        end = gl.minimum(k_len, gl.minimum(row + BLOCK_M, q_len) + k_len - q_len + right)
    if HAS_LEFT:
        low = gl.minimum(gl.maximum(position - left, 0), gl.maximum(k_len - 1, 0))
    end_tile = gl.where(is_live, gl.maximum(end + BLOCK_N - 1, 0) // BLOCK_N, 0)
    first_tile = gl.where(is_live, low // BLOCK_N, 0)
    end_tile = gl.maximum(end_tile, first_tile)
    return b, head, row, q_start, q_len, k_start, k_len, low, first_tile, end_tile, is_live


@gluon.jit
def load_tile(
    desc, tile, barrier, rows, column, BLOCK_N: gl.constexpr, BOX: gl.constexpr, D: gl.constexpr,
):
    mbarrier.expect(barrier, BLOCK_N * D * 2)
    for i in gl.static_range(BLOCK_N // BOX):
        copy_box(desc, [rows[i], column], barrier, tile.slice(i * BOX, BOX, dim=0))


@gluon.jit
def send_note(notes, note_full, note_empty, sent, a, b, c, d, e, f, g, h):
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [1], [0])
    i = gl.arange(0, 8, layout=layout)
    note = gl.where(i == 0, a, gl.where(i == 1, b, gl.where(i == 2, c, gl.where(i == 3, d, 0))))
    note = gl.where(i == 4, e, gl.where(i == 5, f, gl.where(i == 6, g, gl.where(i == 7, h, note))))
    slot = sent % 2
    mbarrier.wait(note_empty.index(slot), ((sent // 2) & 1) ^ 1)
    notes.index(slot).store(note.to(gl.int32))
    mbarrier.arrive(note_full.index(slot), count=1)


@gluon.jit
def receive_note(notes, note_full, note_empty, received):
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    i = gl.arange(0, 8, layout=layout)
    slot = received % 2
    mbarrier.wait(note_full.index(slot), (received // 2) & 1)
    note = notes.index(slot).load(layout)
    mbarrier.arrive(note_empty.index(slot), count=1)
    return (
        gl.sum(gl.where(i == 0, note, 0), 0), gl.sum(gl.where(i == 1, note, 0), 0),
        gl.sum(gl.where(i == 2, note, 0), 0), gl.sum(gl.where(i == 3, note, 0), 0),
        gl.sum(gl.where(i == 4, note, 0), 0), gl.sum(gl.where(i == 5, note, 0), 0),
        gl.sum(gl.where(i == 6, note, 0), 0), gl.sum(gl.where(i == 7, note, 0), 0),
    )  # fmt: skip


@gluon.jit
def producer(
    q_desc, k_desc, v_desc, q_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    notes, note_full, note_empty, counter,
    cu_seqlens_q, cu_seqlens_k, block_table, batch, num_tiles, left, right, table_stride,
    DYNAMIC: gl.constexpr, BLOCK_ROWS: gl.constexpr, Q_HEAD: gl.constexpr, K_HEAD: gl.constexpr, V_HEAD: gl.constexpr,
    V_BLOCK_ROWS: gl.constexpr,
    H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, MODE: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, SHORT: gl.constexpr,
):
    BOX: gl.constexpr = k_desc.block_type.shape[0]
    count = 0
    items = 0
    sent = 0
    step = 0
    P = gl.num_programs(0)
    work = gl.program_id(0)
    if DYNAMIC:
        work = gl.atomic_add(counter, 1, sem="relaxed")
    while work < num_tiles * H:
        b, head, row, q_start, q_len, k_start, k_len, low, first_tile, end_tile, is_live = find_work(
            work, cu_seqlens_q, cu_seqlens_k, batch, num_tiles, left, right,
            H, GROUP, 128, BLOCK_N, HAS_LEFT, HAS_RIGHT, SHORT, 1,
        )
        if is_live:
            send_note(notes, note_full, note_empty, sent, head, row, q_start, q_len, k_len, low, first_tile, end_tile)
            sent += 1
        step += 1
        if DYNAMIC:
            work = gl.atomic_add(counter, 1, sem="relaxed")
        else:
            work = step * P + gl.where(step % 2 == 1, P - 1 - gl.program_id(0), gl.program_id(0))
        if end_tile > first_tile:
            kv_head = head // GROUP
            for w in gl.static_range(2):
                mbarrier.wait(q_empty.index(w), (items & 1) ^ 1)
                mbarrier.expect(q_full.index(w), 64 * D * 2)
                copy_box(q_desc, [q_start + row + w * 64, head * Q_HEAD], q_full.index(w), q_tiles.index(w))
            items += 1
            k_base = k_start
            v_base = k_start
            if MODE == 1:  # one block per sequence
                block = gl.load(block_table + b.to(gl.int64) * table_stride)
                k_base = block * BLOCK_ROWS
                v_base = block * V_BLOCK_ROWS
            table = block_table + b.to(gl.int64) * table_stride
            for j in range(end_tile - first_tile):
                key = (end_tile - 1 - j) * BLOCK_N
                k_rows = ()
                v_rows = ()
                if MODE == 2:
                    for i in gl.static_range(BLOCK_N // BOX):
                        at = gl.minimum(gl.maximum(key + i * BOX, low), k_len - 1) // BLOCK_SIZE
                        block = gl.load(table + at)
                        k_rows = k_rows + (block * BLOCK_ROWS + (key + i * BOX) % BLOCK_SIZE,)
                        v_rows = v_rows + (block * V_BLOCK_ROWS + (key + i * BOX) % BLOCK_SIZE,)
                else:
                    k_rows = (k_base + key,)
                    v_rows = (v_base + key,)
                stage = count % STAGES
                phase = (count // STAGES) & 1
                mbarrier.wait(k_empty.index(stage), phase ^ 1)
                load_tile(k_desc, k_tiles.index(stage), k_full.index(stage), k_rows, kv_head * K_HEAD, BLOCK_N, BOX, D)
                mbarrier.wait(v_empty.index(stage), phase ^ 1)
                load_tile(v_desc, v_tiles.index(stage), v_full.index(stage), v_rows, kv_head * V_HEAD, BLOCK_N, BOX, D)
                count += 1
    send_note(notes, note_full, note_empty, sent, -1, 0, 0, 0, 0, 0, 0, 0)


@gluon.jit
def clear_rows(tile, first, end, BLOCK_N: gl.constexpr, D: gl.constexpr):
    """Zero the rows of a V tile outside [first, end): what lies there may be NaN, and 0 * NaN is NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [4, 1], [1, 0])
    for i in gl.static_range(BLOCK_N // 16):
        if (i * 16 < first) | (i * 16 + 16 > end):
            rows = tile.slice(i * 16, 16, dim=0)
            at = i * 16 + gl.arange(0, 16, layout=gl.SliceLayout(1, layout))
            keep = (at >= first) & (at < end)
            rows.store(gl.where(keep[:, None], rows.load(layout), 0.0))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def softmax(
    s, m, l, key, position, k_len, left, right, scale, cap,
    MASK: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, SOFTCAP: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):
    layout: gl.constexpr = s.type.layout
    if SOFTCAP:
        # cap * tanh(scale * s / cap), in the log2 domain; exp2 overflows to inf and the fraction to 0
        s = cap - 2.0 * cap / (gl.exp2(s * scale) + 1.0)
    if MASK:
        keys = key + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
        at = position + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, layout))
        sees = (keys < k_len)[None, :]
        if HAS_RIGHT:
            sees = sees & (keys[None, :] <= (at + right)[:, None])
        if HAS_LEFT:
            sees = sees & (keys[None, :] >= (at - left)[:, None])
        s = gl.where(sees, s, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, 1))
    if MASK:
        base = gl.where(m_new == float("-inf"), 0.0, m_new)
    else:
        base = m_new
    if SOFTCAP:
        p = gl.exp2(s - base[:, None])
        alpha = gl.exp2(m - base)
    else:
        base = base * scale
        p = gl.exp2(s * scale - base[:, None])
        alpha = gl.exp2(m * scale - base)
    l = l * alpha + gl.sum(p, 1)
    return p, m_new, l, alpha


@gluon.jit
def steps(
    acc, p, m, l, count, start, end, q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
    turns, position, k_len, left, right, scale, cap,
    WARPGROUP: gl.constexpr, PINGPONG: gl.constexpr,
    MASK: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, SOFTCAP: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):
    """Key tiles start - 1 down to end: scores of this tile beside the product of the last one with V."""
    ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    for j in range(start - end):
        key = (start - 1 - j) * BLOCK_N
        stage = count % STAGES
        last = (count - 1) % STAGES
        mbarrier.wait(k_full.index(stage), (count // STAGES) & 1)
        if PINGPONG:
            mbarrier.wait(turns.index(WARPGROUP), (count & 1) ^ (1 - WARPGROUP))
        s = gl.zeros([64, BLOCK_N], gl.float32, layout=S_LAYOUT)
        s = warpgroup_mma(q, k_tiles.index(stage).permute((1, 0)), s, use_acc=False, is_async=True)
        if not OVERLAP:
            s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.wait(v_full.index(last), ((count - 1) // STAGES) & 1)
        acc = warpgroup_mma(p, v_tiles.index(last), acc, is_async=True)
        if PINGPONG:
            mbarrier.arrive(turns.index(1 - WARPGROUP), count=1)
        if OVERLAP:
            s = warpgroup_mma_wait(1, deps=(s,))
        else:
            acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(k_empty.index(stage), count=1)
        p32, m, l, alpha = softmax(
            s, m, l, key, position, k_len, left, right, scale, cap,
            MASK, HAS_LEFT, HAS_RIGHT, SOFTCAP, 64, BLOCK_N,
        )
        p16 = p32.to(v_tiles.dtype)
        if OVERLAP:
            # p16 passes through the wait, or the compiler would move all of the softmax behind it
            mbarrier.wait(v_full.index(last), ((count - 1) // STAGES) & 1)
            acc, p16 = warpgroup_mma_wait(0, deps=(acc, p16))
        mbarrier.arrive(v_empty.index(last), count=1)
        acc = acc * gl.convert_layout(alpha, ROWS)[:, None]
        p = gl.convert_layout(p16, gl.DotOperandLayout(0, O_LAYOUT, 2))
        count += 1
    return acc, p, m, l, count


@gluon.jit
def consumer(
    WARPGROUP: gl.constexpr,
    out, lse, q_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    notes, note_full, note_empty, turns, left, right, scale, cap, total_q,
    out_row, out_head,
    H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, SOFTCAP: gl.constexpr, HAS_LSE: gl.constexpr,
    SHORT: gl.constexpr, OVERLAP: gl.constexpr, PINGPONG: gl.constexpr,
):
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [4, 1], [1, 0])
    count = 0
    items = 0
    received = 0
    head = 0
    while head >= 0:
        head, row, q_start, q_len, k_len, low, first_tile, end_tile = receive_note(notes, note_full, note_empty, received)
        received += 1
        if head >= 0:
            row += WARPGROUP * 64
            position = row + k_len - q_len
            acc = gl.zeros([64, D], gl.float32, layout=O_LAYOUT)
            m = gl.full([64], float("-inf"), gl.float32, layout=S_ROWS)
            l = gl.full([64], 0.0, gl.float32, layout=S_ROWS)
            if end_tile > first_tile:
                q = q_tiles.index(WARPGROUP)
                mbarrier.wait(q_full.index(WARPGROUP), items & 1)
                items += 1
                # The first tile, at the end of the keys
                stage = count % STAGES
                mbarrier.wait(k_full.index(stage), (count // STAGES) & 1)
                if PINGPONG:
                    mbarrier.wait(turns.index(WARPGROUP), (count & 1) ^ (1 - WARPGROUP))
                s = gl.zeros([64, BLOCK_N], gl.float32, layout=S_LAYOUT)
                s = warpgroup_mma(q, k_tiles.index(stage).permute((1, 0)), s, use_acc=False, is_async=True)
                if PINGPONG:
                    mbarrier.arrive(turns.index(1 - WARPGROUP), count=1)
                s = warpgroup_mma_wait(0, deps=(s,))
                mbarrier.arrive(k_empty.index(stage), count=1)
                p32, m, l, alpha = softmax(
                    s, m, l, (end_tile - 1) * BLOCK_N, position, k_len, left, right, scale, cap,
                    True, HAS_LEFT, HAS_RIGHT, SOFTCAP, 64, BLOCK_N,
                )
                p = gl.convert_layout(p32.to(v_tiles.dtype), P_LAYOUT)
                if end_tile * BLOCK_N > k_len:
                    mbarrier.wait(v_full.index(stage), (count // STAGES) & 1)
                    clear_rows(v_tiles.index(stage), 0, k_len - (end_tile - 1) * BLOCK_N, BLOCK_N, D)
                count += 1
                # Tiles that some row sees only in part, tiles that all see, tiles cut by the window's left end
                top = end_tile - 1
                full_end = k_len
                if HAS_RIGHT:
                    full_end = gl.minimum(k_len, gl.maximum(position + right + 1, 0))
                full_end = gl.minimum(gl.maximum(full_end // BLOCK_N, first_tile), top)
                full_first = first_tile
                if HAS_LEFT:
                    full_first = gl.minimum(gl.maximum(position + 63 - left + BLOCK_N - 1, 0) // BLOCK_N, full_end)
                    full_first = gl.maximum(full_first, first_tile)
                if HAS_RIGHT:
                    acc, p, m, l, count = steps(
                        acc, p, m, l, count, top, full_end, q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
                        turns, position, k_len, left, right, scale, cap, WARPGROUP, PINGPONG,
                        True, HAS_LEFT, HAS_RIGHT, SOFTCAP, BLOCK_N, STAGES, OVERLAP, S_LAYOUT, O_LAYOUT,
                    )
                acc, p, m, l, count = steps(
                    acc, p, m, l, count, full_end, full_first, q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
                    turns, position, k_len, left, right, scale, cap, WARPGROUP, PINGPONG,
                    False, HAS_LEFT, HAS_RIGHT, SOFTCAP, BLOCK_N, STAGES, OVERLAP, S_LAYOUT, O_LAYOUT,
                )
                if HAS_LEFT:
                    acc, p, m, l, count = steps(
                        acc, p, m, l, count, full_first, first_tile, q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
                        turns, position, k_len, left, right, scale, cap, WARPGROUP, PINGPONG,
                        True, HAS_LEFT, HAS_RIGHT, SOFTCAP, BLOCK_N, STAGES, OVERLAP, S_LAYOUT, O_LAYOUT,
                    )
                mbarrier.arrive(q_empty.index(WARPGROUP), count=1)
                last = (count - 1) % STAGES
                mbarrier.wait(v_full.index(last), ((count - 1) // STAGES) & 1)
                if HAS_LEFT:
                    if low > first_tile * BLOCK_N:
                        clear_rows(v_tiles.index(last), low - first_tile * BLOCK_N, BLOCK_N, BLOCK_N, D)
                acc = warpgroup_mma(p, v_tiles.index(last), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(v_empty.index(last), count=1)
            total = gl.convert_layout(l, O_ROWS)
            acc = acc * gl.where(total > 0.0, 1.0 / total, 0.0)[:, None]
            rows = row + gl.arange(0, 64, layout=gl.SliceLayout(1, STORE))
            columns = gl.arange(0, D, layout=gl.SliceLayout(0, STORE))
            start = out + (q_start + row).to(gl.int64) * out_row + head.to(gl.int64) * out_head
            local = gl.arange(0, 64, layout=gl.SliceLayout(1, STORE))
            offsets = local[:, None] * out_row + columns[None, :]
            gl.store(start + offsets, gl.convert_layout(acc.to(out.dtype.element_ty), STORE), mask=(rows < q_len)[:, None])
            if HAS_LSE:
                value = gl.where(l > 0.0, m * (1.0 if SOFTCAP else scale) * 0.6931471805599453 + gl.log(l), float("-inf"))
                at = row + gl.arange(0, 64, layout=S_ROWS)
                gl.store(lse + head.to(gl.int64) * total_q + q_start + at, value, mask=at < q_len)


@gluon.jit(do_not_specialize=["batch", "num_tiles", "left", "right", "table_stride", "total_q"])
def kernel(
    q_desc, k_desc, v_desc, out, lse, counter, cu_seqlens_q, cu_seqlens_k, block_table,
    batch, num_tiles, left, right, scale, cap, table_stride, total_q, out_row, out_head,
    BLOCK_ROWS: gl.constexpr, V_BLOCK_ROWS: gl.constexpr,
    Q_HEAD: gl.constexpr, K_HEAD: gl.constexpr, V_HEAD: gl.constexpr,
    H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, MODE: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, SOFTCAP: gl.constexpr, HAS_LSE: gl.constexpr,
    SHORT: gl.constexpr, OVERLAP: gl.constexpr, PINGPONG: gl.constexpr, DYNAMIC: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_tiles = gl.allocate_shared_memory(dtype, [2, 64, D], TILE)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], TILE)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], TILE)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    notes = gl.allocate_shared_memory(gl.int32, [2, 8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    note_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    note_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for i in gl.static_range(2):
        mbarrier.init(note_full.index(i), count=1)
        mbarrier.init(note_empty.index(i), count=2)
        mbarrier.init(turns.index(i), count=1)
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consumer, (
                0, out, lse, q_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                notes, note_full, note_empty, turns, left, right, scale, cap, total_q, out_row, out_head,
                H, GROUP, D, BLOCK_N, STAGES, HAS_LEFT, HAS_RIGHT, SOFTCAP, HAS_LSE, SHORT, OVERLAP, PINGPONG,
            )),
            (consumer, (
                1, out, lse, q_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                notes, note_full, note_empty, turns, left, right, scale, cap, total_q, out_row, out_head,
                H, GROUP, D, BLOCK_N, STAGES, HAS_LEFT, HAS_RIGHT, SOFTCAP, HAS_LSE, SHORT, OVERLAP, PINGPONG,
            )),
            (producer, (
                q_desc, k_desc, v_desc, q_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                notes, note_full, note_empty, counter,
                cu_seqlens_q, cu_seqlens_k, block_table, batch, num_tiles, left, right, table_stride,
                DYNAMIC, BLOCK_ROWS, Q_HEAD, K_HEAD, V_HEAD, V_BLOCK_ROWS, H, GROUP, D, BLOCK_SIZE, BLOCK_N, STAGES, MODE,
                HAS_LEFT, HAS_RIGHT, SHORT,
            )),
        ],
        [4, 1], [232, 40],
    )  # fmt: skip


def rows_and_head(x: Tensor) -> tuple[int, int]:
    """(rows per block, columns per head) of a cache seen as a matrix of one row per slot."""
    return x.stride(0) // x.stride(-3), x.stride(-2)


def as_matrix(x: Tensor, box_rows: int) -> TensorDescriptor:
    """A packed tensor (rows, heads, d) or a cache (blocks, slots, heads, d): one row per token."""
    d = x.shape[-1]
    num_rows = x.shape[0] if x.dim() == 3 else (x.shape[0] - 1) * (x.stride(0) // x.stride(1)) + x.shape[1]
    columns = (x.shape[-2] - 1) * x.stride(-2) + d
    layout = gl.NVMMASharedLayout(128, 16, 2)
    return TensorDescriptor(x, [num_rows, columns], [x.stride(-3), 1], [box_rows, d], layout)


def prefill_attention(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, softmax_scale, causal, window_size,
    softcap, alibi_slopes, sinks, block_table, out, lse, k_scale=None, v_scale=None, leftpad=None,
    batch_invariant=False, block_n=None, stages=2, overlap=True, persistent=True, dynamic=False, pingpong=False, warmup=False,
):
    num_rows, num_heads, head_dim = q.shape
    batch = cu_seqlens_q.shape[0] - 1
    if block_n is None:
        block_n = 64 if head_dim == 256 else 128
    left, right = window_size
    if causal:
        right = 0
    if block_table is None:
        mode, block_size, k_rows, v_rows = 0, 1, 1, 1
    else:
        block_size, k_rows, v_rows = k.shape[1], k.stride(0) // k.stride(1), v.stride(0) // v.stride(1)
        mode = 1 if block_table.shape[1] == 1 else 2
    box = min(block_n, block_size) if mode == 2 else block_n
    num_tiles = num_rows // 128 + batch
    grid = num_tiles * num_heads
    if persistent:
        grid = min(grid, 132 if warmup else torch.cuda.get_device_properties(q.device).multi_processor_count)
    log2e = 1.4426950408889634
    scale, cap = softmax_scale * log2e, 0.0
    if softcap > 0:
        scale, cap = 2 * log2e * softmax_scale / softcap, softcap * log2e
    counter = torch.zeros(1, dtype=torch.int32, device=q.device) if dynamic else None
    arguments = (
        as_matrix(q, 64), as_matrix(k, box), as_matrix(v, box), out, lse, counter, cu_seqlens_q, cu_seqlens_k,
        cu_seqlens_k if block_table is None else block_table, batch, num_tiles, min(left, 1 << 30), min(right, 1 << 30), scale, cap,
        0 if block_table is None else block_table.stride(0), num_rows, out.stride(0), out.stride(1),
    )  # fmt: skip
    constants = dict(
        BLOCK_ROWS=k_rows, V_BLOCK_ROWS=v_rows, Q_HEAD=q.stride(1), K_HEAD=k.stride(-2), V_HEAD=v.stride(-2),
        H=num_heads, GROUP=num_heads // k.shape[-2], D=head_dim, BLOCK_SIZE=block_size, BLOCK_N=block_n,
        STAGES=stages, MODE=mode, HAS_LEFT=left >= 0, HAS_RIGHT=right >= 0, SOFTCAP=softcap > 0,
        HAS_LSE=lse is not None, SHORT=SHORT, OVERLAP=overlap, PINGPONG=pingpong, DYNAMIC=dynamic, num_warps=4,
    )  # fmt: skip
    if warmup:
        return kernel.warmup(*arguments, grid=(grid,), **constants)
    kernel[(grid,)](*arguments, **constants)
