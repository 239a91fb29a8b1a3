# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Prefill on Hopper (sm_90): one warp copies, two warpgroups multiply; sequences of more than 8 rows.

A program is 3 warpgroups that meet only at barriers in shared memory, and stays for the whole launch::

    producer (1 warp)     takes the next tile of 128 query rows x 1 head, tells the others, and copies
                          Q, then per 128 keys K and V, through TMA into rings of slots
    warpgroup 0           rows 0 .. 63 of the tile:     S = Q K^T,  P = softmax(S),  O = O * a + P V
    warpgroup 1           rows 64 .. 127

Keys are walked from the last tile to the first, so that what needs a mask comes first. Inside a warpgroup the
product of tile j with V runs beside the softmax of tile j + 1, and the two warpgroups take turns in issuing
their products, so that one's softmax runs beside the other's::

    tensor cores    | S1 O0 | S1'O0'| S2 O1 | S2'O1'| S3 O2 | ...      ' = warpgroup 1
    warpgroup 0             | softmax 1     | softmax 2     | ...
    warpgroup 1   ...  softmax 0'   | softmax 1'    | softmax 2'

Keys of a paged cache arrive block by block: a TMA box is one block (or BLOCK_N rows of a larger one), and
lands in its rows of the slot. The cache is described to TMA as a matrix of one row per slot.

Memory that no row may see can hold anything: block ids are clamped to those of visible keys, scores are
masked before use, and in the tiles that hold the ends of the keys the V rows outside are zeroed (0 * NaN).
"""

from typing import Any

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
from triton.language.core import _aggregate as aggregate

SHORT = 8
SHORT_ROWS = gl.constexpr(SHORT)
BLOCK_M = gl.constexpr(128)
PACKED, PAGED, ONE_BLOCK = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)

# Names that changed between Triton 3.6 and 3.9
copy_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
sync_partition = getattr(gl, "barrier", None) or gl.thread_barrier


@aggregate
class Ring:
    """Slots that the producer fills and the warpgroups empty; `count` numbers their uses from 0."""

    slots: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, slots, full, empty):
        self.slots = slots
        self.full = full
        self.empty = empty

    @gluon.jit
    def wait_empty(self, count):
        size: gl.constexpr = self.full.shape[0]
        mbarrier.wait(self.empty.index(count % size), ((count // size) & 1) ^ 1)
        return self.slots.index(count % size), self.full.index(count % size)

    @gluon.jit
    def wait_full(self, count):
        size: gl.constexpr = self.full.shape[0]
        mbarrier.wait(self.full.index(count % size), (count // size) & 1)
        return self.slots.index(count % size)

    @gluon.jit
    def release(self, count):
        size: gl.constexpr = self.full.shape[0]
        mbarrier.arrive(self.empty.index(count % size), count=1)


@gluon.jit
def new_ring(dtype, SHAPE: gl.constexpr, LAYOUT: gl.constexpr, READERS: gl.constexpr):
    SIZE: gl.constexpr = SHAPE[0]
    slots = gl.allocate_shared_memory(dtype, SHAPE, LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [SIZE, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SIZE, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SIZE):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    return Ring(slots, full, empty)


@aggregate
class Problem:
    """What every role knows."""

    q: Ring
    k: Ring
    v: Ring
    notes: Ring
    turns: gl.shared_memory_descriptor
    left: gl.tensor
    right: gl.tensor
    scale: gl.tensor
    cap: gl.tensor
    BLOCK_N: gl.constexpr
    D: gl.constexpr
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr
    SOFTCAP: gl.constexpr
    S_LAYOUT: gl.constexpr
    O_LAYOUT: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, q, k, v, notes, turns, left, right, scale, cap, BLOCK_N, D, HAS_LEFT, HAS_RIGHT, SOFTCAP, S_LAYOUT, O_LAYOUT):
        self.q = q
        self.k = k
        self.v = v
        self.notes = notes
        self.turns = turns
        self.left = left
        self.right = right
        self.scale = scale
        self.cap = cap
        self.BLOCK_N = gl.constexpr(BLOCK_N)
        self.D = gl.constexpr(D)
        self.HAS_LEFT = gl.constexpr(HAS_LEFT)
        self.HAS_RIGHT = gl.constexpr(HAS_RIGHT)
        self.SOFTCAP = gl.constexpr(SOFTCAP)
        self.S_LAYOUT = gl.constexpr(S_LAYOUT)
        self.O_LAYOUT = gl.constexpr(O_LAYOUT)


# ---------------------------------------------------------------------------------------------- producer


@gluon.jit
def send(notes, sent, head, row, q_start, q_len, k_len, low, first, end):
    """Tell both warpgroups what to do next: eight numbers; a head of -1 ends the work."""
    note, full = notes.wait_empty(sent)
    i = gl.arange(0, 8, layout=gl.BlockedLayout([8], [32], [1], [0]))
    value = gl.where(i == 0, head, gl.where(i == 1, row, gl.where(i == 2, q_start, q_len)))
    value = gl.where(i < 4, value, gl.where(i == 4, k_len, gl.where(i == 5, low, gl.where(i == 6, first, end))))
    note.store(value.to(gl.int32))
    mbarrier.arrive(full, count=1)


@gluon.jit
def receive(notes, received):
    note = notes.wait_full(received).load(gl.BlockedLayout([8], [32], [4], [0]))
    notes.release(received)
    i = gl.arange(0, 8, layout=gl.BlockedLayout([8], [32], [4], [0]))
    values = ()
    for n in gl.static_range(8):
        values = values + (gl.sum(gl.where(i == n, note, 0), 0),)
    return values


@gluon.jit
def find_sequence(cu_seqlens_q, batch, tile):
    """The last b with cu_seqlens_q[b] // BLOCK_M + b <= tile: where the tiles of sequence b start."""
    found = -1
    for start in range(0, batch, 128):
        b = start + gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [1], [0]))
        first = gl.load(cu_seqlens_q + b, mask=b < batch, other=0) // BLOCK_M + b
        found += gl.sum(((b < batch) & (first <= tile)).to(gl.int32), 0)
    return found


