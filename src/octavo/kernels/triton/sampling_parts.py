"""Pieces that the sampling kernels share: order, fixed-point masses, the random number.

A mass is a token's probability relative to the row's most likely token, as an integer in units of 1 / ONE.
A packed mass counts tokens as well: one TALLY each, above the MASS of up to 2,048 tokens.
A key is a logit as an int32 that sorts alike.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

# Options of the rows, one number each, often slices of one buffer that begin anywhere.
OPTIONS = ["temperatures", "top_ks", "top_ps", "min_ps", "seeds", "positions"]

LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
# Fixed point of probabilities relative to the largest. A list's sum stays below 2^51, a row's below 2^62.
ONE = tl.constexpr(2.0**39)
FROM_UNITS = tl.constexpr(2.0**17)  # a group's sum comes in units of 2^-22
COUNT = tl.constexpr(51)
TALLY = tl.constexpr(1 << 51)
MASS = tl.constexpr((1 << 51) - 1)
LOWEST = tl.constexpr(-(2**31))
# In `ids` between the launches: left to `search`.
OPEN = tl.constexpr(-2)

# splitmix64, as in `reference/sampling.py`
_GAMMA = tl.constexpr(0x9E3779B97F4A7C15 - 2**64)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9 - 2**64)
_MIX_2 = tl.constexpr(0x94D049BB133111EB - 2**64)


@triton.jit
def _mix(x):
    # Logical shifts: int64 shifts arithmetically.
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MIX_1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def uniform_of(seed, position):
    """A float64 in [0, 1)."""
    state = _mix(seed + _GAMMA) + (position + 1) * _GAMMA
    bits = (_mix(state) >> 11) & 0x1FFFFFFFFFFFFF
    return bits.to(tl.float64) * (2.0**-53)


@triton.jit
def key_of(x):
    """int32 in the order of the floats; -0.0 and 0.0 are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """The logit that has this key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def mass_of(key, highest, scale):
    """Mass of a token whose logit has this key."""
    return (weight_of(value_of(key), highest, scale) * ONE).to(tl.int64)


@triton.jit
def scale_of(temperature):
    """log2(e) / temperature, kept where products with logit differences stay in range."""
    return tl.minimum(tl.maximum((1.0 / temperature) * LOG2E, 1e-37), 3e38)


@triton.jit
def weight_of(x, highest, scale):
    """Probability of x relative to that of `highest`; 0 for x = -inf, and where highest is -inf."""
    return tl.exp2((x - tl.maximum(highest, -3e38)) * scale)


@triton.jit
def row_mass(units, likely):
    """Mass of groups whose largest token has weight `likely`."""
    return (units.to(tl.float32) * (likely * FROM_UNITS)).to(tl.int64)


@triton.jit
def row_options(row, top_ks, top_ps, min_ps, vocab_size):
    """(top_k, top_p, min_p) of a row; top_k is 0 and top_p 1 where they cut nothing."""
    top_k = tl.zeros((), tl.int32)
    if top_ks is not None:
        top_k = tl.load(top_ks + row)
        top_k = tl.where((top_k < 0) | (top_k >= vocab_size), 0, top_k)
    top_p = tl.full((), 1.0, tl.float32)
    if top_ps is not None:
        top_p = tl.load(top_ps + row)
    min_p = tl.zeros((), tl.float32)
    if min_ps is not None:
        min_p = tl.load(min_ps + row)
    return top_k, top_p, min_p


@triton.jit
def scaled_up(fraction, total):
    """ceil(fraction * total), at least 1, at most total."""
    share = tl.ceil(fraction.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
    return tl.minimum(tl.maximum(share, 1), total)


@triton.jit
def point_of(row, seeds, positions, total):
    """The row's random number scaled to 0 .. total - 1."""
    uniform = uniform_of(tl.load(seeds + row), tl.load(positions + row))
    point = (uniform * total.to(tl.float64)).to(tl.int64)
    return tl.minimum(point, total - 1)


@triton.jit
def halfway(low, high):
    """Of int64, so that the sum stays in range."""
    return (low + high) >> 1


@triton.jit
def logprob_of(row, token, source, group_max, raw_sum, highest, num_groups, ALL_GROUPS: tl.constexpr):
    """Of the row's token under the softmax of the logits as they are."""
    groups = tl.arange(0, ALL_GROUPS)
    here = groups < num_groups
    place = row.to(tl.int64) * num_groups + groups
    maxima = tl.load(group_max + place, mask=here, other=-float("inf"))
    units = tl.load(raw_sum + place, mask=here, other=0)
    total = tl.sum(row_mass(units, weight_of(maxima, highest, LOG2E)))
    x = tl.load(source + token).to(tl.float32)
    return (x - highest) - tl.log2(total.to(tl.float32) / ONE) * _LN2
