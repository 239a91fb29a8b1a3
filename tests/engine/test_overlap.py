"""Steps launched before the tokens of earlier ones are read, with a device whose results come late."""

from __future__ import annotations

import random
from typing import Any

import pytest
from helpers.core import FakeRunner, answer, drain, letters, make_engine

from octavo.engine.core import Engine
from octavo.engine.request import Request
from octavo.sampling_params import SamplingParams


def runner_of(engine: Engine) -> FakeRunner:
    assert isinstance(engine.runner, FakeRunner)
    return engine.runner


def greedy(max_tokens: int, seed: int = 0, **options: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": max_tokens, "seed": seed, "ignore_eos": True} | options))


def tokens_of(request: Request) -> list[int]:
    assert request.output is not None
    return request.output.token_ids


def under_way(engine: Engine) -> int:
    return len(engine._under_way)


# How many steps are launched, and when


@pytest.mark.parametrize(("overlap", "run_ahead", "most"), [(False, 3, 1), (True, 1, 2), (True, 3, 4)])
def test_steps_run_ahead_as_far_as_allowed(overlap: bool, run_ahead: int, most: int) -> None:
    engine = make_engine(overlap=overlap, run_ahead=run_ahead)
    request = engine.add_request([1, 2, 3], greedy(20))
    drain(engine)
    assert runner_of(engine).most_under_way == most
    assert tokens_of(request) == answer([1, 2, 3], 20, 0)


def test_every_call_brings_the_tokens_of_one_step() -> None:
    engine = make_engine(overlap=True)
    request = engine.add_request([1, 2, 3], greedy(9), stream=True)
    for i in range(9):
        assert engine.step() == [request]
        assert [chunk.token_ids for chunk in request.chunks] == [[t] for t in answer([1, 2, 3], i + 1, 0)]
    assert not engine.has_work
    assert engine.step() == []


def test_nothing_is_computed_past_a_known_length() -> None:
    computed = []
    for overlap in (False, True):
        engine = make_engine(overlap=overlap, run_ahead=5)
        for i in range(3):
            engine.add_request([i] * 3, greedy(4 + 3 * i, seed=i))
        drain(engine)
        computed.append(runner_of(engine).scripted.num_computed_tokens)
    assert computed[0] == computed[1] == 3 * 3 + 3 + 6 + 9


def test_what_was_computed_past_a_stop_is_thrown_away() -> None:
    tokens = answer([5, 6], 12, 1)
    stop = tokens[4]
    engine = make_engine(overlap=True, run_ahead=3)
    request = engine.add_request([5, 6], greedy(12, 1, stop_token_ids=[stop]))
    drain(engine)
    expected = tokens[: tokens.index(stop) + 1]
    assert tokens_of(request) == expected
    assert runner_of(engine).scripted.num_computed_tokens == 2 + len(expected) - 1 + 3
    assert engine.stats().num_output_tokens == len(expected)
    assert (engine.cache.num_owned, under_way(engine)) == (0, 0)


def test_a_new_request_waits_for_no_more_than_the_steps_under_way() -> None:
    engine = make_engine(overlap=True, run_ahead=3)
    engine.add_request([1, 2, 3], greedy(50))
    for _ in range(5):
        engine.step()
    queued = under_way(engine)
    assert queued == 3
    new = engine.add_request([4, 5], greedy(50))
    num_steps = 0
    while new.first_token_s is None:
        engine.step()
        num_steps += 1
    assert num_steps == queued + 1
    engine.close()


def test_prompts_and_arrivals_keep_the_device_one_step_ahead() -> None:
    engine = make_engine(overlap=True, run_ahead=5, budget=8)
    engine.add_request([1, 2, 3], greedy(50))
    engine.step()
    engine.add_request(list(range(40)), greedy(5))
    deepest = []
    while engine.scheduler.running[-1].num_computed_tokens < 40:
        engine.step()
        deepest.append(under_way(engine))
    assert max(deepest[5:]) == 1, "of two launched steps one is collected"
    engine.close()


@pytest.mark.parametrize(
    "options",
    [{"repetition_penalty": 1.1}, {"presence_penalty": 0.5}, {"frequency_penalty": -0.5}],
    ids=lambda options: next(iter(options)),
)
def test_a_row_that_needs_its_last_token_waits_for_it(options: dict[str, float]) -> None:
    engine = make_engine(overlap=True)  # its runner asserts that such a row is never computed too early
    alone = engine.add_request([1, 2], greedy(6, 1, **options))
    drain(engine)
    assert runner_of(engine).most_under_way == 1
    runner_of(engine).most_under_way = 0
    beside = [engine.add_request([3, i], greedy(6, i)) for i in range(4)]
    again = engine.add_request([1, 2], greedy(6, 1, **options))
    drain(engine)
    assert runner_of(engine).most_under_way > 1
    assert tokens_of(alone) == tokens_of(again) == answer([1, 2], 6, 1)
    assert [tokens_of(request) for request in beside] == [answer([3, i], 6, i) for i in range(4)]


def test_where_half_the_rows_need_their_tokens_no_row_runs_ahead_of_the_others() -> None:
    engine = make_engine(overlap=True)
    for i in range(2):
        engine.add_request([1, i], greedy(6, i, presence_penalty=1.0))
        engine.add_request([2, i], greedy(6, i))
    drain(engine)
    assert engine.stats().num_steps == 6
    assert runner_of(engine).most_under_way == 1


def test_while_arrivals_wait_one_step_is_launched_ahead() -> None:
    engine = make_engine(overlap=True, run_ahead=5, max_num_seqs=1)
    engine.add_request([1, 2], greedy(12))
    engine.add_request([3, 4], greedy(12))
    deepest = []
    while engine.step() and engine.scheduler.waiting:
        deepest.append(under_way(engine))
    assert max(deepest) == 1
    drain(engine)
    assert runner_of(engine).most_under_way == 6


# Aborts


@pytest.mark.parametrize("num_steps", range(6))
def test_abort_with_steps_under_way(num_steps: int) -> None:
    engine = make_engine(overlap=True, num_blocks=8)
    doomed = engine.add_request([1, 2, 3, 4, 5], greedy(20), stream=True)
    kept = engine.add_request([6, 7], greedy(12, 2))
    for _ in range(num_steps):
        engine.step()
    engine.abort(doomed.request_id)
    engine.scheduler.check()
    # Takes the blocks that steps under way still write to.
    new = engine.add_request([1, 2, 3, 4, 5, 9], greedy(9, 3))
    drain(engine)
    assert tokens_of(doomed) == answer([1, 2, 3, 4, 5], num_steps, 0)
    assert doomed.chunks[-1].finish_reason == "abort"
    assert tokens_of(kept) == answer([6, 7], 12, 2)
    assert tokens_of(new) == answer([1, 2, 3, 4, 5, 9], 9, 3)


def test_abort_of_the_last_request_gives_up_the_steps_under_way() -> None:
    engine = make_engine(overlap=True)
    request = engine.add_request([1, 2], greedy(20))
    engine.step()
    assert under_way(engine) > 0
    engine.abort(request.request_id)
    assert not engine.has_work
    assert (under_way(engine), engine.cache.num_owned, engine.step()) == (0, 0, [])
    again = engine.add_request([1, 2], greedy(5))
    drain(engine)
    assert tokens_of(again) == answer([1, 2], 5, 0)


def test_requests_dropped_while_a_step_runs_end_with_it() -> None:
    engine = make_engine(overlap=True)
    dropped, kept = engine.add_request([1, 2], greedy(9)), engine.add_request([3, 4], greedy(9))
    for _ in range(3):
        engine.step()
    runner_of(engine).during_step = lambda: engine.drop(dropped.request_id)
    drain(engine)
    assert dropped.output is not None
    assert dropped.output.finish_reason == "abort"
    assert tokens_of(kept) == answer([3, 4], 9, 0)
    assert engine.cache.num_owned == 0


# Blocks


def test_preemption_takes_from_nobody_whose_step_is_under_way() -> None:
    engine = make_engine(overlap=True, num_blocks=7)
    requests = [engine.add_request([i] * 3, greedy(16, i)) for i in range(3)]
    schedule = engine.scheduler.schedule
    num_preemptions = 0

    def watched() -> Any:
        nonlocal num_preemptions
        plan = schedule()
        if plan is not None and plan.preempted:
            num_preemptions += 1
            assert under_way(engine) == 0
        return plan

    engine.scheduler.schedule = watched  # type: ignore[method-assign]
    drain(engine)
    assert num_preemptions > 0
    assert [tokens_of(request) for request in requests] == [answer([i] * 3, 16, i) for i in range(3)]


def test_blocks_become_findable_once_their_tokens_are_known() -> None:
    """Prompt blocks when they are launched, blocks of output with the token that fills them."""
    engine = make_engine(overlap=True, block_size=4)
    first = engine.add_request([1] * 8, greedy(20, 7))
    engine.step()
    assert engine.cache.match_prefix([1] * 9).num_tokens == 8
    tokens = [1] * 8 + answer([1] * 8, 20, 7)
    for num_known in range(9, 20):
        assert engine.cache.match_prefix(tokens).num_tokens == num_known // 4 * 4
        engine.step()
    second = engine.add_request(tokens[:17], greedy(3, 7))
    drain(engine)
    assert second.num_cached_tokens == 16
    assert tokens_of(first) == tokens[8:]
    assert tokens_of(second) == answer(tokens[:17], 3, 7)


def test_forks_that_copy_their_last_block_while_the_prompt_is_under_way() -> None:
    engine = make_engine(overlap=True, budget=3)
    request = engine.add_request([1, 2, 3, 4, 5, 6], greedy(9, 4, n=3))
    other = engine.add_request([1, 2, 3, 4, 5, 6, 7], greedy(9, 4))
    drain(engine)
    assert request.output is not None
    seeds = [seq.seed for seq in request.sequences]
    assert [c.token_ids for c in request.output.outputs] == [
        answer([1, 2, 3, 4, 5, 6], 9, seed) for seed in seeds
    ]
    assert tokens_of(other) == answer([1, 2, 3, 4, 5, 6, 7], 9, 4)


# Trouble


def test_bad_logits_end_their_row_and_what_ran_ahead_of_it() -> None:
    engine = make_engine(overlap=True, poison={13: "nan"})
    good = engine.add_request([1, 2], greedy(8))
    bad = engine.add_request([13, 1], greedy(8, n=2), stream=True)
    drain(engine)
    assert bad.output is not None
    assert [c.finish_reason for c in bad.output.outputs] == ["error", "error"]
    assert [chunk.finish_reason for chunk in bad.chunks] == ["error", "error"]
    assert bad.output.error == "logits are NaN"
    assert tokens_of(good) == answer([1, 2], 8, 0)
    assert engine.stats().num_output_tokens == 8
    assert engine.cache.num_owned == 0


@pytest.mark.parametrize("trouble", ["raise", "interrupt"])
def test_a_launch_that_breaks_keeps_the_tokens_of_the_steps_before_it(trouble: str) -> None:
    engine = make_engine(overlap=True, poison={13: trouble})
    requests = [engine.add_request([1, i], greedy(9, i)) for i in range(2)]
    for _ in range(3):
        engine.step()
    assert under_way(engine) == 3
    known = [list(request.sequences[0].output_token_ids) for request in requests]
    bad = engine.add_request([13, 1], greedy(9))
    error = KeyboardInterrupt if trouble == "interrupt" else None
    for _ in range(5):  # the broken step comes when those under way are down to one
        try:
            engine.step()
        except KeyboardInterrupt:
            assert error is KeyboardInterrupt
            error = None
    assert error is None
    for i, (request, tokens) in enumerate(zip(requests, known, strict=True)):
        assert request.output is not None
        assert request.output.finish_reason == "error"
        assert tokens_of(request) == answer([1, i], len(tokens) + 3, i)
    assert bad.output is not None
    assert bad.output.error is not None
    assert not engine.has_work
    engine.scheduler.check()
    again = engine.add_request([1, 0], greedy(9, 0))
    drain(engine)
    assert tokens_of(again) == answer([1, 0], 9, 0)


@pytest.mark.parametrize("trouble", ["late raise", "late interrupt"])
def test_a_result_that_does_not_come_ends_all_that_built_on_it(trouble: str) -> None:
    engine = make_engine(overlap=True, poison={13: trouble}, max_num_seqs=2)
    before = engine.add_request([1] * 9, greedy(9, 0))
    bad = engine.add_request([13, 1, 2, 3, 4], greedy(9))
    queued = [engine.add_request([2] * 6, greedy(4, 2)), engine.add_request([3] * 9, greedy(5, 3))]
    if trouble == "late interrupt":
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    else:
        assert {request.request_id for request in engine.step()} >= {before.request_id, bad.request_id}
    for request in (before, bad):
        assert request.output is not None
        assert request.output.finish_reason == "error"
    assert engine.cache.match_prefix([13, 1, 2, 3, 4]).num_tokens == 0, "what was written is not known"
    engine.scheduler.check()
    drain(engine)
    assert tokens_of(queued[1]) == answer([3] * 9, 5, 3)
    assert engine.cache.num_owned == 0
    assert not engine.requests


def test_a_request_that_hit_what_a_lost_step_was_to_write_ends_with_it() -> None:
    engine = make_engine(overlap=True, poison={13: "late raise"}, budget=8)
    engine.add_request([13] * 8, greedy(9))
    builder = engine.add_request([13] * 8 + [1], greedy(9))
    assert len(engine.step()) == 2
    assert builder.num_cached_tokens == 8, "it was launched behind the step that was lost"
    assert builder.output is not None
    assert builder.output.error == "the step failed: ZeroDivisionError: late boom"
    assert not engine.has_work


@pytest.mark.parametrize("broken", ["schedule", "advance", "commit", "_release"])
def test_a_scheduler_that_breaks_with_steps_under_way_starts_afresh(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(overlap=True)
    requests = [engine.add_request([i], greedy(12, i, n=2)) for i in range(3)]
    for _ in range(3):
        engine.step()
    original = getattr(engine.scheduler, broken)

    def half_way(*arguments: Any) -> Any:
        original(*arguments)
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, broken, half_way)
        for _ in range(9):
            engine.step()
    for request in requests:
        assert request.output is not None
        assert {c.finish_reason for c in request.output.outputs} == {"error"}
    assert (engine.has_work, under_way(engine), engine.cache.num_owned) == (False, 0, 0)
    again = engine.add_request([1, 2], greedy(5))
    drain(engine)
    assert tokens_of(again) == answer([1, 2], 5, 0)


# The same answers


def mixed_requests(engine: Engine, rng: random.Random) -> list[Request]:
    requests = []
    for i in range(30):
        prompt = [rng.randrange(2) for _ in range(rng.randint(1, 30))]
        tokens = answer(prompt, 12, i)
        options: dict[str, Any] = rng.choice(
            [
                {},
                {"n": 3},
                {"logprobs": 1},
                {"repetition_penalty": 1.2},
                {"stop_token_ids": [tokens[5]]},
                {"stop": letters(tokens[3:5])},
                {"stop": letters(tokens[2:3]), "min_tokens": 6},
                {"ignore_eos": False, "logprobs": 1, "n": 2},
            ]
        )
        requests.append(
            engine.add_request(prompt, greedy(rng.randint(1, 12), i, **options), stream=i % 2 > 0)
        )
    return requests


@pytest.mark.parametrize("limits", [{}, {"num_blocks": 14}, {"budget": 5}, {"max_num_seqs": 3}], ids=str)
@pytest.mark.parametrize("run_ahead", [1, 4])
def test_outputs_are_those_of_one_step_after_the_other(run_ahead: int, limits: dict[str, int]) -> None:
    found = []
    for overlap in (False, True):
        engine = make_engine(overlap=overlap, run_ahead=run_ahead, **limits)
        requests = mixed_requests(engine, random.Random(1))
        drain(engine)
        assert engine.cache.num_owned == 0
        outputs = [request.output for request in requests]
        assert all(outputs)
        found.append(
            [
                [(c.token_ids, c.text, c.finish_reason, c.stop_reason, c.logprobs) for c in output.outputs]
                for output in outputs
                if output is not None
            ]
        )
        for request in requests:
            for completion in request.output.outputs if request.stream and request.output else ():
                mine = [chunk for chunk in request.chunks if chunk.index == completion.index]
                assert [t for chunk in mine for t in chunk.token_ids] == completion.token_ids
                assert "".join(chunk.text for chunk in mine) == completion.text
    assert found[0] == found[1]


def test_the_trace_tells_of_every_step_in_order(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import json

    path = tmp_path / "trace.jsonl"
    engine = make_engine(trace=str(path), overlap=True)
    for i in range(3):
        engine.add_request([i] * 9, greedy(12, i))
    drain(engine)
    engine.close()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(engine.stats().num_steps))
    starts: dict[str, list[int]] = {}
    for record in records:
        for row in record["rows"]:
            starts.setdefault(row["request"], []).append(row["start"])
    assert all(positions == sorted(set(positions)) for positions in starts.values())
    assert sum(record["num_sampled"] for record in records) == engine.stats().num_output_tokens == 36
