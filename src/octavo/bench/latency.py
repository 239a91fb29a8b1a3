"""How long a token takes: batches of one shape that start together, nothing arriving meanwhile."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.bench.drive import Timed, drive, warm_up
from octavo.bench.report import Row
from octavo.bench.serve_report import Spread
from octavo.bench.workloads import MAX_TOKEN_ID

if TYPE_CHECKING:
    from octavo.llm import LLM


@dataclass(frozen=True)
class LatencyResult:
    """Several runs of one batch size. Seconds; `gap` is between two tokens of a request."""

    batch_size: int
    ttft: Spread
    gap: Spread
    output_tokens_per_s: float

    def rows(self, name: str) -> list[Row]:
        prefix = f"{name}, batch {self.batch_size}"
        return [
            Row(f"{prefix}: first token, median", round(1000 * self.ttft.p50, 3), "ms", "lower"),
            Row(f"{prefix}: per token, median", round(1000 * self.gap.p50, 4), "ms", "lower"),
            Row(f"{prefix}: per token, 99th percentile", round(1000 * self.gap.p99, 4), "ms", "lower"),
            Row(f"{prefix}: output", round(self.output_tokens_per_s, 1), "tokens/s"),
        ]


def measure_latency(
    llm: LLM,
    batch_sizes: Sequence[int],
    *,
    input_len: int,
    output_len: int,
    repeats: int = 3,
    seed: int = 0,
    done: Callable[[LatencyResult], None] = lambda result: None,
) -> list[LatencyResult]:
    """Greedy answers of `output_len` (at least 2) tokens to random prompts, of which no two begin alike.

    Each batch runs once more before, untimed. done: called with each result as it is there.
    """
    rng = random.Random(seed)
    warm_up(llm)
    results = []
    for batch_size in batch_sizes:
        runs = []
        for _ in range(1 + repeats):
            prompts = [[rng.randint(0, MAX_TOKEN_ID) for _ in range(input_len)] for _ in range(batch_size)]
            runs.append(drive(llm, [Timed(prompt, output_len) for prompt in prompts]))
        timed = runs[1:]
        answers = [answer for run in timed for answer in run.answers]
        ttft = Spread.of(answer.ttft_s for answer in answers)
        gap = Spread.of(gap for answer in answers for gap in answer.gaps_s)
        assert ttft is not None, "there is an answer"
        assert gap is not None, "an answer has two tokens"
        result = LatencyResult(
            batch_size,
            ttft,
            gap,
            output_tokens_per_s=sum(run.num_output_tokens for run in timed)
            / sum(run.elapsed_s for run in timed),
        )
        done(result)
        results.append(result)
    return results
