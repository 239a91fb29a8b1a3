"""A tokenizer from the files of a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from octavo.errors import ModelError, shown
from octavo.text.recipe import TokenizerRecipe

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_GPT2_END = "<|endoftext|>"


def recipe_from_folder(folder: Path) -> TokenizerRecipe:
    """Read `tokenizer.json` and the files beside it; ModelError as `load_tokenizer` says.

    A GPT-2 folder may have `vocab.json` and `merges.txt` in its place, as they were before there was one.
    `tokenizer_config.json` outranks `special_tokens_map.json`. A chat template comes from
    `chat_template.jinja` (and `additional_chat_templates/*.jinja`), else from the configuration, else from
    `chat_template.json`.
    """
    path = folder / "tokenizer.json"
    config = _json(folder / "tokenizer_config.json")
    specials = {**_json(folder / "special_tokens_map.json"), **config}
    if path.is_file():
        backend = _parsed(path)
    elif _is_gpt2(folder, config) and (folder / "vocab.json").is_file():
        path = folder / "vocab.json"
        backend = _gpt2(folder, bool(config.get("add_prefix_space")))
        specials = {"bos_token": _GPT2_END, "eos_token": _GPT2_END, **specials}
    else:
        older = next((name for name in ("tokenizer.model", "vocab.json") if (folder / name).is_file()), None)
        found = f", only the older {older}" if older else ""
        raise ModelError(
            f"{folder}: no tokenizer.json there{found}; download it with the model, write one with "
            "transformers' AutoTokenizer.from_pretrained(folder).save_pretrained(folder), "
            "or pass token ids as prompts"
        )
    specials = _special_tokens(specials, path)
    _add_configured_tokens(backend, config.get("added_tokens_decoder") or {}, folder)
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    named = extra.values() if isinstance(extra, dict) else extra
    _make_special(backend, [*specials.values(), *(_text(token) for token in named)])
    if isinstance(extra, dict):
        specials |= {name: _text(token) for name, token in extra.items()}
    return TokenizerRecipe(
        backend=backend,
        origin=str(folder),
        special_tokens=specials,
        chat_templates=_chat_templates(folder, config),
        add_bos_token=config.get("add_bos_token"),
        add_eos_token=config.get("add_eos_token"),
    )


def _parsed(path: Path) -> Tokenizer:
    text = _read(path)
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the Rust side raises bare Exception
        raise ModelError(
            f"{path}: cannot be read as a tokenizer ({error}); download the file again"
        ) from error


def _is_gpt2(folder: Path, config: dict[str, Any]) -> bool:
    kind = config.get("tokenizer_class")
    if isinstance(kind, str):
        return kind in ("GPT2Tokenizer", "GPT2TokenizerFast")
    return _json(folder / "config.json").get("model_type") == "gpt2"


def _gpt2(folder: Path, add_prefix_space: bool) -> Tokenizer:
    """Byte-level BPE from GPT-2's two files; other models that have such files split the text otherwise."""
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    lines = [line for line in _read(merges).splitlines() if line and not line.startswith("#version")]
    try:
        pairs = [(left, right) for left, right in (line.split(" ") for line in lines)]
        backend = Tokenizer(models.BPE(vocab=_json(vocab), merges=pairs))
    except Exception as error:  # the Rust side raises bare Exception
        raise ModelError(
            f"{folder}: vocab.json and merges.txt make no tokenizer ({error}); download them again"
        ) from error
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    backend.decoder = decoders.ByteLevel()
    return backend


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}; check its permissions") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: not UTF-8 ({error.reason}); download the file again") from error


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    text = _read(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON ({error}); download the file again") from error
    if not isinstance(value, dict):
        raise ModelError(
            f"{path}: expected a JSON object, got {type(value).__name__}; download the file again"
        )
    return value


def _text(token: Any) -> str:
    """A token written as a string, or as a serialised AddedToken."""
    return str(token["content"] if isinstance(token, dict) else token)


def _special_tokens(values: dict[str, Any], path: Path) -> dict[str, str]:
    specials: dict[str, str] = {}
    for name in _SPECIAL_NAMES:
        token = values.get(name)
        if token is None:
            continue
        if not isinstance(token, str) and not (
            isinstance(token, dict) and isinstance(token.get("content"), str)
        ):
            raise ModelError(
                f"{path.parent}: {name} should be a string or an object with 'content', got {shown(token)}"
            )
        specials[name] = _text(token)
    return specials


def _add_configured_tokens(backend: Tokenizer, entries: dict[str, dict[str, Any]], folder: Path) -> None:
    """Tokens that the configuration adds and `tokenizer.json` lacks; ids must come out as stated."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token_id, entry in sorted(entries.items(), key=lambda item: int(item[0])):
        content = _text(entry)
        if content in known:
            continue
        flags = {
            name: bool(entry[name])
            for name in ("lstrip", "rstrip", "single_word", "normalized")
            if name in entry
        }
        backend.add_tokens([AddedToken(content, special=bool(entry.get("special")), **flags)])
        if backend.token_to_id(content) != int(token_id):
            raise ModelError(
                f"{folder}: added token {content!r} should have id {token_id}, but tokenizer.json puts it at "
                f"{backend.token_to_id(content)}; the files are of different versions, download both again"
            )


def _make_special(backend: Tokenizer, contents: list[str]) -> None:
    """Named special tokens are skipped in output even where `tokenizer.json` calls them ordinary.

    A name outside the vocabulary (often a pad token) is left out: the model has no row for it.
    """
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    missing = [
        content for content in contents if content not in special and backend.token_to_id(content) is not None
    ]
    backend.add_special_tokens([AddedToken(content, special=True, normalized=False) for content in missing])


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    if files:
        return {name: _read(path) for name, path in files.items()}
    stated = config.get("chat_template") or _json(folder / "chat_template.json").get("chat_template")
    match stated:
        case None:
            return {}
        case str():
            return {"default": stated}
        case list() if all(
            isinstance(entry, dict) and {"name", "template"} <= entry.keys() for entry in stated
        ):
            return {entry["name"]: entry["template"] for entry in stated}
    raise ModelError(
        f"{folder}: chat_template should be a string or a list of objects with 'name' and 'template', "
        f"got {shown(stated)}"
    )
