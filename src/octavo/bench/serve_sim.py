"""A day at a server without the server: requests arrive on the clock while the engine works on others."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.bench.drive import Answer, Moment, Run, Timed, drive, warm_up
from octavo.bench.report import Row
from octavo.bench.serve_calls import Mix
from octavo.bench.serve_report import Spread

if TYPE_CHECKING:
    from octavo.llm import LLM


@dataclass(frozen=True)
class SimulationResult:
    """One run. Times are counted from when a request was due, whatever the engine was then doing."""

    run: Run
    cached_share: float

    @property
    def answers(self) -> list[Answer]:
        return self.run.answers

    @property
    def moments(self) -> list[Moment]:
        return self.run.moments

    @property
    def output_tokens_per_s(self) -> float:
        return self.run.num_output_tokens / self.run.elapsed_s

    def spreads(self) -> dict[str, Spread]:
        """By measure, in seconds; without those that no answer has (one token has no gap)."""
        answers = self.answers
        found = {
            "first token": Spread.of(answer.ttft_s for answer in answers),
            "between tokens": Spread.of(gap for answer in answers for gap in answer.gaps_s),
            "whole answer": Spread.of(answer.e2e_s for answer in answers),
        }
        return {name: spread for name, spread in found.items() if spread is not None}

    def rows(self, name: str) -> list[Row]:
        rows = [
            Row(f"{name}: output", round(self.output_tokens_per_s, 2), "tokens/s"),
            Row(f"{name}: answers", round(len(self.answers) / self.run.elapsed_s, 4), "1/s"),
            Row(f"{name}: prompt tokens from the cache", round(100 * self.cached_share, 2), "%"),
        ]
        for measure, spread in self.spreads().items():
            for which in ("p50", "p90", "p99"):
                value = round(1000 * getattr(spread, which), 3)
                rows.append(Row(f"{name}: {measure}, {which}", value, "ms", "lower"))
        return rows


def calls_of(mix: Mix, num_requests: int, seed: int = 0) -> list[Timed]:
    """The first calls of a mix of token ids."""
    calls = itertools.islice(mix.calls(seed), num_requests)
    return [Timed([*map(int, call.prompt)], call.output_len, call.at_s or 0.0) for call in calls]


def simulate(
    llm: LLM,
    calls: list[Timed],
    *,
    temperature: float = 0.0,
    on_finished: Callable[[Run], None] | None = None,
) -> SimulationResult:
    """Send the calls at their times and wait for all answers; a short warm-up is not counted."""
    warm_up(llm)
    run = drive(llm, calls, temperature=temperature, on_finished=on_finished)
    num_cached = sum(output.num_cached_tokens for output in run.outputs)
    return SimulationResult(run, num_cached / sum(len(call.prompt) for call in calls))
