"""Runs requests through an engine in this process, each at its time, and keeps what every step showed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.errors import EngineError
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.engine.request import Request
    from octavo.llm import LLM
    from octavo.outputs import RequestOutput


@dataclass(frozen=True)
class Timed:
    """A request that is due `at_s` seconds after the start, and how many tokens it is answered with."""

    prompt: list[int]
    output_len: int
    at_s: float = 0.0


@dataclass
class Answer:
    """What became of a request. Times are in seconds after it was due, whenever it was sent."""

    due_s: float
    token_times_s: list[float] = field(default_factory=list)
    output: RequestOutput | None = None

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0]

    @property
    def gaps_s(self) -> list[float]:
        """The time from each token to the next."""
        times = self.token_times_s
        return [after - before for before, after in itertools.pairwise(times)]

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first."""
        if len(self.token_times_s) < 2:
            return None
        return (self.token_times_s[-1] - self.token_times_s[0]) / (len(self.token_times_s) - 1)

    @property
    def e2e_s(self) -> float:
        return self.token_times_s[-1]


@dataclass(frozen=True)
class Moment:
    """The engine after a step, `at_s` seconds after the start. Tokens are totals of the run so far."""

    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_running: int
    num_waiting: int
    kv_share: float


@dataclass(frozen=True)
class Run:
    """Every answer, in the order of the requests, and a moment per step."""

    elapsed_s: float
    answers: list[Answer]
    moments: list[Moment]

    @property
    def outputs(self) -> list[RequestOutput]:
        return [answer.output for answer in self.answers if answer.output is not None]

    @property
    def num_output_tokens(self) -> int:
        return sum(len(answer.token_times_s) for answer in self.answers)


def warm_up(llm: LLM) -> None:
    """A short answer, so that nothing that is timed is the first of its kind."""
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)


def drive(
    llm: LLM,
    calls: Sequence[Timed],
    *,
    temperature: float = 0.0,
    on_finished: Callable[[Run], None] | None = None,
) -> Run:
    """Send each request when it is due, whatever has become of the others, and step until all are answered.

    EOS is ignored. The calls are in the order of their times. on_finished: called with the run so far each
    time that a request has ended. Raises EngineError when one of them fails.
    """
    engine = llm.engine
    before = engine.stats()
    answers = [Answer(call.at_s) for call in calls]
    of_request: dict[str, Answer] = {}
    moments: list[Moment] = []
    num_sent = num_ended = 0
    began = time.perf_counter()
    while num_ended < len(calls):
        now = time.perf_counter() - began
        while num_sent < len(calls) and calls[num_sent].at_s <= now:
            call, answer = calls[num_sent], answers[num_sent]
            params = SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=call.output_len)
            of_request[engine.add_request(call.prompt, params).request_id] = answer
            num_sent += 1
        if not engine.has_work:
            time.sleep(max(0.0, calls[num_sent].at_s - now))
            continue
        changed = engine.step()
        now = time.perf_counter() - began
        for request in changed:
            answer = of_request[request.request_id]
            answer.token_times_s += [now - answer.due_s] * (_num_tokens(request) - len(answer.token_times_s))
            if request.output is not None:
                if request.output.error is not None:
                    raise EngineError(f"a request of the benchmark failed: {request.output.error}")
                answer.output = request.output
                num_ended += 1
        stats = engine.stats()
        moments.append(
            Moment(
                now,
                stats.num_prompt_tokens - before.num_prompt_tokens,
                stats.num_output_tokens - before.num_output_tokens,
                stats.num_running,
                stats.num_waiting,
                stats.num_owned_blocks / engine.cache.num_blocks,
            )
        )
        if on_finished is not None and any(request.output is not None for request in changed):
            on_finished(Run(now, answers, moments))
    return Run(time.perf_counter() - began, answers, moments)


def _num_tokens(request: Request) -> int:
    """Tokens of its answer that the host knows."""
    if request.output is not None:
        return len(request.output.token_ids)
    seq = request.sequences[0]
    return len(seq.token_ids) - seq.num_prompt_tokens
