"""Tensor work of the sampler: row-independent orders, sums and draws.

Every function treats a row the same way, to the last bit, whatever the other rows hold and however many there
are. That is why sums of probabilities are float64 and taken in a fixed order, why equal logits are ordered by
token id, and why the random number of a row is a hash and not the next value of a shared generator.

Shapes: R rows, V tokens of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.outputs import Logprob

# Candidates looked at first for a row without top_k; if top_p or min_p reach further, all of it is sorted.
FIRST_CANDIDATES = 256

# Tokens whose probabilities are summed together before one of these blocks is searched token by token.
_BLOCK = 128


def order_keys(logits: Tensor) -> Tensor:
    """(R, V) int64, all different in a row: a larger logit has a larger key, then a lower id has.

    The upper half is the float32's bits made monotone, the lower half counts ids backwards.

    Args:
        logits: (R, V) float32 without NaN.
    """
    size = logits.shape[1]
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 turns -0.0, which compares equal to 0.0, into 0.0
    bits ^= (bits >> 31) & 0x7FFFFFFF
    keys = bits.to(torch.int64)
    keys <<= 32
    keys |= torch.arange(size - 1, -1, -1, device=logits.device)
    return keys


def leading_ids(keys: Tensor, width: int) -> Tensor:
    """(R, width) int64 ids of the largest keys, largest first."""
    size = keys.shape[1]
    if width * 8 < size:
        leading = keys.topk(width, dim=1).values
    elif keys.device.type == "cpu":
        # NumPy sorts int64 with vector instructions, several times faster than torch.sort on a CPU.
        ascending = keys.numpy().copy()
        ascending.sort(axis=1)
        leading = torch.from_numpy(ascending).flip(1)[:, :width]
    else:
        leading = keys.sort(dim=1, descending=True).values[:, :width]
    return (size - 1) - (leading & 0xFFFFFFFF)


def draw_by_id(probs: Tensor, min_p: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one token per row by inverting the cumulative distribution in order of token id.

    Args:
        probs: (R, V) float32, overwritten with 0 where min_p cuts.
        min_p: (R,) float32. uniforms: (R,) float64 in [0, 1).

    Returns (R,) int64.
    """
    num_rows, size = probs.shape
    probs.masked_fill_(probs < (min_p * probs.amax(dim=1))[:, None], 0.0)
    if size % _BLOCK:
        probs = torch.nn.functional.pad(probs, (0, -size % _BLOCK))
    blocks = probs.view(num_rows, -1, _BLOCK)
    ends = blocks.sum(dim=2, dtype=torch.float64).cumsum(dim=1)
    target = uniforms * ends[:, -1]
    block = torch.searchsorted(ends, target[:, None], right=True)
    start = torch.where(block > 0, ends.gather(1, (block - 1).clamp_(min=0)), 0.0)
    inner = blocks[torch.arange(num_rows, device=probs.device), block[:, 0]].double().cumsum(dim=1)
    # The two sums round differently: what is left of the target may overshoot the block by a hair.
    total = inner[:, -1]
    rest = (target - start[:, 0]).minimum(torch.nextafter(total, torch.zeros_like(total)))
    return block[:, 0] * _BLOCK + torch.searchsorted(inner, rest[:, None], right=True)[:, 0]


