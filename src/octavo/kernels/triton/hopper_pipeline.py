"""Attention on Hopper (sm_90) in Gluon: one warp copies, two warpgroups multiply.

A program is three roles that meet only at barriers in shared memory, and stays for the whole launch::

    producer       takes the next tile of 128 query rows of one head, notes for the others what it is,
    (1 warp)       and has TMA copy Q, then BLOCK_N keys and values at a time, into rings of slots
    warpgroup 0    rows 0 .. 63 of the tile      S = Q K^T      P = softmax(S)      O = O * alpha + P V
    warpgroup 1    rows 64 .. 127

Keys are walked from the last tile to the first, so that what needs a mask comes first. In a warpgroup the
product of tile j with V runs beside the softmax of tile j + 1; and the two take turns in issuing products, so
that the tensor cores have work while either is in its softmax (' is warpgroup 1)::

    tensor cores   S2 O1 | S2'O1'| S3 O2 | S3'O2'| S4 O3 | ...
    warpgroup 0          |   softmax 2   |   softmax 3   |
    warpgroup 1    softmax 1'    |   softmax 2'  |   softmax 3'

Keys of a paged cache come block by block: a TMA box is one block, or BLOCK_N rows of a larger one, and lands
in its own rows of a slot. To TMA the cache is a matrix with one row per token.

Memory that no row sees may hold anything. Block ids are looked up only where a key is seen, scores are masked
before they are used, and rows of V before the first key or past the last one are zeroed, for 0 * NaN is NaN.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
# ruff: noqa: RUF005, SIM102  (Gluon has neither starred tuples nor `and` of a constant with a value)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from octavo.kernels.triton import tiles
from octavo.kernels.triton.hopper_ring import Ring, new_ring, receive, send
from octavo.kernels.triton.launch import direct

BLOCK_M = gl.constexpr(128)
PACKED, PAGED, RUNS = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)  # where keys lie; runs: a block each
TILE_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
# (64, 4): what each of the four threads of a row in an accumulator's layout has summed up.
_SUM_LAYOUT = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[8, 0]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 4],
    )
)
_SHORT = gl.constexpr(tiles.SHORT)
_LN_2 = gl.constexpr(0.6931471805599453)

# Names that changed between Triton 3.6 and 3.9.
_copy_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_sync_role = getattr(gl, "barrier", None) or gl.thread_barrier


@aggregate
class Plan:
    """What all roles know. `left`, `right`: the window; `scale`, `cap`: of scores, for weights in base 2."""

    q: Ring
    k: Ring
    v: Ring
    notes: Ring
    turns: gl.shared_memory_descriptor
    left: gl.tensor
    right: gl.tensor
    scale: gl.tensor
    cap: gl.tensor
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr
    HAS_CAP: gl.constexpr
    S_LAYOUT: gl.constexpr
    O_LAYOUT: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, q, k, v, notes, turns, left, right, scale, cap, HAS_LEFT, HAS_RIGHT, HAS_CAP):
        self.q = q
        self.k = k
        self.v = v
        self.notes = notes
        self.turns = turns
        self.left = left
        self.right = right
        self.scale = scale
        self.cap = cap
        self.HAS_LEFT = gl.constexpr(HAS_LEFT)
        self.HAS_RIGHT = gl.constexpr(HAS_RIGHT)
        self.HAS_CAP = gl.constexpr(HAS_CAP)
        block_n, head_dim = k.slots.shape[1], k.slots.shape[2]
        self.S_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block_n, 16]))
        self.O_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, head_dim, 16]))


# ---------------------------------------------------------------------------------------------------------
# The producer


@gluon.jit
def _find_sequence(cu_seqlens_q, batch, tile):
    """The last b with cu_seqlens_q[b] // BLOCK_M + b <= tile: where the tiles of sequence b begin."""
    found = -1
    for start in range(0, batch, 128):
        b = start + gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [1], [0]))
        begin = gl.load(cu_seqlens_q + b, mask=b < batch, other=0) // BLOCK_M + b
        found += gl.sum(((b < batch) & (begin <= tile)).to(gl.int32), 0)
    return found


@gluon.jit
def _count_tiles(cu_seqlens_q, batch):
    """Where the tiles of the last sequence that has rows end: those behind it only pad the batch."""
    num_rows = gl.load(cu_seqlens_q + batch)
    num_tiles = num_rows // BLOCK_M
    for start in range(0, batch, 128):
        b = start + gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [1], [0]))
        begin = gl.load(cu_seqlens_q + b, mask=b < batch, other=0)
        num_tiles += gl.sum(((b < batch) & (begin < num_rows)).to(gl.int32), 0)
    return num_tiles


