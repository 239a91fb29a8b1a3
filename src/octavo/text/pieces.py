"""What each token contributes to the decoded text, derived from the decoder of a `tokenizers` backend.

Decoders of language models come in two shapes, and both can be followed token by token without decoding
twice:

- *byte-level*: every token is a byte string, the text is their concatenation read as UTF-8.
- *pieces*: every token is a string after some replacements (`▁` becomes a space), except that `<0x41>` may
  stand for one byte; a run of such bytes is read as UTF-8 when it ends. Leading spaces may be stripped from
  the whole text.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes: character -> byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


@dataclass(frozen=True)
class DecodeRule:
    """A decoder, taken apart. Fields other than `byte_level` matter only for *pieces*."""

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    separator: str = ""
    """Put between tokens (a backend without a decoder joins them with a space)."""
    first_token_drops: str = ""
    """A character removed from the first token and replaced by a space in the others (Metaspace)."""
    strip: str = ""
    """A character stripped from the start of the text, `max_strip` times at most."""
    max_strip: int = 0

    @classmethod
    def of(cls, backend: Backend, origin: str) -> DecodeRule:
        """The rule of `backend`; ModelError for a decoder that cannot be streamed exactly."""
        if backend.decoder is None:
            return cls(separator=" ")
        state = json.loads(backend.decoder.__getstate__())
        steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
        fields: dict[str, Any] = {}
        replacements: list[tuple[str, str]] = []
        fused = False
        for step in steps:
            match step:
                case {"type": "ByteLevel"} if len(steps) == 1:
                    fields["byte_level"] = True
                case {"type": "Replace", "pattern": {"String": pattern}, "content": content} if not fields:
                    replacements.append((pattern, content))
                case {"type": "Metaspace", "replacement": mark, **options} if not fields:
                    if options.get("prepend_scheme", "always") == "never":
                        replacements.append((mark, " "))
                    else:
                        fields["first_token_drops"] = mark
                case {"type": "ByteFallback"} if not fused:
                    fields["byte_fallback"] = True
                case {"type": "Fuse"}:
                    fused = True
                case {"type": "Strip", "content": content, "start": start, "stop": 0} if fused:
                    fields |= {"strip": content, "max_strip": start}
                case _:
                    raise ModelError(
                        f"{origin}: the tokenizer's decoder step {step['type']!r} cannot be streamed here; "
                        "byte-level, Metaspace and sentencepiece-style decoders can"
                    )
        return cls(replacements=tuple(replacements), **fields)


class TokenPieces:
    """Text or bytes per token id, computed on first use and kept.

    `piece(id)` is bytes for a byte-level token and for a byte-fallback token, str for any other, and None
    where the token shows nothing: an id outside the vocabulary, or a special token when those are skipped.
    """

    def __init__(self, backend: Backend, rule: DecodeRule, *, skip_special_tokens: bool) -> None:
        self.rule = rule
        self._backend = backend
        added = backend.get_added_tokens_decoder().values()
        self._skipped = {token.content for token in added if token.special} if skip_special_tokens else set()
        self._alphabet = byte_level_alphabet() if rule.byte_level else {}
        self._pieces: dict[int, bytes | str | None] = {}

    def piece(self, token_id: int) -> bytes | str | None:
        """See the class; a Metaspace mark is already a space."""
        try:
            return self._pieces[token_id]
        except KeyError:
            value = self._pieces[token_id] = self._compute(token_id, first=False)
            return value

    def first_piece(self, token_id: int) -> bytes | str | None:
        """The piece of the text's first token, which Metaspace decoders treat apart."""
        return self._compute(token_id, first=True) if self.rule.first_token_drops else self.piece(token_id)

    def _compute(self, token_id: int, *, first: bool) -> bytes | str | None:
        token = self._backend.id_to_token(token_id)
        if token is None or token in self._skipped:
            return None
        rule = self.rule
        if rule.byte_level:
            try:
                return bytes(self._alphabet[char] for char in token)
            except KeyError:  # an added token with a character outside the alphabet stands for itself
                return token.encode()
        for old, new in rule.replacements:
            token = token.replace(old, new)
        if rule.first_token_drops:
            token = token.replace(rule.first_token_drops, "" if first else " ")
        if rule.byte_fallback and _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        return token
