"""The cuts of a row that has too many candidates for a list: a flat one, a large top_k, equal logits."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.launch import begin, direct
from octavo.kernels.triton.sampling_list import kth_key, mass_key
from octavo.kernels.triton.sampling_parts import (
    COUNT,
    LOWEST,
    MASS,
    ONE,
    OPEN,
    OPTIONS,
    TALLY,
    halfway,
    key_of,
    logprob_of,
    mass_of,
    point_of,
    row_mass,
    row_options,
    scale_of,
    scaled_up,
    value_of,
    weight_of,
)


@triton.jit
def _chunk(source, start, vocab_size, highest, scale, min_p, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    """(ids, keys, masses) of DEPTH x COLUMNS logits from `start`; key LOWEST and mass 0 where min_p cuts."""
    ids = start + tl.arange(0, DEPTH)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    x = tl.load(source + ids, mask=ids < vocab_size, other=-float("inf")).to(tl.float32)
    likely = weight_of(x, highest, scale)
    is_open = (x > -float("inf")) & (likely >= min_p)
    return ids, tl.where(is_open, key_of(x), LOWEST), tl.where(is_open, likely * ONE, 0.0).to(tl.int64)


@triton.jit
def _reaching(source, key, vocab_size, highest, scale, min_p, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    """(number, mass) of the row's tokens whose key is at least `key`, above LOWEST."""
    counts = tl.zeros((COLUMNS,), tl.int32)
    masses = tl.zeros((COLUMNS,), tl.int64)
    start = 0
    while start < vocab_size:
        _, keys, mass = _chunk(source, start, vocab_size, highest, scale, min_p, COLUMNS, DEPTH)
        counts += tl.sum((keys >= key).to(tl.int32), axis=0)
        masses += tl.sum(tl.where(keys >= key, mass, 0), axis=0)
        start += COLUMNS * DEPTH
    return tl.sum(counts), tl.sum(masses)


