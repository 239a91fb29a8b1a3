"""Decode attention with a row for each query in the matrix of scores: every option, every dtype."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from octavo.kernels.triton import tiles
from octavo.kernels.triton.decode_tiles import NOTHING, load_quickly, logarithms, look_up

_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def absorb(
    q_tile, k_head, v_head, k_scale_head, v_scale_head, strides, table_row, bounds, scale,
    run, base, offsets, k_within, v_within, softcap, slopes, position,
    PLAIN: tl.constexpr, IS_CUT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, COMPUTE: tl.constexpr, SAME_STRIDES: tl.constexpr, ASSEMBLY: tl.constexpr,
    PIN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The partial (acc (M, D), high (M,), total (M,)) of a range of keys for the rows of q_tile.

    Pointers, `strides` and `bounds` as in `decode_by_key.absorb`. Keys in one run (BLOCK_SIZE 0) are those of
    block `run` from slot `base` on. `offsets` (N,) are those of a tile's keys, `k_within` and `v_within` what
    they make in elements inside one block or run. `position` (M,): the rows' own, for `slopes`.
    """
    (
        k_stride_block, k_stride_slot, v_stride_block, v_stride_slot,
        k_scale_stride_block, k_scale_stride_slot, v_scale_stride_block, v_scale_stride_slot,
    ) = strides  # fmt: skip
    from_key, to_key, first, low, above = bounds
    dims = tl.arange(0, BLOCK_D)
    # Whether each tile lies inside one block.
    INSIDE: tl.constexpr = BLOCK_N <= BLOCK_SIZE
    FUSES_SCALES: tl.constexpr = (
        k_scale_head is not None and v_scale_head is not None and softcap is None and slopes is None
    )
    if BLOCK_SIZE > 0:
        next_blocks = look_up(table_row, from_key, first, to_key, BLOCK_SIZE, BLOCK_N, INSIDE)

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    high = tl.full([BLOCK_M], NOTHING, tl.float32)
    # Summed over the keys at the end: one exchange between warps less in every tile.
    totals = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(from_key, to_key, BLOCK_N):
        keys = start + offsets
        seen = keys < to_key
        if IS_CUT:
            seen = seen & (keys >= first)
        if BLOCK_SIZE == 0:
            block = run
            slot = base + start
        else:
            # Looked up one tile ahead, so that keys and values wait for no table.
            block = next_blocks.to(tl.int64)
            next_blocks = look_up(table_row, start + BLOCK_N, first, to_key, BLOCK_SIZE, BLOCK_N, INSIDE)
            if INSIDE:
                slot = tl.zeros([], tl.int64) + (start & (BLOCK_SIZE - 1))
            else:
                slot = (keys & (BLOCK_SIZE - 1)).to(tl.int64)
        k_places = block * k_stride_block + slot * k_stride_slot
        v_places = k_places
        if not SAME_STRIDES:
            v_places = block * v_stride_block + slot * v_stride_slot
        if BLOCK_SIZE == 0 or INSIDE:
            k_places = k_places + k_within
            v_places = v_places + v_within
            slot = slot + offsets
        k_at = k_head + k_places[:, None] + dims[None, :]
        v_at = v_head + v_places[:, None] + dims[None, :]
        k_scales = None
        v_scales = None
        # The scale of a token nobody sees is 0, as may be that of a token that is all 0.
        if k_scale_head is not None:
            k_scale_at = k_scale_head + block * k_scale_stride_block + slot * k_scale_stride_slot
            k_scales = tl.load(k_scale_at, mask=seen, other=0.0)
        if v_scale_head is not None:
            v_scale_at = v_scale_head + block * v_scale_stride_block + slot * v_scale_stride_slot
            v_scales = tl.load(v_scale_at, mask=seen, other=0.0)

        k_tile = load_quickly(k_at, seen[:, None], HEAD_DIM, BLOCK_D, COMPUTE, ASSEMBLY, PIN == 2)
        products = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
        if v_scales is not None:
            weight_of_value = logarithms(v_scales, ASSEMBLY)
        if FUSES_SCALES:
            s = tl.fma(products, (k_scales * (scale * _LOG2_E))[None, :], weight_of_value[None, :])
        else:
            s = tiles.scores(products, scale, softcap, slopes, position, keys, k_scales, PLAIN)
            if v_scales is not None:
                s += weight_of_value[None, :]
        visible = keys[None, :] < above[:, None]
        if IS_CUT:
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
        totals = totals * shrink[:, None]
        if v_scales is not None:
            totals += p * tl.exp2(-weight_of_value)[None, :]
        else:
            totals += p
        v_tile = load_quickly(v_at, seen[:, None], HEAD_DIM, BLOCK_D, COMPUTE, ASSEMBLY, PIN > 0)
        acc = tl.dot(p.to(COMPUTE), v_tile, acc * shrink[:, None], input_precision="ieee")
    total = tl.sum(totals, 1)
    return acc, high, total
