"""How many tokens a second the engine makes of a workload."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.bench.report import Row
from octavo.bench.timing import seconds
from octavo.bench.workloads import Workload
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.llm import LLM
    from octavo.outputs import RequestOutput


@dataclass(frozen=True)
class ThroughputResult:
    """One timed run. `cached_share` is the share of prompt tokens that the prefix cache supplied."""

    elapsed_s: float
    num_input_tokens: int
    num_output_tokens: int
    cached_share: float
    median_ttft_s: float
    median_tpot_s: float

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
    llm: LLM, workload: Workload, *, temperature: float = 0.6, use_tqdm: bool = False
) -> ThroughputResult:
    """Runs the whole workload at once, EOS ignored, after a short warm-up that is not timed.

    The prefix cache keeps what earlier calls with the same `llm` left in it.
    """
    params = [
        SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=output_len)
        for output_len in workload.output_lens
    ]
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    outputs: list[RequestOutput] = []
    elapsed_s = seconds(lambda: outputs.extend(llm.generate(workload.prompts, params, use_tqdm=use_tqdm)))
    return ThroughputResult(
        elapsed_s=elapsed_s,
        num_input_tokens=workload.num_input_tokens,
        num_output_tokens=sum(len(output.token_ids) for output in outputs),
        cached_share=sum(output.num_cached_tokens for output in outputs) / workload.num_input_tokens,
        median_ttft_s=_median(output.metrics.ttft_s for output in outputs),
        median_tpot_s=_median(output.metrics.tpot_s for output in outputs),
    )


def _median(values: Iterable[float | None]) -> float:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else 0.0
