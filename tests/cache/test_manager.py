"""The life of sequences in a small cache, with block ids spelled out."""

import random
import subprocess
import sys
import time
import timeit

import pytest
from helpers.cache import run, state

from octavo.cache.manager import KVCacheManager, PrefixHit

# Prefix hits


def test_c16_a_prompt_that_is_wholly_cached_still_computes_its_last_token() -> None:
    cache = KVCacheManager(64, 16)
    tokens = list(range(100, 148))
    counts = [run(cache, i, tokens[:n], num_new=8) for i, n in enumerate((32, 32, 16, 16, 33, 33, 1, 1, 48))]
    #             32 twice, 16 twice, 33 twice, 1 twice, then 48 tokens with the same start
    assert counts == [0, 16, 0, 0, 32, 32, 0, 0, 32]
    assert cache.num_owned == 0


def test_c17_a_block_taken_for_new_contents_forgets_its_old_ones() -> None:
    cache = KVCacheManager(4, 4)
    x, y = list(range(1, 9)), list(range(101, 116))
    assert run(cache, 0, x, num_new=1) == 0
    assert run(cache, 1, y, num_new=1) == 0
    assert cache.num_evictions == 2
    assert run(cache, 2, x, num_new=1) == 0


def test_a_hit_opens_with_the_cached_blocks_and_grows_behind_them() -> None:
    cache = KVCacheManager(8, 4)
    run(cache, 0, list(range(10)))  # blocks 0, 1 full, 2 half
    hit = cache.match_prefix(list(range(12)))
    assert (hit.block_ids, hit.num_tokens) == ((0, 1), 8)
    cache.open(1, hit)
    assert cache.grow(1, 17)
    assert cache.block_table(1) == [0, 1, 2, 3, 4]
    assert (cache.num_free, cache.num_cached, cache.num_owned) == (3, 0, 5)


@pytest.mark.parametrize(
    ("limit", "num_tokens"), [(None, 8), (12, 8), (8, 8), (7, 4), (4, 4), (3, 0), (0, 0), (-1, 0)]
)
def test_a_hit_stays_within_the_limit(limit: int | None, num_tokens: int) -> None:
    cache = KVCacheManager(8, 4)
    run(cache, 0, list(range(12)))
    assert cache.match_prefix(list(range(12)), limit=limit).num_tokens == num_tokens


@pytest.mark.parametrize("tokens", [[], [0], [0, 1, 2, 3]])
def test_prompts_of_at_most_one_block_never_hit(tokens: list[int]) -> None:
    cache = KVCacheManager(8, 4)
    run(cache, 0, [0, 1, 2, 3])
    assert cache.match_prefix(tokens) == PrefixHit((), 0)


def test_the_salt_is_part_of_the_prefix() -> None:
    cache = KVCacheManager(8, 2)
    assert [run(cache, i, [1, 2, 3], salt=salt) for i, salt in enumerate(["", "a", "b", "a", ""])] == [
        0,
        0,
        0,
        2,
        2,
    ]


@pytest.mark.parametrize(
    "hash_fn", [lambda parent, tokens: 0, lambda parent, tokens: sum(tokens)], ids=["all", "parents"]
)
def test_colliding_hashes_never_hit_other_tokens_or_another_parent(hash_fn) -> None:
    cache = KVCacheManager(8, 2, hash_fn=hash_fn)
    run(cache, 0, [1, 2, 5, 6])
    run(cache, 1, [3, 4, 6, 5])
    assert cache.match_prefix([2, 1, 5, 6, 0]).block_ids == ()
    assert cache.match_prefix([1, 2, 6, 5, 0]).block_ids == (0,)
    assert cache.match_prefix([1, 2, 5, 6, 0]).block_ids == (0, 1)
    assert cache.match_prefix([3, 4, 6, 5, 0]).num_tokens == 4
    assert cache.match_prefix([3, 4, 5, 6, 0]).num_tokens == 2


def test_blocks_are_found_as_soon_as_they_are_computed_and_not_before() -> None:
    cache = KVCacheManager(8, 4)
    tokens = list(range(12))
    cache.open(0)
    cache.grow(0, 12)
    hits = []
    for num_computed in (0, 3, 4, 7, 8, 12):
        cache.commit(0, tokens, num_computed)
        hits.append(cache.match_prefix([*tokens, 99]).num_tokens)
        cache.check()
    assert hits == [0, 0, 4, 4, 8, 12]
    cache.commit(0, tokens, 5)  # a smaller number again
    assert cache.match_prefix([*tokens, 99]).num_tokens == 12


def test_questions_change_nothing() -> None:
    cache = KVCacheManager(4, 2)
    run(cache, 0, [1, 2, 3, 4])
    before = state(cache)
    hit = cache.match_prefix([1, 2, 3, 4, 5])
    assert cache.can_allocate(2, hit.block_ids)
    assert state(cache) == before


