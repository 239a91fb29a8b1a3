"""Blocks, their reference counts, and the order in which unowned blocks are taken.

Every block is in exactly one state::

    free    no owner, nothing worth keeping        ref count 0, on the free stack
    cached  no owner, its contents may be wanted   ref count 0, in the LRU order
    owned   in `ref count` block tables            ref count > 0, in neither

The allocator does not know what a block holds or why its contents may be wanted: whoever releases the last
reference says which of the two unowned states follows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple


class Allocation(NamedTuple):
    """Blocks taken in one call, each owned once; `evicted` are those of them that were cached before."""

    block_ids: list[int]
    evicted: list[int]


class BlockChanges(NamedTuple):
    """What happened since the changes were last taken: `touched` blocks changed state or owners, perhaps back
    to what they were; `evicted` are those whose cached contents were lost, in order."""

    touched: set[int]
    evicted: list[int]


class BlockAllocator:
    """Hands out `num_blocks` blocks with the ids 0..num_blocks-1.

    Free blocks go first, the most recently freed one first: a pool that is never full touches as little
    memory as it can. After them cached blocks go, the least recently released first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        #: Owners of each block, by block id. Read it; only the methods here write it.
        self.ref_counts = [0] * num_blocks
        self.num_evictions = 0
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        # None while nobody watches, so that watching costs nothing then.
        self._changes: BlockChanges | None = None

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_owned(self) -> int:
        return self.num_blocks - len(self._free) - len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out: free and cached."""
        return len(self._free) + len(self._cached)

    def is_cached(self, block_id: int) -> bool:
        return block_id in self._cached

    def num_owners_of(self, block_ids: Iterable[int]) -> list[int]:
        """For each block its number of owners, or -1 for a cached block and 0 for a free one."""
        counts, cached = self.ref_counts, self._cached
        return [counts[i] or (-1 if i in cached else 0) for i in block_ids]

    def record_changes(self, is_on: bool) -> None:
        """Begin to record, forgetting what was recorded before, or stop."""
        self._changes = BlockChanges(set(), []) if is_on else None

    def take_changes(self) -> BlockChanges:
        """What was recorded since the last call; recording goes on. Nothing, while it is off."""
        changes = self._changes
        if changes is None:
            return BlockChanges(set(), [])
        self._changes = BlockChanges(set(), [])
        return changes

    def allocate(self, num: int) -> Allocation | None:
        """Take `num` blocks, each with one owner; None, and nothing changes, when fewer are available."""
        free = self._free
        if num > len(free) + len(self._cached):
            return None
        num_from_free = min(num, len(free))
        block_ids = [free.pop() for _ in range(num_from_free)]
        evicted = [self._cached.popitem(last=False)[0] for _ in range(num - num_from_free)]
        block_ids += evicted
        self.num_evictions += len(evicted)
        for block_id in block_ids:
            self.ref_counts[block_id] = 1
        if self._changes is not None:
            self._changes.touched.update(block_ids)
            self._changes.evicted.extend(evicted)
        return Allocation(block_ids, evicted)

    def share(self, block_id: int) -> None:
        """Add one owner to a cached or owned block; a cached one leaves the LRU order."""
        if self.ref_counts[block_id] == 0:
            assert block_id in self._cached, f"block {block_id} is free and cannot be shared"
            del self._cached[block_id]
        self.ref_counts[block_id] += 1
        if self._changes is not None:
            self._changes.touched.add(block_id)

    def release(self, block_id: int, *, keep: bool) -> None:
        """Take one owner away; after the last one the block is cached when `keep`, else free."""
        count = self.ref_counts[block_id] - 1
        assert count >= 0, f"block {block_id} has no owner to release"
        self.ref_counts[block_id] = count
        if self._changes is not None:
            self._changes.touched.add(block_id)
        if count == 0:
            if keep:
                self._cached[block_id] = None
            else:
                self._free.append(block_id)

    def free_cached(self) -> None:
        """Make every cached block free; the least recently released one is handed out first."""
        if self._changes is not None:
            self._changes.touched.update(self._cached)
        self._free.extend(reversed(self._cached))
        self._cached.clear()

    def reset(self) -> None:
        """Make every block free, whatever an interrupted call left behind."""
        if self._changes is not None:
            self._changes.touched.update(range(self.num_blocks))
        self.ref_counts = [0] * self.num_blocks
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._cached.clear()

    def cached_in_order(self) -> list[int]:
        """The cached blocks, the next one to be evicted first."""
        return list(self._cached)

    def check(self) -> None:
        """Raise AssertionError when a block is in no state, in two, or has a wrong reference count."""
        free, cached = set(self._free), set(self._cached)
        owned = {block_id for block_id, count in enumerate(self.ref_counts) if count > 0}
        assert len(free) == len(self._free), "a block is on the free stack twice"
        assert all(count >= 0 for count in self.ref_counts), "a reference count is negative"
        assert not free & cached, f"blocks both free and cached: {sorted(free & cached)}"
        assert not (free | cached) & owned, (
            f"blocks both unowned and owned: {sorted((free | cached) & owned)}"
        )
        assert free | cached | owned == set(range(self.num_blocks)), "a block is in no state"
        assert self.num_free + self.num_cached + self.num_owned == self.num_blocks
        assert self.num_owned == len(owned)
