"""What a forward's attention layers share: where each sequence's queries and keys are. No dense mask.

A plan travels through a model as its attention mask: an int32 tensor (1, 1, 3, B + 1), which Transformers
takes for a finished 4D mask and hands from layer to layer as it is::

    row 0    prefix sums of the query lengths, B times the same
    row 1    prefix sums of the key lengths, left padding not counted
    row 2    left padding of each sequence; the last entry is not used

What the host knows besides rides along as an attribute of that tensor. Where it gets lost (another device,
`torch.compile`) the tensor itself is enough.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

_ATTRIBUTE = "octavo_plan"
_Make = TypeVar("_Make", bound=Callable[..., Any])


class Plan:
    """B sequences of `num_queries` rows over caches of `num_slots` tokens, of which some are used.

    The last row stands on the last key. `rows` is the tensor drawn above. `window`: keys a row sees, itself
    included; None = all. `max_keys`: an upper bound of the key lengths. `is_full`: there is no padding, and
    every slot holds a key. None of these changes.

    What the layers of a forward share is added as they come: `calls`, where attention keeps what it worked
    out, by the layout of its tensors; where runs of keys begin; the dense mask.
    """

    def __init__(
        self,
        rows: Tensor,
        num_queries: int,
        num_slots: int,
        max_keys: int,
        window: int | None,
        *,
        is_padded: bool = False,
        is_causal: bool = True,
        is_full: bool = False,
    ) -> None:
        self.rows = rows
        self.cu_seqlens_q, self.cu_seqlens_k, padding = rows.view(3, -1).unbind()
        self.leftpad = padding[:-1] if is_padded else None
        self.num_queries = num_queries
        self.num_slots = num_slots
        self.max_keys = max_keys
        self.window = window
        self.is_causal = is_causal
        self.is_full = is_full
        self.calls: dict[tuple[Any, ...], Callable[..., Tensor | None]] = {}
        self._runs: dict[int, Tensor] = {}
        self._dense: Tensor | None = None

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return self.cu_seqlens_q.shape[0] - 1

    def first_rows(self, rows_apart: int) -> Tensor:
        """(B, 1) int32: where each sequence's keys begin, in a cache with sequences that far apart."""
        found = self._runs.get(rows_apart)
        if found is None:
            end, device = max(1, self.batch * rows_apart), self.cu_seqlens_q.device
            rows = torch.arange(0, end, max(1, rows_apart), dtype=torch.int32, device=device)
            found = (rows if self.leftpad is None else rows + self.leftpad)[:, None]
            self._runs[rows_apart] = found
        return found

    def padded_cu_seqlens_k(self) -> Tensor:
        """(B + 1,) int32: prefix sums of the key lengths, left padding counted."""
        if self.leftpad is None:
            return self.cu_seqlens_k
        padding = torch.zeros_like(self.cu_seqlens_k)
        torch.cumsum(self.leftpad, 0, dtype=torch.int32, out=padding[1:])
        return self.cu_seqlens_k + padding

    def dense(self) -> Tensor:
        """(B, 1, Q, T) bool, True = sees. For attention functions of others; one for all layers."""
        if self._dense is None:
            device = self.cu_seqlens_q.device
            first = self.leftpad if self.leftpad is not None else self.cu_seqlens_q.new_zeros(self.batch)
            ends = self.cu_seqlens_k.diff() + first
            rows = torch.arange(self.num_queries, dtype=torch.int32, device=device)
            keys = torch.arange(self.num_slots, dtype=torch.int32, device=device)
            own = (ends - self.num_queries)[:, None, None] + rows[:, None]  # (B, Q, 1): the row's own key
            sees = (keys >= first[:, None, None]) & (keys < ends[:, None, None])
            if self.is_causal:
                sees = sees & (keys <= own)
            if self.window is not None:
                sees = sees & (keys > own - self.window)
            self._dense = sees[:, None]
        return self._dense


def as_mask(plan: Plan) -> Tensor:
    """The plan as what goes through the model."""
    if torch.compiler.is_compiling():
        return plan.rows
    # A tensor of its own: views in the plan keep `rows` alive, and a plan hung on it would never be freed.
    mask = plan.rows.detach()
    setattr(mask, _ATTRIBUTE, plan)
    return mask


class Deferred:
    """A dense mask that is made when somebody asks for it."""

    def __init__(self, make: Callable[[], Tensor | None]) -> None:
        self._make = make
        self._dense: Tensor | None = None

    def dense(self) -> Tensor | None:
        """(B, 1, Q, T) bool, one for all layers."""
        if self._dense is None:
            self._dense = self._make()
        return self._dense


