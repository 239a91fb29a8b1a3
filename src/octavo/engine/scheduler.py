"""Who runs next, and how much of it: continuous batching in one token budget.

Each step: first one token for every decoding sequence, then prompt chunks of sequences already running, then
new ones, all in order of (priority, arrival). Plain integers, no clock, no randomness, no torch: the same
calls give the same schedules.

Room in the KV cache. A sequence is admitted when all blocks of its prompt fit at once, so a prompt never
waits half computed. Decoding grows block by block; when no block is left the newest running sequence is
preempted: its blocks are released (their contents stay findable in the prefix cache as long as nobody needs
the space), it returns to the queue in its old place, and recomputes what it lost. A watermark of free blocks
keeps new sequences from being admitted only to be preempted at once.

Steps under way. A step may be scheduled while the ones before it still run: `advance` says that a step was
launched, `commit` what it drew. In between its sequences count tokens whose ids nobody here knows, and
everything is decided on lengths. Whatever a device does in the order of its launches needs no more care than
that: blocks of a sequence that turns out to have ended are given away at once, for the step that overwrites
them runs after the ones that still used them. Three things do wait for ids: the prefix index, which is told
of a block once all its tokens are known; sequences that say so (`needs_last_token`); and preemption, which
takes only from sequences that are not under way (`may_preempt`).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from operator import attrgetter
from typing import Final

from octavo.cache.manager import KVCacheManager
from octavo.engine.request import Request, Sequence, Status
from octavo.engine.schedule import Schedule
from octavo.errors import CapacityError, RequestError
from octavo.outputs import FinishReason

MAX_LOOK_PAST: Final = 4
"""How many waiting sequences behind a head that does not fit are tried."""
MAX_BYPASSES: Final = 16
"""How often a waiting head may be overtaken; after that everyone behind it waits, so it cannot starve."""

_by_key = attrgetter("key")


class Scheduler:
    """Owns every unfinished sequence: a sorted waiting queue and a sorted list of running ones.

    At most `min(max_num_seqs, max_num_batched_tokens)` sequences run, so that every decoding one gets its
    token in every step. Rows `0 .. max_num_rows - 1` index the runner's per-row arrays.
    """

    def __init__(
        self,
        cache: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_prefill_share: float = 0.5,
        watermark_blocks: int | None = None,
    ) -> None:
        self.cache = cache
        self.block_size = cache.block_size
        self.max_num_rows = min(max_num_seqs, max_num_batched_tokens)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.max_prefill_tokens = max(1, int(max_prefill_share * max_num_batched_tokens))
        self.watermark_blocks = (
            max(1, cache.num_blocks // 100) if watermark_blocks is None else watermark_blocks
        )
        self.num_cacheable_tokens = cache.num_blocks * cache.block_size
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        #: Running sequences that cannot take a step before the ids of the last one are known.
        self.num_needing_ids = 0
        self._num_releases = 0
        self._free_rows = list(range(self.max_num_rows - 1, -1, -1))

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    # Arriving and leaving

    def check_fits(self, num_prompt_tokens: int, n: int) -> None:
        """Refuse what can never run: RequestError for a limit of the model, CapacityError for the cache's."""
        if num_prompt_tokens >= self.max_model_len:
            raise RequestError(
                f"prompt has {num_prompt_tokens} tokens; max_model_len={self.max_model_len} leaves room for "
                f"at most {self.max_model_len - 1} and one new token; shorten it, or raise "
                "max_model_len where the model allows more"
            )
        if num_prompt_tokens > self.num_cacheable_tokens:
            raise CapacityError(
                f"prompt has {num_prompt_tokens} tokens; the KV cache holds {self.num_cacheable_tokens} "
                f"({self.cache.num_blocks} blocks of {self.block_size}); shorten the prompt or raise "
                f"num_blocks or kv_cache_memory"
            )
        if n > self.max_num_rows:
            raise RequestError(
                f"n={n} sequences can never run at once; the limit is {self.max_num_rows} "
                f"(the lower of max_num_seqs and max_num_batched_tokens); lower n or raise the limit"
            )

    def add(self, request: Request) -> None:
        """Queue a request. What can never fit is refused here, so it blocks nobody."""
        num_prompt_tokens = len(request.prompt_token_ids)
        self.check_fits(num_prompt_tokens, request.params.n)
        # The last token is sampled but never written, hence one more than the cache holds.
        longest = min(self.max_model_len, self.num_cacheable_tokens + 1)
        max_tokens = request.params.max_tokens
        if max_tokens is not None:
            longest = min(longest, num_prompt_tokens + max_tokens)
        for seq in request.sequences:
            seq.max_total_tokens = longest
        insort(self.waiting, request.sequences[0], key=_by_key)

    def finish(self, seq: Sequence, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """End a sequence wherever it stands and release what it holds. Ending it twice is a no-op.

        Before the fork a leader and its followers end together: a follower alone has nobody to fork from.
        """
        if seq.status is Status.FINISHED:
            return
        request = seq.request
        if seq.status is Status.RUNNING:
            self._release(seq)
            self.running.remove(seq)
        elif seq.index == 0 or request.is_forked:  # before the fork, followers are not queued
            self.waiting.remove(seq)
        seq.status = Status.FINISHED
        seq.finish_reason = reason
        seq.stop_reason = stop_reason

    def reset(self, requests: Iterable[Request]) -> None:
        """End everything at once, whatever state an interrupted call left behind.

        `requests` are all that were added and may be unfinished: a sequence on its way from one queue to the
        other is in neither.
        """
        for request in requests:
            for seq in request.sequences:
                seq.status = Status.FINISHED
                seq.row = -1
        self.waiting.clear()
        self.running.clear()
        self.cache.close_all()
        self._num_releases += 1
        self.num_needing_ids = 0
        self._free_rows = list(range(self.max_num_rows - 1, -1, -1))

    # One step: schedule, advance once it is launched, commit once its tokens are known

    def schedule(self) -> Schedule | None:
        """Decide the next step and give its sequences their blocks; None when there is nothing to do."""
        plan = Schedule()
        self._schedule_decodes(plan)
        plan.num_tokens = plan.num_decode_rows = len(plan.sequences)
        budget = self.max_num_batched_tokens - plan.num_tokens
        if plan.num_decode_rows:
            budget = min(budget, self.max_prefill_tokens)
        budget = self._schedule_chunks(plan, budget)
        if not plan.preempted:
            self._admit(plan, budget)
        return plan if plan.sequences else None

    def may_preempt(self) -> bool:
        """Whether the next `schedule` might have to preempt; not to be called then with a step under way.

        Each decoding sequence takes one block at most: a new one, or its own copy of a shared one.
        """
        available = self.cache.num_available
        if available >= len(self.running):
            return False
        return available < sum(
            seq.num_tokens > seq.num_covered_tokens or seq.is_tail_shared for seq in self.running
        )

    def advance(self, plan: Schedule) -> None:
        """The step was launched: its tokens count as computed, and those it draws as there.

        Blocks that became full of known tokens are made findable, and followers fork.
        """
        block_size = self.block_size
        for seq, num_new in zip(plan.sequences, plan.num_new_tokens, strict=True):
            before = seq.num_computed_tokens
            after = seq.num_computed_tokens = before + num_new
            if after // block_size != before // block_size:
                self.cache.commit(seq.seq_id, seq.token_ids, min(after, len(seq.token_ids)))
        for leader in plan.forking:
            self._fork_followers(leader)
        for seq in plan.sampled:
            seq.num_pending += 1

    def commit(self, plan: Schedule, token_ids: list[int]) -> list[int]:
        """Record what an advanced step drew: `token_ids[j]` for `plan.sampled[j]`; negative = no token.

        Steps are committed in the order in which they were advanced. Sequences that reached a stop token or
        their length end. Returns the samples that count, in order: those of sequences that had not ended
        before, be it in a step that ran ahead of this one.
        """
        block_size = self.block_size
        finished = Status.FINISHED
        counting = []
        for j, (seq, token_id) in enumerate(zip(plan.sampled, token_ids, strict=True)):
            seq.num_pending -= 1
            if seq.status is finished:
                continue
            counting.append(j)
            if token_id < 0:
                continue
            tokens = seq.token_ids
            tokens.append(token_id)
            num_known = len(tokens)
            # The next step may have computed this token before its id was known.
            if num_known % block_size == 0 and num_known <= seq.num_computed_tokens:
                self.cache.commit(seq.seq_id, tokens, num_known)
            if token_id in seq.stop_ids:
                self.finish(seq, "stop", token_id if token_id in seq.params.stop_token_ids else None)
            elif seq.grammar is not None and seq.grammar.accept(token_id):
                self.finish(seq, "stop")
            elif num_known >= seq.max_total_tokens:
                self.finish(seq, "length")
        return counting

    # Parts of a step

    def _schedule_decodes(self, plan: Schedule) -> None:
        running = self.running
        sequences = plan.sequences
        has_forks = False
        i = 0
        while i < len(running):  # preemption pops from the end, never from what was passed already
            seq = running[i]
            num_pending = seq.num_pending
            num_tokens = len(seq.token_ids) + num_pending
            # Of one whose last token is under way nothing more is to be drawn.
            if (
                seq.num_computed_tokens == num_tokens - 1
                and num_tokens < seq.max_total_tokens
                and not (num_pending and seq.needs_last_token)
            ):
                if num_tokens > seq.num_covered_tokens and not self._grow(seq, num_tokens, plan):
                    break
                if seq.is_tail_shared and not self._unshare_tail(seq, plan):
                    break
                sequences.append(seq)
                has_forks = has_forks or seq.forks
            i += 1
        plan.num_new_tokens = [1] * len(sequences)
        if has_forks:
            for row, seq in enumerate(sequences):
                self._sample_from(plan, seq, row)
        else:
            plan.sampled = sequences.copy()
            plan.sampled_rows = list(range(len(sequences)))

    def _schedule_chunks(self, plan: Schedule, budget: int) -> int:
        for seq in self.running:
            if budget <= 0:
                break
            if seq.num_computed_tokens < seq.num_tokens - 1:
                budget -= self._add_chunk(plan, seq, budget)
        return budget

    def _admit(self, plan: Schedule, budget: int) -> None:
        waiting = self.waiting
        position = 0
        while budget > 0 and position < len(waiting) and self._free_rows:
            seq = waiting[position]
            if self._place(seq, plan):
                del waiting[position]
                if position:
                    waiting[0].num_bypassed += 1
                budget -= self._add_chunk(plan, seq, budget)
            else:
                position += 1
            if position > MAX_LOOK_PAST or (position and waiting[0].num_bypassed >= MAX_BYPASSES):
                break

    def _place(self, seq: Sequence, plan: Schedule) -> bool:
        """Give a waiting sequence rows and all blocks of its tokens; False changes nothing."""
        request, cache = seq.request, self.cache
        num_rows = request.num_waiting_rows
        if seq.blocked_at == self._num_releases or num_rows > len(self._free_rows):
            return False
        num_tokens = seq.num_tokens
        hit = None
        num_needed = -(-num_tokens // self.block_size)
        if not _needs_prompt_logits(request):
            hit = cache.match_prefix(seq.token_ids, request.cache_salt)
            num_needed -= len(hit.block_ids)
        watermark = self.watermark_blocks if self.running else 0
        if not cache.can_allocate(num_needed + watermark, hit.block_ids if hit else ()):
            seq.blocked_at = self._num_releases
            return False
        cache.open(seq.seq_id, hit, request.cache_salt)
        has_grown = cache.grow(seq.seq_id, num_tokens)
        assert has_grown, "can_allocate promised these blocks"
        rows = [self._free_rows.pop() for _ in range(num_rows)]
        for member, row in zip([seq] if request.is_forked else request.sequences, rows, strict=True):
            member.row = row
        seq.status = Status.RUNNING
        if seq.needs_last_token:
            self.num_needing_ids += num_rows
        seq.num_computed_tokens = hit.num_tokens if hit else 0
        seq.num_covered_tokens = -(-num_tokens // self.block_size) * self.block_size
        seq.num_synced_blocks = 0
        seq.num_bypassed = 0
        insort(self.running, seq, key=_by_key)
        plan.admitted.append(seq)
        if hit:
            plan.num_hit_tokens += hit.num_tokens
            if num_tokens == seq.num_prompt_tokens and not request.num_preemptions:
                request.num_cached_tokens = hit.num_tokens
        return True

    def _add_chunk(self, plan: Schedule, seq: Sequence, budget: int) -> int:
        num_left = seq.num_tokens - seq.num_computed_tokens
        num_new = min(num_left, budget)
        plan.sequences.append(seq)
        plan.num_new_tokens.append(num_new)
        plan.num_tokens += num_new
        if num_new == num_left:
            self._sample_from(plan, seq, len(plan.sequences) - 1)
        return num_new

    def _sample_from(self, plan: Schedule, seq: Sequence, row: int) -> None:
        request = seq.request
        if request.is_forked:
            plan.sampled.append(seq)
            plan.sampled_rows.append(row)
        else:
            plan.forking.append(seq)
            plan.sampled += request.sequences
            plan.sampled_rows += [row] * len(request.sequences)

    def _fork_followers(self, leader: Sequence) -> None:
        """The prompt is computed: followers get the leader's blocks; the partly filled last one is shared."""
        request = leader.request
        request.is_forked = True
        leader.forks = False
        leader.is_tail_shared = leader.num_computed_tokens % self.block_size != 0
        for follower in request.sequences[1:]:
            self.cache.fork(leader.seq_id, follower.seq_id)
            follower.num_computed_tokens = leader.num_computed_tokens
            follower.num_covered_tokens = leader.num_covered_tokens
            follower.num_synced_blocks = 0
            follower.is_tail_shared = leader.is_tail_shared
            follower.status = Status.RUNNING
            insort(self.running, follower, key=_by_key)

    def _grow(self, seq: Sequence, num_tokens: int, plan: Schedule) -> bool:
        """Blocks for `num_tokens`, preempting the newest while they are lacking; False if that was `seq`."""
        while not self.cache.grow(seq.seq_id, num_tokens):
            if self._preempt_newest(plan) is seq:
                return False
        seq.num_covered_tokens = -(-num_tokens // self.block_size) * self.block_size
        return True

    def _unshare_tail(self, seq: Sequence, plan: Schedule) -> bool:
        """Copy on write: give `seq` a block of its own to write to, if a sibling still shares it."""
        while (copies := self.cache.prepare_write(seq.seq_id, seq.num_computed_tokens, 1)) is None:
            if self._preempt_newest(plan) is seq:
                return False
        seq.is_tail_shared = False
        if copies:
            plan.copies += copies
            seq.num_synced_blocks = 0
        return True

    def _preempt_newest(self, plan: Schedule) -> Sequence:
        seq = self.running.pop()
        assert not seq.num_pending, f"{seq} is preempted while a step of it is under way"
        self._release(seq)
        seq.status = Status.WAITING
        seq.num_computed_tokens = seq.num_covered_tokens = 0
        seq.is_tail_shared = False
        seq.request.num_preemptions += 1
        self.num_preemptions += 1
        insort(self.waiting, seq, key=_by_key)
        plan.preempted.append(seq)
        return seq

    def _release(self, seq: Sequence) -> None:
        """Give back the blocks and rows of a running sequence."""
        self.cache.close(seq.seq_id)
        self._num_releases += 1
        members = [seq] if seq.request.is_forked else seq.request.sequences
        if seq.needs_last_token:
            self.num_needing_ids -= len(members)
        for member in members:
            self._free_rows.append(member.row)
            member.row = -1

    def check(self) -> None:
        """Raise AssertionError naming a broken invariant of docs/architecture.md; for tests, scans it all."""
        self.cache.check()
        assert self.running == sorted(self.running, key=_by_key), "running is not sorted"
        assert self.waiting == sorted(self.waiting, key=_by_key), "waiting is not sorted"
        rows = list(self._free_rows)
        for seq in self.running:
            assert seq.status is Status.RUNNING, f"{seq} is in running"
            assert seq.num_computed_tokens < seq.num_tokens <= seq.max_total_tokens, f"{seq}: wrong length"
            assert seq.num_pending >= 0, f"{seq} had more tokens collected than drawn"
            table = self.cache.block_table(seq.seq_id)
            assert len(table) * self.block_size == seq.num_covered_tokens, f"{seq} covers {len(table)} blocks"
            members = [seq] if seq.request.is_forked else seq.request.sequences
            rows += [member.row for member in members]
        for seq in self.waiting:
            assert seq.status is Status.WAITING, f"{seq} is in waiting"
            assert seq.row == -1, f"{seq} waits and holds row {seq.row}"
            assert not seq.num_pending, f"{seq} waits while a step of it is under way"
        assert self.num_needing_ids == sum(
            1 if seq.request.is_forked else seq.params.n for seq in self.running if seq.needs_last_token
        ), f"{self.num_needing_ids} sequences are said to need ids"
        assert sorted(rows) == list(range(self.max_num_rows)), "a row is lost or used twice"
        if not self.running:
            assert self.cache.num_owned == 0, f"idle, but {self.cache.num_owned} blocks are owned"


def _needs_prompt_logits(request: Request) -> bool:
    """Prompt log probabilities need every prompt position computed, so such a prompt takes no prefix hit."""
    if request.params.prompt_logprobs is None:
        return False
    collected = request.prompt_logprobs
    return collected is None or len(collected) < len(request.prompt_token_ids)