@triton.jit
def _collect(
    source, low, high, floor, bound, own_keys, own_ids, vocab_size, highest, scale, min_p,
    CANDIDATES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write keys and ids of the tokens with low <= key < high; of those equal to `floor` up to id `bound`."""
    found = 0
    start = 0
    while start < vocab_size:
        ids, keys, _ = _chunk(source, start, vocab_size, highest, scale, min_p, WIDTH, 1)
        inside = (keys >= low) & (keys < high) & ((keys != floor) | (ids <= bound))
        order = found + tl.cumsum(inside.to(tl.int32), axis=1) - 1
        found += tl.sum(inside.to(tl.int32))
        inside = inside & (order < CANDIDATES)
        tl.store(own_keys + order, keys, mask=inside)
        tl.store(own_ids + order, ids, mask=inside)
        start += WIDTH
    tl.debug_barrier()
    return found


@triton.jit
def _cut(
    source, k, target, low, high, count_low, floor, bound, own_keys, own_ids,
    vocab_size, highest, scale, min_p,
    CANDIDATES: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """(key, number above it, mass above it, number with it) of the last token kept.

    The largest key such that at least k tokens (k > 0), or a mass of at least `target` (k = 0), reach it.
    low <= key < high. The bracket is halved by value, later by key, until the tokens in it fit a list.
    The row ends at `floor`, of whose tokens only those up to id `bound` count; count_low tokens reach `low`.
    """
    count_above = tl.zeros((), tl.int32)
    mass_above = tl.zeros((), tl.int64)
    steps = 0
    while (high - low > 1) & (count_low - count_above > CANDIDATES):
        middle = halfway(low, high)
        if steps < 16:
            value = 0.5 * value_of(low.to(tl.int32)) + 0.5 * value_of((high - 1).to(tl.int32))
            middle = tl.minimum(tl.maximum(key_of(value).to(tl.int64), low + 1), high - 1)
        count, mass = _reaching(
            source, middle.to(tl.int32), vocab_size, highest, scale, min_p, COLUMNS, DEPTH
        )
        if ((k > 0) & (count >= k)) | ((k == 0) & (mass >= target)):
            low = middle
            count_low = count
        else:
            high = middle
            count_above = count
            mass_above = mass
        steps += 1
    key = low.to(tl.int32)
    count_here = count_low - count_above
    if high - low > 1:
        found = _collect(
            source, key, high.to(tl.int32), floor, bound, own_keys, own_ids,
            vocab_size, highest, scale, min_p,
            CANDIDATES, 2 * COLUMNS,
        )  # fmt: skip
        lanes = tl.arange(0, CANDIDATES)
        here = lanes < found
        keys = tl.load(own_keys + lanes, mask=here, other=LOWEST)
        packed = tl.where(here, mass_of(keys, highest, scale) + TALLY, 0)
        if k > 0:
            key = kth_key(keys, here, k - count_above, low, high)
        else:
            key = mass_key(keys, packed, target - mass_above, low, high)
        above = tl.sum(tl.where(keys > key, packed, 0))
        count_above += (above >> COUNT).to(tl.int32)
        mass_above += above & MASS
        count_here = tl.sum((here & (keys == key)).to(tl.int32))
    return key, count_above, mass_above, count_here


@triton.jit
def _tie_bound(
    source, key, num_ties, vocab_size, highest, scale, min_p, COLUMNS: tl.constexpr, DEPTH: tl.constexpr
):
    """The id of the row's num_ties-th token whose key is `key`; there are at least that many."""
    bound = vocab_size
    seen = 0
    start = 0
    step = COLUMNS * DEPTH
    while (bound == vocab_size) & (start < vocab_size):
        if step > COLUMNS:
            _ids, keys, _masses = _chunk(source, start, vocab_size, highest, scale, min_p, COLUMNS, DEPTH)
            here = tl.sum((keys == key).to(tl.int32))
        else:
            ids, row_keys, _row = _chunk(source, start, vocab_size, highest, scale, min_p, COLUMNS, 1)
            ties = (row_keys == key).to(tl.int32)
            here = tl.sum(ties)
            is_last = (ties > 0) & (seen + tl.cumsum(ties, axis=1) == num_ties)
            bound = tl.min(tl.where(is_last, ids, vocab_size))
        if seen + here < num_ties:
            seen += here
            start += step
        else:
            step = COLUMNS  # it is in here: a row at a time
    return bound


@triton.jit
def _draw(
    source, key, bound, point, vocab_size, highest, scale, min_p, COLUMNS: tl.constexpr, DEPTH: tl.constexpr
):
    """The first token, in order of id, at which the running mass of what is kept exceeds `point`."""
    token = vocab_size
    before = tl.zeros((), tl.int64)
    start = 0
    step = COLUMNS * DEPTH
    while (token == vocab_size) & (start < vocab_size):
        if step > COLUMNS:
            ids, keys, masses = _chunk(source, start, vocab_size, highest, scale, min_p, COLUMNS, DEPTH)
            kept = (keys > key) | ((keys == key) & (ids <= bound))
            here = tl.sum(tl.where(kept, masses, 0))
        else:
            row_ids, row_keys, row = _chunk(source, start, vocab_size, highest, scale, min_p, COLUMNS, 1)
            row_kept = (row_keys > key) | ((row_keys == key) & (row_ids <= bound))
            row = tl.where(row_kept, row, 0)
            here = tl.sum(row)
            is_past = before + tl.cumsum(row, axis=1) > point
            token = tl.min(tl.where(is_past, row_ids, vocab_size))
        if before + here <= point:
            before += here
            start += step
        else:
            step = COLUMNS
    return token


@direct
@triton.jit(do_not_specialize=["num_tiles"], do_not_specialize_on_alignment=OPTIONS)
def search(
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    positions,
    group_max,
    group_sum,
    raw_sum,
    candidate_keys,
    candidate_ids,
    out_ids,
    out_logprobs,
    row_stride,
    vocab_size,
    num_tiles,
    GROUPS: tl.constexpr,
    ALL_GROUPS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program per row; returns at once unless the row's id is OPEN."""
    begin(PDL)
    row = tl.program_id(0)
    if tl.load(out_ids + row) == OPEN:
        num_groups = num_tiles * GROUPS
        source = logits + row.to(tl.int64) * row_stride
        own_keys = candidate_keys + row.to(tl.int64) * CANDIDATES
        own_ids = candidate_ids + row.to(tl.int64) * CANDIDATES
        scale = scale_of(tl.load(temperatures + row))
        top_k, top_p, min_p = row_options(row, top_ks, top_ps, min_ps, vocab_size)
        groups = tl.arange(0, ALL_GROUPS)
        place = row.to(tl.int64) * num_groups + groups
        maxima = tl.load(group_max + place, mask=groups < num_groups, other=-float("inf"))
        highest = tl.max(maxima)
        high = key_of(highest).to(tl.int64) + 1
        # Further down a token's mass is 0, so it does not matter whether it is kept.
        key = key_of(tl.maximum(highest - 40.0 / scale, -3.4e38))
        bound = vocab_size - 1
        num_kept, mass = _reaching(source, key, vocab_size, highest, scale, min_p, COLUMNS, DEPTH)
        if (top_k > 0) & (num_kept > top_k):
            key, above, mass_above, num_here = _cut(
                source, top_k, mass, key.to(tl.int64), high, num_kept, LOWEST, bound, own_keys, own_ids,
                vocab_size, highest, scale, min_p, CANDIDATES, COLUMNS, DEPTH,
            )  # fmt: skip
            num_ties = top_k - above
            mass = mass_above + mass_of(key, highest, scale) * num_ties
            num_kept = top_k
            if num_ties < num_here:
                bound = _tie_bound(source, key, num_ties, vocab_size, highest, scale, min_p, COLUMNS, DEPTH)
        if top_p < 1:
            total = mass
            if (top_k == 0) & (min_p <= 0):
                units = tl.load(group_sum + place, mask=groups < num_groups, other=0)
                total = tl.sum(row_mass(units, weight_of(maxima, highest, scale)))
            target = tl.minimum(scaled_up(top_p, total), mass)
            floor = key
            none = num_kept - num_kept
            key, above, mass_above, num_here = _cut(
                source, none, target, floor.to(tl.int64), high, num_kept, floor, bound, own_keys, own_ids,
                vocab_size, highest, scale, min_p, CANDIDATES, COLUMNS, DEPTH,
            )  # fmt: skip
            each = tl.maximum(mass_of(key, highest, scale), 1)
            num_ties = tl.minimum(((target - mass_above + each - 1) // each).to(tl.int32), num_here)
            mass = mass_above + each * num_ties
            if num_ties < num_here:
                bound = _tie_bound(source, key, num_ties, vocab_size, highest, scale, min_p, COLUMNS, DEPTH)
            elif key > floor:
                bound = vocab_size - 1
        point = point_of(row, seeds, positions, mass)
        token = _draw(source, key, bound, point, vocab_size, highest, scale, min_p, COLUMNS, DEPTH)
        tl.store(out_ids + row, token.to(tl.int64))
        if out_logprobs is not None:
            logprob = logprob_of(row, token, source, group_max, raw_sum, highest, num_groups, ALL_GROUPS)
            tl.store(out_logprobs + row, logprob)
