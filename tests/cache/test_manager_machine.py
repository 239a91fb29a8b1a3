"""Random sequences against a model of what every slot holds.

The model plays the device: it writes to the slots what the engine would compute. The K and V of a token
depend on all tokens before it, so a slot holds (salt, tokens up to and including its own). A hit is right
when its blocks hold exactly that for the tokens asked for, and complete when it is as long as the dictionary
of committed prefixes says.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.cache.manager import KVCacheManager, PrefixHit

HASHES = {
    "default": None,
    "one": lambda parent, tokens: 0,
    "few": lambda parent, tokens: (parent + sum(tokens)) % 3,
}
# Few beginnings, so that sequences meet in the cache; then a tail of their own.
BEGINNINGS = ([0] * 9, [0, 1] * 5, [0, 0, 0, 1, 1, 1])
token_lists = st.builds(
    lambda text, num, tail: (text[:num] + tail) or [0],
    st.sampled_from(BEGINNINGS),
    st.integers(0, 10),
    st.lists(st.integers(0, 1), max_size=3),
)
salts = st.sampled_from(["", "a"])

Prefix = tuple[str, tuple[int, ...]]


@dataclass
class Running:
    salt: str
    tokens: list[int]
    num_computed: int = 0
    num_committed: int = 0
    is_findable: bool = True


class ManagerMachine(RuleBasedStateMachine):
    @initialize(
        num_slots=st.integers(12, 40),
        block_size=st.sampled_from([1, 2, 4]),
        hash_name=st.sampled_from(sorted(HASHES)),
    )
    def start(self, num_slots: int, block_size: int, hash_name: str) -> None:
        num_blocks = num_slots // block_size
        self.cache = KVCacheManager(num_blocks, block_size, hash_fn=HASHES[hash_name])
        self.block_size = block_size
        self.slots: list[list[Prefix | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.block_of: dict[Prefix, int] = {}
        self.running: dict[int, Running] = {}
        self.next_id = 0

    # What the device and the dictionary know

    def lose(self, block_ids: list[int]) -> None:
        """The cache took these blocks for new contents."""
        taken = set(block_ids)
        self.block_of = {key: block for key, block in self.block_of.items() if block not in taken}
        for block_id in taken:
            self.slots[block_id] = [None] * self.block_size

    def write(self, seq_id: int, first: int, tokens: list[int]) -> bool:
        """Write `tokens` at position `first`, as the engine does: False when no block was free for a copy."""
        seq = self.running[seq_id]
        table = self.cache.block_table(seq_id)
        counts = self.counts()
        copies = self.cache.prepare_write(seq_id, first, len(tokens))
        if copies is None:
            assert self.counts() == counts
            return False
        old = [(src, list(self.slots[src])) for src, _ in copies]
        self.lose([dst for _, dst in copies])
        for (_, contents), (_, dst) in zip(old, copies, strict=True):
            self.slots[dst] = contents
        text = seq.tokens[:first]
        for i, token in enumerate(tokens, start=first):
            text.append(token)
            block_id = table[i // self.block_size]
            assert block_id not in self.block_of.values(), "a findable block is written"
            for other_id in self.running:
                shared = block_id in self.cache.block_table(other_id)
                assert other_id == seq_id or not shared, "a shared block is written"
            self.slots[block_id][i % self.block_size] = (seq.salt, tuple(text))
        return True

    def counts(self) -> tuple[int, ...]:
        return (self.cache.num_free, self.cache.num_cached, self.cache.num_owned, self.cache.num_evictions)

    def match(self, tokens: list[int], salt: str, limit: int | None = None) -> PrefixHit:
        counts = self.counts()
        hit = self.cache.match_prefix(tokens, salt, limit)
        assert self.counts() == counts
        bound = len(tokens) - 1 if limit is None else min(limit, len(tokens) - 1)
        expected = []
        while (end := (len(expected) + 1) * self.block_size) <= bound:
            block_id = self.block_of.get((salt, tuple(tokens[:end])))
            if block_id is None:
                break
            expected.append(block_id)
        assert list(hit.block_ids) == expected
        assert hit.num_tokens == len(expected) * self.block_size
        self.assert_holds(hit.block_ids, tokens[: hit.num_tokens], salt)
        return hit

    def assert_holds(self, block_ids, tokens: list[int], salt: str) -> None:
        for i in range(len(tokens)):
            held = self.slots[block_ids[i // self.block_size]][i % self.block_size]
            assert held == (salt, tuple(tokens[: i + 1])), f"token {i} is not in its slot"

    def draw_running(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.running)))

    def grow(self, seq_id: int, num_tokens: int) -> bool:
        counts, table = self.counts(), list(self.cache.block_table(seq_id))
        num_new = max(0, -(-num_tokens // self.block_size) - len(table))
        fits = self.cache.can_allocate(num_new)
        assert fits == (num_new <= self.cache.num_available)
        assert self.cache.grow(seq_id, num_tokens) is fits
        if not fits:
            assert (self.counts(), self.cache.block_table(seq_id)) == (counts, table)
            return False
        assert self.cache.block_table(seq_id)[: len(table)] == table
        new = self.cache.block_table(seq_id)[len(table) :]
        assert len(new) == num_new
        self.lose(new)
        return True

    # Rules

    @rule(tokens=token_lists, salt=salts, num_now=st.integers(0, 12))
    def open(self, tokens: list[int], salt: str, num_now: int) -> None:
        hit = self.match(tokens, salt)
        num_new = -(-len(tokens) // self.block_size) - len(hit.block_ids)
        fits = self.cache.can_allocate(num_new, hit.block_ids)
        seq_id, self.next_id = self.next_id, self.next_id + 1
        self.cache.open(seq_id, hit, salt)
        self.running[seq_id] = Running(salt, list(tokens), hit.num_tokens, hit.num_tokens)
        assert self.grow(seq_id, len(tokens)) is fits
        if fits:
            self.compute(seq_id, num_now)
            self.commit(seq_id)
        else:
            self.cache.close(seq_id)
            del self.running[seq_id]

    def compute(self, seq_id: int, num: int) -> None:
        seq = self.running[seq_id]
        chunk = seq.tokens[seq.num_computed : seq.num_computed + num]
        if self.write(seq_id, seq.num_computed, chunk):
            seq.num_computed += len(chunk)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num=st.integers(1, 6), is_committed=st.booleans())
    def run_chunk(self, data: st.DataObject, num: int, is_committed: bool) -> None:
        seq_id = self.draw_running(data)
        self.compute(seq_id, num)
        if is_committed:
            self.commit(seq_id)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), new_tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def decode(self, data: st.DataObject, new_tokens: list[int]) -> None:
        """Finish the prompt, then token after token."""
        seq_id = self.draw_running(data)
        seq = self.running[seq_id]
        for token in new_tokens:
            self.compute(seq_id, len(seq.tokens))
            self.commit(seq_id)
            if seq.num_computed == len(seq.tokens) and self.grow(seq_id, len(seq.tokens) + 1):
                seq.tokens.append(token)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def commit_late(self, data: st.DataObject) -> None:
        self.commit(self.draw_running(data))

    def commit(self, seq_id: int) -> None:
        seq = self.running[seq_id]
        self.cache.commit(seq_id, seq.tokens, seq.num_computed)
        if seq.is_findable:
            table = self.cache.block_table(seq_id)
            for i in range(seq.num_committed // self.block_size, seq.num_computed // self.block_size):
                key = (seq.salt, tuple(seq.tokens[: (i + 1) * self.block_size]))
                self.block_of.setdefault(key, table[i])
            seq.num_committed = seq.num_computed

    @precondition(lambda self: self.running)
    @rule(data=st.data(), drafts=st.lists(st.integers(2, 3), min_size=1, max_size=3))
    def write_and_reject_drafts(self, data: st.DataObject, drafts: list[int]) -> None:
        """Speculation: tokens are written past the end and then not accepted."""
        seq_id = self.draw_running(data)
        seq = self.running[seq_id]
        if seq.num_computed == len(seq.tokens) and self.grow(seq_id, len(seq.tokens) + len(drafts)):
            self.write(seq_id, len(seq.tokens), drafts)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent_id = self.draw_running(data)
        parent = self.running[parent_id]
        child_id, self.next_id = self.next_id, self.next_id + 1
        self.cache.fork(parent_id, child_id)
        assert self.cache.block_table(child_id) == self.cache.block_table(parent_id)
        self.running[child_id] = Running(
            parent.salt, list(parent.tokens), parent.num_computed, parent.num_committed, parent.is_findable
        )

    @precondition(lambda self: len(self.running) > 1)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        seq_id = self.draw_running(data)
        self.cache.close(seq_id)
        del self.running[seq_id]

    @rule()
    def close_all(self) -> None:
        for seq_id in sorted(self.running):
            self.cache.close(seq_id)
        self.running.clear()

    @rule(is_wanted=st.integers(0, 9))
    def reset(self, is_wanted: int) -> None:
        if is_wanted < 9:  # rarely, or nothing is ever cached
            return
        self.cache.reset_prefix_cache()
        self.block_of.clear()
        for seq in self.running.values():
            seq.is_findable = False
        assert self.cache.num_cached == 0

    @rule(tokens=token_lists, salt=salts, limit=st.none() | st.integers(0, 10))
    def ask(self, tokens: list[int], salt: str, limit: int | None) -> None:
        self.match(tokens, salt, limit)

    @invariant()
    def holds(self) -> None:
        self.cache.check()
        assert sum(self.counts()[:3]) == self.cache.num_blocks
        assert self.cache._index.block_ids() == set(self.block_of.values())
        for seq_id, seq in self.running.items():
            self.assert_holds(self.cache.block_table(seq_id), seq.tokens[: seq.num_computed], seq.salt)
        if not self.running:
            assert self.cache.num_owned == 0


TestManager = ManagerMachine.TestCase
TestManager.settings = settings(max_examples=250, stateful_step_count=50, deadline=None)