def draw_by_order(
    scaled: Tensor,
    probs: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniforms: Tensor,
    width: int,
) -> Tensor:
    """Draw one token per row among those that min_p, then top_k, then top_p keep, most likely first.

    All three keep a prefix of the tokens ordered by logit. `width` candidates are looked at first; it must be
    at least every top_k below V, and changes the cost, not the result.

    Args:
        scaled: (R, V) float32 logits divided by temperature. probs: (R, V) float32, their softmax.
        top_k: (R,) int64 in 1..V. top_p: (R,) float64. min_p: (R,) float32. uniforms: (R,) float64 in [0, 1).

    Returns (R,) int64.
    """
    size = scaled.shape[1]
    ids = leading_ids(order_keys(scaled), width)
    candidates = probs.gather(1, ids)
    ends = candidates.double().cumsum(dim=1)
    is_whole = (top_k == size) & (min_p == 0)
    kept = (candidates >= (min_p * candidates[:, 0])[:, None]).sum(dim=1).minimum(top_k)
    mass = ends.gather(1, kept[:, None] - 1)[:, 0]
    # Softmax has made the mass of a whole row 1; summing it would need every candidate.
    reached = ends >= (top_p * torch.where(is_whole, 1.0, mass))[:, None]
    if width < size:
        is_open = torch.where(is_whole, ~reached[:, -1], (kept == width) & (top_k > width))
    kept = kept.minimum((~reached).sum(dim=1) + 1)
    total = ends.gather(1, kept[:, None] - 1)[:, 0]
    target = uniforms * total
    place = torch.searchsorted(ends, target[:, None], right=True)
    chosen = ids.gather(1, place)[:, 0]
    if width < size and bool(is_open.any()):
        rest = is_open.nonzero()[:, 0]
        chosen[rest] = draw_by_order(
            scaled[rest], probs[rest], top_k[rest], top_p[rest], min_p[rest], uniforms[rest], size
        )
    return chosen


def gather_logprobs(logits: Tensor, chosen: Tensor, widths: list[int]) -> list[dict[int, Logprob]]:
    """Per row the log probability and rank of the chosen token, then of the most likely `widths[row]`.

    Args:
        logits: (R, V) float32 without NaN, as the model gave them. chosen: (R,) int64.
    """
    own, *tables = Read([chosen, *logprob_tables(logits, chosen, max(widths))]).wait()
    return logprob_entries(own.tolist(), tables, widths)


def logprob_tables(logits: Tensor, chosen: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(ranks (R,) int64, log probabilities (R,) float32) of the chosen tokens, then (ids (R, width), log
    probabilities) of the most likely ones, in order. Arguments as in `gather_logprobs`.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    keys = order_keys(logits)
    own = chosen[:, None]
    ranks = (keys > keys.gather(1, own)).sum(dim=1) + 1
    ids = leading_ids(keys, width)
    return ranks, logprobs.gather(1, own)[:, 0], ids, logprobs.gather(1, ids)


def logprob_entries(chosen: list[int], tables: list[Tensor], widths: list[int]) -> list[dict[int, Logprob]]:
    """What `logprob_tables` found, one dict per row: the chosen token, then the `widths[row]` most likely."""
    found = []
    columns = (table.tolist() for table in tables)
    for token, width, rank, value, tops, top in zip(chosen, widths, *columns, strict=True):
        entry = {token: Logprob(value, rank)}
        for place in range(width):
            entry.setdefault(tops[place], Logprob(top[place], place + 1))
        found.append(entry)
    return found


class Read:
    """int64 and float32 tensors of one device on their way to the CPU, in one copy that was queued here."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        self._together: Tensor | None = None
        self._event: Any = None
        if tensors[0].is_cpu:
            return
        bits = [x if x.dtype == torch.int64 else x.double().view(torch.int64) for x in tensors]
        together = torch.cat([x.reshape(-1) for x in bits]) if len(bits) > 1 else bits[0].reshape(-1)
        self._together = torch.empty(
            together.shape, dtype=torch.int64, device="cpu", pin_memory=together.is_cuda
        )
        self._together.copy_(together, non_blocking=True)
        if together.is_cuda:
            cuda: Any = torch.cuda
            self._event = cuda.Event()
            self._event.record()

    def wait(self) -> list[Tensor]:
        """The tensors, once they have come. Floats that crossed over are float64."""
        if self._together is None:
            return self._tensors
        if self._event is not None:
            self._event.synchronize()
        found, start = [], 0
        for x in self._tensors:
            part = self._together[start : start + x.numel()]
            start += x.numel()
            found.append((part if x.dtype == torch.int64 else part.view(torch.float64)).view(x.shape))
        return found
