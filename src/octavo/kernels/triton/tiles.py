"""What every attention kernel here does to one tile of keys: find it, load it, score it, mask it, weigh it.

Shapes: M query rows, N keys, D = head_dim rounded up to a power of two. Scores and maxima are in the log2
domain, so that exp2 needs no factor. A *partial* is (acc, high, total): `high` (M,) the highest score, acc
(M, D) the weighted values and `total` (M,) the sum of the weights, both relative to it. That of no keys is
(0, -inf, 0).

Keys of one tile are named by block ids and slots: element = block * stride_block + slot * stride_slot.
BLOCK_SIZE is that of a paged cache, or 0 when a sequence's keys lie in one run: a contiguous cache (block =
its row, slot = key) or packed keys (block = 0, slot = first row of the sequence + key).

Options that are off are None, and compiled away.

A product that is added to something is written as `fma`: which of two products a compiler contracts must not
depend on the kernel around it, or batch-invariant rows would differ between prefill and decode.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from octavo.kernels.triton import SHORT as SHORT

# Batch-invariant mode: keys are cut at multiples of this, wherever the batch and its chunks begin and end.
INVARIANT_CHUNK = 1024

# How a quantised cache's scales come: none (for attention also: folded into a float), one in memory, one per
# token and head; for the write also one as a number in the call.
NO_SCALE = 0
ONE_SCALE = 1
TOKEN_SCALES = 2
ONE_VALUE = 3

_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def places(table_row, run_block, run_slot, start, seen, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where keys start .. start + BLOCK_N - 1 lie: (block, base, lanes), slots being base + lanes.

    Block (int64) is one or (N,), base one slot, lanes (N,) the same for every tile. `start` is a multiple of
    BLOCK_N. Of the table, entries of keys that are `seen` (N,) are read; there must be one at least.
    `run_block` (int64) and `run_slot` are for keys in one run (BLOCK_SIZE 0), `table_row` for the others.
    """
    lanes = tl.arange(0, BLOCK_N)
    if BLOCK_SIZE == 0:
        block = run_block
        base = run_slot + start
    elif BLOCK_SIZE >= BLOCK_N:  # the tile lies in one block
        block = tl.load(table_row + start // BLOCK_SIZE).to(tl.int64)
        base = start % BLOCK_SIZE
    else:
        entries = table_row + start // BLOCK_SIZE + lanes // BLOCK_SIZE
        block = tl.load(entries, mask=seen, other=0).to(tl.int64)
        base = start * 0
        lanes = lanes % BLOCK_SIZE
    return block, base, lanes


@triton.jit
def elements(block, base, lanes, stride_block, stride_slot):
    """Elements (N,), counted from block 0, slot 0, at which what lies at those places begins."""
    return (block * stride_block + base.to(tl.int64) * stride_slot) + lanes.to(tl.int64) * stride_slot


@triton.jit
def load_tile(
    rows, seen, MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, COMPUTE: tl.constexpr
):
    """Keys or values (N, BLOCK_D) in the dtype COMPUTE; 0 past HEAD_DIM and, if MASKED, where not `seen`.

    `rows` (N,) point at their first elements. Without MASKED every key of the tile must be readable.
    """
    dims = tl.arange(0, BLOCK_D)
    addresses = rows[:, None] + dims[None, :]
    if MASKED:
        if HEAD_DIM == BLOCK_D:
            tile = tl.load(addresses, mask=seen[:, None], other=0.0)
        else:
            tile = tl.load(addresses, mask=seen[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    elif HEAD_DIM == BLOCK_D:
        tile = tl.load(addresses)
    else:
        tile = tl.load(addresses, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    return tile.to(COMPUTE)


@triton.jit
def load_token_scales(head, block, slot, seen, stride_block, stride_slot, SPREAD: tl.constexpr = False):
    """The scales (N,) of one tile; 1 where not `seen`, and for the scale 0 of a token that is all 0.

    SPREAD: each thread loads one. A vector smaller than the block of threads is otherwise loaded by every
    thread that needs an element of it, many times over; one load for each thread is not taken apart so.
    """
    addresses = head + block * stride_block + slot.to(tl.int64) * stride_slot
    if SPREAD:
        COPIES: tl.constexpr = 256 // seen.shape[0]
        same = tl.arange(0, COPIES)[None, :] * 0
        scales = tl.load(addresses[:, None] + same, mask=seen[:, None] & (same == 0), other=1.0)
        scales = tl.max(scales, 1)
    else:
        scales = tl.load(addresses, mask=seen, other=1.0)
    return tl.where(scales == 0.0, 1.0, scales)


@triton.jit
def visible(positions, keys, first, last, left, right):
    """(M, N): which rows, at `positions` (M,), see which `keys` (N,) from `first` to below `last`."""
    mask = ((keys >= first) & (keys < last))[None, :]
    if right is not None:
        mask = mask & (keys[None, :] <= positions[:, None] + right)
    if left is not None:
        mask = mask & (keys[None, :] >= positions[:, None] - left)
    return mask


@triton.jit
def capped(s, softcap):
    """softcap * tanh(s / softcap), right to float32's relative precision however large the softcap is."""
    x = s * (1.0 / softcap)
    square = x * x
    # tanh(x) / x by its series: next to 0, 1 - 2 / (1 + e^2x) is a difference of two numbers near 1.
    series = tl.fma(square, tl.fma(square, tl.fma(square, -17.0 / 315.0, 2.0 / 15.0), -1.0 / 3.0), 1.0)
    far = softcap - 2.0 * softcap / (1.0 + tl.exp2(s * (2.0 * _LOG2_E / softcap)))  # right at 0, inf
    return tl.where(tl.abs(x) < 0.125, s * series, far)


@triton.jit
def scores(products, scale, softcap, slopes, positions, keys, k_scales, PLAIN: tl.constexpr):
    """Scores (M, N) from products (M, N) of queries and keys; `absorb` takes them with the same PLAIN.

    PLAIN: nothing but a positive `scale`; the products come back as they are, and `absorb` multiplies while
    it subtracts. k_scales (N,): that of each token.
    """
    if PLAIN:
        return products
    s = products * scale
    if k_scales is not None:
        s = s * k_scales[None, :]
    if softcap is not None:
        s = capped(s, softcap)
    if slopes is not None:
        s = s - slopes[:, None] * tl.abs(positions[:, None] - keys[None, :]).to(tl.float32)
    return s * _LOG2_E


@triton.jit
def absorb(s, acc, high, total, scale, PLAIN: tl.constexpr, MASKED: tl.constexpr):
    """One step of the online softmax: weights (M, N) of the scores, and the partial made relative to them.

    The caller adds weights @ values to acc. MASKED: scores may be -inf, a whole row of them too.
    """
    tile_high = tl.max(s, 1)
    if PLAIN:
        tile_high = tile_high * (scale * _LOG2_E)
    new_high = tl.maximum(high, tile_high)
    base = new_high
    if MASKED:
        base = tl.where(new_high == float("-inf"), 0.0, new_high)  # -inf - -inf is NaN
    if PLAIN:
        p = tl.exp2(tl.fma(s, scale * _LOG2_E, -base[:, None]))
    else:
        p = tl.exp2(s - base[:, None])
    shrink = tl.exp2(high - base)
    return p, acc * shrink[:, None], new_high, tl.fma(total, shrink, tl.sum(p, 1))


@triton.jit
def merge(acc_a, high_a, total_a, acc_b, high_b, total_b):
    """One partial of two. Exactly the other one where one of them is that of no keys."""
    high = tl.maximum(high_a, high_b)
    base = tl.where(high == float("-inf"), 0.0, high)
    a, b = tl.exp2(high_a - base), tl.exp2(high_b - base)
    return tl.fma(acc_a, a[:, None], acc_b * b[:, None]), high, tl.fma(total_a, a, total_b * b)


@triton.jit
def finish(acc, high, total, sinks, value_scale):
    """Output (M, D) and natural LSE (M,) of a partial of all keys; 0 and -inf for a row without keys.

    `sinks` (M,) join the denominator here, once; `value_scale` is one scale of all values.
    """
    empty = total == 0.0
    top = high
    shrink = 1.0
    if sinks is not None:
        sink = sinks.to(tl.float32) * _LOG2_E
        top = tl.maximum(high, sink)
        shrink = tl.exp2(high - top)
        total = tl.fma(total, shrink, tl.exp2(sink - top))
    total = tl.where(empty, 1.0, total)
    factor = value_scale * shrink / total
    lse = tl.where(empty, float("-inf"), (top + tl.log2(total)) * _LN_2)
    return acc * tl.where(empty, 0.0, factor)[:, None], lse


@triton.jit
def absorb_tiles(
    q, acc, high, total, from_tile, to_tile, num_left, skipped, keys_of, rows_of,
    table_row, k_scale, v_scale, left, right, softcap, slopes,
    MASKED: tl.constexpr, PLAIN: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_N: tl.constexpr,
    SAME_STRIDES: tl.constexpr = False,
):  # fmt: skip
    """The partial after tiles from_tile .. to_tile - 1 of keys; from the `num_left`-th on, `skipped` further.

    MASKED: not every row sees every key of them. Scales of tokens: those of keys are multiplied into the
    scores, which is exact; those of values into the values, before these are rounded to COMPUTE, which saves
    the way of another vector through shared memory.
    """
    (
        k, k_stride_block, k_stride_slot, v, v_stride_block, v_stride_slot, run_block, run_slot,
        k_scale_stride_block, k_scale_stride_slot, v_scale_stride_block, v_scale_stride_slot,
    ) = keys_of  # fmt: skip
    positions, first, last, scale = rows_of
    for i in range(from_tile, to_tile):
        tile = i
        if MASKED:
            tile = tl.where(i < num_left, i, i + skipped)
        start = tile * BLOCK_N
        keys = start + tl.arange(0, BLOCK_N)
        seen = (keys >= first) & (keys < last)
        block, base, lanes = places(table_row, run_block, run_slot, start, seen, BLOCK_SIZE, BLOCK_N)
        rows = elements(block, base, lanes, k_stride_block, k_stride_slot)
        k_tile = load_tile(k + rows, seen, MASKED, HEAD_DIM, BLOCK_D, COMPUTE)
        products = tl.dot(q, tl.trans(k_tile), input_precision="ieee")
        if k_scale is not None:
            k_scales = load_token_scales(
                k_scale, block, base + lanes, seen, k_scale_stride_block, k_scale_stride_slot, True
            )
            products = products * k_scales[None, :]
        s = scores(products, scale, softcap, slopes, positions, keys, None, PLAIN)
        if MASKED:
            mask = visible(positions, keys, first, last, left, right)
            s = tl.where(mask, s, float("-inf"))
        p, acc, high, total = absorb(s, acc, high, total, scale, PLAIN, MASKED)
        if not SAME_STRIDES:
            rows = elements(block, base, lanes, v_stride_block, v_stride_slot)
        if v_scale is None:
            v_tile = load_tile(v + rows, seen, MASKED, HEAD_DIM, BLOCK_D, COMPUTE)
        else:
            v_tile = load_tile(v + rows, seen, MASKED, HEAD_DIM, BLOCK_D, tl.float32)
            v_scales = load_token_scales(
                v_scale, block, base + lanes, seen, v_scale_stride_block, v_scale_stride_slot
            )
            v_tile = (v_tile * v_scales[:, None]).to(COMPUTE)
        acc = tl.dot(p.to(COMPUTE), v_tile, acc, input_precision="ieee")
    return acc, high, total


@triton.jit
def store_rows(
    acc, high, total, out, lse, sinks, value_scale, rows, heads, seen,
    out_stride_token, out_stride_head, lse_stride, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Output and LSE of the partials of all keys, for `rows` (M,) of the packed batch and their `heads`."""
    sink = None
    if sinks is not None:
        sink = tl.load(sinks + heads)
    result, lse_rows = finish(acc, high, total, sink, value_scale)
    dims = tl.arange(0, BLOCK_D)
    starts = rows * out_stride_token + heads.to(tl.int64) * out_stride_head
    mask = seen[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(out + starts[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=mask)
    if lse is not None:
        tl.store(lse + heads.to(tl.int64) * lse_stride + rows, lse_rows, mask=seen)
