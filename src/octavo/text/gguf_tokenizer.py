"""A tokenizer from the metadata of a GGUF file.

Two models are known: `gpt2` (byte-level BPE, split first by the rule that `tokenizer.ggml.pre` names) and
`llama` (sentencepiece BPE with scores and byte fallback).
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from octavo.errors import ModelError, nearest
from octavo.gguf_file import GGUFFile
from octavo.text.gguf_pre_tokenizers import PRE_TOKENIZERS
from octavo.text.recipe import TokenizerRecipe

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
_SPECIAL_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # spelled so by the format
    "pad_token": "padding_token_id",
    "mask_token": "mask_token_id",
}
_END_OF_TURN_KEYS = ("eot_token_id", "eom_token_id")


def recipe_from_gguf(path: Path) -> TokenizerRecipe:
    """Read `path`'s tokenizer; ModelError or WeightsError as `load_tokenizer` says."""
    with GGUFFile(path) as file:
        return recipe_from_metadata(file.values("tokenizer."), str(path))


def recipe_from_metadata(metadata: dict[str, Any], origin: str) -> TokenizerRecipe:
    """The recipe in already read metadata; `origin` names the file in errors."""
    ggml = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    tokens = _tokens(ggml, origin)
    match ggml.get("model"):
        case "gpt2":
            backend, adds_bos = _byte_level_bpe(ggml, tokens, origin)
        case "llama":
            backend, adds_bos = _sentencepiece(ggml, tokens, origin), True
        case other:
            raise ModelError(
                f"{origin}: tokenizer.ggml.model {other!r} is not supported (expected 'gpt2' or 'llama'); "
                "use the model's Hugging Face folder, whose tokenizer.json needs no conversion"
            )
    _add_tokens(backend, tokens, ggml.get("token_type") or [])

    def token_at(key: str) -> str | None:
        token_id: int | None = ggml.get(key)
        if token_id is None:
            return None
        if not 0 <= token_id < len(tokens):
            raise ModelError(
                f"{origin}: tokenizer.ggml.{key} is {token_id}, outside the vocabulary of {len(tokens)} "
                "tokens; convert the file again, or correct the key with the gguf package's gguf-set-metadata"
            )
        return tokens[token_id]

    specials: dict[str, str | None] = {name: token_at(key) for name, key in _SPECIAL_KEYS.items()}
    templates = {
        key.removeprefix("tokenizer.chat_template").removeprefix(".") or "default": value
        for key, value in metadata.items()
        if key.startswith("tokenizer.chat_template") and isinstance(value, str)
    }
    return TokenizerRecipe(
        backend=backend,
        origin=origin,
        special_tokens={name: token for name, token in specials.items() if token is not None},
        chat_templates=templates,
        add_bos_token=ggml.get("add_bos_token", adds_bos and specials["bos_token"] is not None),
        add_eos_token=ggml.get("add_eos_token", False),
        extra_eos_token_ids=frozenset(ggml[key] for key in _END_OF_TURN_KEYS if token_at(key) is not None),
    )


def _tokens(ggml: dict[str, Any], origin: str) -> list[str]:
    tokens: list[str] = ggml.get("tokens") or []
    if not tokens:
        raise ModelError(
            f"{origin}: the file has no vocabulary (tokenizer.ggml.tokens); pass token ids as prompts, "
            "or use a file that holds the tokenizer"
        )
    # llama.cpp names empty tokens so; without a name they would all be the same entry.
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
    if len(set(tokens)) != len(tokens):
        twice = Counter(tokens).most_common(1)[0][0]
        raise ModelError(f"{origin}: the vocabulary holds {twice!r} more than once; convert the file again")
    return tokens


def _byte_level_bpe(ggml: dict[str, Any], tokens: list[str], origin: str) -> tuple[Tokenizer, bool]:
    name = ggml.get("pre", "default")
    rule = PRE_TOKENIZERS.get(name)
    if rule is None:
        raise ModelError(
            f"{origin}: tokenizer.ggml.pre {name!r} is not known{nearest(name, PRE_TOKENIZERS)}, and another "
            "rule would split text wrongly without a sign; use the model's Hugging Face folder, "
            "whose tokenizer.json states the rule"
        )
    merges = ggml.get("merges")
    if merges is None:
        raise ModelError(f"{origin}: tokenizer.ggml.merges is missing; convert the file again")
    pairs = [merge.partition(" ")[::2] for merge in merges]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(_bpe(vocab, pairs, origin, ignore_merges=rule.ignore_merges))
    if rule.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = rule.build()
    backend.decoder = decoders.ByteLevel()
    return backend, rule.adds_bos


def _sentencepiece(ggml: dict[str, Any], tokens: list[str], origin: str) -> Tokenizer:
    scores = ggml.get("scores")
    if scores is None or len(scores) != len(tokens):
        got = "none" if scores is None else str(len(scores))
        raise ModelError(
            f"{origin}: expected {len(tokens)} tokenizer.ggml.scores, got {got}; convert the file again"
        )
    types = ggml.get("token_type") or [1] * len(tokens)
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = tokens[ggml.get("unknown_token_id", 0)]
    backend = Tokenizer(
        _bpe(
            vocab,
            _merges(tokens, scores, types),
            origin,
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = [normalizers.Prepend("▁")] if ggml.get("add_space_prefix", True) else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _merges(tokens: list[str], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, best score first: the order in which sentencepiece merges."""
    mergeable = {
        token: scores[i] for i, token in enumerate(tokens) if types[i] not in (_UNKNOWN, _CONTROL, _BYTE)
    }
    ranked = [
        (-score, cut, token)
        for token, score in mergeable.items()
        for cut in range(1, len(token))
        if token[:cut] in mergeable and token[cut:] in mergeable
    ]
    ranked.sort(key=lambda entry: entry[:2])
    return [(token[:cut], token[cut:]) for _, cut, token in ranked]


def _bpe(vocab: dict[str, int], merges: list[tuple[str, str]], origin: str, **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab=vocab, merges=merges, **options)
    except Exception as error:  # the Rust side raises bare Exception, naming the merge
        raise ModelError(f"{origin}: the merges do not fit the vocabulary ({error})") from error


def _add_tokens(backend: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Make control tokens special and user-defined ones whole; both keep their ids."""
    added = [
        AddedToken(token, normalized=False, special=kind != _USER_DEFINED)
        for token, kind in zip(tokens, types, strict=False)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    backend.add_tokens([token for token in added if not token.special])
    backend.add_special_tokens([token for token in added if token.special])
