"""Decode attention over one byte per number, for few rows: scores with a row for each key.

An instruction of the matrix unit has 16 rows and 8 columns. With queries as rows, the two to eight heads of a
KV head leave most of the 16 empty, and the empty ones are scaled, masked and raised to powers like the
others. Over bytes that counts, because there the kernel is bound by its instructions. So here the keys are
the rows, the queries the columns, and the values' product is transposed with them::

      scores (keys, queries) = K Q^T           weighted values (dims, queries) = V^T weights

Each warp has keys of its own, RUN of them in a row, with a maximum, sums and weighted values of its own: the
first dimension of everything is the warp. They meet once, at the end of an item, not in every tile. The
compiler puts the first dimension of a product on the warps.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from octavo.kernels.triton.decode_tiles import NOTHING, load_quickly, logarithms

# Packed query rows, at most: the columns of one instruction.
COLUMNS = 8

_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def absorb(
    q_tile, k_head, v_head, k_scale_head, v_scale_head, strides, table_row, bounds, scale,
    IS_CUT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    COMPUTE: tl.constexpr, SAME_STRIDES: tl.constexpr, ASSEMBLY: tl.constexpr, WARPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The partial (acc (M, D), high (M,), total (M,)) of a range of keys for the rows of q_tile.

    Pointers are to the head's keys, values and their scales, None where tokens have none; `strides` are those
    of each in turn, over blocks and slots. `bounds` (from_key, to_key, first, low, above): the range, the
    first key of the sequence that any row sees, and those that each row (M,) sees, `low` to `above` - 1;
    IS_CUT says that `first` and `low` are not 0 everywhere. Keys before `first` or from `to_key` on are not
    read.

    A warp's keys of a tile are one run in one block, or, where they are more than a block, two: 16 at least,
    the rows of an instruction, and two blocks at most.
    """
    tl.static_assert(BLOCK_N // WARPS >= 16 and BLOCK_N // WARPS <= 2 * BLOCK_SIZE)
    TWICE: tl.constexpr = BLOCK_N // WARPS > BLOCK_SIZE
    RUN: tl.constexpr = BLOCK_SIZE if TWICE else BLOCK_N // WARPS
    runs = tl.arange(0, WARPS) * (BLOCK_N // WARPS)
    queries = tl.broadcast_to(tl.trans(q_tile)[None, :, :], [WARPS, BLOCK_D, BLOCK_M])
    caches = (k_head, v_head, k_scale_head, v_scale_head)
    from_key, to_key, _, _, _ = bounds
    factor = scale * _LOG2_E

    acc = tl.zeros([WARPS, BLOCK_D, BLOCK_M], tl.float32)
    high = tl.full([WARPS, BLOCK_M], NOTHING, tl.float32)
    totals = tl.zeros([WARPS, RUN, BLOCK_M], tl.float32)
    blocks = _look_up(table_row, from_key + runs, to_key, BLOCK_SIZE)
    more_blocks = blocks
    if TWICE:
        more_blocks = _look_up(table_row, from_key + runs + RUN, to_key, BLOCK_SIZE)
    for start in range(from_key, to_key, BLOCK_N):
        # Looked up one tile ahead, so that keys and values wait for no table.
        these = blocks
        blocks = _look_up(table_row, start + BLOCK_N + runs, to_key, BLOCK_SIZE)
        s, share, v_at, seen = _score(
            queries, these, start + runs, runs, caches, strides, bounds, factor,
            IS_CUT, HEAD_DIM, BLOCK_D, BLOCK_SIZE, COMPUTE, SAME_STRIDES, ASSEMBLY, BLOCK_N, RUN,
        )  # fmt: skip
        top = s
        if TWICE:
            these = more_blocks
            more_blocks = _look_up(table_row, start + BLOCK_N + runs + RUN, to_key, BLOCK_SIZE)
            more_s, more_share, more_v_at, more_seen = _score(
                queries, these, start + runs + RUN, runs + RUN, caches, strides, bounds, factor,
                IS_CUT, HEAD_DIM, BLOCK_D, BLOCK_SIZE, COMPUTE, SAME_STRIDES, ASSEMBLY, BLOCK_N, RUN,
            )  # fmt: skip
            top = tl.maximum(s, more_s)
        new_high = tl.maximum(high, tl.max(top, 1))
        shrink = tl.exp2(high - new_high)[:, None, :]
        high = new_high
        p = tl.exp2(s - new_high[:, None, :])
        totals = totals * shrink + p * share
        v_tile = load_quickly(v_at, seen, HEAD_DIM, BLOCK_D, COMPUTE, ASSEMBLY, True)
        acc = tl.dot(tl.permute(v_tile, (0, 2, 1)), p.to(COMPUTE), acc * shrink, input_precision="ieee")
        if TWICE:
            p = tl.exp2(more_s - new_high[:, None, :])
            totals += p * more_share
            v_tile = load_quickly(more_v_at, more_seen, HEAD_DIM, BLOCK_D, COMPUTE, ASSEMBLY, True)
            acc = tl.dot(tl.permute(v_tile, (0, 2, 1)), p.to(COMPUTE), acc, input_precision="ieee")

    top = tl.max(high, 0)
    share = tl.exp2(high - top[None, :])
    total = tl.sum(tl.sum(totals, 1) * share, 0)
    return tl.trans(tl.sum(acc * share[:, None, :], 0)), top, total


@triton.jit
def _score(
    queries, blocks, begins, runs, caches, strides, bounds, factor,
    IS_CUT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    COMPUTE: tl.constexpr, SAME_STRIDES: tl.constexpr, ASSEMBLY: tl.constexpr, BLOCK_N: tl.constexpr,
    RUN: tl.constexpr,
):  # fmt: skip
    """Scores (WARPS, RUN, M) of a run of keys per warp, which begins at key `begins` and lies in `blocks`.

    Also what a key's weight counts for in the denominator, where its values are, and whether they are seen.
    `runs`: the begins, counted from that of the tile.
    """
    k_head, v_head, k_scale_head, v_scale_head = caches
    (
        k_stride_block, k_stride_slot, v_stride_block, v_stride_slot,
        k_scale_stride_block, k_scale_stride_slot, v_scale_stride_block, v_scale_stride_slot,
    ) = strides  # fmt: skip
    _, to_key, first, low, above = bounds
    within = tl.arange(0, RUN)
    dims = tl.arange(0, BLOCK_D)[None, None, :].to(tl.uint32)
    keys = begins[:, None] + within[None, :]
    seen = keys < to_key
    if IS_CUT:
        seen = seen & (keys >= first)
    slots = runs
    if BLOCK_SIZE > BLOCK_N:
        slots = begins
    slots = slots & (BLOCK_SIZE - 1)
    k_at = _places(blocks, slots, k_stride_block, k_stride_slot)
    v_at = k_at
    if not SAME_STRIDES:
        v_at = _places(blocks, slots, v_stride_block, v_stride_slot)
    k_at = (k_head + _of_runs(k_at)) + ((within * k_stride_slot).to(tl.uint32)[None, :, None] + dims)
    v_at = (v_head + _of_runs(v_at)) + ((within * v_stride_slot).to(tl.uint32)[None, :, None] + dims)

    k_tile = load_quickly(k_at, seen[:, :, None], HEAD_DIM, BLOCK_D, COMPUTE, ASSEMBLY, False)
    products = tl.dot(k_tile, queries, input_precision="ieee")
    # The scale of a token nobody sees is 0, as may be that of a token that is all 0.
    if k_scale_head is not None:
        k_scale_at = _scales_of(blocks, slots, within, k_scale_stride_block, k_scale_stride_slot)
        factor = (tl.load(k_scale_head + k_scale_at, mask=seen, other=0.0) * factor)[:, :, None]
    share = 1.0
    if v_scale_head is None:
        s = products * factor
    else:
        if k_scale_head is not None and SAME_STRIDES:
            v_scale_at = k_scale_at
        else:
            v_scale_at = _scales_of(blocks, slots, within, v_scale_stride_block, v_scale_stride_slot)
        v_scales = tl.load(v_scale_head + v_scale_at, mask=seen, other=0.0)
        weight_of_value = logarithms(v_scales, ASSEMBLY)[:, :, None]
        s = tl.fma(products, factor, weight_of_value)
        share = tl.exp2(-weight_of_value)
    visible = keys[:, :, None] < above[None, None, :]
    if IS_CUT:
        visible = visible & (keys[:, :, None] >= low[None, None, :])
    return tl.where(visible, s, float("-inf")), share, v_at, seen[:, :, None]


@triton.jit
def _of_runs(places):
    """Where each run begins, to be added to where its keys are in it: multiples of 16.

    That they follow each other is not so; it makes the compiler lay them out over the lanes of a warp before
    the keys of a run, in every version. So a lane looks up one block, and reads of shared memory by key do
    not collide. Nothing else depends on it: in memory the numbers of a key follow each other further.
    """
    return tl.max_contiguous(tl.multiple_of(places[:, None, None], (16, 16, 16)), (places.shape[0], 1, 1))


@triton.jit
def _places(block, slot, stride_block, stride_slot):
    """Elements, 64-bit, at which runs begin."""
    return block.to(tl.int64) * stride_block + slot * stride_slot


@triton.jit
def _scales_of(block, slot, within, stride_block, stride_slot):
    """Elements (WARPS, RUN), 64-bit, at which the scales of all keys of runs are."""
    runs = _places(block, slot, stride_block, stride_slot)
    return runs[:, None] + (within * stride_slot).to(tl.uint32)[None, :]


@triton.jit
def _look_up(table_row, keys, to_key, BLOCK_SIZE: tl.constexpr):
    """Block ids of the runs that begin at `keys`, if they begin before `to_key`."""
    return tl.load(table_row + keys.to(tl.uint32) // BLOCK_SIZE, mask=keys < to_key, other=0)
