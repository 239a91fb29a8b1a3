"""What a sequence may ask of the cache: find a prefix, hold blocks, grow, share, give back.

The manager joins the allocator, which knows owners, and the prefix index, which knows contents. It works on
plain integers and loads no torch. Every block is free, cached or owned (`allocator`); a block is *findable*
when the index knows its contents, and a findable block is never written again.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from octavo.cache.allocator import BlockAllocator, BlockChanges
from octavo.cache.prefix_index import HashFn, Prefix, PrefixIndex
from octavo.cache.sizing import blocks_for_tokens
from octavo.cache.spec import check_block_size
from octavo.errors import ConfigError

_NEVER = sys.maxsize


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The leading blocks of a prompt that are already computed; void once blocks were taken."""

    block_ids: tuple[int, ...] = ()
    num_tokens: int = 0
    _last: Prefix | None = field(default=None, repr=False, compare=False)


class _Table:
    """The blocks of one open sequence and how far they have been made findable."""

    __slots__ = ("block_ids", "capacity", "next_commit", "num_committed", "position")

    def __init__(
        self, block_ids: list[int], capacity: int, num_committed: int, position: Prefix | None
    ) -> None:
        self.block_ids = block_ids
        #: Tokens the blocks have room for.
        self.capacity = capacity
        #: Leading blocks that were offered to the index.
        self.num_committed = num_committed
        #: Where the sequence stands in the index, held there; None when its blocks are not to be found.
        self.position = position
        #: Computed tokens from which on `commit` has something to do.
        self.next_commit = _NEVER


