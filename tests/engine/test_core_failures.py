"""The step loop when something goes wrong: refusals, aborts, broken steps. Neighbours are never harmed."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

import pytest
from helpers.core import answer, drain, make_engine, run
from helpers.engine import VOCAB_SIZE

from octavo.errors import ConfigError, EngineError, RequestError
from octavo.sampling_params import SamplingParams


def test_bad_logits_end_one_row_and_harm_no_neighbour() -> None:
    engine = make_engine(poison={13: "nan"})
    good = [
        engine.add_request([1, i], SamplingParams(max_tokens=4, seed=i, ignore_eos=True)) for i in range(2)
    ]
    bad = engine.add_request([13, 1], SamplingParams(max_tokens=4, n=2), stream=True)
    drain(engine)
    assert bad.output is not None
    assert [c.finish_reason for c in bad.output.outputs] == ["error", "error"]
    assert bad.output.error == "logits are NaN"
    assert [c.token_ids for c in bad.output.outputs] == [[], []]
    for i, request in enumerate(good):
        assert request.output is not None
        assert request.output.token_ids == answer([1, i], 4, i)
    assert engine.cache.num_owned == 0


def test_step_that_raises_ends_its_requests_and_the_engine_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="octavo")
    engine = make_engine(poison={13: "raise"}, max_num_seqs=2)
    bad = engine.add_request([13, 1], SamplingParams(n=2))
    later = engine.add_request([1, 2], SamplingParams(max_tokens=4, seed=0, ignore_eos=True))
    drain(engine)
    assert bad.output is not None
    assert later.output is not None
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert [(record.getMessage(), record.exc_info) for record in errors] == [
        ("the step failed: ZeroDivisionError: boom; 1 requests end with it", None)
    ]
    assert [record.exc_info is not None for record in caplog.records if record.levelno == logging.DEBUG] == [
        True
    ]
    assert bad.output.error == "the step failed: ZeroDivisionError: boom"
    assert [c.finish_reason for c in bad.output.outputs] == ["error", "error"]
    assert later.output.token_ids == answer([1, 2], 4, 0)
    assert engine.cache.num_owned == 0
    assert not engine.requests


def test_abort_keeps_what_was_generated() -> None:
    engine = make_engine()
    request = engine.add_request([1, 2], SamplingParams(max_tokens=50, seed=3, ignore_eos=True), stream=True)
    for _ in range(4):
        engine.step()
    engine.abort(request.request_id)
    engine.abort(request.request_id)
    engine.abort("no such request")
    output = request.output
    assert output is not None
    assert output.token_ids == answer([1, 2], 4, 3)
    assert output.finish_reason == "abort"
    assert "".join(chunk.text for chunk in request.chunks) == output.text
    assert [chunk.finish_reason for chunk in request.chunks][-1] == "abort"
    assert engine.cache.num_owned == 0
    assert not engine.has_work


def test_abort_while_queued_and_during_prefill() -> None:
    engine = make_engine(max_num_seqs=1, budget=4)
    running = engine.add_request(list(range(20)), SamplingParams(n=1))
    queued = engine.add_request([1, 2], SamplingParams(n=1))
    engine.step()
    for request in (queued, running):
        engine.abort(request.request_id)
        assert request.output is not None
        assert request.output.finish_reason == "abort"
        assert request.output.metrics.ttft_s is None
    assert not engine.has_work
    assert engine.step() == []


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt is empty"),
        ([1, VOCAB_SIZE], r"prompt_token_ids\[1\] is 50, outside the vocabulary \(0 to 49\)"),
        ([-1], r"prompt_token_ids\[0\] is -1, outside"),
        ([1, "a"], r"prompt_token_ids\[1\] must be an int, got 'a'"),
        ([True], r"prompt_token_ids\[0\] must be an int, got True"),
        ([1] * 200, "prompt has 200 tokens; max_model_len=200"),
    ],
)
def test_bad_prompt_is_refused_beside_a_running_one(prompt: list[int], message: str) -> None:
    engine = make_engine()
    good = engine.add_request([1, 2], SamplingParams(max_tokens=3, seed=1, ignore_eos=True))
    engine.step()
    with pytest.raises(RequestError, match=message):
        engine.add_request(prompt, SamplingParams())
    drain(engine)
    assert good.output is not None
    assert good.output.token_ids == answer([1, 2], 3, 1)


def test_ids_outside_the_vocabulary_in_options_are_refused() -> None:
    with pytest.raises(RequestError, match="logit_bias names token id 50"):
        make_engine().add_request([1], SamplingParams(logit_bias={50: 1.0}))


def test_request_id_in_use_and_closed_engine() -> None:
    engine = make_engine()
    engine.add_request([1], SamplingParams(), request_id="a")
    with pytest.raises(RequestError, match="request_id 'a' is already running"):
        engine.add_request([1], SamplingParams(), request_id="a")
    engine.close()
    engine.close()
    assert not engine.has_work
    with pytest.raises(EngineError, match="closed"):
        engine.add_request([1], SamplingParams())


def test_trace_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trace: cannot write .*No such file or directory"):
        make_engine(trace=str(tmp_path / "no" / "where.jsonl"))


def test_interrupted_step_ends_what_ran_in_it_and_is_raised_again() -> None:
    engine = make_engine(poison={13: "interrupt"}, max_num_seqs=2)
    bad = engine.add_request([13, 1], SamplingParams(n=2))
    later = engine.add_request([1, 2], SamplingParams(max_tokens=4, seed=0, ignore_eos=True))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert bad.output is not None
    assert bad.output.error == "the step failed: KeyboardInterrupt: "
    assert engine.cache.num_owned == 0
    drain(engine)
    assert later.output is not None
    assert later.output.token_ids == answer([1, 2], 4, 0)


def test_request_dropped_in_the_middle_of_a_step_harms_nobody() -> None:
    engine = make_engine()
    params = SamplingParams(max_tokens=5, seed=0, ignore_eos=True)
    dropped, kept = engine.add_request([1, 2], params), engine.add_request([3, 4], params)
    engine.runner.during_step = lambda: engine.drop(dropped.request_id)  # type: ignore[attr-defined]
    drain(engine)
    assert dropped.output is not None
    assert kept.output is not None
    assert dropped.output.finish_reason == "abort"
    assert kept.output.token_ids == answer([3, 4], 5, 0)
    assert engine.cache.num_owned == 0


def test_more_log_probabilities_than_memory_holds_are_refused() -> None:
    engine = make_engine(max_model_len=100_000, num_blocks=30_000)
    with pytest.raises(RequestError, match=r"prompt_logprobs=-1 for 50000 tokens is 2,500,000 .* 2,000,000"):
        engine.add_request([1] * 50_000, SamplingParams(prompt_logprobs=-1))
    with pytest.raises(RequestError, match="logprobs=50 for 90000 tokens is 4,500,000"):
        engine.add_request([1], SamplingParams(logprobs=50, n=3, max_tokens=30_000))
    engine.add_request([1] * 50, SamplingParams(prompt_logprobs=-1, logprobs=-1, max_tokens=10))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"priority": "x"}, "priority must be an int"),
        ({"priority": None}, "priority must be an int"),
        ({"priority": float("nan")}, "priority must be an int"),
        ({"cache_salt": [1]}, r"cache_salt must be a string, got \[1\]"),
        ({"cache_salt": None}, "cache_salt must be a string, got None"),
    ],
)
def test_bad_request_options_are_refused_beside_a_running_request(options: Any, message: str) -> None:
    engine = make_engine()
    good = engine.add_request([1, 2], SamplingParams(max_tokens=3, seed=1, ignore_eos=True))
    engine.step()
    with pytest.raises(RequestError, match=message):
        engine.add_request([1], SamplingParams(), **options)
    drain(engine)
    assert good.output is not None
    assert good.output.token_ids == answer([1, 2], 3, 1)


def test_scheduler_that_raises_ends_everything_and_the_engine_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(max_num_seqs=2)
    requests = [engine.add_request([i], SamplingParams(n=2)) for i in range(3)]
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "_schedule_decodes", lambda plan: 1 / 0)
        assert len(engine.step()) == 3
    for request in requests:
        assert request.output is not None
        assert request.output.error == "the step failed: ZeroDivisionError: division by zero"
    assert not engine.has_work
    assert engine.cache.num_owned == 0
    output = run(engine, [1, 2], SamplingParams(max_tokens=3, seed=1, ignore_eos=True)).output
    assert output is not None
    assert output.token_ids == answer([1, 2], 3, 1)


@pytest.mark.parametrize("broken", ["_fork_followers", "_release", "_place", "commit"])
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_scheduler_broken_half_way_starts_afresh(
    broken: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(max_num_seqs=4, num_blocks=12)
    requests = [engine.add_request([i] * 9, SamplingParams(n=2, max_tokens=9), stream=True) for i in range(3)]
    original = getattr(engine.scheduler, broken)

    def half_way(*arguments: Any) -> Any:
        original(*arguments)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, broken, half_way)
        with contextlib.suppress(error):
            for _ in range(20):
                engine.step()
    for request in requests:
        assert request.output is not None
        assert {c.finish_reason for c in request.output.outputs} == {"error"}
    assert not engine.has_work
    engine.scheduler.check()
    output = run(engine, [1, 2], SamplingParams(max_tokens=3, seed=1, ignore_eos=True)).output
    assert output is not None
    assert output.token_ids == answer([1, 2], 3, 1)
    engine.close()


@pytest.mark.parametrize("max_tokens", [1, 5])
def test_output_that_breaks_ends_its_requests_whole(max_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    params = SamplingParams(max_tokens=max_tokens, logprobs=1, seed=0, ignore_eos=True)
    requests = [engine.add_request([i], params, stream=True) for i in range(2)]
    monkeypatch.setattr(engine.output, "_add_logprobs", lambda seq, logprobs: 1 / 0)
    engine.step()
    for request in requests:
        assert request.output is not None
        assert request.output.error == "the step failed: ZeroDivisionError: division by zero"
        assert request.output.finish_reason == "error"
        assert request.chunks[-1].output is request.output
    assert not engine.has_work
    engine.close()


def test_abort_from_another_thread_waits_for_the_end_of_the_step() -> None:
    engine = make_engine()
    params = SamplingParams(max_tokens=5, seed=0, ignore_eos=True)
    mine, other = engine.add_request([1, 2], params), engine.add_request([3, 4], params)
    engine.runner.during_step = lambda: (engine.abort(mine.request_id), engine.stats())  # type: ignore[attr-defined]
    drain(engine)
    assert mine.output is not None
    assert other.output is not None
    assert mine.output.finish_reason == "abort"
    assert other.output.token_ids == answer([3, 4], 5, 0)


def test_trace_on_a_full_disk_ends_and_the_answers_go_on() -> None:
    engine = make_engine(trace="/dev/full")
    request = run(engine, [1, 2], SamplingParams(max_tokens=3, seed=0, ignore_eos=True))
    assert request.output is not None
    assert request.output.token_ids == answer([1, 2], 3, 0)
    engine.close()
