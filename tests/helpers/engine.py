"""A scheduler with a scripted model: no torch, and a cache that remembers what was written where."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from octavo.cache.manager import KVCacheManager
from octavo.engine.request import Request, Sequence
from octavo.engine.schedule import Schedule
from octavo.engine.scheduler import Scheduler
from octavo.sampling_params import SamplingParams

VOCAB_SIZE = 50


def next_token(prefix: Seq[int], seed: int = 0) -> int:
    """What the scripted model says after `prefix`: any change of any earlier token changes it."""
    state = seed * 7919 + 17
    for token in prefix:
        state = (state * 1_000_003 + token * 31 + 7) % 2_147_483_647
    return state % VOCAB_SIZE


def solo_output(
    prompt: Seq[int], num_tokens: int, seed: int = 0, stop_ids: frozenset[int] = frozenset()
) -> list[int]:
    """What a request must answer, whatever happens around it."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens, seed))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]


class ScriptedRunner:
    """Stands in for the model. A slot holds the whole prefix that its token's K/V depends on.

    Every step checks that each row finds exactly its own prefix at its slots, so a block given to two owners,
    a wrong hit or a forgotten copy is an assertion, not a wrong answer later. Like a device it keeps the last
    token of each row: a step may run before the host knows what the one before it drew.
    """

    def __init__(self, cache: KVCacheManager) -> None:
        self.cache = cache
        self.slots: dict[int, tuple[int, ...]] = {}
        self.last_token_ids: dict[int, int] = {}
        self.num_computed_tokens = 0

    def run(self, plan: Schedule) -> list[int]:
        size = self.cache.block_size
        for source, destination in plan.copies:
            for offset in range(size):
                self.slots[destination * size + offset] = self.slots.get(source * size + offset, ())
        written: set[int] = set()
        prefixes = []
        for seq, num_new in zip(plan.sequences, plan.num_new_tokens, strict=True):
            start = seq.num_computed_tokens
            prefixes.append(self._prefix(seq, num_new))
            for i in range(start, start + num_new):
                slot = self._slot(seq, i)
                assert slot not in written, f"slot {slot} is written twice in a step"
                written.add(slot)
                self.slots[slot] = prefixes[-1][: i + 1]
            self.num_computed_tokens += num_new
        for seq, prefix in zip(plan.sequences, prefixes, strict=True):
            for i in range(len(prefix)):
                held = self.slots.get(self._slot(seq, i))
                assert held == prefix[: i + 1], f"{seq}: token {i} finds {held}"
        tokens = []
        for seq, row in zip(plan.sampled, plan.sampled_rows, strict=True):
            assert len(prefixes[row]) == plan.sequences[row].num_tokens, "sampled from an unfinished row"
            tokens.append(next_token(prefixes[row], seq.seed))
            self.last_token_ids[seq.row] = tokens[-1]
        return tokens

    def _prefix(self, seq: Sequence, num_new: int) -> tuple[int, ...]:
        """All tokens up to the last new one, of which the host may not know the last."""
        start = seq.num_computed_tokens
        if start + num_new <= len(seq.token_ids):
            return tuple(seq.token_ids[: start + num_new])
        assert num_new == 1, f"{seq}: a prompt of tokens that are not known"
        return (*self.slots[self._slot(seq, start - 1)], self.last_token_ids[seq.row])

    def _slot(self, seq: Sequence, i: int) -> int:
        table = self.cache.block_table(seq.seq_id)
        return table[i // self.cache.block_size] * self.cache.block_size + i % self.cache.block_size


@dataclass
class ScriptedEngine:
    """schedule -> scripted run -> commit, with the invariants checked after every step."""

    num_blocks: int = 64
    block_size: int = 4
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 64
    max_model_len: int = 1024
    enable_prefix_caching: bool = True
    max_prefill_share: float = 0.5
    watermark_blocks: int | None = None
    hash_fn: Callable[..., int] | None = None
    requests: list[Request] = field(default_factory=list)
    plans: list[Schedule] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cache = KVCacheManager(
            self.num_blocks,
            self.block_size,
            enable_prefix_caching=self.enable_prefix_caching,
            hash_fn=self.hash_fn,
        )
        self.scheduler = Scheduler(
            self.cache,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            max_prefill_share=self.max_prefill_share,
            watermark_blocks=self.watermark_blocks,
        )
        self.runner = ScriptedRunner(self.cache)
        self._next_seq_id = 0

    def add(
        self,
        prompt: Seq[int],
        max_tokens: int | None = 4,
        *,
        n: int = 1,
        priority: int = 0,
        salt: str = "",
        stop_ids: Seq[int] = (),
    ) -> Request:
        arrival = len(self.requests)
        request = Request(
            f"r{arrival}",
            list(prompt),
            SamplingParams(n=n, max_tokens=max_tokens, stop_token_ids=list(stop_ids)),
            seeds=range(n),
            first_seq_id=self._next_seq_id,
            arrival=arrival,
            priority=priority,
            cache_salt=salt,
        )
        self.scheduler.add(request)
        self._next_seq_id += n
        self.requests.append(request)
        return request

    def abort(self, request: Request) -> None:
        for seq in request.sequences:
            self.scheduler.finish(seq, "abort")

    def step(self) -> Schedule | None:
        plan = self.scheduler.schedule()
        if plan is None:
            return None
        assert plan.num_tokens == sum(plan.num_new_tokens) <= self.max_num_batched_tokens
        assert not (plan.preempted and plan.admitted), "preempting and admitting in one step is thrash"
        token_ids = self.runner.run(plan)
        self.scheduler.advance(plan)
        self.scheduler.commit(plan, token_ids)
        self.scheduler.check()
        self.plans.append(plan)
        return plan

    def drain(self, max_steps: int = 10_000) -> int:
        """Step until nothing is left; returns the number of steps."""
        for num_steps in range(max_steps):
            if not self.scheduler.has_work:
                return num_steps
            assert self.step() is not None, "work is left, but nothing was scheduled"
        raise AssertionError(f"not idle after {max_steps} steps")