def test_cached_hit_blocks_do_not_count_as_available() -> None:
    cache = KVCacheManager(4, 2)
    run(cache, 0, [1, 2, 3, 4])
    hit = cache.match_prefix([1, 2, 3, 4, 5])
    assert cache.num_available == 4
    assert cache.can_allocate(2, hit.block_ids)
    assert not cache.can_allocate(3, hit.block_ids)
    assert cache.can_allocate(4)
    cache.open(1, hit)  # owned now: a second owner takes nothing away
    assert cache.can_allocate(2, hit.block_ids)


def test_two_sequences_that_computed_the_same_keep_one_entry() -> None:
    cache = KVCacheManager(8, 2)
    for seq_id in (0, 1):
        cache.open(seq_id)
        cache.grow(seq_id, 4)
    cache.commit(0, [1, 2, 3, 4], 2)
    cache.commit(1, [1, 2, 3, 4], 4)
    cache.check()
    assert cache.match_prefix([1, 2, 3, 4, 5]).block_ids == (0, 3)
    cache.close(1)
    assert (cache.num_free, cache.num_cached, cache.num_owned) == (5, 1, 2)  # block 2 was never findable
    cache.check()


def test_losing_the_first_block_of_a_chain_does_not_lose_the_rest_for_ever() -> None:
    cache = KVCacheManager(4, 2)
    for seq_id in (0, 1):
        cache.open(seq_id)
        cache.grow(seq_id, 2 * (seq_id + 1))
    cache.commit(0, [1, 2], 2)
    cache.commit(1, [1, 2, 3, 4], 4)  # chain: block 0 of sequence 0, block 2 of sequence 1
    cache.close(0)
    cache.open(2)
    cache.grow(2, 4)  # takes block 3 and evicts block 0
    cache.check()
    assert cache.block_table(2) == [3, 0]
    assert cache.match_prefix([1, 2, 3, 4, 5]).block_ids == ()
    cache.commit(2, [1, 2], 2)
    cache.check()
    assert cache.match_prefix([1, 2, 3, 4, 5]).block_ids == (3, 2)


# Eviction


def test_the_end_of_a_closed_sequence_is_evicted_before_its_start() -> None:
    cache = KVCacheManager(6, 2)
    run(cache, 0, [1, 2, 3, 4, 5, 6])  # blocks 0 1 2
    run(cache, 1, [7, 8, 9, 10])  # blocks 3 4
    assert cache._allocator.cached_in_order() == [2, 1, 0, 4, 3]
    cache.open(2)
    cache.grow(2, 6)  # block 5, then 2 and 1
    assert cache.block_table(2) == [5, 2, 1]
    assert cache.num_evictions == 2
    assert cache.match_prefix([1, 2, 3, 4, 5, 6, 0]).block_ids == (0,)
    assert cache.match_prefix([7, 8, 9, 10, 0]).block_ids == (3, 4)


def test_a_hit_makes_its_blocks_the_last_to_go() -> None:
    cache = KVCacheManager(4, 2)
    run(cache, 0, [1, 2])
    run(cache, 1, [3, 4])
    run(cache, 2, [1, 2, 9])  # hits block 0, takes and frees another
    assert cache._allocator.cached_in_order() == [1, 0]


def test_owned_blocks_are_never_evicted() -> None:
    cache = KVCacheManager(3, 2)
    run(cache, 0, [1, 2, 3, 4])
    cache.open(1, cache.match_prefix([1, 2, 3, 4, 5]))
    cache.open(2)
    assert not cache.grow(2, 4)
    assert cache.grow(2, 2)
    assert cache.match_prefix([1, 2, 3, 4, 5]).block_ids == (0, 1)


def test_after_a_reset_nothing_is_found_and_open_sequences_go_on() -> None:
    cache = KVCacheManager(6, 2)
    run(cache, 0, [1, 2, 3, 4])
    cache.open(1, cache.match_prefix([1, 2, 3]))
    cache.grow(1, 6)
    cache.commit(1, [1, 2, 3, 4, 5, 6], 4)
    cache.reset_prefix_cache()
    cache.check()
    assert cache.match_prefix([1, 2, 3]).block_ids == ()
    assert (cache.num_free, cache.num_cached, cache.num_owned) == (3, 0, 3)
    cache.commit(1, [1, 2, 3, 4, 5, 6], 6)  # computed before the reset: not to be found again
    cache.fork(1, 2)
    cache.check()
    assert cache.match_prefix([1, 2, 3]).block_ids == ()
    cache.close(1)
    cache.close(2)
    assert cache.num_free == 6
    assert run(cache, 3, [1, 2, 3]) == 0
    assert run(cache, 4, [1, 2, 3]) == 2


def test_without_prefix_caching_every_block_is_freed() -> None:
    cache = KVCacheManager(4, 2, enable_prefix_caching=False)
    assert [run(cache, i, [1, 2, 3, 4]) for i in range(2)] == [0, 0]
    assert (cache.num_free, cache.num_cached, cache.num_owned) == (4, 0, 0)


