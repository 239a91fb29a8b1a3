"""Random use of the prefix index against a dictionary from (salt, tokens so far) to block."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.cache.prefix_index import Prefix, PrefixIndex

BLOCK_SIZE = 2
HASHES = {
    "default": None,
    "one": lambda parent, tokens: 0,
    "few": lambda parent, tokens: (parent + sum(tokens)) % 3,
}
blocks_of_tokens = st.tuples(st.integers(0, 1), st.integers(0, 1))
salts = st.sampled_from(["", "a"])

Key = tuple[str, tuple[int, ...]]


class PrefixIndexMachine(RuleBasedStateMachine):
    @initialize(hash_name=st.sampled_from(sorted(HASHES)))
    def start(self, hash_name: str) -> None:
        self.index = PrefixIndex(BLOCK_SIZE, "model", HASHES[hash_name])
        self.block_of: dict[Key, int] = {}
        self.cursors: list[tuple[Prefix, str, tuple[int, ...]]] = []
        self.next_block = 0

    @rule(salt=salts)
    def open(self, salt: str) -> None:
        self.cursors.append((self.index.hold_root(salt), salt, ()))

    @precondition(lambda self: self.cursors)
    @rule(data=st.data(), tokens=blocks_of_tokens)
    def extend(self, data: st.DataObject, tokens: tuple[int, int]) -> None:
        i = data.draw(st.integers(0, len(self.cursors) - 1))
        link, salt, before = self.cursors[i]
        block_id, self.next_block = self.next_block, self.next_block + 1
        self.cursors[i] = (self.index.extend(link, tokens, block_id), salt, before + tokens)
        self.block_of.setdefault((salt, before + tokens), block_id)

    @precondition(lambda self: self.cursors)
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        link, salt, before = data.draw(st.sampled_from(self.cursors))
        self.cursors.append((self.index.hold(link), salt, before))

    @precondition(lambda self: self.cursors)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        link, _, _ = self.cursors.pop(data.draw(st.integers(0, len(self.cursors) - 1)))
        self.index.drop(link)

    @precondition(lambda self: self.block_of)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.block_of)))
        self.index.forget(self.block_of.pop(key))

    @rule()
    def clear(self) -> None:
        self.index.clear()
        self.block_of.clear()
        self.cursors.clear()

    @rule(salt=salts, tokens=st.lists(blocks_of_tokens, max_size=4), bound=st.integers(0, 5))
    def match(self, salt: str, tokens: list[tuple[int, int]], bound: int) -> None:
        flat = [token for block in tokens for token in block]
        bound = min(bound, len(tokens))
        expected = []
        for i in range(1, bound + 1):
            block_id = self.block_of.get((salt, tuple(flat[: i * BLOCK_SIZE])))
            if block_id is None:
                break
            expected.append(block_id)
        assert [link.block_id for link in self.index.match(flat, salt, bound)] == expected

    @invariant()
    def agrees(self) -> None:
        self.index.check(held=[link for link, _, _ in self.cursors])
        assert self.index.block_ids() == set(self.block_of.values())


TestPrefixIndex = PrefixIndexMachine.TestCase
TestPrefixIndex.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