@gluon.jit
def producer(
    p, q_desc, k_desc, v_desc, cu_seqlens_q, cu_seqlens_k, block_table, counter, batch, num_tiles, table_stride,
    H: gl.constexpr, GROUP: gl.constexpr, HEAD_COLUMNS: gl.constexpr, BLOCK_ROWS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    BLOCK_N: gl.constexpr = p.BLOCK_N
    BOX: gl.constexpr = k_desc.block_type.shape[0]
    count = 0
    num_q = 0
    sent = 0
    work = gl.atomic_add(counter, 1, sem="relaxed")
    while work < num_tiles * H:
        # Long tiles first, and the heads of a group together: they read the same keys
        head = work % H
        tile = num_tiles - 1 - work // H
        work = gl.atomic_add(counter, 1, sem="relaxed")
        b = find_sequence(cu_seqlens_q, batch, tile)
        q_start = gl.load(cu_seqlens_q + b)
        q_len = gl.load(cu_seqlens_q + b + 1) - q_start
        k_start = gl.load(cu_seqlens_k + b)
        k_len = gl.load(cu_seqlens_k + b + 1) - k_start
        row = (tile - q_start // BLOCK_M - b) * BLOCK_M
        if (q_len > SHORT_ROWS) & (row < q_len):
            # Some row of this tile sees keys low .. high - 1
            past = k_len - q_len
            low = 0
            high = k_len
            if p.HAS_RIGHT:
                high = gl.minimum(k_len, gl.minimum(row + BLOCK_M, q_len) + past + p.right)
            if p.HAS_LEFT:
                low = gl.minimum(gl.maximum(row + past - p.left, 0), gl.maximum(k_len - 1, 0))
            first = low // BLOCK_N
            end = gl.maximum(gl.maximum(high + BLOCK_N - 1, 0) // BLOCK_N, first)
            send(p.notes, sent, head, row, q_start, q_len, k_len, low, first, end)
            sent += 1
            if end > first:
                for i in gl.static_range(2):
                    slot, full = p.q.wait_empty(num_q * 2 + i)
                    mbarrier.expect(full, 64 * p.D * 2)
                    copy_box(q_desc, [q_start + row + i * 64, head * HEAD_COLUMNS[0]], full, slot)
                num_q += 1
                table = block_table + b.to(gl.int64) * table_stride
                k_base = k_start
                v_base = k_start
                if KEYS == ONE_BLOCK:
                    block = gl.load(table)
                    k_base = block * BLOCK_ROWS[0]
                    v_base = block * BLOCK_ROWS[1]
                for j in range(end - first):
                    key = (end - 1 - j) * BLOCK_N
                    k_rows = ()
                    v_rows = ()
                    if KEYS == PAGED:
                        for i in gl.static_range(BLOCK_N // BOX):
                            at = key + i * BOX
                            block = gl.load(table + gl.minimum(gl.maximum(at, low), k_len - 1) // BLOCK_SIZE)
                            k_rows = k_rows + (block * BLOCK_ROWS[0] + at % BLOCK_SIZE,)
                            v_rows = v_rows + (block * BLOCK_ROWS[1] + at % BLOCK_SIZE,)
                    else:
                        k_rows = (k_base + key,)
                        v_rows = (v_base + key,)
                    copy_tile(p.k, count, k_desc, k_rows, head // GROUP * HEAD_COLUMNS[1])
                    copy_tile(p.v, count, v_desc, v_rows, head // GROUP * HEAD_COLUMNS[2])
                    count += 1
    send(p.notes, sent, -1, 0, 0, 0, 0, 0, 0, 0)


@gluon.jit
def copy_tile(ring, count, desc, rows, column):
    """Box by box into the next slot."""
    BOX: gl.constexpr = desc.block_type.shape[0]
    slot, full = ring.wait_empty(count)
    mbarrier.expect(full, slot.shape[0] * slot.shape[1] * 2)
    for i in gl.static_range(len(rows)):
        copy_box(desc, [rows[i], column], full, slot.slice(i * BOX, BOX, dim=0))


# ------------------------------------------------------------------------------------------- warpgroups


@gluon.jit
def consumer(p, W: gl.constexpr, out, lse, total_rows, out_row, out_head):
    """Warpgroup W: 64 rows of each tile."""
    D: gl.constexpr = p.D
    BLOCK_N: gl.constexpr = p.BLOCK_N
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, p.O_LAYOUT, 2)
    count = 0
    num_q = 0
    received = 0
    head, row, q_start, q_len, k_len, low, first, end = receive(p.notes, received)
    while head >= 0:
        row += W * 64
        position = row + k_len - q_len  # of the first row among the keys
        acc = gl.zeros([64, D], gl.float32, layout=p.O_LAYOUT)
        m = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, p.S_LAYOUT))
        l = gl.full([64], 0.0, gl.float32, layout=gl.SliceLayout(1, p.S_LAYOUT))
        if end > first:
            q = p.q.wait_full(num_q * 2 + W)
            k = p.k.wait_full(count)
            my_turn(p, W, count)
            s = scores(p, q, k)
            your_turn(p, W)
            s = warpgroup_mma_wait(0, deps=(s,))
            p.k.release(count)
            s, m, l, alpha = softmax(p, s, m, l, (end - 1) * BLOCK_N, position, k_len, True)
            weights = gl.convert_layout(s.to(p.v.slots.dtype), P_LAYOUT)
            if end * BLOCK_N > k_len:
                clear_rows(p.v.wait_full(count), 0, k_len - (end - 1) * BLOCK_N)
            count += 1
            # Tiles full_first .. full_end - 1 are seen whole by all rows
            last = end - 1
            full_end = k_len
            full_first = first
            if p.HAS_RIGHT:
                full_end = gl.minimum(k_len, gl.maximum(position + p.right + 1, 0))
            full_end = gl.minimum(gl.maximum(full_end // BLOCK_N, first), last)
            if p.HAS_LEFT:
                full_first = gl.maximum(position + 63 - p.left + BLOCK_N - 1, 0) // BLOCK_N
                full_first = gl.maximum(gl.minimum(full_first, full_end), first)
            if p.HAS_RIGHT:
                acc, weights, m, l, count = walk(
                    p, W, acc, weights, m, l, count, q, last, full_end, position, k_len, True
                )
            acc, weights, m, l, count = walk(
                p, W, acc, weights, m, l, count, q, full_end, full_first, position, k_len, False
            )
            if p.HAS_LEFT:
                acc, weights, m, l, count = walk(
                    p, W, acc, weights, m, l, count, q, full_first, first, position, k_len, True
                )
            p.q.release(num_q * 2 + W)
            num_q += 1
            v = p.v.wait_full(count - 1)
            if p.HAS_LEFT:
                if low > first * BLOCK_N:
                    clear_rows(v, low - first * BLOCK_N, BLOCK_N)
            acc = warpgroup_mma(weights, v, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            p.v.release(count - 1)
        store(p, out, lse, acc, m, l, head, row, q_start, q_len, total_rows, out_row, out_head)
        received += 1
        head, row, q_start, q_len, k_len, low, first, end = receive(p.notes, received)


@gluon.jit
def walk(p, W: gl.constexpr, acc, weights, m, l, count, q, start, stop, position, k_len, MASK: gl.constexpr):
    """Key tiles start - 1 down to stop; the product with V lags one tile behind the scores."""
    for j in range(start - stop):
        k = p.k.wait_full(count)
        my_turn(p, W, count)
        s = scores(p, q, k)
        v = p.v.wait_full(count - 1)
        acc = warpgroup_mma(weights, v, acc, is_async=True)
        your_turn(p, W)
        s = warpgroup_mma_wait(1, deps=(s,))
        p.k.release(count)
        s, m, l, alpha = softmax(p, s, m, l, (start - 1 - j) * p.BLOCK_N, position, k_len, MASK)
        s = s.to(v.dtype)
        # A wait that never waits, but ends a basic block: without it the assembler moves the softmax past
        # the wait for the product, and nothing runs beside it
        p.v.wait_full(count - 1)
        acc, s = warpgroup_mma_wait(0, deps=(acc, s))
        p.v.release(count - 1)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, p.O_LAYOUT))[:, None]
        weights = gl.convert_layout(s, gl.DotOperandLayout(0, p.O_LAYOUT, 2))
        count += 1
    return acc, weights, m, l, count


@gluon.jit
def scores(p, q, k):
    s = gl.zeros([64, p.BLOCK_N], gl.float32, layout=p.S_LAYOUT)
    return warpgroup_mma(q, k.permute((1, 0)), s, use_acc=False, is_async=True)


@gluon.jit
def my_turn(p, W: gl.constexpr, count):
    mbarrier.wait(p.turns.index(W), (count & 1) ^ (1 - W))


@gluon.jit
def your_turn(p, W: gl.constexpr):
    mbarrier.arrive(p.turns.index(1 - W), count=1)


@gluon.jit
def softmax(p, s, m, l, key, position, k_len, MASK: gl.constexpr):
    """One step of the online softmax in base 2: the weights, new m and l, what to multiply the past with.

    m is the largest score so far in the units of s.
    """
    scale = p.scale
    if p.SOFTCAP:
        # cap * tanh(scale * s / cap); where exp2 overflows the fraction is 0
        s = p.cap - 2.0 * p.cap / (gl.exp2(s * scale) + 1.0)
        scale = 1.0
    if MASK:
        keys = key + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))[None, :]
        rows = position + gl.arange(0, s.shape[0], layout=gl.SliceLayout(1, s.type.layout))[:, None]
        sees = keys < k_len
        if p.HAS_RIGHT:
            sees = sees & (keys <= rows + p.right)
        if p.HAS_LEFT:
            sees = sees & (keys >= rows - p.left)
        s = gl.where(sees, s, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, 1))
    base = m_new * scale
    if MASK:  # a row that has seen nothing
        base = gl.where(m_new == float("-inf"), 0.0, base)
    s = gl.exp2(s * scale - base[:, None])
    alpha = gl.exp2(m * scale - base)
    return s, m_new, l * alpha + gl.sum(s, 1), alpha


@gluon.jit
def clear_rows(v, first, end):
    """Zero the rows of a V tile outside first .. end - 1. Both warpgroups do it, with the same values."""
    D: gl.constexpr = v.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [4, 1], [1, 0])
    for i in gl.static_range(v.shape[0] // 16):
        if (i * 16 < first) | (i * 16 + 16 > end):
            some = v.slice(i * 16, 16, dim=0)
            at = i * 16 + gl.arange(0, 16, layout=gl.SliceLayout(1, layout))[:, None]
            some.store(gl.where((at >= first) & (at < end), some.load(layout), 0.0))
    fence_async_shared()
    sync_partition()


@gluon.jit
def store(p, out, lse, acc, m, l, head, row, q_start, q_len, total_rows, out_row, out_head):
    D: gl.constexpr = p.D
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [4, 1], [1, 0])
    total = gl.convert_layout(l, gl.SliceLayout(1, p.O_LAYOUT))
    acc = acc * gl.where(total > 0.0, 1.0 / total, 0.0)[:, None]
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))[:, None]
    columns = gl.arange(0, D, layout=gl.SliceLayout(0, layout))[None, :]
    start = out + (q_start + row).to(gl.int64) * out_row + head.to(gl.int64) * out_head
    value = gl.convert_layout(acc.to(out.dtype.element_ty), layout)
    gl.store(start + rows * out_row + columns, value, mask=rows < q_len - row)
    if lse is not None:
        scale = p.scale
        if p.SOFTCAP:
            scale = 1.0
        value = gl.where(l > 0.0, m * scale * 0.6931471805599453 + gl.log(l), float("-inf"))
        rows = gl.arange(0, 64, layout=gl.SliceLayout(1, p.S_LAYOUT))
        gl.store(lse + head.to(gl.int64) * total_rows + q_start + row + rows, value, mask=rows < q_len - row)