@gluon.jit
def _copy_tile(ring, count, desc, rows, column):
    """Into the next slot, box by box: the rows where they start are a tuple."""
    BOX: gl.constexpr = desc.block_type.shape[0]
    slot, full = ring.wait_empty(count)
    mbarrier.expect(full, slot.shape[0] * slot.shape[1] * 2)
    for i in gl.static_range(len(rows)):
        _copy_box(desc, [rows[i], column], full, slot.slice(i * BOX, BOX, dim=0))


@gluon.jit
def _produce(
    plan, q_desc, k_desc, v_desc, cu_seqlens_q, cu_seqlens_k, block_table, counter,
    batch, num_splits, table_stride, NUM_HEADS: gl.constexpr, GROUP: gl.constexpr,
    HEAD_COLUMNS: gl.constexpr, BLOCK_ROWS: gl.constexpr, BLOCK_SIZE: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    BLOCK_N: gl.constexpr = plan.k.slots.shape[1]
    BOX: gl.constexpr = k_desc.block_type.shape[0]
    count = 0
    num_q = 0
    sent = 0
    num_tiles = _count_tiles(cu_seqlens_q, batch)
    work = gl.atomic_add(counter, 1, sem="relaxed")
    while work < num_tiles * NUM_HEADS * num_splits:
        # Long tiles first, and heads of a group one after the other: they read the same keys.
        head = work % NUM_HEADS
        split = work // NUM_HEADS % num_splits
        tile = num_tiles - 1 - work // NUM_HEADS // num_splits
        b = _find_sequence(cu_seqlens_q, batch, tile)
        q_start = gl.load(cu_seqlens_q + b)
        q_len = gl.load(cu_seqlens_q + b + 1) - q_start
        k_start = gl.load(cu_seqlens_k + b)
        k_len = gl.load(cu_seqlens_k + b + 1) - k_start
        row = (tile - q_start // BLOCK_M - b) * BLOCK_M
        if (q_len > _SHORT) & (row < q_len):
            # Rows of this tile see keys from low to below high.
            low = 0
            high = k_len
            if plan.HAS_RIGHT:
                high = gl.minimum(k_len, gl.minimum(row + BLOCK_M, q_len) + k_len - q_len + plan.right)
            if plan.HAS_LEFT:
                low = gl.minimum(gl.maximum(row + k_len - q_len - plan.left, 0), gl.maximum(k_len - 1, 0))
            first = low // BLOCK_N
            count_all = gl.maximum(gl.maximum(high + BLOCK_N - 1, 0) // BLOCK_N - first, 0)
            end = first + count_all * (split + 1) // num_splits
            first += count_all * split // num_splits
            part = split * NUM_HEADS + head
            send(plan.notes, sent, part, row, q_start, q_len, k_len, low, first, end)
            sent += 1
            if end > first:
                for i in gl.static_range(2):
                    _copy_tile(plan.q, num_q, q_desc, (q_start + row + i * 64,), head * HEAD_COLUMNS[0])
                    num_q += 1
                table = block_table + b.to(gl.int64) * table_stride
                k_begin = k_start
                v_begin = k_start
                if KEYS == RUNS:
                    block = gl.load(table)
                    k_begin = block * BLOCK_ROWS[0]
                    v_begin = block * BLOCK_ROWS[1]
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
                        k_rows = (k_begin + key,)
                        v_rows = (v_begin + key,)
                    _copy_tile(plan.k, count, k_desc, k_rows, head // GROUP * HEAD_COLUMNS[1])
                    _copy_tile(plan.v, count, v_desc, v_rows, head // GROUP * HEAD_COLUMNS[2])
                    count += 1
        work = gl.atomic_add(counter, 1, sem="relaxed")
    send(plan.notes, sent, -1, 0, 0, 0, 0, 0, 0, 0)


# ---------------------------------------------------------------------------------------------------------
# The warpgroups. Of their 64 rows: acc (64, D), not yet divided; high (64), the largest score so far; sums
# (64, 4), of the weights so far


@gluon.jit
def _consume(
    plan, WARPGROUP: gl.constexpr, out, lse, partial_acc, partial_sums, lse_stride, out_row, out_head,
    num_rows, num_splits, NUM_HEADS: gl.constexpr,
):  # fmt: skip
    BLOCK_N: gl.constexpr = plan.k.slots.shape[1]
    D: gl.constexpr = plan.k.slots.shape[2]
    ROWS: gl.constexpr = gl.SliceLayout(1, plan.S_LAYOUT)
    count = 0
    num_q = WARPGROUP
    received = 0
    part, row, q_start, q_len, k_len, low, first, end = receive(plan.notes, received)
    while part >= 0:
        row += WARPGROUP * 64
        position = row + k_len - q_len  # of the first row, among the keys
        acc = gl.zeros([64, D], gl.float32, layout=plan.O_LAYOUT)
        high = gl.full([64], float("-inf"), gl.float32, layout=ROWS)
        sums = gl.full([64, 4], 0.0, gl.float32, layout=_SUM_LAYOUT)
        if end > first:
            q = plan.q.wait_full(num_q)
            k = plan.k.wait_full(count)
            _my_turn(plan, WARPGROUP, count)
            s = _scores(plan, q, k)
            _your_turn(plan, WARPGROUP)
            s = warpgroup_mma_wait(0, deps=(s,))
            plan.k.release(count)
            s, high, sums, _ = _softmax(plan, s, high, sums, (end - 1) * BLOCK_N, position, k_len, True)
            p = _as_operand(plan, s.to(q.dtype))
            if end * BLOCK_N > k_len:
                # Where one tile is first and last, both warpgroups clear both ends of it: neither may store
                # back what it loaded before the other cleared it.
                last = (end - 1) * BLOCK_N
                _clear_rows(plan.v.wait_full(count), low - last if plan.HAS_LEFT else 0, k_len - last)
            count += 1
            # Every row sees all of the tiles from whole_first to below whole_end.
            whole_first = first
            whole_end = k_len
            if plan.HAS_RIGHT:
                whole_end = gl.minimum(k_len, gl.maximum(position + plan.right + 1, 0))
            whole_end = gl.minimum(gl.maximum(whole_end // BLOCK_N, first), end - 1)
            if plan.HAS_LEFT:
                whole_first = gl.maximum(position + 63 - plan.left + BLOCK_N - 1, 0) // BLOCK_N
                whole_first = gl.maximum(gl.minimum(whole_first, whole_end), first)
            state = (acc, p, high, sums, count)
            if plan.HAS_RIGHT:
                state = _walk(plan, WARPGROUP, state, q, end - 1, whole_end, position, k_len, True)
            state = _walk(plan, WARPGROUP, state, q, whole_end, whole_first, position, k_len, False)
            if plan.HAS_LEFT:
                state = _walk(plan, WARPGROUP, state, q, whole_first, first, position, k_len, True)
            acc, p, high, sums, count = state
            plan.q.release(num_q)
            num_q += 2
            v = plan.v.wait_full(count - 1)
            if plan.HAS_LEFT:
                if low > first * BLOCK_N:
                    _clear_rows(v, low - first * BLOCK_N, BLOCK_N)
            acc = warpgroup_mma(p, v, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            plan.v.release(count - 1)
        total = gl.convert_layout(gl.sum(sums, 1), ROWS)
        if num_splits > 1:
            place = (
                (part // NUM_HEADS).to(gl.int64) * num_rows + q_start + row
            ) * NUM_HEADS + part % NUM_HEADS
            _store_part(plan, acc, high, total, partial_acc, partial_sums, place, q_len - row, NUM_HEADS)
        else:
            _store(plan, acc, high, total, out, lse, part, row, q_start, q_len, lse_stride, out_row, out_head)
        received += 1
        part, row, q_start, q_len, k_len, low, first, end = receive(plan.notes, received)


@gluon.jit
def _walk(plan, WARPGROUP: gl.constexpr, state, q, end, first, position, k_len, MASKED: gl.constexpr):
    """Key tiles end - 1 down to first; the product with V is one tile behind the scores."""
    acc, p, high, sums, count = state
    for j in range(end - first):
        k = plan.k.wait_full(count)
        _my_turn(plan, WARPGROUP, count)
        s = _scores(plan, q, k)
        v = plan.v.wait_full(count - 1)
        acc = warpgroup_mma(p, v, acc, is_async=True)
        _your_turn(plan, WARPGROUP)
        s = warpgroup_mma_wait(1, deps=(s,))
        plan.k.release(count)
        key = (end - 1 - j) * k.shape[0]
        s, high, sums, alpha = _softmax(plan, s, high, sums, key, position, k_len, MASKED)
        s = s.to(q.dtype)
        # Full long since; but a wait ends a basic block, and in one block with the wait for the product the
        # assembler would move the softmax behind that, and nothing would run beside the product.
        plan.v.wait_full(count - 1)
        acc, s = warpgroup_mma_wait(0, deps=(acc, s))
        plan.v.release(count - 1)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, plan.O_LAYOUT))[:, None]
        p = _as_operand(plan, s)
        count += 1
    return acc, p, high, sums, count


@gluon.jit
def _scores(plan, q, k):
    BLOCK_N: gl.constexpr = k.shape[0]
    s = gl.zeros([64, BLOCK_N], gl.float32, layout=plan.S_LAYOUT)
    return warpgroup_mma(q, k.permute((1, 0)), s, use_acc=False, is_async=True)


@gluon.jit
def _as_operand(plan, s):
    """Weights as the left side of the product with V: the same values in the same registers."""
    return gl.convert_layout(s, gl.DotOperandLayout(0, plan.O_LAYOUT, k_width=2))


@gluon.jit
def _my_turn(plan, WARPGROUP: gl.constexpr, count):
    """Wait until the other warpgroup has issued its products; warpgroup 0 begins."""
    mbarrier.wait(plan.turns.index(WARPGROUP), (count & 1) ^ (1 - WARPGROUP))


@gluon.jit
def _your_turn(plan, WARPGROUP: gl.constexpr):
    mbarrier.arrive(plan.turns.index(1 - WARPGROUP), count=1)


@gluon.jit
def _softmax(plan, s, high, sums, key, position, k_len, MASKED: gl.constexpr):
    """Weights of scores s (64, BLOCK_N), the new high and sums, and alpha, which rescales what came before.

    Weights are powers of 2: exp2(s * scale - high * scale), one multiply-add and one exp2 for each.
    """
    scale = plan.scale
    if plan.HAS_CAP:
        # cap * tanh(s * softmax_scale / softcap); where exp2 is infinite, its inverse is 0.
        s = plan.cap - 2.0 * plan.cap / (gl.exp2(s * scale) + 1.0)
        scale = 1.0
    if MASKED:
        keys = key + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, plan.S_LAYOUT))[None, :]
        rows = position + gl.arange(0, 64, layout=gl.SliceLayout(1, plan.S_LAYOUT))[:, None]
        seen = keys < k_len
        if plan.HAS_RIGHT:
            seen = seen & (keys <= rows + plan.right)
        if plan.HAS_LEFT:
            seen = seen & (keys >= rows - plan.left)
        s = gl.where(seen, s, float("-inf"))
    new_high = gl.maximum(high, gl.max(s, 1))
    base = new_high * scale
    if MASKED:  # a row may have seen nothing yet
        base = gl.where(new_high == float("-inf"), 0.0, base)
    s = gl.exp2(s * scale - base[:, None])
    alpha = gl.exp2(high * scale - base)
    # A row's four threads each sum their own columns; they meet at the end of the tile.
    own = gl.sum(gl.sum(s.reshape([64, s.shape[1] // 8, 4, 2]), 3), 1)
    sums = sums * gl.convert_layout(alpha, gl.SliceLayout(1, _SUM_LAYOUT))[:, None]
    return s, new_high, sums + gl.convert_layout(own, _SUM_LAYOUT), alpha


@gluon.jit
def _clear_rows(v, first, end):
    """Zero the rows of a tile outside first .. end - 1. Both warpgroups do, and write the same."""
    D: gl.constexpr = v.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [4, 1], [1, 0])
    for i in gl.static_range(v.shape[0] // 16):
        if (i * 16 < first) | (i * 16 + 16 > end):
            some = v.slice(i * 16, 16, dim=0)
            row = i * 16 + gl.arange(0, 16, layout=gl.SliceLayout(1, layout))[:, None]
            some.store(gl.where((row >= first) & (row < end), some.load(layout), 0.0))
    fence_async_shared()
    _sync_role()


@gluon.jit
def _store_part(plan, acc, high, total, partial_acc, partial_sums, place, num_rows, NUM_HEADS: gl.constexpr):
    """What these keys alone come to, as `prefill.py` merges it. Written from where it lies: there is no room
    in shared memory to put so many float32 in order.
    """
    D: gl.constexpr = acc.shape[1]
    scale = plan.scale
    if plan.HAS_CAP:
        scale = 1.0
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, plan.O_LAYOUT))[:, None]
    columns = gl.arange(0, D, layout=gl.SliceLayout(0, plan.O_LAYOUT))[None, :]
    gl.store(partial_acc + (place + rows * NUM_HEADS) * D + columns, acc, mask=rows < num_rows)
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, plan.S_LAYOUT))
    sums = partial_sums + (place + rows * NUM_HEADS) * 2
    gl.store(sums, high * scale, mask=rows < num_rows)
    gl.store(sums + 1, total, mask=rows < num_rows)


@gluon.jit
def _store(plan, acc, high, total, out, lse, head, row, q_start, q_len, lse_stride, out_row, out_head):
    D: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [4, 1], [1, 0])
    inverse = gl.where(total > 0.0, 1.0 / total, 0.0)
    acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, plan.O_LAYOUT))[:, None]
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))[:, None]
    columns = gl.arange(0, D, layout=gl.SliceLayout(0, layout))[None, :]
    start = out + (q_start + row).to(gl.int64) * out_row + head.to(gl.int64) * out_head
    value = gl.convert_layout(acc.to(out.dtype.element_ty), layout)
    gl.store(start + rows * out_row + columns, value, mask=rows < q_len - row)
    if lse is not None:
        scale = plan.scale
        if plan.HAS_CAP:
            scale = 1.0
        value = gl.where(total > 0.0, high * scale * _LN_2 + gl.log(total), float("-inf"))
        rows = gl.arange(0, 64, layout=gl.SliceLayout(1, plan.S_LAYOUT))
        start = lse + head.to(gl.int64) * lse_stride + q_start + row
        gl.store(start + rows, value, mask=rows < q_len - row)


