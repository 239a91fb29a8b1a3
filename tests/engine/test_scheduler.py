"""The scheduler's decisions, spelled out. No torch, no model."""

from __future__ import annotations

import pytest
from helpers.engine import ScriptedEngine, solo_output

from octavo.engine.request import Request, Status
from octavo.errors import CapacityError, RequestError


def lengths(engine: ScriptedEngine) -> list[list[tuple[str, int]]]:
    return [
        [(s.request.request_id, n) for s, n in zip(p.sequences, p.num_new_tokens, strict=True)]
        for p in engine.plans
    ]


def check_solo(request: Request) -> None:
    for seq in request.sequences:
        expected = solo_output(
            request.prompt_token_ids, request.params.max_tokens or 10**6, seq.seed, seq.stop_ids
        )
        assert seq.output_token_ids == expected[: len(seq.output_token_ids)]
        assert len(seq.output_token_ids) == len(expected), seq


def test_one_request_prefills_in_chunks_then_decodes() -> None:
    engine = ScriptedEngine(max_num_batched_tokens=4)
    request = engine.add(range(10), max_tokens=3)
    engine.drain()
    assert lengths(engine) == [[("r0", 4)], [("r0", 4)], [("r0", 2)], [("r0", 1)], [("r0", 1)]]
    assert request.sequences[0].finish_reason == "length"
    check_solo(request)


def test_decodes_come_first_and_a_prompt_gets_its_share_of_the_budget() -> None:
    engine = ScriptedEngine(max_num_batched_tokens=8, max_prefill_share=0.5)
    engine.add(range(3), max_tokens=6)
    engine.step()
    engine.add(range(20, 30), max_tokens=2)
    engine.drain()
    assert lengths(engine) == [
        [("r0", 3)],
        [("r0", 1), ("r1", 4)],
        [("r0", 1), ("r1", 4)],
        [("r0", 1), ("r1", 2)],
        [("r0", 1), ("r1", 1)],
        [("r0", 1)],
    ]


def test_every_running_sequence_decodes_in_every_step() -> None:
    engine = ScriptedEngine(max_num_batched_tokens=3, max_num_seqs=16)
    for i in range(6):
        engine.add([i, i + 1], max_tokens=5)
    engine.drain()
    assert engine.scheduler.max_num_rows == 3
    last_step: dict[str, int] = {}
    for step, rows in enumerate(lengths(engine)):
        for name, num_new in rows:
            if num_new == 1 and name in last_step:
                assert step - last_step[name] == 1, f"{name} waited"
            last_step[name] = step


def test_a_higher_priority_overtakes_the_queue() -> None:
    engine = ScriptedEngine(max_num_seqs=1)
    engine.add([1, 2], max_tokens=2)
    engine.step()
    engine.add([3, 4], max_tokens=1)
    urgent = engine.add([5, 6], max_tokens=1, priority=-1)
    engine.drain()
    assert [rows[0][0] for rows in lengths(engine)] == ["r0", "r0", "r2", "r1"]
    check_solo(urgent)


def test_stop_token_ends_a_request_and_is_kept() -> None:
    engine = ScriptedEngine()
    answer = solo_output([1, 2, 3], 8)
    stop = answer[2]
    request = engine.add([1, 2, 3], max_tokens=8, stop_ids=[stop])
    engine.drain()
    seq = request.sequences[0]
    assert seq.output_token_ids == answer[: answer.index(stop) + 1]
    assert (seq.finish_reason, seq.stop_reason) == ("stop", stop)


@pytest.mark.parametrize(("num_prompt", "fits"), [(98, True), (99, True), (100, False), (101, False)])
def test_prompt_around_max_model_len(num_prompt: int, fits: bool) -> None:
    engine = ScriptedEngine(max_model_len=100)
    if not fits:
        with pytest.raises(
            RequestError, match=rf"prompt has {num_prompt} tokens; max_model_len=100 .* at most 99"
        ):
            engine.add([1] * num_prompt)
        assert not engine.scheduler.has_work
        return
    request = engine.add([1] * num_prompt, max_tokens=None)
    engine.drain()
    assert len(request.sequences[0].token_ids) == 100
    assert request.sequences[0].finish_reason == "length"


