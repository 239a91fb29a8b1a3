"""One token per row of logits: temperature, min_p, top_k, top_p, and a draw in order of token id."""

from __future__ import annotations

import torch
from torch import Tensor

# splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014), constants as int64.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """One number in [0, 1) per row, a function of its seed and position alone.

    splitmix64 whose starting state is the mixed seed, at output number `position`; the upper 53 bits become a
    float64. Mixing the seed first keeps neighbouring seeds from walking the same sequence. A total times such
    a number rounds to less than the total, so a search for it ends at a token with some probability.

    Args:
        seeds, positions: (R,) int64.
    """
    state = _mix(seeds + _GAMMA) + (positions + 1) * _GAMMA
    return _shift_right(_mix(state), 11).double() * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: int64 tensors shift arithmetically, which would copy the sign downwards."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
    return_logprobs: bool,
) -> tuple[Tensor, Tensor | None]:
    """`(ids, logprobs)`; see `octavo.kernels.sample`."""
    if len(logits) == 0:
        empty = torch.empty(0, dtype=torch.int64, device=logits.device)
        return empty, empty.float() if return_logprobs else None
    probs = probabilities(logits, temperature, top_k, top_p, min_p)
    ends = probs.cumsum(dim=1)
    target = uniform(seeds, positions) * ends[:, -1]
    drawn = torch.searchsorted(ends, target[:, None], right=True)
    # A sum may be flat behind its last token; no draw may fall there.
    last = probs.shape[1] - 1 - (probs.flip(1) > 0).int().argmax(dim=1, keepdim=True)
    ids = torch.minimum(drawn, last)
    wide = logits.double()
    is_bad = ~wide.amax(dim=1).isfinite()
    logprobs = torch.log_softmax(wide, dim=1).gather(1, ids)[:, 0].float() if return_logprobs else None
    if logprobs is not None:
        logprobs = logprobs.masked_fill(is_bad, torch.nan)
    return ids[:, 0].masked_fill(is_bad, -1), logprobs


def probabilities(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> Tensor:
    """(R, V) float64: how likely each token is to be drawn, up to a factor per row; 0 where it is cut.

    Each filter keeps a run of the tokens, ordered by logit and, where logits are equal, by id.
    """
    wide = logits.double()
    size = logits.shape[1]
    order = wide.sort(dim=1, descending=True, stable=True).indices
    is_greedy = temperature <= 0
    divisor = torch.where(is_greedy, 1.0, temperature.double())
    # Relative to the largest, so that no temperature overflows.
    probs = torch.exp((wide - wide.amax(dim=1, keepdim=True)) / divisor[:, None]).gather(1, order)
    kept = torch.full((len(logits),), size, device=logits.device)
    if min_p is not None:
        kept = (probs >= min_p.double()[:, None]).sum(dim=1)
    if top_k is not None:
        limit = torch.where((top_k > 0) & (top_k < size), top_k, size)
        kept = kept.minimum(limit)
    ends = probs.cumsum(dim=1)
    if top_p is not None:
        mass = ends.gather(1, (kept - 1).clamp_min(0)[:, None])
        is_reached = ends >= top_p.double()[:, None] * mass
        kept = torch.where(top_p < 1, kept.minimum((~is_reached).sum(dim=1) + 1), kept)
    kept = torch.where(is_greedy, 1, kept)
    places = torch.arange(size, device=logits.device)
    probs = probs.masked_fill(places >= kept[:, None], 0.0)
    return torch.zeros_like(probs).scatter(1, order, probs)
