"""The tokenizer the engine uses: one class over the `tokenizers` package, whatever file it came from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol

from octavo.errors import ModelError, RequestError
from octavo.text.pieces import DecodeRule, TokenPieces

if TYPE_CHECKING:
    from octavo.text.fewest_tokens import FewestTokens
    from octavo.text.recipe import TokenizerRecipe


_LONG_TEXT: Final = 2_000


class TokenizerSource(Protocol):
    """Where a tokenizer lives; `octavo.models.source.ModelSource` is one."""

    @property
    def kind(self) -> str:
        """`folder` (Hugging Face files) or `gguf`."""

    @property
    def path(self) -> Path:
        """The folder or the file."""


def load_tokenizer(source: TokenizerSource) -> Tokenizer:
    """The tokenizer of a model, from a folder's `tokenizer.json` or from a GGUF file's metadata.

    Raises ModelError when there is none, or one that would be split or decoded wrongly here; the message says
    what to do. Raises WeightsError for a truncated GGUF file.
    """
    # `tokenizers` is imported by these two, and only now.
    if source.kind == "gguf":
        from octavo.text.gguf_tokenizer import recipe_from_gguf

        return Tokenizer(recipe_from_gguf(source.path))
    if source.kind == "folder":
        from octavo.text.folder_tokenizer import recipe_from_folder

        return Tokenizer(recipe_from_folder(source.path))
    raise ModelError(
        f"{source.path}: a model of kind {source.kind!r} has no tokenizer; expected 'folder' or 'gguf'. "
        "Pass token ids as prompts instead of text"
    )


class Tokenizer:
    """Text to ids and back. Immutable after loading; may be shared between threads."""

    def __init__(self, recipe: TokenizerRecipe) -> None:
        backend = recipe.backend
        # A checkpoint may carry its training run's limits; a prompt must never be cut or padded in silence.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.origin = recipe.origin
        self._rule = DecodeRule.of(backend, recipe.origin)
        self._pieces = {
            skip: TokenPieces(backend, self._rule, skip_special_tokens=skip) for skip in (True, False)
        }
        added_ids = backend.get_added_tokens_decoder()
        self.vocab_size: int = max(
            [backend.get_vocab_size(with_added_tokens=True), *(i + 1 for i in added_ids)]
        )
        """One more than the highest id, added tokens included."""
        self.special_tokens: Mapping[str, str] = MappingProxyType(dict(recipe.special_tokens))
        """Text of `bos_token`, `eos_token`, ... as chat templates see them."""
        self.chat_templates: Mapping[str, str] = MappingProxyType(dict(recipe.chat_templates))
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")
        self.pad_token_id = self._special_id("pad_token")
        eos_ids = () if self.eos_token_id is None else (self.eos_token_id,)
        self.eos_token_ids: frozenset[int] = recipe.extra_eos_token_ids.union(eos_ids)
        """Every id that ends a turn, `eos_token_id` among them."""
        self._prefix_ids, self._suffix_ids = self._wrapping(recipe)

    @property
    def chat_template(self) -> str | None:
        """The default chat template's Jinja source."""
        return self.chat_templates.get("default")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; the text of a special token inside it becomes that token.

        With `add_special_tokens` the BOS the model wants is put in front, unless the text begins with it
        already, and likewise the EOS at the end. Text from `render_chat` is encoded without: the template
        wrote its own.
        """
        if not isinstance(text, str):
            raise RequestError(f"prompt: expected a string to encode, got {type(text).__name__}")
        try:
            if len(text) < _LONG_TEXT:
                ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
            else:
                # Other threads can run meanwhile only this way; a short text is through before they notice.
                ids = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError("prompt: not valid Unicode: it holds lone surrogates; remove them") from error
        if not add_special_tokens:
            return ids
        prefix, suffix = self._prefix_ids, self._suffix_ids
        if prefix and ids[: len(prefix)] == prefix:
            prefix = []
        if suffix and ids[-len(suffix) :] == suffix:
            suffix = []
        return [*prefix, *ids, *suffix]

    def fewest_tokens(self, text: str) -> int:
        """How many tokens `encode(text)` has at least, much sooner than that says; 0 when not known."""
        return 0 if self._fewest is None else self._fewest.count(text)

    @cached_property
    def _fewest(self) -> FewestTokens | None:
        from octavo.text.fewest_tokens import FewestTokens

        return FewestTokens.of(self._backend)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`. Invalid UTF-8 becomes U+FFFD, ids outside the vocabulary nothing."""
        ids = list(ids)
        try:
            text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except OverflowError as error:
            bad = next(id_ for id_ in ids if not 0 <= id_ < 2**32)
            raise RequestError(f"token ids: expected ids of 0 to {self.vocab_size - 1}, got {bad}") from error
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes this token adds in the middle of a text; `b""` for an id outside the vocabulary."""
        piece = self._pieces[False].piece(token_id)
        return piece.encode() if isinstance(piece, str) else piece or b""

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text for display: half a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_to_id(self, token: str) -> int | None:
        """Id of a token as the vocabulary spells it, or None."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def pieces(self, *, skip_special_tokens: bool) -> TokenPieces:
        """What every token adds to a text; for `Detokenizer`."""
        return self._pieces[skip_special_tokens]

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.token_to_id(token)

    def _wrapping(self, recipe: TokenizerRecipe) -> tuple[list[int], list[int]]:
        """The ids put before and after a plain prompt."""
        # An empty text shows what is added, a text shows where.
        added = self._backend.encode("", add_special_tokens=True).ids
        wrapped = self._backend.encode("a", add_special_tokens=True).ids
        num_before = next((i for i, id_ in enumerate(added) if wrapped[i] != id_), len(added))
        prefix, suffix = added[:num_before], added[num_before:]
        # What the configuration states outranks the post-processor.
        for name, stated, token_id in (
            ("add_bos_token", recipe.add_bos_token, self.bos_token_id),
            ("add_eos_token", recipe.add_eos_token, self.eos_token_id),
        ):
            if stated is None:
                continue
            if stated and token_id is None:
                token = name.removeprefix("add_")
                raise ModelError(
                    f"{self.origin}: {name} is true, but {token} is not a token of the vocabulary "
                    f"(got {self.special_tokens.get(token)!r}); correct {token} or set {name} to false"
                )
            ids = [token_id] if stated and token_id is not None else []
            prefix, suffix = (ids, suffix) if name == "add_bos_token" else (prefix, ids)
        return prefix, suffix
