"""The sampling options of a batch, as the tensors that a step needs."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.engine.draw import FIRST_CANDIDATES
from octavo.engine.grammar_masks import GrammarMasks
from octavo.engine.request import Sequence
from octavo.kernels.reference.sampling import uniform

_MAX_TEMPERATURE = 3e38


class KernelRow(NamedTuple):
    """One row's arguments of `octavo.kernels.sample`, as `SamplingPlan.kernel_options` has them for a batch.

    has_filters: top_k, top_p or min_p have something to cut.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    has_filters: bool


def kernel_row(seq: Sequence, vocab_size: int) -> KernelRow:
    """The arguments for the rows of one sequence."""
    p = seq.params
    is_random = not p.is_greedy and p.top_k != 1
    top_k = min(p.top_k or vocab_size, vocab_size)
    return KernelRow(
        temperature=min(p.temperature, _MAX_TEMPERATURE) if is_random else 0.0,
        top_k=top_k,
        top_p=p.top_p,
        min_p=p.min_p,
        seed=_wrap_int64(seq.seed),
        has_filters=is_random and (top_k < vocab_size or p.top_p < 1 or p.min_p > 0),
    )


class SamplingPlan:
    """The options of one batch as tensors, kept while the batch is made of the same sequences.

    Made when they are first asked for, on the logits' device:
    temperature (1 where nothing is drawn), top_k (vocab_size for none), top_p, min_p: (R,).
    greedy, unordered, ordered: the rows that take the argmax, that are drawn from the whole row, and that are
    drawn among the leading tokens. greedy is None when there are none, a slice when it is all.
    """

    def __init__(
        self, sequences: list[Sequence], vocab_size: int, device: torch.device, previous: SamplingPlan | None
    ) -> None:
        self._sequences = list(sequences)
        self._vocab_size = vocab_size
        self._device = device
        self._params = params = [seq.params for seq in sequences]
        rows = range(len(params))
        # top_k=1 leaves nothing to draw.
        self.random_rows = [row for row in rows if not params[row].is_greedy and params[row].top_k != 1]
        self._limits = [min(p.top_k or vocab_size, vocab_size) for p in params]
        self._ordered = [
            row for row in self.random_rows if self._limits[row] < vocab_size or params[row].top_p < 1
        ]
        self.num_candidates = min(
            vocab_size,
            max(
                (
                    self._limits[row] if self._limits[row] < vocab_size else FIRST_CANDIDATES
                    for row in self._ordered
                ),
                default=1,
            ),
        )
        self.logprob_widths = {
            row: vocab_size if p.logprobs < 0 else min(p.logprobs, vocab_size)
            for row, p in enumerate(params)
            if p.logprobs is not None
        }
        self._init_changes(previous)

    @cached_property
    def greedy(self) -> Tensor | slice | None:
        is_random = set(self.random_rows)
        greedy = [row for row in range(len(self._params)) if row not in is_random]
        return None if not greedy else self.to_device(greedy) if is_random else slice(None)

    @cached_property
    def ordered(self) -> Tensor:
        return self.to_device(self._ordered)

    @cached_property
    def unordered(self) -> Tensor:
        is_ordered = set(self._ordered)
        return self.to_device([row for row in self.random_rows if row not in is_ordered])

    @cached_property
    def temperature(self) -> Tensor:
        return self._floats(self._temperatures(where_greedy=1.0))

    @cached_property
    def min_p(self) -> Tensor:
        return self._floats([p.min_p for p in self._params])

    @cached_property
    def top_p(self) -> Tensor:
        return self._doubles([p.top_p for p in self._params])

    @cached_property
    def top_k(self) -> Tensor:
        return self.to_device(self._limits)

    @cached_property
    def _seeds(self) -> Tensor:
        return self.to_device([_wrap_int64(seq.seed) for seq in self._sequences])

    def _temperatures(self, *, where_greedy: float) -> list[float]:
        is_random = set(self.random_rows)
        # Capped where float32 ends: a masked logit over an infinite temperature would be NaN.
        return [
            min(p.temperature, _MAX_TEMPERATURE) if row in is_random else where_greedy
            for row, p in enumerate(self._params)
        ]

    @cached_property
    def _fixed_kernel_options(self) -> dict[str, Tensor | None]:
        drawn = [self._params[row] for row in self.random_rows]
        # All filters or none: each subset would be a kernel of its own to compile.
        has_filters = bool(self._ordered) or any(p.min_p > 0 for p in drawn)
        return {
            "temperature": self._floats(self._temperatures(where_greedy=0.0)),
            "top_k": self._tensor(self._limits, torch.int32) if has_filters else None,
            "top_p": self._floats([p.top_p for p in self._params]) if has_filters else None,
            "min_p": self.min_p if has_filters else None,
            "seeds": self._seeds,
        }

    def kernel_options(self) -> dict[str, Any]:
        """This step's arguments of `octavo.kernels.sample` beside the logits."""
        return {**self._fixed_kernel_options, "positions": self._positions()}

    def _init_changes(self, previous: SamplingPlan | None) -> None:
        """What `process` needs for the rows that change their logits."""
        rows = list(enumerate(seq.params for seq in self._sequences))
        self._restricted = [row for row, p in rows if p.allowed_token_ids is not None]
        self._allowed = self._cells((row, p.allowed_token_ids or ()) for row, p in rows)
        self._biased = self._cells((row, p.logit_bias) for row, p in rows)
        self._bias = self._floats([bias for _, p in rows for bias in p.logit_bias.values()])
        self._grammar_masks = GrammarMasks(self._sequences, self._vocab_size, self._device)
        self.grammar_errors: dict[int, str] = {}
        # A grammar outranks min_tokens; its mask sees to both.
        self._min_tokens = [
            (row, p.min_tokens)
            for row, p in rows
            if p.min_tokens > 0 and self._sequences[row].grammar is None
        ]
        self._held: list[int] = []
        self._forbidden = self._cells([])
        self._penalised = [
            row
            for row, p in rows
            if p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0
        ]
        self._repetition = self._doubles([p.repetition_penalty for _, p in rows])
        self._presence = self._doubles([p.presence_penalty for _, p in rows])
        self._frequency = self._doubles([p.frequency_penalty for _, p in rows])
        known = {id(seq): history for seq, history in previous._histories()} if previous else {}
        self._history = [
            known.get(id(self._sequences[row])) or _History(self._sequences[row]) for row in self._penalised
        ]

    def _histories(self) -> Iterable[tuple[Sequence, _History]]:
        return zip((self._sequences[row] for row in self._penalised), self._history, strict=True)

    def is_for(self, sequences: list[Sequence], device: torch.device) -> bool:
        """Whether the batch is made of the same sequences in the same order as when the plan was made."""
        return (
            len(sequences) == len(self._sequences)
            and device == self._device
            and all(map(operator.is_, sequences, self._sequences))
        )

    def uniforms(self) -> Tensor:
        """(R,) float64: this step's random number of every row."""
        return uniform(self._seeds, self._positions())

    def _positions(self) -> Tensor:
        return self.to_device([seq.num_tokens - seq.num_prompt_tokens for seq in self._sequences])

    def process(self, logits: Tensor) -> Tensor:
        """The logits after masks, bias and penalties: a changed float32 copy; `logits` when no row asks.

        `grammar_errors` are then those of this step: rows that cannot go on, and why.
        """
        held = [
            row
            for row, least in self._min_tokens
            if self._sequences[row].num_tokens - self._sequences[row].num_prompt_tokens < least
        ]
        masks = self._grammar_masks
        if not (self._restricted or held or self._penalised or len(self._bias) or masks.rows):
            return logits
        work = logits.to(torch.float32, copy=True)
        # A plain number assigned to chosen cells would be copied to the device, and the host would wait.
        nothing = work.new_full((), -math.inf)
        if self._restricted:
            kept = work[self._allowed]
            work[self.to_device(self._restricted)] = nothing
            work[self._allowed] = kept
        if held:
            if held != self._held:
                self._held = held
                # An end-of-sequence id may lie outside the logits; then it cannot be chosen anyway.
                self._forbidden = self._cells(
                    (row, [i for i in self._sequences[row].stop_ids if i < self._vocab_size]) for row in held
                )
            work[self._forbidden] = nothing
        if len(self._bias):
            work[self._biased] += self._bias
        if self._penalised:
            self._penalise(work)
        if masks.rows:
            self.grammar_errors = masks.apply(work)
        return work

    def _penalise(self, work: Tensor) -> None:
        """Repetition, frequency and presence penalties, in place, on the tokens each row has seen."""
        seen = [history.advance() for history in self._history]
        lengths = [len(ids) for ids, _ in seen]
        rows = self._uploaded(torch.from_numpy(np.repeat(self._penalised, lengths)))
        ids = self._uploaded(torch.from_numpy(np.concatenate([ids for ids, _ in seen])))
        counts = self._uploaded(torch.from_numpy(np.concatenate([counts for _, counts in seen])))
        values = work[rows, ids].double()
        repetition = self._repetition[rows]
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= self._frequency[rows] * counts
        values -= self._presence[rows] * (counts > 0)
        work[rows, ids] = values.float()

    def _cells(self, ids_of_rows: Iterable[tuple[int, Iterable[int]]]) -> tuple[Tensor, Tensor]:
        """Index of the logits at the given ids of each row."""
        cells = [(row, i) for row, ids in ids_of_rows for i in ids]
        return self.to_device([row for row, _ in cells]), self.to_device([i for _, i in cells])

    def to_device(self, values: list[int]) -> Tensor:
        """int64."""
        return self._tensor(values, torch.int64)

    def _floats(self, values: list[float]) -> Tensor:
        return self._tensor(values, torch.float32)

    def _doubles(self, values: list[float]) -> Tensor:
        return self._tensor(values, torch.float64)

    def _tensor(self, values: list[int] | list[float], dtype: torch.dtype) -> Tensor:
        return self._uploaded(torch.tensor(values, dtype=dtype, device="cpu"))

    def _uploaded(self, values: Tensor) -> Tensor:
        """On the device. From pinned memory, so that the host need not wait for the model before it."""
        if self._device.type != "cuda":
            return values.to(self._device)
        return values.pin_memory().to(self._device, non_blocking=True)


