"""The cuts and the draw among candidates that lie in a list: logits (or keys) and ids, in any order."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.sampling_parts import (
    COUNT,
    LOWEST,
    MASS,
    ONE,
    TALLY,
    halfway,
    key_of,
    point_of,
    scaled_up,
    weight_of,
)


@triton.jit
def kth_key(keys, valid, k, low, high):
    """Smallest key among the k largest valid ones; low and high bracket it: low <= it < high."""
    while high - low > 1:
        middle = halfway(low, high)
        count = tl.sum((valid & (keys >= middle.to(tl.int32))).to(tl.int32))
        if count >= k:
            low = middle
        else:
            high = middle
        if count == k:
            high = low + 1
    return tl.min(tl.where(valid & (keys >= low.to(tl.int32)), keys, 2147483647))


@triton.jit
def mass_key(keys, packed, target, low, high):
    """Largest key such that the keys from it upward have a mass of at least target."""
    inside = 2
    above = tl.zeros((), tl.int64)
    below = tl.sum(packed)
    while (high - low > 1) & (inside > 1):
        middle = halfway(low, high)
        found = tl.sum(tl.where(keys >= middle.to(tl.int32), packed, 0))
        if (found & MASS) >= target:
            low = middle
            below = found
        else:
            high = middle
            above = found
        inside = ((below >> COUNT) - (above >> COUNT)).to(tl.int32)
    return tl.max(tl.where((packed > 0) & (keys < high.to(tl.int32)), keys, LOWEST))


@triton.jit
def without_late_ties(keys, ids, kept, key, num_ties, vocab_size):
    """The kept tokens above `key`, and of those equal to it the num_ties with the lowest ids."""
    ties = kept & (keys == key)
    bound = vocab_size
    if tl.sum(ties.to(tl.int32)) > num_ties:
        low = -1
        high = vocab_size - 1
        while high - low > 1:
            middle = halfway(low, high)
            if tl.sum((ties & (ids <= middle)).to(tl.int32)) >= num_ties:
                high = middle
            else:
                low = middle
        bound = high
    return kept & ((keys > key) | ((keys == key) & (ids <= bound)))


@triton.jit
def draw_from_list(ids, packed, point, vocab_size):
    """The first id at which the running mass, in id order, exceeds point."""
    low = -1
    high = vocab_size - 1
    inside = 2
    before = tl.zeros((), tl.int64)
    through = tl.sum(packed)
    while (high - low > 1) & (inside > 1):
        middle = halfway(low, high)
        found = tl.sum(tl.where(ids <= middle, packed, 0))
        if (found & MASS) > point:
            high = middle
            through = found
        else:
            low = middle
            before = found
        inside = ((through >> COUNT) - (before >> COUNT)).to(tl.int32)
    return tl.max(tl.where((packed > 0) & (ids <= high), ids, -1))


@triton.jit
def _order(x, ids):
    """Larger for a larger logit, then for a lower id."""
    return (key_of(x).to(tl.int64) << 32) - ids


@triton.jit
def choose_among_few(
    own_logits, own_ids, num_found, total, highest, scale, top_k, top_p, min_p, row, seeds, positions,
    vocab_size, FEW: tl.constexpr, PART: tl.constexpr = 16,
):  # fmt: skip
    """As `choose_from_list`, but compares each candidate with each other one instead of searching."""
    lanes = tl.arange(0, FEW)
    here = lanes < num_found
    x = tl.load(own_logits + lanes, mask=here, other=-float("inf"))
    ids = tl.load(own_ids + lanes, mask=here, other=0)
    order = _order(x, ids)
    packed = tl.where(here, (weight_of(x, highest, scale) * ONE).to(tl.int64) + TALLY, 0)
    ahead = tl.zeros((PART, FEW), tl.int64)
    for start in range(0, FEW, PART):
        others = start + tl.arange(0, PART)
        is_there = others < num_found
        other_x = tl.load(own_logits + others, mask=is_there, other=-float("inf"))
        other_ids = tl.load(own_ids + others, mask=is_there, other=0)
        other_packed = tl.where(is_there, (weight_of(other_x, highest, scale) * ONE).to(tl.int64) + TALLY, 0)
        is_ahead = _order(other_x, other_ids)[:, None] > order[None, :]
        ahead += tl.where(is_ahead, other_packed[:, None], 0)
    ahead = tl.sum(ahead, axis=0)
    if top_k > 0:
        packed = tl.where((ahead >> COUNT) < top_k, packed, 0)
    if top_p < 1:
        mass_here = tl.sum(packed) & MASS
        if (top_k > 0) | (min_p > 0):
            total = mass_here
        target = tl.minimum(scaled_up(top_p, total), mass_here)
        packed = tl.where((ahead & MASS) < target, packed, 0)
    point = point_of(row, seeds, positions, tl.sum(packed) & MASS)
    return draw_from_list(ids, packed, point, vocab_size)


@triton.jit
def choose_from_list(
    own_logits, own_ids, num_found, total, highest, scale, top_k, top_p, min_p, row, seeds, positions,
    vocab_size, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """top_k, top_p and the draw among num_found <= CANDIDATES tokens, min_p's cut behind them.

    `total` is the mass of the whole row; top_p refers to it where nothing else cuts.
    """
    lanes = tl.arange(0, CANDIDATES)
    kept = lanes < num_found
    x = tl.load(own_logits + lanes, mask=kept, other=-float("inf"))
    ids = tl.load(own_ids + lanes, mask=kept, other=0)
    keys = key_of(x)
    packed = (weight_of(x, highest, scale) * ONE).to(tl.int64) + TALLY
    low = tl.min(tl.where(kept, keys, 2147483647)).to(tl.int64)
    high = key_of(highest).to(tl.int64) + 1
    if (top_k > 0) & (num_found > top_k):
        key = kth_key(keys, kept, top_k, low, high)
        num_ties = top_k - tl.sum((kept & (keys > key)).to(tl.int32))
        kept = without_late_ties(keys, ids, kept, key, num_ties, vocab_size)
        low = key.to(tl.int64)
    packed = tl.where(kept, packed, 0)
    mass_here = tl.sum(packed) & MASS
    if top_p < 1:
        if (top_k > 0) | (min_p > 0):
            total = mass_here
        target = tl.minimum(scaled_up(top_p, total), mass_here)
        key = mass_key(keys, packed, target, low, high)
        above = tl.sum(tl.where(keys > key, packed, 0)) & MASS
        ties = keys == key
        # Never 0: the target is not reached above the key.
        each = tl.max(tl.where(kept & ties, packed, 0)) & MASS
        num_ties = ((target - above + each - 1) // each).to(tl.int32)
        kept = without_late_ties(keys, ids, kept, key, num_ties, vocab_size)
        packed = tl.where(kept, packed, 0)
        mass_here = tl.sum(packed) & MASS
    point = point_of(row, seeds, positions, mass_here)
    return draw_from_list(ids, packed, point, vocab_size)