def as_deferred_mask(deferred: Deferred, device: torch.device) -> Tensor:
    """What travels through the model in its place; no plan, which has other rows."""
    mask = torch.zeros((1, 1, 1, 1), dtype=torch.int32, device=device)
    setattr(mask, _ATTRIBUTE, deferred)
    return mask


def undeferred(mask: Tensor | None) -> Tensor | None:
    """The dense mask for one that was deferred, any other as it is."""
    found = None if torch.compiler.is_compiling() else getattr(mask, _ATTRIBUTE, None)
    return found.dense() if isinstance(found, Deferred) else mask


def carried_by(mask: Tensor | None) -> Plan | None:
    """The plan that rides along with a mask, if one does."""
    found = None if torch.compiler.is_compiling() else getattr(mask, _ATTRIBUTE, None)
    return found if isinstance(found, Plan) else None


def is_plan(mask: Any) -> bool:
    """Whether an attention mask is a plan."""
    return isinstance(mask, Tensor) and mask.dtype == torch.int32 and mask.dim() == 4 and mask.shape[2] == 3


def of_mask(
    mask: Tensor, num_queries: int, num_slots: int, window: int | None, is_causal: bool = True
) -> Plan:
    """The plan that travels as `mask`; the other arguments are for one that has lost its attribute."""
    if not torch.compiler.is_compiling():
        found: Plan | None = getattr(mask, _ATTRIBUTE, None)
        if found is not None:
            return found
    return from_rows(mask, num_queries, num_slots, window, is_causal)


def from_rows(
    mask: Tensor, num_queries: int, num_slots: int, window: int | None, is_causal: bool = True
) -> Plan:
    """The plan in the tensor's own rows."""
    return Plan(mask, num_queries, num_slots, num_slots, window, is_padded=True, is_causal=is_causal)


def make_rows(
    batch: int, num_queries: int, num_keys: int | Tensor, device: torch.device, padding: tuple[int, ...] = ()
) -> Tensor:
    """The tensor of a batch whose sequences have that much left padding each, in one launch."""
    fixed, by_key = _remembered(_template, device)(batch, num_queries, padding, device)
    if isinstance(num_keys, int):
        return torch.add(fixed, by_key, alpha=num_keys)
    return (fixed + by_key * num_keys).to(torch.int32)


def unpadded(
    batch: int,
    num_queries: int,
    num_keys: int,
    num_slots: int,
    window: int | None,
    device: torch.device,
    is_causal: bool = True,
) -> Tensor:
    """The plan, as a mask, of a batch without padding whose lengths the host knows."""
    made = _remembered(_unpadded, device)
    plan = made(batch, num_queries, num_keys, num_slots, window, device, is_causal)
    if not torch.compiler.is_compiling():
        # A copy for each mask: the calls and the dense matrix that are kept with it are freed with the mask.
        plan = copy.copy(plan)
        plan.calls = {}
    return as_mask(plan)


def _remembered(make: _Make, device: torch.device) -> _Make:
    """`make` with its last results kept; not under capture, where memory is the graph's."""
    if torch.compiler.is_compiling() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return make
    return cast(_Make, _memory(make, torch.is_inference_mode_enabled()))


@functools.cache
def _memory(make: Callable[..., Any], is_inference: bool) -> Callable[..., Any]:
    """One for each mode: tensors made in inference mode stay in it."""
    return functools.lru_cache(maxsize=16)(make)


def _template(
    batch: int, num_queries: int, padding: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """The rows without a key, and what a key more adds to them."""
    count = torch.arange(batch + 1, dtype=torch.int32, device=device)
    zeros = torch.zeros_like(count)
    less, left = zeros, zeros
    if padding:
        # From pinned memory, or the host would wait for what the device still has to do.
        is_cuda = device.type == "cuda"
        left = torch.tensor([*padding, 0], dtype=torch.int32, pin_memory=is_cuda)
        left = left.to(device, non_blocking=is_cuda)
        less = (left - left.cumsum(0)).int()
    fixed = torch.stack([count * num_queries, less, left])[None, None]
    return fixed, torch.stack([zeros, count, zeros])[None, None]


def _unpadded(
    batch: int,
    num_queries: int,
    num_keys: int,
    num_slots: int,
    window: int | None,
    device: torch.device,
    is_causal: bool,
) -> Plan:
    is_full = num_keys == num_slots
    rows = make_rows(batch, num_queries, num_keys, device)
    return Plan(rows, num_queries, num_slots, num_keys, window, is_causal=is_causal, is_full=is_full)
