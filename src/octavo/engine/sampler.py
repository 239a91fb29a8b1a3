"""From logits to the next token of every row: one vectorised pass over the batch.

The order is vLLM's. Log probabilities are read from the raw logits. Then, for the rows that ask for it:
allowed_token_ids, min_tokens, logit_bias, penalties; greedy rows take the argmax; the others are divided by
their temperature, cut by min_p, top_k and top_p, and one token is drawn.

A row's token depends on its own logits, options, seed and number of output tokens, to the last bit, and never
on its neighbours; `draw.py` says how. Nothing is computed that no row asked for.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.engine.draw import FIRST_CANDIDATES, draw_by_id, draw_by_order, gather_logprobs, uniform
from octavo.engine.request import Sequence
from octavo.outputs import Logprob

_MAX_TEMPERATURE = 3e38
NO_TOKEN = -1
"""Stands in `SamplerOutput.token_ids` for a row that ended in an error."""

# Elements of a matrix that are worked on at a time, so that temporaries stay small however wide the batch.
_TILE_ELEMENTS = 2**21


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """What one step chose.

    token_ids: one per row; NO_TOKEN exactly for the rows in `errors`.
    logprobs: per row the chosen token and the alternatives asked for: the chosen one first, the others by
        rank; None where none were asked for, and for rows in error.
    errors: row -> why no token could be chosen.
    """

    token_ids: list[int]
    logprobs: list[dict[int, Logprob] | None]
    errors: dict[int, str]


class Sampler:
    """Chooses tokens for a model with `vocab_size` ids.

    Keeps the options of the last batch in tensor form, and its sequences, until the next call; nothing else.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._tile_rows = max(1, _TILE_ELEMENTS // vocab_size)
        self._plan = _Plan([], vocab_size, torch.device("cpu"), None)

    @torch.inference_mode()
    def sample(self, logits: Tensor, sequences: list[Sequence]) -> SamplerOutput:
        """Choose the next token of each sequence.

        Args:
            logits: (R, vocab_size) float32, one row per sequence; not modified.
            sequences: R sequences; their params, seed, stop_ids, num_prompt_tokens and token_ids are read.

        A row whose raw logits hold NaN or +inf, or that has no finite logit left to choose, gets an error and
        no token; the other rows are as if it were absent.
        """
        assert logits.shape == (len(sequences), self.vocab_size), (logits.shape, len(sequences))
        if not sequences:
            return SamplerOutput([], [], {})
        plan = self._plan
        if not plan.is_for(sequences, logits.device):
            plan = self._plan = _Plan(sequences, self.vocab_size, logits.device, plan)

        highest = logits.amax(dim=1)
        errors = _errors(highest, _RAW_REASONS)
        work = plan.process(logits)
        if work is not logits:
            highest = work.amax(dim=1)
        if work is not logits or plan.random_rows:
            errors = _errors(highest / plan.temperature, _CHOICE_REASONS) | errors
        if errors:
            # Zeros are as good as any finite row: computed along with the others, and thrown away.
            work = work.index_fill(0, torch.tensor(list(errors), device=work.device), 0.0)

        chosen = torch.empty(len(sequences), dtype=torch.int64, device=logits.device)
        if plan.greedy is not None:
            chosen[plan.greedy] = work[plan.greedy].argmax(dim=1)
        if plan.random_rows:
            self._draw(work, plan, chosen)
        logprobs = self._logprobs(logits, plan, chosen, errors)
        token_ids: list[int] = chosen.tolist()
        for row in errors:
            token_ids[row] = NO_TOKEN
        return SamplerOutput(token_ids, logprobs, errors)

    @torch.inference_mode()
    def prompt_logprobs(self, logits: Tensor, target_ids: list[int], k: int) -> list[dict[int, Logprob]]:
        """Log probabilities of given tokens, each with the `k` most likely ones (-1: all of the vocabulary).

        Args:
            logits: (n, vocab_size) float32, the model's own, not modified; row i predicts target_ids[i].
            target_ids: n ids inside the vocabulary.

        Returns n dicts: the target first, then the most likely tokens by rank.
        """
        assert logits.shape == (len(target_ids), self.vocab_size), (logits.shape, len(target_ids))
        width = self.vocab_size if k < 0 else min(k, self.vocab_size)
        targets = torch.tensor(target_ids, dtype=torch.int64, device=logits.device)
        found: list[dict[int, Logprob]] = []
        for part, ids in zip(self._tiles(logits), self._tiles(targets), strict=True):
            found += gather_logprobs(part, ids, [width] * len(part))
        return found

    def _tiles(self, rows: Tensor) -> list[Tensor]:
        return [rows[start : start + self._tile_rows] for start in range(0, len(rows), self._tile_rows)]

    def _draw(self, work: Tensor, plan: _Plan, chosen: Tensor) -> None:
        """Fill `chosen` for the rows that are not greedy."""
        uniforms = plan.uniforms()
        for part in self._tiles(plan.unordered):
            probs = torch.softmax(work.index_select(0, part).div_(plan.temperature[part, None]), dim=1)
            chosen[part] = draw_by_id(probs, plan.min_p[part], uniforms[part])
        for part in self._tiles(plan.ordered):
            scaled = work.index_select(0, part).div_(plan.temperature[part, None])
            chosen[part] = draw_by_order(
                scaled,
                torch.softmax(scaled, dim=1),
                plan.top_k[part],
                plan.top_p[part],
                plan.min_p[part],
                uniforms[part],
                plan.num_candidates,
            )

    def _logprobs(
        self, logits: Tensor, plan: _Plan, chosen: Tensor, errors: dict[int, str]
    ) -> list[dict[int, Logprob] | None]:
        found: list[dict[int, Logprob] | None] = [None] * len(chosen)
        wanted = [row for row in plan.logprob_widths if row not in errors]
        for start in range(0, len(wanted), self._tile_rows):
            rows = wanted[start : start + self._tile_rows]
            part = torch.tensor(rows, device=logits.device)
            widths = [plan.logprob_widths[row] for row in rows]
            for row, entry in zip(rows, gather_logprobs(logits[part], chosen[part], widths), strict=True):
                found[row] = entry
        return found


@dataclass(frozen=True, slots=True)
class _Reasons:
    nan: str
    high: str
    low: str


_RAW_REASONS = _Reasons(
    nan="the model's logits hold NaN; its weights or the dtype it runs in may be at fault",
    high="the model's logits hold +inf; its weights or the dtype it runs in may be at fault",
    low="every logit the model gave is -inf, so no token can be chosen",
)
_CHOICE_REASONS = _Reasons(
    nan="the options make a logit NaN, so no token can be chosen",
    high="the options take the logits out of float32's range; a temperature or penalty is too extreme",
    low="allowed_token_ids, min_tokens and logit_bias together leave no token to choose",
)


def _errors(highest: Tensor, reasons: _Reasons) -> dict[int, str]:
    """Rows whose highest logit (NaN if any is) is not finite, with the reason."""
    is_bad = ~highest.isfinite()
    if not bool(is_bad.any()):
        return {}
    rows: list[int] = is_bad.nonzero()[:, 0].tolist()
    values: list[float] = highest[is_bad].tolist()
    return {
        row: reasons.nan if math.isnan(value) else reasons.high if value > 0 else reasons.low
        for row, value in zip(rows, values, strict=True)
    }


class _Plan:
    """The options of one batch as tensors, kept while the batch is made of the same sequences.

    temperature (1 where nothing is drawn), top_k (vocab_size for none), top_p, min_p: (R,), on the logits'
    device. greedy, unordered, ordered: the rows that take the argmax, that are drawn from the whole row, and
    that are drawn among the leading tokens. greedy is None when there are none, a slice when it is all.
    """

    def __init__(
        self, sequences: list[Sequence], vocab_size: int, device: torch.device, previous: _Plan | None
    ) -> None:
        self._sequences = list(sequences)
        self._vocab_size = vocab_size
        self._device = device
        params = [seq.params for seq in sequences]
        rows = range(len(params))
        # top_k=1 leaves nothing to draw.
        self.random_rows = [row for row in rows if not params[row].is_greedy and params[row].top_k != 1]
        is_random = set(self.random_rows)
        greedy = [row for row in rows if row not in is_random]
        self.greedy = None if not greedy else self._ids(greedy) if is_random else slice(None)
        limits = [min(p.top_k or vocab_size, vocab_size) for p in params]
        ordered = [row for row in self.random_rows if limits[row] < vocab_size or params[row].top_p < 1]
        is_ordered = set(ordered)
        self.ordered = self._ids(ordered)
        self.unordered = self._ids([row for row in self.random_rows if row not in is_ordered])
        self.num_candidates = min(
            vocab_size,
            max(
                (limits[row] if limits[row] < vocab_size else FIRST_CANDIDATES for row in ordered), default=1
            ),
        )
        self.temperature = self._floats(
            # Capped where float32 ends: a masked logit over an infinite temperature would be NaN.
            [
                min(p.temperature, _MAX_TEMPERATURE) if row in is_random else 1.0
                for row, p in enumerate(params)
            ]
        )
        self.min_p = self._floats([p.min_p for p in params])
        self.top_p = self._doubles([p.top_p for p in params])
        self.top_k = self._ids(limits)
        self._seeds = self._ids([_wrap_int64(seq.seed) for seq in sequences])
        self.logprob_widths = {
            row: vocab_size if p.logprobs < 0 else min(p.logprobs, vocab_size)
            for row, p in enumerate(params)
            if p.logprobs is not None
        }
        self._init_changes(previous)

    def _init_changes(self, previous: _Plan | None) -> None:
        """What `process` needs for the rows that change their logits."""
        rows = list(enumerate(seq.params for seq in self._sequences))
        self._restricted = [row for row, p in rows if p.allowed_token_ids is not None]
        self._allowed = self._cells((row, p.allowed_token_ids or ()) for row, p in rows)
        self._biased = self._cells((row, p.logit_bias) for row, p in rows)
        self._bias = self._floats([bias for _, p in rows for bias in p.logit_bias.values()])
        self._min_tokens = [(row, p.min_tokens) for row, p in rows if p.min_tokens > 0]
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
        positions = [len(seq.token_ids) - seq.num_prompt_tokens for seq in self._sequences]
        return uniform(self._seeds, self._ids(positions))

    def process(self, logits: Tensor) -> Tensor:
        """The logits after masks, bias and penalties: a changed copy, or `logits` itself when no row asks."""
        held = [
            row
            for row, least in self._min_tokens
            if len(self._sequences[row].token_ids) - self._sequences[row].num_prompt_tokens < least
        ]
        if not (self._restricted or held or self._penalised or len(self._bias)):
            return logits
        work = logits.clone()
        if self._restricted:
            kept = work[self._allowed]
            work[self._ids(self._restricted)] = -math.inf
            work[self._allowed] = kept
        if held:
            if held != self._held:
                self._held = held
                # An end-of-sequence id may lie outside the logits; then it cannot be chosen anyway.
                self._forbidden = self._cells(
                    (row, [i for i in self._sequences[row].stop_ids if i < self._vocab_size]) for row in held
                )
            work[self._forbidden] = -math.inf
        if len(self._bias):
            work[self._biased] += self._bias
        if self._penalised:
            self._penalise(work)
        return work

    def _penalise(self, work: Tensor) -> None:
        """Repetition, frequency and presence penalties, in place, on the tokens each row has seen."""
        seen = [history.advance() for history in self._history]
        lengths = [len(ids) for ids, _ in seen]
        rows = torch.from_numpy(np.repeat(self._penalised, lengths)).to(self._device)
        ids = torch.from_numpy(np.concatenate([ids for ids, _ in seen])).to(self._device)
        counts = torch.from_numpy(np.concatenate([counts for _, counts in seen])).to(self._device)
        values = work[rows, ids].double()
        repetition = self._repetition[rows]
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= self._frequency[rows] * counts
        values -= self._presence[rows] * (counts > 0)
        work[rows, ids] = values.float()

    def _cells(self, ids_of_rows: Iterable[tuple[int, Iterable[int]]]) -> tuple[Tensor, Tensor]:
        """Index of the logits at the given ids of each row."""
        cells = [(row, i) for row, ids in ids_of_rows for i in ids]
        return self._ids([row for row, _ in cells]), self._ids([i for _, i in cells])

    def _ids(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _floats(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._device)

    def _doubles(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self._device)


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
