"""From logits to the next token of every row: one vectorised pass over the batch.

The order is vLLM's. Log probabilities are read from the raw logits. Then, for the rows that ask for it:
allowed_token_ids, min_tokens, logit_bias, penalties, the mask of a grammar; greedy rows take the argmax; the
others are divided by their temperature, cut by min_p, top_k and top_p, and one token is drawn.

A row's token depends on its own logits, options, seed and number of output tokens, to the last bit, and never
on its neighbours; `draw.py` says how. Nothing is computed that no row asked for.

On a GPU the draw is one call of `octavo.kernels.sample`, and everything the host needs to know of a step
comes back in one read. Filtered draws run through the tokens in another order there, so the same seed may
choose another token than on the CPU; greedy rows never do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from octavo.engine.draw import (
    Read,
    draw_by_id,
    draw_by_order,
    gather_logprobs,
    logprob_entries,
    logprob_tables,
)
from octavo.engine.request import Sequence
from octavo.engine.sampling_plan import SamplingPlan
from octavo.kernels import sampling
from octavo.outputs import Logprob

Rows = TypeVar("Rows", Tensor, list[int])

NO_TOKEN = -1
"""Stands in `SamplerOutput.token_ids` for a row that ended in an error."""

# Elements of a matrix that are worked on at a time, so that temporaries stay small however wide the batch:
# inside a CPU's caches, but enough to fill a GPU.
_TILE_ELEMENTS = 2**21
_DEVICE_TILE_ELEMENTS = 2**24


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


class PendingSample:
    """Tokens that are being chosen.

    token_ids: (R,) int64 on the device; what it holds for a row that ends in an error is no token to go on
        with, though it may look like one.
    """

    __slots__ = ("_collect", "token_ids")

    def __init__(self, token_ids: Tensor, collect: Callable[[], SamplerOutput]) -> None:
        self.token_ids = token_ids
        self._collect = collect

    def collect(self) -> SamplerOutput:
        """Wait for the tokens and read them; to be called once."""
        with torch.inference_mode():
            return self._collect()


NOTHING_DRAWN = PendingSample(
    torch.empty(0, dtype=torch.int64, device="cpu"), lambda: SamplerOutput([], [], {})
)
"""What a step that draws from no row leaves to collect."""


class Sampler:
    """Chooses tokens for a model with `vocab_size` ids.

    Keeps the options of the last batch in tensor form, and its sequences, until the next call; nothing else.

    Args:
        vocab_size: number of ids.
        with_kernel: draw by `octavo.kernels.sample` on the CPU, too, to see what a GPU does.
    """

    def __init__(self, vocab_size: int, *, with_kernel: bool = False) -> None:
        self.vocab_size = vocab_size
        self._with_kernel = with_kernel
        self._plan = SamplingPlan([], vocab_size, torch.device("cpu"), None)

    def sample(self, logits: Tensor, sequences: list[Sequence]) -> SamplerOutput:
        """Choose the next token of each sequence: `launch` and `collect` in one."""
        return self.launch(logits, sequences).collect()

    @torch.inference_mode()
    def launch(self, logits: Tensor, sequences: list[Sequence]) -> PendingSample:
        """Have the next token of each sequence chosen. A GPU is still at it when this returns.

        Args:
            logits: (R, vocab_size) float32, bfloat16 or float16, one row per sequence; not modified, here or
                by the caller until the tokens are collected. They count as their float32 copies do, and on a
                GPU are copied only where options change them.
            sequences: R sequences; their params, seed, stop_ids, num_prompt_tokens and num_tokens are read,
                and the token_ids and grammar of those that have penalties or a grammar, which must know all
                of their tokens.

        A row whose raw logits hold NaN or +inf, or that has no finite logit left to choose, gets an error and
        no token; the other rows are as if it were absent.
        """
        assert logits.shape == (len(sequences), self.vocab_size), (logits.shape, len(sequences))
        if not sequences:
            return NOTHING_DRAWN
        plan = self._plan
        if not plan.is_for(sequences, logits.device):
            plan = self._plan = SamplingPlan(sequences, self.vocab_size, logits.device, plan)
        if self._with_kernel or not logits.is_cpu:
            return self._launch_kernel(logits, plan)

        logits = logits.float()
        highest = logits.amax(dim=1)
        errors = _errors(highest, _RAW_REASONS)
        work = plan.process(logits)
        if work is not logits:
            highest = work.amax(dim=1)
        if work is not logits or plan.random_rows:
            errors = _errors(highest / plan.temperature, _CHOICE_REASONS) | plan.grammar_errors | errors
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
        output = SamplerOutput(token_ids, logprobs, errors)
        return PendingSample(chosen, lambda: output)

    def _launch_kernel(self, logits: Tensor, plan: SamplingPlan) -> PendingSample:
        work = plan.process(logits)
        grammar_errors = plan.grammar_errors  # the plan may serve the next step before this one is read
        chosen = sampling.sample(work, **plan.kernel_options())
        if work is not logits:
            # What the options covered up is still an error.
            chosen = chosen.masked_fill(~logits.amax(dim=1).isfinite(), NO_TOKEN)
        parts = self._tiles(list(plan.logprob_widths), logits.device)
        widths = [[plan.logprob_widths[row] for row in part] for part in parts]
        tables: list[Tensor] = []
        for part, part_widths in zip(parts, widths, strict=True):
            rows = plan.to_device(part)
            tables += logprob_tables(logits[rows].float(), chosen[rows].clamp_min(0), max(part_widths))
        reading = Read([chosen, *tables])

        def collect() -> SamplerOutput:
            ids, *tables = reading.wait()
            token_ids: list[int] = ids.tolist()
            errors = dict(grammar_errors)
            if NO_TOKEN in token_ids:
                errors = _errors(work.amax(dim=1), _CHOICE_REASONS) | errors
                errors |= _errors(logits.amax(dim=1), _RAW_REASONS)
            logprobs: list[dict[int, Logprob] | None] = [None] * len(token_ids)
            for number, (part, part_widths) in enumerate(zip(parts, widths, strict=True)):
                found = tables[4 * number : 4 * number + 4]
                entries = logprob_entries(ids[part].tolist(), found, part_widths)
                for row, entry in zip(part, entries, strict=True):
                    logprobs[row] = None if row in errors else entry
            for row in grammar_errors:
                token_ids[row] = NO_TOKEN
            return SamplerOutput(token_ids, logprobs, errors)

        return PendingSample(chosen, collect)

    @torch.inference_mode()
    def prompt_logprobs(self, logits: Tensor, target_ids: list[int], k: int) -> list[dict[int, Logprob]]:
        """Log probabilities of given tokens, each with the `k` most likely ones (-1: all of the vocabulary).

        Args:
            logits: (n, vocab_size), the model's own, as in `launch`; row i predicts target_ids[i].
            target_ids: n ids inside the vocabulary.

        Returns n dicts: the target first, then the most likely tokens by rank.
        """
        assert logits.shape == (len(target_ids), self.vocab_size), (logits.shape, len(target_ids))
        width = self.vocab_size if k < 0 else min(k, self.vocab_size)
        targets = torch.tensor(target_ids, dtype=torch.int64, device=logits.device)
        found: list[dict[int, Logprob]] = []
        for part, ids in zip(self._tiles(logits), self._tiles(targets), strict=True):
            found += gather_logprobs(part.float(), ids, [width] * len(part))
        return found

    def _tiles(self, rows: Rows, device: torch.device | None = None) -> list[Rows]:
        """`rows`, a tensor or a list, in pieces small enough to be worked on at once on their device."""
        if device is None:
            assert isinstance(rows, Tensor)
            device = rows.device
        elements = _TILE_ELEMENTS if device.type == "cpu" else _DEVICE_TILE_ELEMENTS
        size = max(1, elements // self.vocab_size)
        return [rows[start : start + size] for start in range(0, len(rows), size)]

    def _draw(self, work: Tensor, plan: SamplingPlan, chosen: Tensor) -> None:
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
        self, logits: Tensor, plan: SamplingPlan, chosen: Tensor, errors: dict[int, str]
    ) -> list[dict[int, Logprob] | None]:
        found: list[dict[int, Logprob] | None] = [None] * len(chosen)
        wanted = [row for row in plan.logprob_widths if row not in errors]
        for rows in self._tiles(wanted, logits.device):
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
    low="the options leave no token to choose: allowed_token_ids, min_tokens, structured_output, logit_bias",
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
