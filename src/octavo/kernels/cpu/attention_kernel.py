"""Attention of ragged queries over paged or packed keys: the loops.

A task is a few consecutive query tokens of one sequence for one KV head. Its rows are (token, query head of
the group), so that every key and value is read once for the whole group::

    rows   token t, heads g0 g1 g2       K block (KEYS x D), transposed        V block (KEYS x D)
           token t+1, g0 g1 g2       x   into fp32 scratch            ->  p x  copied into fp32 scratch
           ...                           scores: tile()                        chained tile()

Decode is a task with one token, a chunk of a prompt many tasks of several tokens; nothing else differs.

**Same bits for a row whatever its company.** Key blocks start at absolute key positions 0, KEYS, 2 KEYS, ...
For one row and block: a score is one chain of fmas over the head dimension; masked scores are -inf, so their
weights are exact zeros in the fixed tree of the sum; the weighted sum of V is one chain of fmas over the
row's own keys in ascending order, and a chained tile may be cut anywhere. A block of which a row sees nothing
is skipped, which is the same as multiplying by exactly 1 and adding exactly 0. So how many tokens the task
has, how the keys were split over earlier calls, block size and block table, and the number of threads do not
enter.

**Masked memory stays out.** Keys outside of the task's range are not read at all; a key inside that one of
the rows does not see is kept out of that row's V chain by its bounds, not by a zero weight, so that a NaN
there cannot reach it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

from numba import float32

from octavo.kernels.cpu import threads
from octavo.kernels.cpu.attention_parameters import SCRATCH_SLOT, SLOTS
from octavo.kernels.cpu.compiled import compile_kernel, source_digest
from octavo.kernels.cpu.host import FLOAT_BYTES, vector_shape
from octavo.kernels.cpu.ir import (
    ITEM_BYTES,
    bits_to_float,
    fma,
    keep_lanes,
    lanes_max,
    lanes_sum,
    load,
    load_i32,
    load_i64,
    maximum,
    splat,
    store,
    store_i64,
    take,
    transpose,
)
from octavo.kernels.cpu.math import exp, tanh
from octavo.kernels.cpu.tile import tile

KEYS = 64  # keys of one block of the online softmax; part of the definition of a result's bits
ROWS_PER_TASK = 96  # enough rows to pay for transposing K, few enough for the L2 cache
_ALIGN_ROWS = 16

# Attention's own tile: head dims are multiples of 64, 32 or 16 far more often than of a linear panel.
_TILES = {"avx512": (4, 6), "avx2": (2, 6), "neon": (4, 6)}


def tile_columns() -> int:
    """Head dimensions are padded to a multiple of this in scratch."""
    shape = vector_shape()
    return shape.lanes * _TILES[shape.name][0]


class TaskShape(NamedTuple):
    """How a task is cut for one group size and head dimension."""

    tokens: int
    rows: int  # rounded up for aligned scratch arrays
    scratch_bytes: int  # of one worker: q, scores, accumulators, m, l; K transposed, V; key addresses


@functools.cache
def task_shape(group: int, head_dim: int) -> TaskShape:
    """The task for `group` query heads a KV head."""
    tokens = max(1, ROWS_PER_TASK // group)
    rows = -(-tokens * group // _ALIGN_ROWS) * _ALIGN_ROWS
    columns = tile_columns()
    padded = -(-head_dim // columns) * columns
    floats = rows * (head_dim + KEYS + padded + 2) + KEYS * (head_dim + padded)
    return TaskShape(tokens, rows, floats * FLOAT_BYTES + KEYS * 2 * 8)


@functools.cache
def attention_kernel(q_dtype: str, kv_dtype: str) -> int:
    """Address of the kernel for these dtypes ("float32", "float16", "bfloat16") on this host."""
    shape = vector_shape()
    vectors, max_rows = _TILES[shape.name]
    return compile_kernel(_attention(q_dtype, kv_dtype, shape.lanes, vectors, max_rows, source_digest()))


def _attention(
    q_dtype: str, kv_dtype: str, lanes: int, vectors: int, max_rows: int, digest: str
) -> Callable[[int], None]:
    panel = lanes * vectors
    q_item = ITEM_BYTES[q_dtype]
    kv_item = ITEM_BYTES[kv_dtype]
    minus_infinity = float("-inf")

    def attention(block: int) -> None:
        digest  # noqa: B018  # part of the cache key
        batch = load_i64(block, SLOTS.batch)
        group = load_i64(block, SLOTS.group)
        kv_heads = load_i64(block, SLOTS.kv_heads)
        dim = load_i64(block, SLOTS.dim)
        q = load_i64(block, SLOTS.q)
        q_token = load_i64(block, SLOTS.q_token)
        q_head = load_i64(block, SLOTS.q_head)
        k = load_i64(block, SLOTS.k)
        k_block = load_i64(block, SLOTS.k_block)
        k_slot = load_i64(block, SLOTS.k_slot)
        k_head = load_i64(block, SLOTS.k_head)
        v = load_i64(block, SLOTS.v)
        v_block = load_i64(block, SLOTS.v_block)
        v_slot = load_i64(block, SLOTS.v_slot)
        v_head = load_i64(block, SLOTS.v_head)
        out = load_i64(block, SLOTS.out)
        out_token = load_i64(block, SLOTS.out_token)
        out_head = load_i64(block, SLOTS.out_head)
        lse = load_i64(block, SLOTS.lse)
        lse_head = load_i64(block, SLOTS.lse_head)
        starts_q = load_i64(block, SLOTS.starts_q)
        starts_k = load_i64(block, SLOTS.starts_k)
        table = load_i64(block, SLOTS.table)
        table_row = load_i64(block, SLOTS.table_row)
        block_size = load_i64(block, SLOTS.block_size)
        scale = splat(bits_to_float(load_i64(block, SLOTS.scale)), lanes)
        softcap_number = bits_to_float(load_i64(block, SLOTS.softcap))
        softcap = splat(softcap_number, lanes)
        left = load_i64(block, SLOTS.left)
        right = load_i64(block, SLOTS.right)
        slopes = load_i64(block, SLOTS.slopes)
        slopes_row = load_i64(block, SLOTS.slopes_row)
        sinks = load_i64(block, SLOTS.sinks)
        tokens_per_task = load_i64(block, SLOTS.tokens_per_task)
        rows_stride = load_i64(block, SLOTS.rows_stride)
        zeros = load_i64(block, SLOTS.zeros)
        lane_numbers = load(load_i64(block, SLOTS.lane_numbers), "float32", lanes)
        scratch_size = load_i64(block, SLOTS.scratch_size)
        s_q = load_i64(block, SCRATCH_SLOT) + take(block, threads.WORKER) * scratch_size

        padded = (dim + panel - 1) // panel * panel
        s_scores = s_q + rows_stride * dim * 4
        s_acc = s_scores + rows_stride * KEYS * 4
        s_max = s_acc + rows_stride * padded * 4
        s_sum = s_max + rows_stride * 4
        s_k = s_sum + rows_stride * 4
        s_v = s_k + dim * KEYS * 4
        s_k_at = s_v + padded * KEYS * 4
        s_v_at = s_k_at + KEYS * 8
        whole = dim // lanes * lanes  # the part of a head that whole vectors cover
        infinity = splat(bits_to_float(0xFF800000), 1)

        b = 0
        before = 0  # tasks of the sequences before b
        while True:
            # Tasks come in ascending order, so each worker walks through the sequences once.
            task = take(block, threads.TASK)
            q_len = 0
            tiles = 0
            while b < batch:
                q_len = load_i32(starts_q, b + 1) - load_i32(starts_q, b)
                tiles = (q_len + tokens_per_task - 1) // tokens_per_task
                if task < before + tiles * kv_heads:
                    break
                before += tiles * kv_heads
                b += 1
            if b >= batch:
                break
            # The last tokens see the most keys: they go first, so that the workers end together.
            i_tile = tiles - 1 - (task - before) // kv_heads
            head = (task - before) % kv_heads
            start_q = load_i32(starts_q, b)
            start_k = load_i32(starts_k, b)
            k_len = load_i32(starts_k, b + 1) - start_k
            first_token = i_tile * tokens_per_task
            rows = (min(first_token + tokens_per_task, q_len) - first_token) * group
            diagonal = k_len - q_len
            last_token = first_token + rows // group - 1
            first_key = 0
            if left >= 0:
                first_key = max(first_token + diagonal - left, 0)
            end_key = k_len
            if right >= 0:
                end_key = min(last_token + diagonal + right + 1, k_len)

            for r in range(rows):
                at = q + (start_q + first_token + r // group) * q_token + (head * group + r % group) * q_head
                to = s_q + r * dim * 4
                for c in range(0, whole, lanes):
                    store(to + c * 4, load(at + c * q_item, q_dtype, lanes), "float32")
                for c in range(whole, dim):
                    store(to + c * 4, load(at + c * q_item, q_dtype, 1), "float32")
                store(s_max + r * 4, infinity, "float32")
                store(s_sum + r * 4, splat(bits_to_float(0), 1), "float32")
                for c in range(0, padded, lanes):
                    store(s_acc + (r * padded + c) * 4, splat(bits_to_float(0), lanes), "float32")

            for i_keys in range(first_key // KEYS, (end_key + KEYS - 1) // KEYS):
                block_start = i_keys * KEYS
                first = max(first_key - block_start, 0)
                end = min(end_key - block_start, KEYS)
                if first >= end:
                    continue
                # 1. Where the keys lie. Entries outside [first, end) repeat the first: loads stay inside
                # memory.
                if table == 0:
                    for j in range(first, end):
                        place = start_k + block_start + j
                        store_i64(s_k_at, j, k + place * k_slot + head * k_head)
                        store_i64(s_v_at, j, v + place * v_slot + head * v_head)
                else:
                    i_block = (block_start + first) // block_size
                    slot = (block_start + first) % block_size
                    block_id = load_i32(table + b * table_row, i_block)
                    for j in range(first, end):
                        if slot == block_size:
                            slot = 0
                            i_block += 1
                            block_id = load_i32(table + b * table_row, i_block)
                        store_i64(s_k_at, j, k + block_id * k_block + slot * k_slot + head * k_head)
                        store_i64(s_v_at, j, v + block_id * v_block + slot * v_slot + head * v_head)
                        slot += 1
                for j in range(first):
                    store_i64(s_k_at, j, load_i64(s_k_at, first))
                for j in range(end, KEYS):
                    store_i64(s_k_at, j, load_i64(s_k_at, first))

                # 2. K transposed and V copied, both to fp32.
                end_group = (end + lanes - 1) // lanes * lanes
                for j in range(first // lanes * lanes, end_group, lanes):
                    for c in range(0, whole, lanes):
                        transpose(
                            s_k_at + j * 8, c * kv_item, s_k + (c * KEYS + j) * 4, KEYS, kv_dtype, lanes
                        )
                for c in range(whole, dim):
                    for j in range(first, end):
                        value = load(load_i64(s_k_at, j) + c * kv_item, kv_dtype, 1)
                        store(s_k + (c * KEYS + j) * 4, value, "float32")
                for j in range(first, end):
                    at = load_i64(s_v_at, j)
                    to = s_v + j * padded * 4
                    for c in range(0, whole, lanes):
                        store(to + c * 4, load(at + c * kv_item, kv_dtype, lanes), "float32")
                    for c in range(whole, dim):
                        store(to + c * 4, load(at + c * kv_item, kv_dtype, 1), "float32")

                # 3. Scores of all rows.
                for r in range(0, rows, max_rows):
                    count = min(max_rows, rows - r)
                    for c in range(0, end, panel):
                        tile(
                            count, panel, dim, s_q + r * dim * 4, dim, s_k + c * 4, KEYS, 0, 1, zeros, 0,
                            s_scores + (r * KEYS + c) * 4, KEYS, "float32", lanes, vectors, max_rows, 0,
                        )  # fmt: skip

                # 4. The online softmax: scores become weights, older sums are rescaled.
                for r in range(rows):
                    position = first_token + r // group + diagonal - block_start
                    low = first
                    if left >= 0:
                        low = max(position - left, first)
                    high = end
                    if right >= 0:
                        high = min(position + right + 1, end)
                    if low >= high:
                        continue
                    scores = s_scores + r * KEYS * 4
                    largest = splat(bits_to_float(0xFF800000), lanes)
                    for c in range(0, high, lanes):
                        s = load(scores + c * 4, "float32", lanes) * scale
                        if softcap_number > 0.0:
                            s = softcap * tanh(s / softcap)
                        if slopes != 0:
                            slope_at = slopes + b * slopes_row + (head * group + r % group) * 4
                            slope = splat(bits_to_float(load_i32(slope_at, 0)), lanes)
                            ahead = lane_numbers + splat(float32(c - position), lanes)
                            behind = splat(float32(position - c), lanes) - lane_numbers
                            s = s - slope * maximum(ahead, behind)
                        s = keep_lanes(s, min(max(low - c, 0), lanes), min(high - c, lanes), minus_infinity)
                        store(scores + c * 4, s, "float32")
                        largest = maximum(s, largest)
                    old_max = load(s_max + r * 4, "float32", 1)
                    new_max = maximum(splat(lanes_max(largest), 1), old_max)
                    new_max_wide = splat(lanes_max(new_max), lanes)
                    total = splat(bits_to_float(0), lanes)
                    for c in range(0, high, lanes):
                        p = exp(load(scores + c * 4, "float32", lanes) - new_max_wide)
                        store(scores + c * 4, p, "float32")
                        total = total + p
                    shrink = exp(old_max - new_max)
                    shrink_wide = splat(lanes_sum(shrink), lanes)
                    old_sum = load(s_sum + r * 4, "float32", 1)
                    store(s_max + r * 4, new_max, "float32")
                    store(s_sum + r * 4, fma(old_sum, shrink, splat(lanes_sum(total), 1)), "float32")
                    for c in range(0, padded, lanes):
                        at = s_acc + (r * padded + c) * 4
                        store(at, load(at, "float32", lanes) * shrink_wide, "float32")

                # 5. Weights times V. A tile of rows goes over the keys that all of them see; what only some
                # of them see comes before (left edge of a window) and after (right edge, causal), row by row.
                for r in range(0, rows, max_rows):
                    count = min(max_rows, rows - r)
                    top = first_token + r // group + diagonal - block_start
                    bottom = first_token + (r + count - 1) // group + diagonal - block_start
                    all_low = first
                    if left >= 0:
                        all_low = max(bottom - left, first)
                    all_high = end
                    if right >= 0:
                        all_high = min(top + right + 1, end)
                    if all_low >= all_high:
                        all_low = KEYS
                        all_high = KEYS
                    for step in range(2 * count + 1):
                        # step < count: left edge of that row; count: all rows; beyond: right edges
                        row = r
                        many = count
                        low = all_low
                        high = all_high
                        if step != count:
                            many = 1
                            row = r + step % (count + 1)
                            if step > count:
                                row = r + step - count - 1
                            position = first_token + row // group + diagonal - block_start
                            low = first
                            if left >= 0:
                                low = max(position - left, first)
                            high = end
                            if right >= 0:
                                high = min(position + right + 1, end)
                            if step < count:
                                high = min(high, all_low)
                            else:
                                low = max(low, all_high)
                        if low < high:
                            for c in range(0, padded, panel):
                                at = s_acc + (row * padded + c) * 4
                                tile(
                                    many, panel, high - low, s_scores + (row * KEYS + low) * 4, KEYS,
                                    s_v + (low * padded + c) * 4, padded, 0, 1, at, padded, at, padded,
                                    "float32", lanes, vectors, max_rows, 1,
                                )  # fmt: skip

            for r in range(rows):
                token = start_q + first_token + r // group
                i_head = head * group + r % group
                to = out + token * out_token + i_head * out_head
                row_max = load(s_max + r * 4, "float32", 1)
                total = load(s_sum + r * 4, "float32", 1)
                shrink = splat(bits_to_float(0x3F800000), 1)
                if sinks != 0:
                    sink = load(sinks + i_head * 4, "float32", 1)
                    with_sink = maximum(row_max, sink)
                    shrink = exp(row_max - with_sink)
                    if lanes_max(total) != 0.0:
                        total = fma(total, shrink, exp(sink - with_sink))
                        row_max = with_sink
                log_total = minus_infinity
                divisor = total
                if lanes_max(total) == 0.0:  # no key is visible
                    divisor = splat(bits_to_float(0x3F800000), 1)
                    shrink = splat(bits_to_float(0), 1)
                else:
                    log_total = lanes_max(row_max) + math.log(lanes_max(total))
                factor = splat(lanes_max(shrink), lanes)
                divide = splat(lanes_max(divisor), lanes)
                for c in range(0, whole, lanes):
                    value = load(s_acc + (r * padded + c) * 4, "float32", lanes)
                    store(to + c * q_item, value * factor / divide, q_dtype)
                for c in range(whole, dim):
                    value = load(s_acc + (r * padded + c) * 4, "float32", 1)
                    store(to + c * q_item, value * shrink / divisor, q_dtype)
                if lse != 0:
                    store(lse + i_head * lse_head + token * 4, splat(float32(log_total), 1), "float32")

    return attention