# ---------------------------------------------------------------------------------------------------------


@direct
@gluon.jit(
    do_not_specialize=["batch", "num_rows", "num_splits", "left", "right", "table_stride", "lse_stride"],
    do_not_specialize_on_alignment=["lse", "cu_seqlens_q", "cu_seqlens_k", "block_table", "counter"],
)
def attend(
    q_desc, k_desc, v_desc, out, lse, partial_acc, partial_sums,
    cu_seqlens_q, cu_seqlens_k, block_table, counter, batch, num_rows, num_splits,
    left, right, scale, cap, table_stride, lse_stride, out_row, out_head,
    NUM_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_COLUMNS: gl.constexpr,
    BLOCK_ROWS: gl.constexpr, BLOCK_SIZE: gl.constexpr, KEYS: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_CAP: gl.constexpr,
    BLOCK_N: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """All tiles of a packed batch. `counter`: one 0. HEAD_COLUMNS: of q, k and v; BLOCK_ROWS: of k and v.

    The keys of a tile are divided among `num_splits`; from two on the partials of each are written in place
    of `out` and `lse`: partial_acc (splits, num_rows, heads, D), partial_sums (splits, num_rows, heads, 2).
    """
    q = new_ring(q_desc.dtype, [2, 64, HEAD_DIM], TILE_LAYOUT, READERS=1)
    k = new_ring(q_desc.dtype, [SLOTS, BLOCK_N, HEAD_DIM], TILE_LAYOUT, READERS=2)
    v = new_ring(q_desc.dtype, [SLOTS, BLOCK_N, HEAD_DIM], TILE_LAYOUT, READERS=2)
    notes = new_ring(gl.int32, [2, 8], gl.SwizzledSharedLayout(1, 1, 1, [0]), READERS=2)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(turns.index(0), count=1)
    mbarrier.init(turns.index(1), count=1)
    fence_async_shared()
    plan = Plan(q, k, v, notes, turns, left, right, scale, cap, HAS_LEFT, HAS_RIGHT, HAS_CAP)
    gl.warp_specialize(
        [
            (_consume, (
                plan, 0, out, lse, partial_acc, partial_sums, lse_stride, out_row, out_head,
                num_rows, num_splits, NUM_HEADS,
            )),
            (_consume, (
                plan, 1, out, lse, partial_acc, partial_sums, lse_stride, out_row, out_head,
                num_rows, num_splits, NUM_HEADS,
            )),
            (_produce, (
                plan, q_desc, k_desc, v_desc, cu_seqlens_q, cu_seqlens_k, block_table, counter,
                batch, num_splits, table_stride, NUM_HEADS, GROUP, HEAD_COLUMNS, BLOCK_ROWS, BLOCK_SIZE, KEYS,
            )),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[232, 40],
    )  # fmt: skip
