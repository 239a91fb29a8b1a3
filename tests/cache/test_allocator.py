"""Blocks by id: who is handed out, who is evicted, and in which order."""

import pytest

from octavo.cache.allocator import Allocation, BlockAllocator


def test_blocks_are_handed_out_from_zero_and_last_freed_first() -> None:
    allocator = BlockAllocator(4)
    assert allocator.allocate(3) == Allocation([0, 1, 2], [])
    allocator.release(0, keep=False)
    allocator.release(2, keep=False)
    assert allocator.allocate(3) == Allocation([2, 0, 3], [])
    allocator.check()


def test_free_blocks_go_before_cached_ones_and_cached_ones_in_the_order_of_their_release() -> None:
    allocator = BlockAllocator(4)
    allocator.allocate(4)
    for block_id in (2, 0, 3):
        allocator.release(block_id, keep=True)
    allocator.release(1, keep=False)
    assert (allocator.num_free, allocator.num_cached, allocator.num_owned) == (1, 3, 0)
    assert allocator.cached_in_order() == [2, 0, 3]
    assert allocator.allocate(3) == Allocation([1, 2, 0], [2, 0])
    assert allocator.num_evictions == 2
    assert allocator.cached_in_order() == [3]
    allocator.check()


def test_sharing_a_cached_block_takes_it_out_of_the_order_and_its_release_puts_it_last() -> None:
    allocator = BlockAllocator(3)
    allocator.allocate(3)
    for block_id in (0, 1, 2):
        allocator.release(block_id, keep=True)
    allocator.share(0)
    assert allocator.cached_in_order() == [1, 2]
    allocator.release(0, keep=True)
    assert allocator.cached_in_order() == [1, 2, 0]
    allocator.check()


def test_a_shared_block_needs_as_many_releases_as_owners() -> None:
    allocator = BlockAllocator(1)
    allocator.allocate(1)
    allocator.share(0)
    allocator.release(0, keep=False)
    assert (allocator.num_free, allocator.num_owned, allocator.ref_counts) == (0, 1, [1])
    allocator.release(0, keep=False)
    assert (allocator.num_free, allocator.num_owned, allocator.ref_counts) == (1, 0, [0])


def test_a_request_that_does_not_fit_changes_nothing() -> None:
    allocator = BlockAllocator(3)
    allocator.allocate(2)
    allocator.release(1, keep=True)
    assert allocator.num_available == 2
    assert allocator.allocate(3) is None
    assert allocator.cached_in_order() == [1]
    assert (allocator.num_free, allocator.num_cached, allocator.num_owned) == (1, 1, 1)
    assert allocator.num_evictions == 0
    allocator.check()


def test_freeing_the_cached_blocks_hands_out_the_oldest_first() -> None:
    allocator = BlockAllocator(3)
    allocator.allocate(3)
    for block_id in (1, 2, 0):
        allocator.release(block_id, keep=True)
    allocator.free_cached()
    assert allocator.allocate(3) == Allocation([1, 2, 0], [])
    assert allocator.num_evictions == 0


def test_misuse_is_named() -> None:
    allocator = BlockAllocator(2)
    with pytest.raises(AssertionError, match="block 0 is free and cannot be shared"):
        allocator.share(0)
    with pytest.raises(AssertionError, match="block 1 has no owner to release"):
        allocator.release(1, keep=True)
    assert allocator.ref_counts == [0, 0]
    allocator.check()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda a: a._free.append(0), "both unowned and owned"),
        (lambda a: a._free.append(a._free[0]), "on the free stack twice"),
        (lambda a: a._cached.update({a._free[0]: None}), "both free and cached"),
        (lambda a: a.ref_counts.__setitem__(0, -1), "negative"),
        (lambda a: a._free.pop(), "in no state"),
    ],
)
def test_check_finds_damage(damage, message) -> None:
    allocator = BlockAllocator(3)
    allocator.allocate(1)
    damage(allocator)
    with pytest.raises(AssertionError, match=message):
        allocator.check()


def test_reset_makes_every_block_free_whatever_state_it_was_in() -> None:
    allocator = BlockAllocator(5)
    allocator.allocate(4)
    allocator.release(0, keep=True)
    allocator.release(1, keep=False)
    allocator._free.pop()  # a block in no state, and one that counts an owner nobody is
    allocator.record_changes(True)
    allocator.reset()
    allocator.check()
    assert (allocator.num_free, allocator.num_cached, allocator.num_owned) == (5, 0, 0)
    assert allocator.take_changes().touched == {0, 1, 2, 3, 4}
    allocation = allocator.allocate(5)
    assert allocation is not None
    assert allocation.block_ids == [0, 1, 2, 3, 4]
