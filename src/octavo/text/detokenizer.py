"""Token ids to text, piece by piece, exactly as one decode of them all would give it."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer

# A character is at most this many bytes of UTF-8, so this many bytes tell how a text's tail is to be read.
_MAX_CHARACTER_BYTES = 4


class Detokenizer:
    """Streams the text of one sequence; the joined pieces equal one `tokenizer.decode` of all its ids.

    A piece never ends in half a character: bytes of one that is not complete yet are held back, and become
    U+FFFD in `finish()` if nothing completes them. With a sentencepiece vocabulary the whole run of byte
    tokens is held until it ends, because one bad byte changes how all of the run is decoded; a run is seldom
    longer than a word.

    With `prompt_token_ids` the text is read as their continuation: a leading space stays a space, and a
    character that the prompt began and the output completes belongs to the output. The prompt's own text is
    not shown.

    Cost per token does not depend on how many came before. Not thread-safe.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._pieces = tokenizer.pieces(skip_special_tokens=skip_special_tokens)
        self._rule = self._pieces.rule
        self._pending = b""
        self._started = False
        self._strip_left = self._rule.max_strip
        if prompt_token_ids:
            self.push(prompt_token_ids[self._anchor(prompt_token_ids) :])

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these further ids make certain; may be empty."""
        if self._rule.byte_level:
            piece = self._pieces.piece
            if isinstance(token_ids, list) and len(token_ids) == 1:  # nearly every call
                only = piece(token_ids[0])
                return self._decode(self._pending + only if only else self._pending, final=False)  # type: ignore[operator]  # byte-level pieces are bytes
            parts = [self._pending, *(part for id_ in token_ids if (part := piece(id_)) is not None)]
            return self._decode(b"".join(parts), final=False)  # type: ignore[arg-type]  # byte-level pieces are bytes
        return self._strip("".join(self._push_pieces(token_ids)))

    def finish(self) -> str:
        """What was held back. A broken tail becomes U+FFFD, once."""
        if self._rule.byte_level:
            return self._decode(self._pending, final=True)
        return self._strip(self._end_run())

    def _decode(self, data: bytes, *, final: bool) -> str:
        text, used = codecs.utf_8_decode(data, "replace", final)
        self._pending = data[used:]
        return text

    def _push_pieces(self, token_ids: Iterable[int]) -> list[str]:
        shown: list[str] = []
        for token_id in token_ids:
            part = self._pieces.piece(token_id) if self._started else self._pieces.first_piece(token_id)
            if part is None:
                continue
            if isinstance(part, bytes):
                self._pending += part
            else:
                if self._pending:
                    shown.append(self._end_run())
                shown.append(self._rule.separator + part if self._started else part)
            self._started = True
        return shown

    def _end_run(self) -> str:
        run, self._pending = self._pending, b""
        try:
            return run.decode()
        except UnicodeDecodeError:
            # The byte-fallback rule: a run that is not UTF-8 as a whole is bad in every byte.
            return "\N{REPLACEMENT CHARACTER}" * len(run)

    def _strip(self, text: str) -> str:
        start = 0
        while self._strip_left and text.startswith(self._rule.strip, start) and start < len(text):
            start += 1
            self._strip_left -= 1
        if start < len(text):
            self._strip_left = 0
        return text[start:]

    def _anchor(self, token_ids: Sequence[int]) -> int:
        """The last index from which reading the prompt leaves the same state as reading all of it."""
        num_bytes = 0
        for index in range(len(token_ids) - 1, -1, -1):
            part = self._pieces.piece(token_ids[index])
            if self._rule.byte_level:
                num_bytes += len(part or b"")
                if num_bytes >= _MAX_CHARACTER_BYTES:
                    return index
            elif isinstance(part, str) and part.strip():
                return index
        return 0
