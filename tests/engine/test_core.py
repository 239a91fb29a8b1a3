"""The step loop with a scripted model: text, stops, n, streams, counts, traces."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from helpers.core import answer, drain, letters, make_engine, run
from helpers.engine import VOCAB_SIZE

from octavo.sampling_params import SamplingParams


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
