"""Random lives of requests against what must always hold, with hashes that collide."""

from __future__ import annotations

import os

from helpers.engine import ScriptedEngine, solo_output
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.engine.request import Request, Status
from octavo.errors import CapacityError, RequestError

# A few tokens and lengths around block boundaries: prompts share prefixes often.
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=24)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(2, 12),
        block_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(1, 12),
        max_model_len=st.integers(4, 30),
        prefix_caching=st.booleans(),
        num_hashes=st.sampled_from([1, 2, 1000]),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        budget: int,
        max_model_len: int,
        prefix_caching: bool,
        num_hashes: int,
    ) -> None:
        self.engine = ScriptedEngine(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            enable_prefix_caching=prefix_caching,
            hash_fn=lambda *key: hash(key) % num_hashes,
        )
        self.ended: dict[tuple[str, int], str] = {}

    @rule(
        prompt=prompts,
        max_tokens=st.none() | st.integers(1, 12),
        n=st.integers(1, 3),
        priority=st.integers(-1, 1),
        salt=st.sampled_from(["", "x"]),
        stops=st.sampled_from([(), (3, 7, 11), tuple(range(0, 50, 3))]),
    )
    def arrive(
        self,
        prompt: list[int],
        max_tokens: int | None,
        n: int,
        priority: int,
        salt: str,
        stops: tuple[int, ...],
    ) -> None:
        engine = self.engine
        before = (len(engine.scheduler.waiting), engine.cache.num_owned)
        fits = (
            len(prompt) < engine.max_model_len
            and len(prompt) <= engine.num_blocks * engine.block_size
            and n <= engine.scheduler.max_num_rows
        )
        try:
            engine.add(prompt, max_tokens, n=n, priority=priority, salt=salt, stop_ids=stops)
        except (RequestError, CapacityError):
            assert not fits
            assert before == (len(engine.scheduler.waiting), engine.cache.num_owned)
        else:
            assert fits

    @precondition(lambda self: self.engine.scheduler.has_work)
    @rule()
    def step(self) -> None:
        assert self.engine.step() is not None, "work is left, but nothing was scheduled"

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.engine.abort(data.draw(st.sampled_from(self.engine.requests)))

    @precondition(lambda self: self.engine.scheduler.running)
    @rule(data=st.data())
    def stop_string(self, data: st.DataObject) -> None:
        """The text ended it, as the output processor decides."""
        seq = data.draw(st.sampled_from(self.engine.scheduler.running))
        if seq.request.is_forked:
            self.engine.scheduler.finish(seq, "stop", "text")

    @rule()
    def reset_prefix_cache(self) -> None:
        self.engine.cache.reset_prefix_cache()

    @invariant()
    def everything_holds(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.scheduler.check()
        for request in self.engine.requests:
            for seq in request.sequences:
                key = (request.request_id, seq.index)
                assert (seq.finish_reason is None) == (seq.status is not Status.FINISHED), seq
                if seq.finish_reason is not None:
                    assert self.ended.setdefault(key, seq.finish_reason) == seq.finish_reason, "ended twice"

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.drain(max_steps=5000)
        assert self.engine.cache.num_owned == 0
        for request in self.engine.requests:
            check_answer(self.engine, request)


def check_answer(engine: ScriptedEngine, request: Request) -> None:
    """Each sequence is a prefix of its solo answer, and the whole of it unless something cut it short."""
    for seq in request.sequences:
        assert seq.status is Status.FINISHED
        room = seq.max_total_tokens - seq.num_prompt_tokens
        expected = solo_output(request.prompt_token_ids, room, seq.seed, seq.stop_ids)
        output = seq.output_token_ids if seq.token_ids else []
        assert output == expected[: len(output)], seq
        if seq.finish_reason == "length" or (seq.finish_reason == "stop" and seq.stop_reason != "text"):
            assert output == expected, seq


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=int(os.environ.get("OCTAVO_FUZZ_EXAMPLES", "150")),
    stateful_step_count=40,
    deadline=None,
)