# Fork and copy on write


def test_a_fork_shares_all_blocks_and_copies_only_what_it_writes() -> None:
    cache = KVCacheManager(8, 2)
    cache.open(0)
    cache.grow(0, 5)  # blocks 0 1, and 2 half full
    cache.commit(0, [1, 2, 3, 4, 5], 5)
    cache.fork(0, 1)
    cache.fork(0, 2)
    assert [cache.block_table(i) for i in range(3)] == [[0, 1, 2]] * 3
    assert cache.num_owned == 3
    assert cache.prepare_write(0, 5, 1) == [(2, 3)]
    assert cache.prepare_write(1, 5, 1) == [(2, 4)]
    assert cache.prepare_write(2, 5, 1) == []  # the last owner writes in place
    assert [cache.block_table(i) for i in range(3)] == [[0, 1, 3], [0, 1, 4], [0, 1, 2]]
    cache.check()
    cache.commit(1, [1, 2, 3, 4, 5, 60], 6)
    cache.commit(2, [1, 2, 3, 4, 5, 61], 6)
    assert cache.match_prefix([1, 2, 3, 4, 5, 60, 0]).block_ids == (0, 1, 4)
    assert cache.match_prefix([1, 2, 3, 4, 5, 61, 0]).block_ids == (0, 1, 2)
    for seq_id in range(3):
        cache.close(seq_id)
        cache.check()
    assert (cache.num_free, cache.num_cached) == (4, 4)


def test_a_write_over_several_blocks_copies_each_shared_one() -> None:
    cache = KVCacheManager(8, 2)
    cache.open(0)
    cache.grow(0, 6)
    cache.fork(0, 1)
    assert cache.prepare_write(1, 1, 3) == [(0, 3), (1, 4)]
    assert cache.block_table(1) == [3, 4, 2]
    assert cache.prepare_write(1, 1, 0) == []


def test_a_block_that_can_be_found_is_not_written_in_place() -> None:
    cache = KVCacheManager(4, 4)
    cache.open(0)
    cache.grow(0, 4)
    cache.fork(0, 1)
    cache.commit(0, [1, 2, 3, 4], 4)  # block 0 is findable now; sequence 1 has not committed it
    cache.close(0)
    assert cache.prepare_write(1, 2, 2) == [(0, 1)]
    cache.check()
    assert cache.match_prefix([1, 2, 3, 4, 5]).block_ids == (0,)
    assert (cache.num_cached, cache.num_owned) == (1, 1)


# Cost


class UncopiedTokens(list):
    """A token list that counts the tokens read from it and refuses to be walked or copied."""

    num_read = 0

    def __getitem__(self, key):
        value = super().__getitem__(key)
        self.num_read += len(value) if isinstance(key, slice) else 1
        return value

    def __iter__(self):
        raise AssertionError("the token list was walked")


def test_a_step_reads_no_tokens_but_those_of_a_block_that_filled() -> None:
    cache = KVCacheManager(100, 16)
    tokens = UncopiedTokens(range(1000))
    cache.open(0)
    cache.grow(0, 1000)
    cache.commit(0, tokens, 991)
    tokens.num_read = 0
    cache.commit(0, tokens, 991)
    assert tokens.num_read == 0
    cache.commit(0, tokens, 992)
    assert tokens.num_read == 16


def test_grow_and_commit_without_a_new_block_take_well_under_a_microsecond() -> None:
    cache = KVCacheManager(100, 16)
    tokens = list(range(1000))
    cache.open(0)
    cache.grow(0, 1000)
    cache.commit(0, tokens, 1000)
    for call in (lambda: cache.grow(0, 1000), lambda: cache.commit(0, tokens, 1000)):
        assert min(timeit.repeat(call, timer=time.process_time, number=10_000, repeat=7)) / 10_000 < 1e-6


def test_a_million_prompt_tokens_are_hashed_in_under_two_seconds() -> None:
    draw = random.Random(0)
    prompts = [[draw.randrange(150_000) for _ in range(1_000)] for _ in range(1_000)]
    cache = KVCacheManager(63_000, 16)
    start = time.process_time()  # the tests may share their cores
    for seq_id, prompt in enumerate(prompts):
        cache.open(seq_id, cache.match_prefix(prompt))
        cache.grow(seq_id, 1_000)
        cache.commit(seq_id, prompt, 1_000)
    assert time.process_time() - start < 2.0
    assert cache.num_owned == 63_000


def test_the_cache_room_loads_no_torch() -> None:
    code = (
        "import sys, octavo.cache.manager, octavo.cache.sizing, octavo.cache.spec\n"
        "import octavo.models.shapes, octavo.cli.kv\n"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules or 'matplotlib' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}).returncode == 0
    )
