"""How many tokens a text has at least, in milliseconds a megabyte: tokenising it takes about a second.

A byte-level BPE splits the text's bytes into entries of its vocabulary, whatever its merges and its patterns
are. So two neighbouring bytes that are neighbours in no entry have a border between them, and a byte that is
in no entry more than m times is in n tokens at most m * n times.
"""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from octavo.text.pieces import byte_level_alphabet

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_Counts = NDArray[np.int64]
_PART_BYTES: Final = 2**20
_PART_CHARACTERS: Final = 2**16
# Letters of the common scripts, and ASCII: such a character neither joins what is before it nor moves there.
_STARTS_AFRESH: Final = re.compile(
    "[\0-\u02ff\u0370-\u0482\u05d0-\u05ea\u0620-\u064a\u0904-\u0939\u0e01-\u0e30"
    "\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fff\uac00-\ud7a3]"
)
_KEEPS_ALL: Final = ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")


class FewestTokens:
    """The bound for texts of one tokenizer; `of` says None where there is none that surely holds."""

    def __init__(self, entries: list[bytes], dropped: bytes, *, is_nfc: bool) -> None:
        self._dropped = dropped
        self._is_nfc = is_nfc
        entries = [entry.translate(None, dropped) for entry in entries]
        self._longest = max(1, *map(len, entries))
        self._bytes, self._pairs = _most_in_one(entries)

    @classmethod
    def of(cls, backend: Backend) -> FewestTokens | None:
        """For a byte-level BPE after NFC or no normaliser."""
        alphabet = byte_level_alphabet()
        added = backend.get_added_tokens_decoder().values()
        if not _is_byte_level(backend):
            return None
        for one in added:
            # A token that takes the spaces around it along may be of any length.
            if one.lstrip or one.rstrip or not unicodedata.is_normalized("NFC", one.content):
                return None
        as_bytes = str.maketrans({char: chr(byte) for char, byte in alphabet.items()})
        entries = [
            token.translate(as_bytes).encode("latin-1", "replace")
            for token in backend.get_vocab(with_added_tokens=True)
        ]
        entries += [one.content.encode() for one in added]
        # Bytes that the vocabulary lacks leave no token, and what is around them becomes neighbours.
        dropped = bytes(byte for char, byte in alphabet.items() if backend.model.token_to_id(char) is None)
        return cls(entries, dropped, is_nfc=backend.normalizer is not None)

    def count(self, text: str) -> int:
        """At least so many tokens has `text`; 0 where nothing can be said, as of one that is no Unicode."""
        try:
            encoded = text.encode()
        except UnicodeEncodeError:
            return 0
        # The normaliser makes texts shorter, part by part between added tokens.
        if self._is_nfc and not _stays_as_it_is(text):
            return 0
        kept = encoded.translate(None, self._dropped)
        if not kept:
            return 0
        data = np.frombuffer(kept, np.uint8)
        num_bytes, num_pairs = np.zeros(2**8, np.int64), np.zeros(2**16, np.int64)
        for start in range(0, len(data), _PART_BYTES):
            part = data[start : start + _PART_BYTES + 1]
            num_bytes += np.bincount(part[:_PART_BYTES], minlength=2**8)
            num_pairs += np.bincount(_pairs(part), minlength=2**16)
        never = self._pairs == 0
        # In n tokens a pair is at most m times in each, and n - 1 times on the borders.
        bounds = [
            -(-len(data) // self._longest),
            int(np.max(-(-num_bytes // np.maximum(self._bytes, 1)))),
            int(np.max(-(-(num_pairs[~never] + 1) // (self._pairs[~never] + 1)), initial=0)),
            int(num_pairs[never].sum()) + 1,
        ]
        return max(bounds)


def _stays_as_it_is(text: str) -> bool:
    """Whether NFC surely leaves it alone, by the tables of whatever version of Unicode.

    What is normalised stays so in later versions, as far as its characters have been assigned; one without a
    character is older than it, and takes it for one that joins nothing and moves nowhere.
    """
    if text.isascii():
        return True
    occurs = np.zeros(sys.maxunicode + 1, np.bool_)
    # In parts, as each call keeps all other threads waiting.
    for part in _parts(text):
        if not unicodedata.is_normalized("NFC", part):
            return False
        occurs[np.frombuffer(part.encode("utf-32-le"), np.uint32)] = True
    return all(unicodedata.category(chr(one)) != "Cn" for one in np.flatnonzero(occurs))


def _parts(text: str) -> Iterator[str]:
    """It is normalised if they are."""
    start = 0
    while start < len(text):
        found = _STARTS_AFRESH.search(text, start + _PART_CHARACTERS)
        end = len(text) if found is None else found.start()
        yield text[start:end]
        start = end


def _is_byte_level(backend: Backend) -> bool:
    """Whether its tokens are the bytes of the text, end to end; but for bytes that it does not know."""
    from tokenizers import models

    model = backend.model
    if not isinstance(model, models.BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    if backend.normalizer is not None and _state(backend.normalizer) != {"type": "NFC"}:
        return False
    if backend.pre_tokenizer is None:
        return False
    state = _state(backend.pre_tokenizer)
    steps = state["pretokenizers"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps]
    return kinds.count("ByteLevel") == 1 and all(
        kind in ("ByteLevel", "Digits")
        or (kind in ("Split", "Punctuation") and step["behavior"] in _KEEPS_ALL)
        for kind, step in zip(kinds, steps, strict=True)
    )


def _state(component: Any) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(component.__getstate__())
    return state


def _pairs(data: NDArray[np.uint8]) -> NDArray[np.uint16]:
    """Each two neighbours as one number."""
    return np.asarray(data[:-1].astype(np.uint16) << 8 | data[1:], np.uint16)


def _most_in_one(entries: list[bytes]) -> tuple[_Counts, _Counts]:
    """For each byte and for each pair, how often it is in the entry that has it most often."""
    data = np.frombuffer(b"".join(entries), np.uint8)
    owners = np.repeat(np.arange(len(entries)), [len(entry) for entry in entries])
    within = owners[:-1] == owners[1:]
    found = []
    for values, whose, size in ((data, owners, 2**8), (_pairs(data)[within], owners[:-1][within], 2**16)):
        keys, counts = np.unique(whose * size + values, return_counts=True)
        most = np.zeros(size, np.int64)
        np.maximum.at(most, keys % size, counts)
        found.append(most)
    return found[0], found[1]
