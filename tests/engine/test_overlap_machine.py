"""Random lives of requests while steps are under way: what must always hold, and the answers; then many."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence as Seq
from typing import Any

from helpers.core import Delayed, answer, letters, make_engine, run
from helpers.engine import VOCAB_SIZE
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.cache.manager import KVCacheManager
from octavo.config import EngineConfig
from octavo.engine.core import Engine
from octavo.engine.request import Request, Sequence, Status
from octavo.engine.sampler import SamplerOutput
from octavo.engine.schedule import Schedule
from octavo.engine.scheduler import Scheduler
from octavo.errors import CapacityError, RequestError
from octavo.sampling_params import SamplingParams

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=20)


class OverlapMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(2, 14),
        block_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(1, 12),
        max_model_len=st.integers(4, 30),
        run_ahead=st.integers(1, 4),
        num_hashes=st.sampled_from([1, 1000]),
    )
    def start(self, num_hashes: int, run_ahead: int, **limits: int) -> None:
        self.limits = limits
        self.engine = make_engine(
            overlap=True, run_ahead=run_ahead, hash_fn=lambda *key: hash(key) % num_hashes, **limits
        )
        self.requests: list[Request] = []
        self.ended: dict[str, Any] = {}

    @rule(
        prompt=prompts,
        max_tokens=st.none() | st.integers(1, 12),
        n=st.integers(1, 3),
        priority=st.integers(-1, 1),
        salt=st.sampled_from(["", "x"]),
        seed=st.integers(0, 3),
        stop=st.sampled_from(["", "ids", "text", "eos"]),
        options=st.sampled_from([{}, {"logprobs": 1}, {"repetition_penalty": 1.5}, {"min_tokens": 3}]),
        stream=st.booleans(),
    )
    def arrive(
        self,
        prompt: list[int],
        max_tokens: int | None,
        n: int,
        priority: int,
        salt: str,
        seed: int,
        stop: str,
        options: dict[str, Any],
        stream: bool,
    ) -> None:
        engine = self.engine
        tokens = answer(prompt, 6, seed)
        params = SamplingParams(
            n=n,
            max_tokens=max_tokens,
            seed=seed,
            ignore_eos=stop != "eos",
            stop_token_ids=tokens[2:4] if stop == "ids" else (),
            stop=letters(tokens[3:5]) if stop == "text" else (),
            **(options if max_tokens is None or max_tokens >= 3 else {}),
        )
        try:
            request = engine.add_request(prompt, params, priority=priority, cache_salt=salt, stream=stream)
        except (RequestError, CapacityError):
            assert (
                len(prompt) >= engine.scheduler.max_model_len
                or len(prompt) > engine.scheduler.num_cacheable_tokens
                or n > engine.scheduler.max_num_rows
            )
        else:
            self.requests.append(request)

    @precondition(lambda self: self.engine.has_work)
    @rule()
    def step(self) -> None:
        before = self.engine.stats().num_steps
        self.engine.step()
        assert self.engine.stats().num_steps == before + 1, "work is left, but no step was taken"

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.engine.abort(data.draw(st.sampled_from(self.requests)).request_id)

    @rule()
    def reset_prefix_cache(self) -> None:
        self.engine.cache.reset_prefix_cache()

    @invariant()
    def everything_holds(self) -> None:
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        engine.scheduler.check()
        for request in self.requests:
            assert (request.output is not None) == request.is_finished
            assert (request.request_id in engine.requests) == (request.output is None)
            if request.output is not None:
                assert self.ended.setdefault(request.request_id, request.output) is request.output
        # What the steps under way are to draw is what their sequences count on.
        pending: dict[Sequence, int] = {}
        for step in engine._under_way:
            for seq in step.plan.sampled:
                pending[seq] = pending.get(seq, 0) + 1
        for seq in engine.scheduler.running:
            members = [seq] if seq.request.is_forked else seq.request.sequences
            assert all(member.num_pending == pending.get(member, 0) for member in members)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(5000):
            if not self.engine.has_work:
                break
            self.engine.step()
        assert not self.engine.has_work
        assert self.engine.cache.num_owned == 0
        assert not self.engine.requests
        assert not self.engine.output._texts
        for request in self.requests:
            self.check_answer(request)

    def check_answer(self, request: Request) -> None:
        """What an engine says that does one step after the other, for this request alone."""
        alone = run(make_engine(**self.limits), request.prompt_token_ids, request.params).output
        assert alone is not None
        assert request.output is not None
        for found, expected in zip(request.output.outputs, alone.outputs, strict=True):
            assert found.finish_reason is not None
            if found.finish_reason == "abort":
                assert found.token_ids == expected.token_ids[: len(found.token_ids)]
            else:
                assert found == expected
        if request.stream:
            for completion in request.output.outputs:
                mine = [chunk for chunk in request.chunks if chunk.index == completion.index]
                assert [t for chunk in mine for t in chunk.token_ids] == completion.token_ids
                assert "".join(chunk.text for chunk in mine) == completion.text
                assert [chunk.finish_reason for chunk in mine][-1] == completion.finish_reason


TestOverlap = OverlapMachine.TestCase
TestOverlap.settings = settings(
    max_examples=int(os.environ.get("OCTAVO_FUZZ_EXAMPLES", "150")),
    stateful_step_count=40,
    deadline=None,
)


# Ten thousand requests


class FoldingRunner:
    """A device whose slots hold one number: its token's prefix folded together. Cheap, and as strict."""

    def __init__(self, cache: KVCacheManager) -> None:
        self.cache = cache
        self.slots: dict[int, int] = {}
        self.last_token_ids: dict[int, int] = {}
        self.under_way: list[Delayed] = []

    def launch(self, plan: Schedule) -> Delayed:
        size, slots = self.cache.block_size, self.slots
        for source, destination in plan.copies:
            for offset in range(size):
                slots[destination * size + offset] = slots.get(source * size + offset, 0)
        states = []
        for seq, num_new in zip(plan.sequences, plan.num_new_tokens, strict=True):
            table, start = self.cache.block_table(seq.seq_id), seq.num_computed_tokens
            known = seq.token_ids[start : start + num_new] or [self.last_token_ids[seq.row]]
            assert len(known) == num_new
            before = start - 1
            state = slots[table[before // size] * size + before % size] if start else 17
            for i, token in enumerate(known, start):
                state = fold(state, token)
                slots[table[i // size] * size + i % size] = state
            states.append(state)
        token_ids = []
        for seq, row in zip(plan.sampled, plan.sampled_rows, strict=True):
            token_ids.append(drawn(states[row], seq.seed))
            self.last_token_ids[seq.row] = token_ids[-1]
        step = Delayed(self, SamplerOutput(token_ids, [None] * len(token_ids), {}), None)  # type: ignore[arg-type]  # keeps `under_way`, too
        self.under_way.append(step)
        return step

    def close(self) -> None:
        pass


def fold(state: int, token: int) -> int:
    return (state * 1_000_003 + token * 31 + 7) % 2_147_483_647


def drawn(state: int, seed: int) -> int:
    return (state ^ (seed * 7919)) % VOCAB_SIZE


def expected_tokens(prompt: Seq[int], seq: Sequence) -> list[int]:
    state = 17
    for token in prompt:
        state = fold(state, token)
    tokens: list[int] = []
    while len(prompt) + len(tokens) < seq.max_total_tokens:
        tokens.append(drawn(state, seq.seed))
        if tokens[-1] in seq.stop_ids:
            break
        state = fold(state, tokens[-1])
    return tokens


def test_ten_thousand_requests_with_aborts_and_preemption() -> None:
    rng = random.Random(0)
    cache = KVCacheManager(100, 4)
    scheduler = Scheduler(cache, max_num_seqs=24, max_num_batched_tokens=96, max_model_len=120)
    engine = Engine(
        EngineConfig(model="folding", overlap=True),
        scheduler,
        FoldingRunner(cache),  # type: ignore[arg-type]  # the runner's interface without a model
        vocab_size=VOCAB_SIZE,
        eos_token_ids=[VOCAB_SIZE - 1],
    )
    shared = [[rng.randrange(VOCAB_SIZE) for _ in range(40)] for _ in range(8)]
    requests: list[Request] = []
    aborted: set[str] = set()
    deepest = 0
    while len(requests) < 10_000 or engine.has_work:
        for _ in range(min(rng.choice((0, 0, 1, 2, 8)), 10_000 - len(requests))):
            prompt = rng.choice(shared)[: rng.randrange(41)] + [rng.randrange(VOCAB_SIZE)] * rng.randint(1, 6)
            params = SamplingParams(
                n=rng.choice((1, 1, 1, 1, 3)),
                max_tokens=rng.randint(1, 40),
                seed=rng.randrange(100),
                stop_token_ids=[rng.randrange(VOCAB_SIZE)],
                presence_penalty=rng.choice((0.0,) * 9 + (1.0,)),
            )
            requests.append(engine.add_request(prompt, params, priority=rng.choice((0, 0, 1))))
        if engine.requests and rng.random() < 0.05:
            request_id = rng.choice(list(engine.requests))
            aborted.add(request_id)
            engine.abort(request_id)
        engine.step()
        deepest = max(deepest, len(engine._under_way) + 1)
        if engine._num_steps % 64 == 0:
            scheduler.check()
            if len(engine.scheduler.waiting) > 200:
                for _ in range(300):
                    engine.step()
    scheduler.check()
    stats = engine.stats()
    assert (stats.num_owned_blocks, stats.num_free_blocks + stats.num_cached_blocks) == (0, 100)
    assert not engine.requests
    assert not engine._under_way
    assert deepest == 4
    assert stats.num_preemptions > 100
    assert stats.num_hit_tokens > 10_000
    assert len(aborted) > 100
    for request in requests:
        assert request.output is not None
        for seq in request.sequences:
            assert seq.status is Status.FINISHED
            expected = expected_tokens(request.prompt_token_ids, seq)
            if seq.finish_reason == "abort":
                assert request.request_id in aborted
                expected = expected[: len(seq.output_token_ids)]
            assert seq.output_token_ids == expected, seq
