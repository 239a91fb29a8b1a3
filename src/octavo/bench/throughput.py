"""How many tokens a second the engine makes of a workload."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.bench.drive import Moment, Run, Timed, drive, warm_up
from octavo.bench.report import Row
from octavo.bench.workloads import Workload

if TYPE_CHECKING:
    from octavo.llm import LLM


@dataclass(frozen=True)
class ThroughputResult:
    """One timed run. `cached_share` is the share of prompt tokens that the prefix cache supplied."""

    elapsed_s: float
    num_input_tokens: int
    num_output_tokens: int
    cached_share: float
    median_ttft_s: float
    median_tpot_s: float
    moments: list[Moment]

    @property
    def output_tokens_per_s(self) -> float:
        return self.num_output_tokens / self.elapsed_s

    @property
    def total_tokens_per_s(self) -> float:
        return (self.num_input_tokens + self.num_output_tokens) / self.elapsed_s

    def rows(self, name: str) -> list[Row]:
        """The result as rows of a result file."""
        return [
            Row(f"{name}: output", round(self.output_tokens_per_s, 2), "tokens/s"),
            Row(f"{name}: prompt and output", round(self.total_tokens_per_s, 2), "tokens/s"),
            Row(f"{name}: seconds", round(self.elapsed_s, 3), "s", better="lower"),
            Row(f"{name}: first token, median", round(self.median_ttft_s, 4), "s", better="lower"),
            Row(f"{name}: per token, median", round(self.median_tpot_s, 5), "s", better="lower"),
            Row(f"{name}: prompt tokens from the cache", round(100 * self.cached_share, 2), "%"),
        ]


def measure_throughput(
    llm: LLM,
    workload: Workload,
    *,
    temperature: float = 0.6,
    on_finished: Callable[[Run], None] | None = None,
) -> ThroughputResult:
    """Runs the whole workload at once, EOS ignored, after a short warm-up that is not timed.

    The prefix cache keeps what earlier calls with the same `llm` left in it.
    """
    warm_up(llm)
    calls = [Timed(*call) for call in zip(workload.prompts, workload.output_lens, strict=True)]
    run = drive(llm, calls, temperature=temperature, on_finished=on_finished)
    outputs = run.outputs
    return ThroughputResult(
        elapsed_s=run.elapsed_s,
        num_input_tokens=workload.num_input_tokens,
        num_output_tokens=run.num_output_tokens,
        cached_share=sum(output.num_cached_tokens for output in outputs) / workload.num_input_tokens,
        median_ttft_s=statistics.median(answer.ttft_s for answer in run.answers),
        median_tpot_s=_median(answer.tpot_s for answer in run.answers),
        moments=run.moments,
    )


def _median(values: Iterable[float | None]) -> float:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else 0.0
