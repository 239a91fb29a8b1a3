"""The driver of the engine's benchmarks: arrivals on the clock, times per token, and the picture of a run."""

from types import SimpleNamespace
from typing import Any

import pytest

from octavo.bench import drive as module
from octavo.bench.drive import Answer, Moment, Timed, drive
from octavo.bench.serve_calls import Arrivals, Lengths, Mix
from octavo.bench.serve_sim import calls_of
from octavo.bench.timeline import rates
from octavo.errors import EngineError


class Clock:
    """A second is a second only when somebody sleeps or the engine steps."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class Engine:
    """One token per running request and step; a step takes a second and requests may share it."""

    def __init__(self, clock: Clock, error: str | None = None) -> None:
        self.clock = clock
        self.error = error
        self.running: list[Any] = []
        self.added_at: list[float] = []
        self.num_output_tokens = 7
        self.cache = SimpleNamespace(num_blocks=10)

    @property
    def has_work(self) -> bool:
        return bool(self.running)

    def add_request(self, prompt: list[int], params: Any) -> Any:
        seq = SimpleNamespace(token_ids=list(prompt), num_prompt_tokens=len(prompt))
        request = SimpleNamespace(
            request_id=str(len(self.added_at)), sequences=[seq], output=None, left=params.max_tokens
        )
        assert params.ignore_eos
        self.added_at.append(self.clock.now)
        self.running.append(request)
        return request

    def step(self) -> list[Any]:
        self.clock.now += 1
        changed = list(self.running)
        for request in changed:
            self.num_output_tokens += 1
            request.left -= 1
            (seq,) = request.sequences
            seq.token_ids.append(5)
            if request.left == 0:
                tokens = seq.token_ids[seq.num_prompt_tokens :]
                request.output = SimpleNamespace(error=self.error, token_ids=tokens)
                self.running.remove(request)
        return changed

    def stats(self) -> Any:
        return SimpleNamespace(
            num_prompt_tokens=0,
            num_output_tokens=self.num_output_tokens,
            num_running=len(self.running),
            num_waiting=0,
            num_owned_blocks=len(self.running),
        )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_requests_are_sent_when_they_are_due_and_timed_from_then(clock: Clock) -> None:
    engine = Engine(clock)
    calls = [Timed([1], 3), Timed([1, 2], 1, 1.5), Timed([1], 2, 9.0)]
    finished: list[int] = []
    run = drive(
        SimpleNamespace(engine=engine),  # type: ignore[arg-type]
        calls,
        on_finished=lambda run: finished.append(len(run.outputs)),
    )
    # The second is due in the middle of a step and sent after it; its wait counts.
    assert engine.added_at == [100.0, 102.0, 109.0]
    assert clock.slept == [6.0]
    assert [answer.token_times_s for answer in run.answers] == [[1.0, 2.0, 3.0], [1.5], [1.0, 2.0]]
    assert finished == [2, 3]
    assert run.elapsed_s == 11.0
    assert run.num_output_tokens == 6
    assert [moment.num_output_tokens for moment in run.moments] == [1, 2, 4, 5, 6]
    assert [moment.kv_share for moment in run.moments] == [0.1, 0.1, 0.0, 0.1, 0.0]


def test_a_failed_request_ends_the_run(clock: Clock) -> None:
    with pytest.raises(EngineError, match="a request of the benchmark failed: no memory"):
        drive(SimpleNamespace(engine=Engine(clock, "no memory")), [Timed([1], 1)])  # type: ignore[arg-type]


def test_times_of_an_answer() -> None:
    answer = Answer(4.0, [0.5, 0.7, 1.5])
    assert answer.ttft_s == 0.5
    assert answer.e2e_s == 1.5
    assert answer.gaps_s == pytest.approx([0.2, 0.8])
    assert answer.tpot_s == pytest.approx(0.5)
    assert Answer(0.0, [0.5]).tpot_s is None


def test_rates_spread_the_tokens_of_a_long_step_over_it() -> None:
    moments = [Moment(2.0, 100, 0, 1, 0, 0.1), Moment(2.5, 100, 10, 1, 0, 0.1), Moment(4.0, 100, 10, 0, 0, 0)]
    edges, prompt, output = rates(moments)
    assert (edges[0], edges[-1]) == (0.0, 4.0)
    width = edges[1]
    assert prompt.sum() * width == pytest.approx(100)
    assert output.sum() * width == pytest.approx(10)
    assert prompt[edges[:-1] < 2.0 - width] == pytest.approx(50)
    assert output[edges[:-1] > 2.5] == pytest.approx(0)
    assert output.max() == pytest.approx(20)


def test_the_calls_of_a_simulation_are_token_ids_at_their_times() -> None:
    mix = Mix(
        Lengths.parse("input", "uniform:3:5"), Lengths.parse("output", "2"), Arrivals(10.0), as_text=False
    )
    calls = calls_of(mix, 50, seed=3)
    assert calls == calls_of(mix, 50, seed=3) != calls_of(mix, 50, seed=4)
    assert {len(call.prompt) for call in calls} == {3, 4, 5}
    assert all(call.output_len == 2 for call in calls)
    times = [call.at_s for call in calls]
    assert times == sorted(times)
    assert 3.0 < times[-1] < 8.0  # ten a second
