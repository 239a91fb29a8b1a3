"""The step loop with a scripted model: text, stops, errors, aborts, n, metrics, traces."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.engine import VOCAB_SIZE, ScriptedRunner, next_token
from helpers.text import letters_tokenizer

from octavo.cache.manager import KVCacheManager
from octavo.config import EngineConfig
from octavo.engine.core import Engine
from octavo.engine.request import Request
from octavo.engine.sampler import NO_TOKEN, SamplerOutput
from octavo.engine.schedule import Schedule
from octavo.engine.scheduler import Scheduler
from octavo.errors import ConfigError, EngineError, RequestError
from octavo.outputs import Logprob
from octavo.sampling_params import SamplingParams


class FakeRunner:
    """The scripted model behind the runner's interface. `poison` maps a prompt's first token to a trouble."""

    def __init__(self, cache: KVCacheManager, poison: dict[int, str]) -> None:
        self.scripted = ScriptedRunner(cache)
        self.poison = poison
        self.during_step: Callable[[], object] = lambda: None

    def execute(self, plan: Schedule) -> SamplerOutput:
        troubles = [self.poison.get(seq.token_ids[0]) for seq in plan.sequences]
        self.during_step()
        if "raise" in troubles:
            raise ZeroDivisionError("boom")
        if "interrupt" in troubles:
            raise KeyboardInterrupt
        token_ids = self.scripted.run(plan)
        errors = {j: "logits are NaN" for j, row in enumerate(plan.sampled_rows) if troubles[row] == "nan"}
        logprobs = [
            {token: Logprob(-1.0, 2), (token + 1) % VOCAB_SIZE: Logprob(-0.5, 1)}
            if seq.params.logprobs
            else None
            for seq, token in zip(plan.sampled, token_ids, strict=True)
        ]
        for j in errors:
            token_ids[j] = NO_TOKEN
        return SamplerOutput(token_ids, logprobs, errors)


def make_engine(*, trace: str | None = None, poison: dict[int, str] | None = None, **limits: int) -> Engine:
    limits = {
        "num_blocks": 64,
        "block_size": 4,
        "max_num_seqs": 8,
        "budget": 32,
        "max_model_len": 200,
    } | limits
    cache = KVCacheManager(limits["num_blocks"], limits["block_size"])
    scheduler = Scheduler(
        cache,
        max_num_seqs=limits["max_num_seqs"],
        max_num_batched_tokens=limits["budget"],
        max_model_len=limits["max_model_len"],
    )
    ticks = iter(range(10**6))
    return Engine(
        EngineConfig(model="scripted", trace=trace),
        scheduler,
        FakeRunner(cache, poison or {}),  # type: ignore[arg-type]  # the runner's interface without a model
        vocab_size=VOCAB_SIZE,
        eos_token_ids=[VOCAB_SIZE - 1],
        tokenizer=letters_tokenizer(VOCAB_SIZE),
        clock=lambda: float(next(ticks)),
    )


def drain(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
        engine.scheduler.check()


def answer(prompt: list[int], num_tokens: int, seed: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens, seed))
    return tokens[len(prompt) :]


def letters(token_ids: list[int]) -> str:
    return letters_tokenizer(VOCAB_SIZE).decode(token_ids)


def run(engine: Engine, prompt: list[int], params: SamplingParams, **kwargs: object) -> Request:
    request = engine.add_request(prompt, params, **kwargs)  # type: ignore[arg-type]  # passed through
    drain(engine)
    return request


def test_output_holds_text_tokens_reason_and_times() -> None:
    request = run(make_engine(), [1, 2, 3], SamplingParams(max_tokens=5, seed=4, ignore_eos=True))
    output = request.output
    assert output is not None
    assert output.token_ids == answer([1, 2, 3], 5, 4)
    assert output.text == letters(output.token_ids)
    assert output.finish_reason == "length"
    metrics = output.metrics
    assert metrics.queue_s is not None
    assert metrics.ttft_s is not None
    assert metrics.tpot_s is not None
    assert 0 < metrics.queue_s < metrics.ttft_s < metrics.e2e_s
    assert metrics.tpot_s == pytest.approx((metrics.e2e_s - metrics.ttft_s) / 4)
    assert metrics.num_preemptions == 0


def test_eos_ends_the_text_before_it_unless_ignored() -> None:
    engine = make_engine()
    eos = VOCAB_SIZE - 1
    prompt, seed, tokens = next(
        ([a, b], seed, tokens)
        for seed in range(9)
        for a in range(20)
        for b in range(20)
        if eos in (tokens := answer([a, b], 8, seed))[1:6]
    )
    stopped = run(engine, prompt, SamplingParams(max_tokens=8, seed=seed)).output
    ignoring = run(engine, prompt, SamplingParams(max_tokens=8, seed=seed, ignore_eos=True)).output
    assert stopped is not None
    assert ignoring is not None
    at = tokens.index(eos)
    assert stopped.token_ids == tokens[: at + 1]
    assert (stopped.finish_reason, stopped.outputs[0].stop_reason) == ("stop", None)
    assert stopped.text == letters(tokens[:at])
    assert ignoring.token_ids == tokens


def test_stop_string_across_tokens_in_both_modes() -> None:
    tokens = answer([5, 6], 12, 1)
    text = letters(tokens)
    stop = text[3:6]
    end = text.index(stop)
    for stream in (False, True):
        for include in (False, True):
            params = SamplingParams(
                max_tokens=12, seed=1, stop=stop, include_stop_str_in_output=include, ignore_eos=True
            )
            request = run(make_engine(), [5, 6], params, stream=stream)
            output = request.output
            assert output is not None
            assert output.text == text[: end + len(stop) if include else end]
            assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
            assert len(output.token_ids) == end + len(stop)
            if stream:
                assert "".join(chunk.text for chunk in request.chunks) == output.text


def test_stop_string_does_not_count_before_min_tokens() -> None:
    tokens = answer([5, 6], 12, 1)
    first = letters(tokens)[0]
    params = SamplingParams(max_tokens=12, min_tokens=12, seed=1, stop=first, ignore_eos=True)
    output = run(make_engine(), [5, 6], params).output
    assert output is not None
    assert len(output.token_ids) == 12


def test_stream_pieces_join_to_the_output_for_every_index() -> None:
    params = SamplingParams(n=3, max_tokens=6, seed=9, logprobs=1, ignore_eos=True)
    request = run(make_engine(), [1, 2, 3, 4, 5], params, stream=True)
    chunks = list(request.chunks)
    output = request.output
    assert output is not None
    for completion in output.outputs:
        mine = [chunk for chunk in chunks if chunk.index == completion.index]
        assert "".join(chunk.text for chunk in mine) == completion.text
        assert [t for chunk in mine for t in chunk.token_ids] == completion.token_ids
        assert [chunk.finish_reason for chunk in mine] == [None] * 5 + ["length"]
        assert [entry for chunk in mine for entry in chunk.logprobs or []] == completion.logprobs
        assert completion.cumulative_logprob == -6.0
    assert [chunk.output for chunk in chunks] == [None] * (len(chunks) - 1) + [output]
    assert len({tuple(c.token_ids) for c in output.outputs}) == 3


def test_seeds_differ_by_index_and_repeat() -> None:
    first = run(make_engine(), [1, 2], SamplingParams(n=3, max_tokens=4, seed=5)).output
    second = run(make_engine(), [1, 2], SamplingParams(n=3, max_tokens=4, seed=5)).output
    alone = run(make_engine(), [1, 2], SamplingParams(max_tokens=4, seed=5)).output
    assert first is not None
    assert second is not None
    assert alone is not None
    assert [c.token_ids for c in first.outputs] == [c.token_ids for c in second.outputs]
    assert first.outputs[0].token_ids == alone.token_ids


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


def test_trace_has_one_line_per_step_that_adds_up(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    engine = make_engine(trace=str(path), num_blocks=8, budget=32)
    for i in range(3):
        engine.add_request([i] * 9, SamplingParams(max_tokens=12, seed=i, ignore_eos=True))
    drain(engine)
    engine.close()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    stats = engine.stats()
    assert [record["step"] for record in records] == list(range(stats.num_steps))
    for record in records:
        assert sum(record["blocks"].values()) == 8
        assert record["num_tokens"] == sum(row["num_tokens"] for row in record["rows"])
        assert set(record) == {
            *("step", "step_s", "num_tokens", "num_decode_rows", "rows", "num_sampled", "admitted"),
            *("preempted", "num_hit_tokens", "num_copied_blocks", "num_waiting", "num_running"),
            *("num_evictions", "blocks"),
        }
    assert sum(len(record["preempted"]) for record in records) == stats.num_preemptions > 0
    assert sum(record["num_evictions"] for record in records) == stats.num_evictions > 0
    assert sum(record["num_sampled"] for record in records) == stats.num_output_tokens == 36
    assert sum(record["num_hit_tokens"] for record in records) == stats.num_hit_tokens
    assert records[0]["rows"][0] == {
        "request": "request-0",
        "index": 0,
        "row": 0,
        "start": 0,
        "num_tokens": 9,
    }
    assert records[-1]["blocks"]["owned"] == 0


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


def test_stats_count_prompt_hit_and_output_tokens() -> None:
    engine = make_engine(poison={13: "nan"}, budget=8)
    for prompt in ([1] * 17, [1] * 17, [13] * 3):
        engine.add_request(prompt, SamplingParams(max_tokens=4, seed=0, ignore_eos=True))
        drain(engine)
    stats = engine.stats()
    assert (stats.num_prompt_tokens, stats.num_hit_tokens, stats.num_output_tokens) == (17 + 1 + 3, 16, 8)


def test_integers_of_numpy_are_token_ids() -> None:
    request = run(make_engine(), np.array([1, 2]), SamplingParams(max_tokens=2, seed=0, ignore_eos=True))  # type: ignore[arg-type]
    assert request.prompt_token_ids == [1, 2]
    assert [type(token) for token in request.prompt_token_ids] == [int, int]


def test_stop_string_begun_before_min_tokens_and_completed_after_it() -> None:
    tokens = answer([5, 6], 12, 1)
    text = letters(tokens)
    for min_tokens in (3, 4, 5):
        params = SamplingParams(max_tokens=12, min_tokens=min_tokens, seed=1, stop=text[2:5], ignore_eos=True)
        output = run(make_engine(), [5, 6], params).output
        assert output is not None
        assert (output.text, output.finish_reason) == (text[:2], "stop")


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