# ----------------------------------------------------------------------------------------------- launch


@gluon.jit(do_not_specialize=["batch", "num_tiles", "left", "right", "table_stride", "total_rows"])
def kernel(
    q_desc, k_desc, v_desc, out, lse, cu_seqlens_q, cu_seqlens_k, block_table, counter,
    batch, num_tiles, left, right, scale, cap, table_stride, total_rows, out_row, out_head,
    H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, HEAD_COLUMNS: gl.constexpr,
    BLOCK_ROWS: gl.constexpr, BLOCK_SIZE: gl.constexpr, KEYS: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, SOFTCAP: gl.constexpr,
    BLOCK_N: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q = new_ring(q_desc.dtype, [2, 64, D], LAYOUT, 1)
    k = new_ring(q_desc.dtype, [SLOTS, BLOCK_N, D], LAYOUT, 2)
    v = new_ring(q_desc.dtype, [SLOTS, BLOCK_N, D], LAYOUT, 2)
    notes = new_ring(gl.int32, [2, 8], gl.SwizzledSharedLayout(1, 1, 1, [0]), 2)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(turns.index(0), count=1)
    mbarrier.init(turns.index(1), count=1)
    fence_async_shared()
    p = Problem(
        q, k, v, notes, turns, left, right, scale, cap, BLOCK_N, D, HAS_LEFT, HAS_RIGHT, SOFTCAP,
        gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16]),
        gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16]),
    )  # fmt: skip
    gl.warp_specialize(
        [
            (consumer, (p, 0, out, lse, total_rows, out_row, out_head)),
            (consumer, (p, 1, out, lse, total_rows, out_row, out_head)),
            (producer, (
                p, q_desc, k_desc, v_desc, cu_seqlens_q, cu_seqlens_k, block_table, counter, batch, num_tiles,
                table_stride, H, GROUP, HEAD_COLUMNS, BLOCK_ROWS, BLOCK_SIZE, KEYS,
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


def prefill_attention(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, softmax_scale, causal, window_size,
    softcap, alibi_slopes, sinks, block_table, out, lse, k_scale=None, v_scale=None, leftpad=None,
    batch_invariant=False, block_n=None, stages=2, warmup=False,
):
    num_rows, num_heads, head_dim = q.shape
    batch = cu_seqlens_q.shape[0] - 1
    if block_n is None:
        block_n = 64 if head_dim == 256 else 128
    left, right = window_size
    if causal:
        right = 0
    keys, block_size, block_rows = 0, 1, (1, 1)
    if block_table is not None:
        block_size, block_rows = k.shape[1], (k.stride(0) // k.stride(1), v.stride(0) // v.stride(1))
        keys = 2 if block_table.shape[1] == 1 else 1
    box = min(block_n, block_size) if keys == 1 else block_n
    num_tiles = num_rows // 128 + batch
    grid = min(num_tiles * num_heads, 132 if warmup else torch.cuda.get_device_properties(q.device).multi_processor_count)
    log2e = 1.4426950408889634
    scale, cap = softmax_scale * log2e, 0.0
    if softcap > 0:
        scale, cap = 2 * log2e * softmax_scale / softcap, softcap * log2e
    counter = torch.zeros(1, dtype=torch.int32, device=q.device)
    table = cu_seqlens_k if block_table is None else block_table
    arguments = (
        as_matrix(q, 64), as_matrix(k, box), as_matrix(v, box), out, lse, cu_seqlens_q, cu_seqlens_k, table, counter,
        batch, num_tiles, min(left, 1 << 30), min(right, 1 << 30), scale, cap,
        0 if block_table is None else block_table.stride(0), num_rows, out.stride(0), out.stride(1),
    )  # fmt: skip
    constants = dict(
        H=num_heads, GROUP=num_heads // k.shape[-2], D=head_dim,
        HEAD_COLUMNS=(q.stride(1), k.stride(-2), v.stride(-2)), BLOCK_ROWS=block_rows, BLOCK_SIZE=block_size, KEYS=keys,
        HAS_LEFT=left >= 0, HAS_RIGHT=right >= 0, SOFTCAP=softcap > 0, BLOCK_N=block_n, SLOTS=stages, num_warps=4,
    )  # fmt: skip
    if warmup:
        return kernel.warmup(*arguments, grid=(grid,), **constants)
    kernel[(grid,)](*arguments, **constants)


def as_matrix(x: Tensor, box_rows: int) -> TensorDescriptor:
    """A packed tensor (rows, heads, d) or a cache (blocks, slots, heads, d): one row per token."""
    d = x.shape[-1]
    num_rows = x.shape[0] if x.dim() == 3 else (x.shape[0] - 1) * (x.stride(0) // x.stride(1)) + x.shape[1]
    columns = (x.shape[-2] - 1) * x.stride(-2) + d
    layout = gl.NVMMASharedLayout(128, 16, 2)
    return TensorDescriptor(x, [num_rows, columns], [x.stride(-3), 1], [box_rows, d], layout)