def test_what_can_never_fit_is_refused_and_blocks_nobody() -> None:
    """vllm#39734: pool 64 x 16 = 1,024 tokens, max_model_len 4,096."""
    engine = ScriptedEngine(num_blocks=64, block_size=16, max_model_len=4096, max_num_batched_tokens=512)
    with pytest.raises(
        CapacityError, match=r"prompt has 1500 tokens; the KV cache holds 1024 \(64 blocks of 16\)"
    ):
        engine.add([1] * 1500)
    small = engine.add([2] * 10, max_tokens=5)
    large = engine.add(list(range(40)) * 25, max_tokens=500)
    engine.drain(max_steps=200)
    assert small.sequences[0].finish_reason == "length"
    assert len(small.sequences[0].output_token_ids) == 5
    # 1,024 tokens are cached and one more is sampled from the last of them.
    assert len(large.sequences[0].output_token_ids) == 25
    assert large.sequences[0].finish_reason == "length"


def test_thrashing_pool_still_finishes_first_come_first() -> None:
    """inference-sim#297: ten blocks of 16, eight requests that need eight blocks each."""
    engine = ScriptedEngine(num_blocks=10, block_size=16, max_num_batched_tokens=512)
    requests = [engine.add([(7 * i + j) % 50 for j in range(64)], max_tokens=64) for i in range(8)]
    order: list[str] = []
    num_steps = 0
    while engine.scheduler.has_work:
        engine.step()
        num_steps += 1
        order += [r.request_id for r in requests if r.is_finished and r.request_id not in order]
    assert num_steps <= 1100
    assert order == [f"r{i}" for i in range(8)]
    for request in requests:
        check_solo(request)


def test_preemption_takes_the_newest_and_resumes_it_with_the_same_answer() -> None:
    engine = ScriptedEngine(num_blocks=8, block_size=4, watermark_blocks=0)
    first = engine.add([1, 2, 3, 4, 5, 6, 7], max_tokens=14)
    second = engine.add([9, 8, 7, 6, 5, 4, 3], max_tokens=14)
    engine.drain()
    assert [s.request.request_id for p in engine.plans for s in p.preempted] == ["r1"]
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    assert second.num_cached_tokens == 0  # its own recomputed blocks are no prompt hit
    check_solo(first)
    check_solo(second)


def test_a_head_that_does_not_fit_is_overtaken_a_bounded_number_of_times() -> None:
    engine = ScriptedEngine(num_blocks=16, block_size=4, watermark_blocks=0, max_num_seqs=4)
    runner = engine.add([1] * 8, max_tokens=40)
    engine.step()
    head = engine.add([2] * 60, max_tokens=1)  # 15 of 16 blocks: fits only when the first is gone
    small = [engine.add([3, i], max_tokens=1) for i in range(30)]
    while not head.is_finished:
        engine.step()
    overtook = [r for r in small if r.is_finished]
    assert 1 <= len(overtook) <= 16 + 4
    engine.drain()
    for request in (runner, head, *small):
        check_solo(request)


def test_wholly_cached_prompt_computes_its_last_token() -> None:
    """vllm#11186: the second run of 32, 16, 33 and 1 tokens hits 16, 0, 32 and 0."""
    hits = []
    for num_prompt in (32, 16, 33, 1):
        engine = ScriptedEngine(block_size=16)
        prompt = [(3 * i) % 50 for i in range(num_prompt)]
        first = engine.add(prompt, max_tokens=8)
        engine.drain()
        second = engine.add(prompt, max_tokens=8)
        engine.drain()
        assert second.sequences[0].output_token_ids == first.sequences[0].output_token_ids
        hits.append(second.num_cached_tokens)
        if num_prompt == 32:
            longer = engine.add(prompt + list(range(16)), max_tokens=1)
            engine.drain()
            assert longer.num_cached_tokens == 32
    assert hits == [16, 0, 32, 0]


def test_reused_block_forgets_its_old_prompt() -> None:
    """nano-vllm#163: after Y filled the pool, X hits nothing."""
    engine = ScriptedEngine(num_blocks=4, block_size=4, max_num_batched_tokens=64)
    x, y = [1, 2, 3, 4, 5, 6, 7, 8], list(range(21, 36))
    first = engine.add(x, max_tokens=1)
    engine.drain()
    engine.add(y, max_tokens=1)
    engine.drain()
    again = engine.add(x, max_tokens=1)
    engine.drain()
    assert again.num_cached_tokens == 0
    assert again.sequences[0].output_token_ids == first.sequences[0].output_token_ids


def test_salt_keeps_prompts_apart() -> None:
    engine = ScriptedEngine()
    prompt = list(range(20))
    for salt, cached in (("a", 0), ("a", 16), ("b", 0), ("", 0), ("b", 16)):
        request = engine.add(prompt, max_tokens=1, salt=salt)
        engine.drain()
        assert request.num_cached_tokens == cached, salt


