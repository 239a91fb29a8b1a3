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

from octavo.kernels.triton.decode_tiles import load_quickly, logarithms

# Packed query rows, at most: the columns of one instruction.
COLUMNS = 8

_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_NOTHING: tl.constexpr = tl.constexpr(-1.0e30)


@triton.jit
def absorb(
    q_tile, k_head, v_head, k_scale_head, v_scale_head, table_row, from_key, to_key, first, low, above, scale,
    k_stride_block, k_stride_slot, v_stride_block, v_stride_slot,
    k_scale_stride_block, k_scale_stride_slot, v_scale_stride_block, v_scale_stride_slot,
    IS_CUT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    COMPUTE: tl.constexpr, SAME_STRIDES: tl.constexpr, ASSEMBLY: tl.constexpr, WARPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The partial (acc (M, D), high (M,), total (M,)) of keys from_key .. to_key - 1 for the rows of q_tile.

    A row sees keys low .. above - 1 (M,); IS_CUT says that `low` is not 0 everywhere. Keys before `first` or
    from `to_key` on are not read, nor is the table for them. RUN keys never leave their block.
    """
    RUN: tl.constexpr = BLOCK_N // WARPS
    runs = tl.arange(0, WARPS) * RUN
    within = tl.arange(0, RUN)
    dims = tl.arange(0, BLOCK_D)[None, None, :].to(tl.uint32)
    queries = tl.broadcast_to(tl.trans(q_tile)[None, :, :], [WARPS, BLOCK_D, BLOCK_M])
    factor = scale * _LOG2_E
    k_lanes = (within * k_stride_slot).to(tl.uint32)[None, :, None] + dims
    v_lanes = (within * v_stride_slot).to(tl.uint32)[None, :, None] + dims

    acc = tl.zeros([WARPS, BLOCK_D, BLOCK_M], tl.float32)
    high = tl.full([WARPS, BLOCK_M], _NOTHING, tl.float32)
    totals = tl.zeros([WARPS, RUN, BLOCK_M], tl.float32)
    next_blocks = _look_up(table_row, from_key + runs, first, to_key, IS_CUT, BLOCK_SIZE, RUN)
    for start in range(from_key, to_key, BLOCK_N):
        keys = start + runs[:, None] + within[None, :]
        seen = keys < to_key
        if IS_CUT:
            seen = seen & (keys >= first)
        # Looked up one tile ahead, so that keys and values wait for no table.
        block = next_blocks.to(tl.uint32)
        next_blocks = _look_up(table_row, start + BLOCK_N + runs, first, to_key, IS_CUT, BLOCK_SIZE, RUN)
        slot = runs
        if BLOCK_SIZE > BLOCK_N:
            slot = start + runs
        slot = slot & (BLOCK_SIZE - 1)
        k_places = _places(block, slot, k_stride_block, k_stride_slot)
        v_places = k_places
        if not SAME_STRIDES:
            v_places = _places(block, slot, v_stride_block, v_stride_slot)

        k_at = (k_head + _of_runs(k_places)) + k_lanes
        k_tile = load_quickly(k_at, seen[:, :, None], HEAD_DIM, BLOCK_D, COMPUTE, ASSEMBLY, False)
        products = tl.dot(k_tile, queries, input_precision="ieee")
        # The scale of a token nobody sees is 0, as may be that of a token that is all 0.
        factors = factor
        if k_scale_head is not None:
            k_scale_at = _places(block, slot, k_scale_stride_block, k_scale_stride_slot)[:, None]
            k_scale_at += (within * k_scale_stride_slot).to(tl.uint32)[None, :]
            factors = (tl.load(k_scale_head + k_scale_at, mask=seen, other=0.0) * factor)[:, :, None]
        if v_scale_head is None:
            s = products * factors
        else:
            v_scale_at = _places(block, slot, v_scale_stride_block, v_scale_stride_slot)[:, None]
            v_scale_at += (within * v_scale_stride_slot).to(tl.uint32)[None, :]
            v_scales = tl.load(v_scale_head + v_scale_at, mask=seen, other=0.0)
            weight_of_value = logarithms(v_scales, ASSEMBLY)[:, :, None]
            s = tl.fma(products, factors, weight_of_value)
        visible = keys[:, :, None] < above[None, None, :]
        if IS_CUT:
            visible = visible & (keys[:, :, None] >= low[None, None, :])
        s = tl.where(visible, s, float("-inf"))

        new_high = tl.maximum(high, tl.max(s, 1))
        p = tl.exp2(s - new_high[:, None, :])
        shrink = tl.exp2(high - new_high)[:, None, :]
        high = new_high
        totals = totals * shrink
        if v_scale_head is None:
            totals += p
        else:
            totals += p * tl.exp2(-weight_of_value)
        v_at = (v_head + _of_runs(v_places)) + v_lanes
        v_tile = load_quickly(v_at, seen[:, :, None], HEAD_DIM, BLOCK_D, COMPUTE, ASSEMBLY, True)
        acc = tl.dot(tl.permute(v_tile, (0, 2, 1)), p.to(COMPUTE), acc * shrink, input_precision="ieee")

    top = tl.max(high, 0)
    share = tl.exp2(high - top[None, :])
    total = tl.sum(tl.sum(totals, 1) * share, 0)
    return tl.trans(tl.sum(acc * share[:, None, :], 0)), top, total


@triton.jit
def _of_runs(places):
    """Where each run's block begins, to be added to where the keys of a run are in it."""
    return tl.max_contiguous(tl.multiple_of(places[:, None, None], (16, 16, 16)), (places.shape[0], 1, 1))


@triton.jit
def _places(block, slot, stride_block, stride_slot):
    """Elements, 64-bit, at which runs begin: one wide product, as block and stride are below 2^31."""
    return block.to(tl.int64) * stride_block.to(tl.uint32).to(tl.int64) + slot * stride_slot


@triton.jit
def _look_up(
    table_row, keys, first, to_key, IS_CUT: tl.constexpr, BLOCK_SIZE: tl.constexpr, RUN: tl.constexpr
):  # fmt: skip
    """Block ids of the runs that begin at `keys`; only of those that have one of first .. to_key - 1."""
    needed = keys < to_key
    if IS_CUT:
        needed = needed & (keys + RUN > first)
    return tl.load(table_row + keys.to(tl.uint32) // BLOCK_SIZE, mask=needed, other=0)