class KVCacheManager:
    """Block tables over a pool of `num_blocks` blocks of `block_size` tokens (a power of two).

    Methods that can lack blocks say so by their result (`False`, `None`) and then have changed nothing. An
    unknown `seq_id` is a KeyError; calls that break a rule stated here are AssertionErrors, since only our
    engine calls. `model_id` keeps models apart whose caches are ever compared; `hash_fn` replaces the hash of
    the prefix index.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        model_id: str = "",
        hash_fn: HashFn | None = None,
    ) -> None:
        if num_blocks < 1:
            raise ConfigError(f"num_blocks must be at least 1, got {num_blocks}")
        check_block_size(block_size)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._allocator = BlockAllocator(num_blocks)
        self._index = PrefixIndex(block_size, model_id, hash_fn)
        self._tables: dict[int, _Table] = {}

    # -- counts

    @property
    def num_free(self) -> int:
        """Blocks without owner and without known contents."""
        return self._allocator.num_free

    @property
    def num_cached(self) -> int:
        """Blocks without owner whose contents can be found; they are taken when no block is free."""
        return self._allocator.num_cached

    @property
    def num_owned(self) -> int:
        """Blocks in at least one block table."""
        return self._allocator.num_owned

    @property
    def num_available(self) -> int:
        """Blocks that `grow` can take: free and cached."""
        return self._allocator.num_available

    @property
    def num_evictions(self) -> int:
        """Cached blocks taken for new contents since the start."""
        return self._allocator.num_evictions

    # -- questions: they change nothing, not even the order of eviction

    def match_prefix(self, token_ids: Sequence[int], salt: str = "", limit: int | None = None) -> PrefixHit:
        """The longest run of whole cached blocks that `token_ids` begins with.

        It covers at most `len(token_ids) - 1` tokens, because the last one must be computed to get logits,
        and at most `limit` tokens when that is given. Prompts under different salts never share.
        """
        bound = len(token_ids) - 1 if limit is None else min(limit, len(token_ids) - 1)
        if not self.enable_prefix_caching or bound < self.block_size:
            return PrefixHit()
        links = self._index.match(token_ids, salt, bound // self.block_size)
        if not links:
            return PrefixHit()
        block_ids = tuple(link.block_id for link in links if link.block_id is not None)
        return PrefixHit(block_ids, len(block_ids) * self.block_size, links[-1])

    def can_allocate(self, num_new_blocks: int, hit_blocks: Sequence[int] = ()) -> bool:
        """Whether `num_new_blocks` blocks can be taken after a sequence opened with `hit_blocks`.

        The cached ones among `hit_blocks` are then owned and no longer available.
        """
        allocator = self._allocator
        available = allocator.num_available - sum(map(allocator.is_cached, hit_blocks))
        return num_new_blocks <= available

    def block_table(self, seq_id: int) -> list[int]:
        """The sequence's block ids in token order: the live list, which callers must not change."""
        return self._tables[seq_id].block_ids

    # -- for onlookers

    def num_owners_of(self, block_ids: Iterable[int]) -> list[int]:
        """For each block its number of owners, or -1 for a cached block and 0 for a free one."""
        return self._allocator.num_owners_of(block_ids)

    def record_changes(self, is_on: bool) -> None:
        """Begin to record which blocks change, forgetting what was recorded before, or stop."""
        self._allocator.record_changes(is_on)

    def take_changes(self) -> BlockChanges:
        """The blocks that changed since the last call, while recording."""
        return self._allocator.take_changes()

    # -- the life of a sequence

    def open(self, seq_id: int, hit: PrefixHit | None = None, salt: str = "") -> None:
        """Start a block table with the blocks of `hit`, which must come from `match_prefix` under the same
        salt with no block taken since.
        """
        assert seq_id not in self._tables, f"sequence {seq_id} is already open"
        hit = hit or PrefixHit()
        self._check_fresh(hit, salt)
        for block_id in hit.block_ids:
            self._allocator.share(block_id)
        position = None
        if self.enable_prefix_caching:
            position = self._index.hold(hit._last) if hit._last else self._index.hold_root(salt)
        table = _Table(list(hit.block_ids), hit.num_tokens, len(hit.block_ids), position)
        self._set_next_commit(table)
        self._tables[seq_id] = table

    def grow(self, seq_id: int, num_tokens: int) -> bool:
        """Make the table cover `num_tokens` tokens; False when blocks are lacking. Never shrinks."""
        table = self._tables[seq_id]
        if num_tokens <= table.capacity:
            return True
        num_new = blocks_for_tokens(num_tokens - table.capacity, self.block_size)
        block_ids = self._take(num_new)
        if block_ids is None:
            return False
        table.block_ids += block_ids
        table.capacity += num_new * self.block_size
        return True

    def commit(self, seq_id: int, token_ids: Sequence[int], num_computed: int) -> None:
        """State that the KV of the first `num_computed` tokens of `token_ids` is in the blocks, for good.

        Blocks wholly computed become findable. A block whose contents another block already offers stays
        unfindable: one entry for one prefix. `token_ids` may be the caller's live list; only tokens of newly
        filled blocks are read. Calling again with the same or a smaller number does nothing.
        """
        table = self._tables[seq_id]
        if num_computed < table.next_commit:
            return
        assert num_computed <= table.capacity, f"{num_computed} tokens computed, room for {table.capacity}"
        assert num_computed <= len(token_ids), f"{num_computed} tokens computed of {len(token_ids)}"
        position = table.position
        assert position is not None
        size = self.block_size
        for i in range(table.num_committed, num_computed // size):
            tokens = tuple(token_ids[i * size : (i + 1) * size])
            position = self._index.extend(position, tokens, table.block_ids[i])
            table.position = position
            table.num_committed = i + 1
        self._set_next_commit(table)

    def fork(self, parent_id: int, child_id: int) -> None:
        """Open `child_id` with all of the parent's blocks, shared until `prepare_write`."""
        parent = self._tables[parent_id]
        assert child_id not in self._tables, f"sequence {child_id} is already open"
        for block_id in parent.block_ids:
            self._allocator.share(block_id)
        position = self._index.hold(parent.position) if parent.position else None
        child = _Table(list(parent.block_ids), parent.capacity, parent.num_committed, position)
        child.next_commit = parent.next_commit
        self._tables[child_id] = child

    def prepare_write(self, seq_id: int, first_token: int, num_tokens: int) -> list[tuple[int, int]] | None:
        """Make the blocks of tokens `first_token .. first_token + num_tokens - 1` safe to write.

        Blocks that others own too, or that can be found, are replaced in the table by new ones. Returns the
        copies to make before the write, as (source block, destination block) in order; None when blocks are
        lacking. The table must cover the tokens, and tokens given to `commit` in full blocks are final.
        """
        if num_tokens <= 0:
            return []
        table = self._tables[seq_id]
        size = self.block_size
        first, last = first_token // size, (first_token + num_tokens - 1) // size
        assert first >= table.num_committed or table.position is None, (
            f"token {first_token} of sequence {seq_id} is in a committed block and final"
        )
        assert last < len(table.block_ids), f"tokens up to {first_token + num_tokens} exceed the block table"
        ref_counts, block_ids = self._allocator.ref_counts, table.block_ids
        places = [
            i for i in range(first, last + 1) if ref_counts[block_ids[i]] > 1 or block_ids[i] in self._index
        ]
        if not places:
            return []
        new_ids = self._take(len(places))
        if new_ids is None:
            return None
        copies = [(block_ids[i], new_id) for i, new_id in zip(places, new_ids, strict=True)]
        for i, new_id in zip(places, new_ids, strict=True):
            self._release(block_ids[i])
            block_ids[i] = new_id
        return copies

    def close(self, seq_id: int) -> None:
        """Give all blocks back, the last one first: the end of a sequence is evicted before its start.

        Blocks without another owner become cached when they can be found, else free.
        """
        table = self._tables.pop(seq_id)
        for block_id in reversed(table.block_ids):
            self._release(block_id)
        if table.position is not None:
            self._index.drop(table.position)

    def close_all(self) -> None:
        """Close every open sequence and forget all contents, whatever an interrupted call left behind."""
        # Not block by block: counts, lists and tables may disagree.
        self._tables.clear()
        self._index.clear()
        self._allocator.reset()

    def reset_prefix_cache(self) -> None:
        """Forget all contents: cached blocks become free, hits made before are void.

        Open sequences keep their blocks, which never become findable again.
        """
        self._index.clear()
        self._allocator.free_cached()
        for table in self._tables.values():
            table.position = None
            self._set_next_commit(table)

    # -- within

    def _take(self, num: int) -> list[int] | None:
        allocation = self._allocator.allocate(num)
        if allocation is None:
            return None
        for block_id in allocation.evicted:
            self._index.forget(block_id)
        return allocation.block_ids

    def _release(self, block_id: int) -> None:
        self._allocator.release(block_id, keep=block_id in self._index)

    def _set_next_commit(self, table: _Table) -> None:
        stopped = table.position is None
        table.next_commit = _NEVER if stopped else (table.num_committed + 1) * self.block_size

    def _check_fresh(self, hit: PrefixHit, salt: str) -> None:
        """A hit whose blocks were taken since would hand out somebody else's tokens."""
        link = hit._last
        for block_id in reversed(hit.block_ids):
            assert link is not None, "a hit must come from match_prefix"
            assert link.block_id == block_id, f"stale hit: block {block_id} was taken"
            link = link.parent
        assert link is None or (link.parent is None and link.salt == salt), (
            "the hit was made under another salt"
        )

    def check(self) -> None:
        """Raise AssertionError naming a broken invariant: states, reference counts, index and tables."""
        self._allocator.check()
        self._index.check([table.position for table in self._tables.values() if table.position is not None])
        appearances = Counter(block_id for table in self._tables.values() for block_id in table.block_ids)
        for block_id, count in enumerate(self._allocator.ref_counts):
            assert count == appearances[block_id], (
                f"block {block_id} counts {count} owners and is in {appearances[block_id]} tables"
            )
        unowned = {block_id for block_id in self._index.block_ids() if block_id not in appearances}
        cached = set(self._allocator.cached_in_order())
        assert cached == unowned, (
            f"cached blocks {sorted(cached)} are not the findable unowned {sorted(unowned)}"
        )
        for seq_id, table in self._tables.items():
            assert table.capacity == len(table.block_ids) * self.block_size, f"capacity of sequence {seq_id}"
            assert len(set(table.block_ids)) == len(table.block_ids), f"sequence {seq_id} holds a block twice"
            assert table.num_committed <= len(table.block_ids), f"sequence {seq_id} committed too much"
