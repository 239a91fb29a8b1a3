"""Calls that fail leave the cache as it was, and damage is found."""

from collections.abc import Callable

import pytest
from helpers.cache import run, state

from octavo.cache.manager import KVCacheManager
from octavo.errors import ConfigError


def too_large(cache: KVCacheManager) -> None:
    assert cache.grow(1, 9) is False


def no_block_for_the_copy(cache: KVCacheManager) -> None:
    assert cache.prepare_write(2, 3, 1) is None


def opened_twice(cache: KVCacheManager) -> None:
    with pytest.raises(AssertionError, match="sequence 1 is already open"):
        cache.open(1)


def opened_under_another_salt(cache: KVCacheManager) -> None:
    hit = cache.match_prefix([1, 2, 3])
    assert hit.num_tokens == 2
    with pytest.raises(AssertionError, match="another salt"):
        cache.open(9, hit, salt="x")


def forked_onto_an_open_one(cache: KVCacheManager) -> None:
    with pytest.raises(AssertionError, match="sequence 2 is already open"):
        cache.fork(1, 2)


def unknown(cache: KVCacheManager) -> None:
    for call in (cache.close, cache.block_table, lambda i: cache.grow(i, 1), lambda i: cache.fork(i, 10)):
        with pytest.raises(KeyError):
            call(9)


def committed_past_the_table(cache: KVCacheManager) -> None:
    with pytest.raises(AssertionError, match="6 tokens computed, room for 4"):
        cache.commit(1, [1, 2, 3, 4, 5, 6], 6)


def committed_past_the_tokens(cache: KVCacheManager) -> None:
    with pytest.raises(AssertionError, match="4 tokens computed of 3"):
        cache.commit(1, [1, 2, 3], 4)


def write_to_a_committed_block(cache: KVCacheManager) -> None:
    with pytest.raises(AssertionError, match="token 1 of sequence 1 is in a committed block"):
        cache.prepare_write(1, 1, 2)


def write_past_the_table(cache: KVCacheManager) -> None:
    with pytest.raises(AssertionError, match="exceed the block table"):
        cache.prepare_write(1, 3, 2)


@pytest.mark.parametrize(
    "call",
    [
        too_large,
        no_block_for_the_copy,
        opened_twice,
        opened_under_another_salt,
        forked_onto_an_open_one,
        unknown,
        committed_past_the_table,
        committed_past_the_tokens,
        write_to_a_committed_block,
        write_past_the_table,
    ],
)
def test_a_call_that_fails_changes_nothing(call: Callable[[KVCacheManager], None]) -> None:
    cache = KVCacheManager(2, 2)
    cache.open(1)
    cache.grow(1, 4)
    cache.commit(1, [1, 2, 3], 3)
    cache.fork(1, 2)
    before = state(cache)
    call(cache)
    assert state(cache) == before
    cache.check()


def test_a_hit_whose_block_was_taken_is_refused() -> None:
    cache = KVCacheManager(2, 2)
    run(cache, 0, [1, 2])
    hit = cache.match_prefix([1, 2, 3])
    cache.open(1)
    cache.grow(1, 4)
    before = state(cache)
    with pytest.raises(AssertionError, match="stale hit: block 0 was taken"):
        cache.open(2, hit)
    assert state(cache) == before


@pytest.mark.parametrize("block_size", [0, -1, 3, 24])
def test_a_block_size_that_is_no_power_of_two_is_refused(block_size: int) -> None:
    with pytest.raises(ConfigError, match=f"power of two.*got {block_size}"):
        KVCacheManager(4, block_size)


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_blocks must be at least 1, got 0"):
        KVCacheManager(0, 16)


@pytest.mark.parametrize("block_size", [1, 2, 64, 1024])
def test_any_power_of_two_works(block_size: int) -> None:
    cache = KVCacheManager(8, block_size)
    tokens = list(range(2 * block_size + 1))
    assert [run(cache, i, tokens) for i in range(2)] == [0, 2 * block_size]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda c: c._tables[0].block_ids.pop(), "counts 1 owners and is in 0 tables"),
        (lambda c: c._tables[0].block_ids.append(1), "counts 1 owners and is in 2 tables"),
        (lambda c: setattr(c._tables[0], "capacity", 0), "capacity of sequence 0"),
        (lambda c: c._allocator.free_cached(), "are not the findable unowned"),
        (lambda c: c._index._of_block.pop(0), "do not map one to one"),
        (lambda c: setattr(c._tables[0].position, "num_users", 9), "counts 9 users"),
    ],
)
def test_check_finds_damage(damage: Callable[[KVCacheManager], object], message: str) -> None:
    cache = KVCacheManager(8, 2)
    run(cache, 1, [5, 6])
    cache.open(0)
    cache.grow(0, 4)
    cache.commit(0, [1, 2, 3, 4], 4)
    cache.check()
    damage(cache)
    with pytest.raises(AssertionError, match=message):
        cache.check()
