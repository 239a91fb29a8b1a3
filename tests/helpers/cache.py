"""Serving sequences from a cache manager by hand, and seeing that nothing changed."""

from octavo.cache.manager import KVCacheManager


def run(cache: KVCacheManager, seq_id: int, tokens: list[int], num_new: int = 0, salt: str = "") -> int:
    """Serve one request alone, compute everything, close it; returns the number of cached tokens."""
    hit = cache.match_prefix(tokens, salt)
    cache.open(seq_id, hit, salt)
    assert cache.grow(seq_id, len(tokens) + num_new)
    cache.commit(seq_id, tokens, len(tokens))
    cache.check()
    cache.close(seq_id)
    cache.check()
    return hit.num_tokens


def state(cache: KVCacheManager) -> object:
    """Everything a failing call must leave as it was."""
    allocator, index = cache._allocator, cache._index
    return (
        list(allocator._free),
        allocator.cached_in_order(),
        list(allocator.ref_counts),
        {block: (link, link.num_users) for block, link in index._of_block.items()},
        {
            seq_id: (list(t.block_ids), t.capacity, t.num_committed, t.next_commit, t.position)
            for seq_id, t in cache._tables.items()
        },
    )