class _History:
    """The distinct tokens of a sequence and how often each is in its output; grows with the sequence."""

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence
        self._restart()

    def _restart(self) -> None:
        self._token_ids = self._sequence.token_ids
        prompt = self._token_ids[: self._sequence.num_prompt_tokens]
        # Presence and frequency look at the output only, so their prompt need not be carried along.
        ids = list(dict.fromkeys(prompt)) if self._sequence.params.repetition_penalty != 1 else []
        self._ids = np.array(ids, dtype=np.int64)
        self._counts = np.zeros(len(ids), dtype=np.float64)
        self._place = {token: place for place, token in enumerate(ids)}
        self._num_read = len(prompt)

    def advance(self) -> tuple[np.ndarray, np.ndarray]:
        """Take in the tokens that came since; returns (ids int64, output counts float64), one per token."""
        token_ids = self._sequence.token_ids
        if token_ids is not self._token_ids or len(token_ids) < self._num_read:
            self._restart()
        for token in token_ids[self._num_read :]:
            place = self._place.setdefault(token, len(self._place))
            if place == len(self._ids):
                grown = max(64, 2 * place)
                self._ids = np.concatenate([self._ids, np.zeros(grown - place, dtype=np.int64)])
                self._counts = np.concatenate([self._counts, np.zeros(grown - place)])
            self._ids[place] = token
            self._counts[place] += 1
        self._num_read = len(token_ids)
        size = len(self._place)
        return self._ids[:size], self._counts[:size]


def _wrap_int64(seed: int) -> int:
    """The int64 with the same low 64 bits."""
    return (seed + 2**63) % 2**64 - 2**63
