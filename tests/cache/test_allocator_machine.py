"""Random use of the allocator against a list of owners, a stack and a queue."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.cache.allocator import BlockAllocator


class AllocatorMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 8))
    def start(self, num_blocks: int) -> None:
        self.allocator = BlockAllocator(num_blocks)
        self.free = list(reversed(range(num_blocks)))
        self.cached: list[int] = []
        self.owners = [0] * num_blocks
        self.num_evictions = 0

    @rule(num=st.integers(0, 9))
    def allocate(self, num: int) -> None:
        result = self.allocator.allocate(num)
        if num > len(self.free) + len(self.cached):
            assert result is None
            return
        expected, evicted = [], []
        for _ in range(num):
            if self.free:
                expected.append(self.free.pop())
            else:
                evicted.append(self.cached.pop(0))
        assert result is not None
        assert (result.block_ids, result.evicted) == (expected + evicted, evicted)
        self.num_evictions += len(evicted)
        for block_id in result.block_ids:
            self.owners[block_id] = 1

    @precondition(lambda self: self.cached or any(self.owners))
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        usable = [b for b, count in enumerate(self.owners) if count or b in self.cached]
        block_id = data.draw(st.sampled_from(usable))
        self.allocator.share(block_id)
        self.owners[block_id] += 1
        if block_id in self.cached:
            self.cached.remove(block_id)

    @precondition(lambda self: any(self.owners))
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data: st.DataObject, keep: bool) -> None:
        block_id = data.draw(st.sampled_from([b for b, count in enumerate(self.owners) if count]))
        self.allocator.release(block_id, keep=keep)
        self.owners[block_id] -= 1
        if not self.owners[block_id]:
            (self.cached if keep else self.free).append(block_id)

    @rule()
    def free_cached(self) -> None:
        self.allocator.free_cached()
        self.free += reversed(self.cached)
        self.cached = []

    @invariant()
    def agrees(self) -> None:
        self.allocator.check()
        assert self.allocator.cached_in_order() == self.cached
        assert self.allocator.ref_counts == self.owners
        assert self.allocator.num_free == len(self.free)
        assert self.allocator.num_evictions == self.num_evictions


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
