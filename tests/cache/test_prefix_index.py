"""Which block a prefix leads to, with hashes that collide and links that lost their block."""

import subprocess
import sys

import pytest

from octavo.cache.prefix_index import PrefixIndex, hash_block

ONE_HASH = lambda parent, tokens: 0  # noqa: E731 - a name for the worst hash function


def insert(index: PrefixIndex, tokens: list[int], blocks: list[int], salt: str = "") -> None:
    """Offer `blocks` for the full blocks of `tokens` and stand nowhere afterwards."""
    link = index.hold_root(salt)
    for i, block_id in enumerate(blocks):
        size = index.block_size
        link = index.extend(link, tuple(tokens[i * size : (i + 1) * size]), block_id)
    index.drop(link)
    index.check()


def found(index: PrefixIndex, tokens: list[int], salt: str = "") -> list[int | None]:
    return [link.block_id for link in index.match(tokens, salt, len(tokens) // index.block_size)]


@pytest.mark.parametrize("hash_fn", [None, ONE_HASH], ids=["hash", "all collide"])
def test_the_longest_chain_of_equal_blocks_is_found(hash_fn) -> None:
    index = PrefixIndex(2, hash_fn=hash_fn)
    insert(index, [1, 2, 3, 4, 5, 6], [7, 3, 5])
    insert(index, [1, 2, 9, 9], [8, 4])  # its first block is known already, so 8 is not kept
    assert found(index, [1, 2, 3, 4, 5, 6]) == [7, 3, 5]
    assert found(index, [1, 2, 9, 9, 5, 6]) == [7, 4]
    assert found(index, [3, 4, 5, 6]) == []
    assert found(index, [1, 2, 5, 6]) == [7]
    assert index.block_ids() == {3, 4, 5, 7}
    assert 8 not in index


def test_a_match_stops_at_the_bound() -> None:
    index = PrefixIndex(2)
    insert(index, [1, 2, 3, 4], [0, 1])
    assert [link.block_id for link in index.match([1, 2, 3, 4], "", 1)] == [0]
    assert index.match([1, 2, 3, 4], "", 0) == []


@pytest.mark.parametrize("hash_fn", [None, ONE_HASH], ids=["hash", "all collide"])
def test_salts_do_not_share(hash_fn) -> None:
    index = PrefixIndex(2, hash_fn=hash_fn)
    insert(index, [1, 2], [0], salt="a")
    insert(index, [1, 2], [1], salt="b")
    assert found(index, [1, 2], "a") == [0]
    assert found(index, [1, 2], "b") == [1]
    assert found(index, [1, 2]) == []


def test_model_and_salt_are_in_the_first_hash_and_cannot_be_confused() -> None:
    def first_hash(model_id: str, salt: str) -> int:
        return PrefixIndex(2, model_id).hold_root(salt).hash

    hashes = [
        first_hash("m", ""),
        first_hash("", "m"),
        first_hash("m", "s"),
        first_hash("ms", ""),
        first_hash("", ""),
    ]
    assert len(set(hashes)) == 5


def test_hashes_are_the_same_in_every_process() -> None:
    code = (
        "from octavo.cache.prefix_index import PrefixIndex, hash_block;"
        "print(hash_block(PrefixIndex(2, 'model').hold_root('salt').hash, (1, 2)))"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert printed == {f"{hash_block(PrefixIndex(2, 'model').hold_root('salt').hash, (1, 2))}\n"}


def test_equal_tokens_below_different_parents_are_different_prefixes() -> None:
    index = PrefixIndex(2, hash_fn=ONE_HASH)
    insert(index, [1, 2, 5, 6], [0, 1])
    insert(index, [3, 4, 5, 6], [2, 3])
    assert found(index, [1, 2, 5, 6]) == [0, 1]
    assert found(index, [3, 4, 5, 6]) == [2, 3]


def test_forgetting_the_last_block_removes_the_whole_chain_of_empty_links() -> None:
    index = PrefixIndex(2)
    insert(index, [1, 2, 3, 4], [0, 1])
    index.forget(0)
    index.check()
    assert found(index, [1, 2, 3, 4]) == []
    index.forget(1)
    index.check()
    assert not index._buckets
    assert not index._roots


def test_a_hollow_link_is_filled_again_and_what_is_below_is_found_again() -> None:
    index = PrefixIndex(2)
    insert(index, [1, 2, 3, 4], [0, 1])
    index.forget(0)
    insert(index, [1, 2], [5])
    assert found(index, [1, 2, 3, 4]) == [5, 1]


def test_a_held_link_survives_the_loss_of_its_block() -> None:
    index = PrefixIndex(2)
    link = index.extend(index.hold_root(""), (1, 2), 0)
    index.forget(0)
    index.check(held=[link])
    below = index.extend(link, (3, 4), 1)
    index.check(held=[below])
    index.drop(index.extend(index.hold_root(""), (1, 2), 2))
    index.check(held=[below])
    assert found(index, [1, 2, 3, 4]) == [2, 1]


def test_one_block_cannot_stand_for_two_prefixes() -> None:
    index = PrefixIndex(2)
    insert(index, [1, 2], [0])
    root = index.hold_root("")
    with pytest.raises(AssertionError, match="block 0 is already findable under another prefix"):
        index.extend(root, (3, 4), 0)
    index.check(held=[root])


def test_clear_forgets_all() -> None:
    index = PrefixIndex(2)
    insert(index, [1, 2, 3, 4], [0, 1])
    links = index.match([1, 2, 3, 4], "", 2)
    index.clear()
    index.check()
    assert len(index) == 0
    assert [link.block_id for link in links] == [None, None]
    insert(index, [1, 2], [1])
    assert found(index, [1, 2, 3, 4]) == [1]
