"""Finding a tag in text that arrives in pieces, without ever showing half of it."""

from __future__ import annotations


def num_held(text: str, tag: str) -> int:
    """Length of the longest end of `text` that begins `tag` (and is not all of it)."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if tag.startswith(text[-length:]):
            return length
    return 0


def split_at(text: str, tag: str) -> tuple[str, str | None, str]:
    """`(before, after, held)`: `after` is None while the tag has not come; `held` may be its beginning."""
    start = text.find(tag)
    if start >= 0:
        return text[:start], text[start + len(tag) :], ""
    length = num_held(text, tag)
    return text[: len(text) - length], None, text[len(text) - length :]