def test_abort_in_the_middle_of_prefill() -> None:
    """sglang#38981: 3,000 tokens, chunks of 512, abort after the second; only what was computed is hit."""
    engine = ScriptedEngine(num_blocks=256, block_size=16, max_num_batched_tokens=512, max_model_len=4096)
    prompt = [(11 * i + i // 7) % 50 for i in range(3000)]
    request = engine.add(prompt)
    engine.step()
    engine.step()
    engine.abort(request)
    engine.scheduler.check()
    assert engine.cache.num_owned == 0
    assert request.sequences[0].finish_reason == "abort"
    other = engine.add([*prompt[:1024], 1, 2, 3], max_tokens=6)
    engine.drain()
    assert other.num_cached_tokens == 1024
    check_solo(other)


def test_abort_ends_a_request_exactly_once_wherever_it_stands() -> None:
    engine = ScriptedEngine(max_num_seqs=2)
    running, queued = engine.add([1, 2, 3], n=2), engine.add([4, 5], n=2)
    engine.step()
    for request in (running, queued, running):
        engine.abort(request)
        engine.scheduler.check()
    assert [s.finish_reason for r in (running, queued) for s in r.sequences] == ["abort"] * 4
    assert not engine.scheduler.has_work
    assert engine.cache.num_owned == 0


def test_n_shares_the_prompt_and_copies_only_the_partial_block() -> None:
    engine = ScriptedEngine(num_blocks=16, block_size=4)
    request = engine.add([1, 2, 3, 4, 5, 6], max_tokens=5, n=3)
    engine.step()
    assert engine.cache.num_owned == 2  # the prompt's two blocks, once
    assert [s.status for s in request.sequences] == [Status.RUNNING] * 3
    plan = engine.step()
    assert plan is not None
    assert len(plan.copies) == 2  # the last owner writes in place
    assert engine.cache.num_owned == 4
    engine.drain()
    assert engine.runner.num_computed_tokens == 6 + 3 * 4
    check_solo(request)
    outputs = [s.output_token_ids for s in request.sequences]
    assert outputs[0] != outputs[1] != outputs[2]


def test_n_on_a_block_boundary_needs_no_copy() -> None:
    engine = ScriptedEngine(num_blocks=16, block_size=4)
    request = engine.add([1, 2, 3, 4], max_tokens=3, n=2)
    engine.drain()
    assert sum(len(plan.copies) for plan in engine.plans) == 0
    check_solo(request)


def test_n_in_a_pool_too_small_for_all_at_once() -> None:
    engine = ScriptedEngine(num_blocks=5, block_size=4, watermark_blocks=0)
    request = engine.add([1, 2, 3, 4, 5], max_tokens=12, n=4)
    engine.drain()
    assert request.num_preemptions > 0
    check_solo(request)


def test_n_above_the_running_limit_is_refused() -> None:
    engine = ScriptedEngine(max_num_seqs=4)
    with pytest.raises(RequestError, match="n=5 sequences can never run at once; the limit is 4"):
        engine.add([1], n=5)


def test_n_with_first_token_at_the_limit() -> None:
    engine = ScriptedEngine()
    request = engine.add([1, 2, 3, 4, 5], max_tokens=1, n=3)
    engine.drain()
    assert [s.finish_reason for s in request.sequences] == ["length"] * 3
    check_solo(request)


@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize("budget", [7, 16, 64])
def test_same_answer_whatever_the_chunks_and_blocks(block_size: int, budget: int) -> None:
    engine = ScriptedEngine(
        num_blocks=4096 // block_size, block_size=block_size, max_num_batched_tokens=budget
    )
    requests = [engine.add([(i * j) % 50 for j in range(3 + 11 * i)], max_tokens=9) for i in range(8)]
    engine.drain()
    for request in requests:
        check_solo(request)


def test_finished_request_leaves_nothing_behind() -> None:
    engine = ScriptedEngine()
    for i in range(5):
        engine.add([i] * (4 * i + 1), n=1 + i % 2)
    engine.drain()
    cache = engine.cache
    assert cache.num_owned == 0
    assert cache.num_free + cache.num_cached == cache.num_blocks


def test_a_blocked_queue_is_not_matched_again_until_something_is_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = ScriptedEngine(num_blocks=16, block_size=4, watermark_blocks=0)
    engine.add([1] * 8, max_tokens=30)
    engine.step()
    for i in range(6):
        engine.add([2, i] * 30, max_tokens=1)
    calls = []
    match = engine.cache.match_prefix
    monkeypatch.setattr(engine.cache, "match_prefix", lambda *a: calls.append(a) or match(*a))
    for _ in range(20):
        engine.step()
    assert len(calls) == 5  # the head and the four behind it that may overtake, once each
    engine.drain()
    for request in engine.requests:
        check_solo(request)
