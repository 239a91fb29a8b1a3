"""Which block holds the KV of which prefix.

A prefix is a chain of full blocks. Each link is a `Prefix`: its token ids, its parent link and, while some
block holds its KV, that block. The chain starts at a root that stands for the model and the salt::

    root(model, salt) <- (1, 2, 3, 4) <- (5, 6, 7, 8) <- ...
                            block 7         block 2

The hash over parent hash and token ids only finds candidates. A candidate counts when its token ids are equal
and its parent *is* the link we came from, so colliding hashes cost time and never a wrong answer.

A link outlives its block while links below it, or sequences, stand on it: then it is *hollow*, and a later
block with the same contents fills it again. Without that, losing one block of a chain would lose everything
below it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

HashFn = Callable[[int, tuple[int, ...]], int]
"""(hash of the parent link, token ids of this block) -> hash of this link."""


def hash_block(parent_hash: int, token_ids: tuple[int, ...]) -> int:
    """The default `HashFn`: Python's tuple hash, which for integers is the same in every process."""
    return hash((parent_hash, token_ids))


class Prefix:
    """One link of a chain; compared by identity. `block_id` is None for a root and for a hollow link."""

    __slots__ = ("block_id", "hash", "num_users", "parent", "salt", "token_ids")

    def __init__(self, parent: Prefix | None, salt: str, token_ids: tuple[int, ...], hash_: int) -> None:
        self.parent = parent
        self.salt = salt
        self.token_ids = token_ids
        self.hash = hash_
        self.block_id: int | None = None
        #: Links whose parent this is, plus sequences that stand here (`hold`).
        self.num_users = 0


class PrefixIndex:
    """Chains of full blocks of one model. `model_id` and the salt are part of every chain's first hash."""

    def __init__(self, block_size: int, model_id: str = "", hash_fn: HashFn | None = None) -> None:
        self.block_size = block_size
        self.model_id = model_id
        self._hash_fn = hash_fn or hash_block
        self._roots: dict[str, Prefix] = {}
        # A bucket is a list only because hashes may collide; nearly always it has one element.
        self._buckets: dict[int, list[Prefix]] = {}
        self._of_block: dict[int, Prefix] = {}

    def __len__(self) -> int:
        """Number of blocks that can be found."""
        return len(self._of_block)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._of_block

    def block_ids(self) -> set[int]:
        """Ids of all blocks that can be found."""
        return set(self._of_block)

    def hold_root(self, salt: str) -> Prefix:
        """The link every chain under `salt` starts from, held once for the caller (see `hold`)."""
        root = self._roots.get(salt)
        if root is None:
            identity = f"{len(self.model_id)}:{self.model_id}{salt}".encode("utf-8", "surrogatepass")
            digest = hashlib.blake2b(identity, digest_size=8).digest()
            root = self._roots[salt] = Prefix(None, salt, (), int.from_bytes(digest, "little", signed=True))
        root.num_users += 1
        return root

    def match(self, token_ids: Sequence[int], salt: str, max_blocks: int) -> list[Prefix]:
        """The longest chain of at most `max_blocks` links, all with blocks, that `token_ids` begins with."""
        links: list[Prefix] = []
        link = self._roots.get(salt)
        size = self.block_size
        while link is not None and len(links) < max_blocks:
            start = len(links) * size
            link = self._find(link, tuple(token_ids[start : start + size]))
            if link is None or link.block_id is None:
                break
            links.append(link)
        return links

    def hold(self, link: Prefix) -> Prefix:
        """Keep a link from vanishing while a sequence stands on it; give it back with `drop`."""
        link.num_users += 1
        return link

    def drop(self, link: Prefix) -> None:
        """Give back one `hold`."""
        link.num_users -= 1
        self._prune(link)

    def extend(self, link: Prefix, token_ids: tuple[int, ...], block_id: int) -> Prefix:
        """The link below `link` for a full block, held for the caller in exchange for the hold on `link`.

        `block_id` becomes findable under it, unless another block with the same contents already is.
        """
        key = self._hash_fn(link.hash, token_ids)
        child = self._find(link, token_ids, key)
        if child is None or child.block_id is None:
            assert block_id not in self._of_block, (
                f"block {block_id} is already findable under another prefix"
            )
        if child is None:
            child = Prefix(link, link.salt, token_ids, key)
            # The child becomes the user of `link` in the caller's place, hence no change to its count.
            self._buckets.setdefault(key, []).append(child)
        else:
            link.num_users -= 1
        child.num_users += 1
        if child.block_id is None:
            child.block_id = block_id
            self._of_block[block_id] = child
        return child

    def forget(self, block_id: int) -> None:
        """The block's contents are about to be lost: no prefix may lead to it any more."""
        link = self._of_block.pop(block_id)
        link.block_id = None
        self._prune(link)

    def clear(self) -> None:
        """Forget every block and every link. Links still held by callers lead nowhere from then on."""
        for link in self._of_block.values():
            link.block_id = None
        self._of_block.clear()
        self._buckets.clear()
        self._roots.clear()

    def _find(self, parent: Prefix, token_ids: tuple[int, ...], key: int | None = None) -> Prefix | None:
        if key is None:
            key = self._hash_fn(parent.hash, token_ids)
        for link in self._buckets.get(key, ()):
            if link.parent is parent and link.token_ids == token_ids:
                return link
        return None

    def _prune(self, link: Prefix) -> None:
        """Remove `link`, and then its ancestors, as far as nobody needs them."""
        current: Prefix | None = link
        while current is not None and current.num_users == 0 and current.block_id is None:
            if current.parent is None:
                self._roots.pop(current.salt, None)
            else:
                bucket = self._buckets[current.hash]
                bucket.remove(current)
                if not bucket:
                    del self._buckets[current.hash]
                current.parent.num_users -= 1
            current = current.parent

    def check(self, held: Sequence[Prefix] = ()) -> None:
        """Raise AssertionError when blocks and links disagree; `held` lists every hold of a caller."""
        links = [link for bucket in self._buckets.values() for link in bucket]
        users: dict[Prefix, int] = dict.fromkeys([*links, *self._roots.values()], 0)
        for link in links:
            parent = link.parent
            assert parent is not None, "a root is in a bucket"
            assert parent in users, "a link's parent is gone from the index"
            users[parent] += 1
            assert link.hash == self._hash_fn(parent.hash, link.token_ids), "a link is in the wrong bucket"
            assert link.salt == parent.salt, "a chain changes its salt"
            assert len(link.token_ids) == self.block_size, "a link is not a full block"
        for link in held:
            assert link in users, "a held link is gone from the index"
            users[link] += 1
        for link, count in users.items():
            assert link.num_users == count, f"a link counts {link.num_users} users and has {count}"
            assert count or link.block_id is not None, "a link nobody needs was kept"
        with_block = {link.block_id: link for link in links if link.block_id is not None}
        assert with_block == self._of_block, "blocks and links do not map one to one"
        assert len(with_block) == sum(link.block_id is not None for link in links), "two links share a block"
