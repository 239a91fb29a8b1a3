from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
from helpers.tokenizers_by_hand import BYTE_CHARACTERS, Source, byte_level, sentencepiece_like
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, GPT2Tokenizer

from octavo.errors import ModelError
from octavo.text.tokenizer import Tokenizer, load_tokenizer


def folder(path: Path, files: dict[str, Any]) -> Source:
    backend = byte_level({0: b"Hello", 1: b"[PAD]"}, special=["<s>", "</s>"], added=["<tool>"])
    backend.save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / name).parent.mkdir(exist_ok=True)
        text = content if isinstance(content, str | bytes) else json.dumps(content)
        (path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return Source("folder", path)


def load(path: Path, files: dict[str, Any]) -> Tokenizer:
    return load_tokenizer(folder(path, files))


def test_tokenizer_json_alone(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, {})
    assert tokenizer.decode(tokenizer.encode("<s>Hello<tool> é</s>")) == "Hello<tool> é"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.chat_template) == (None, None, None)
    assert tokenizer.special_tokens == {}


def test_special_tokens_as_strings_and_as_objects(tmp_path: Path) -> None:
    config = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "unk_token": None}
    tokenizer = load(
        tmp_path, {"tokenizer_config.json": config | {"pad_token": "<nowhere>", "add_bos_token": True}}
    )
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<nowhere>"}
    assert tokenizer.encode("Hello") == [tokenizer.bos_token_id, 0]
    assert tokenizer.pad_token_id is None  # the model has no row for it


def test_the_configuration_outranks_the_special_tokens_map(tmp_path: Path) -> None:
    files = {
        "special_tokens_map.json": {"bos_token": "</s>", "eos_token": {"content": "</s>"}},
        "tokenizer_config.json": {"bos_token": "<s>"},
    }
    assert load(tmp_path, files).special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_named_specials_are_skipped_in_output(tmp_path: Path) -> None:
    config = {"pad_token": "[PAD]", "additional_special_tokens": ["<tool>"]}
    tokenizer = load(tmp_path, {"tokenizer_config.json": config})
    assert tokenizer.decode(tokenizer.encode("Hello[PAD]<tool>!")) == "Hello!"
    assert tokenizer.decode(tokenizer.encode("[PAD]"), skip_special_tokens=False) == "[PAD]"


def test_tokens_that_only_the_configuration_adds(tmp_path: Path) -> None:
    entries = {
        "261": {"content": "<think>", "special": False, "normalized": False},
        "262": {"content": "<|end|>", "special": True},
    }
    tokenizer = load(tmp_path, {"tokenizer_config.json": {"added_tokens_decoder": entries}})
    assert tokenizer.encode("<think>Hello<|end|>") == [261, 0, 262]
    assert tokenizer.decode([261, 0, 262]) == "<think>Hello"
    assert tokenizer.vocab_size == 263


def test_named_extra_tokens_are_template_variables(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, {"tokenizer_config.json": {"extra_special_tokens": {"tool_token": "<tool>"}}})
    assert tokenizer.special_tokens == {"tool_token": "<tool>"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": {"chat_template": "one"}}, {"default": "one"}),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [
                        {"name": "default", "template": "one"},
                        {"name": "tool_use", "template": "two"},
                    ]
                }
            },
            {"default": "one", "tool_use": "two"},
        ),
        ({"chat_template.json": {"chat_template": "old"}}, {"default": "old"}),
        (
            {"chat_template.jinja": "file\n", "tokenizer_config.json": {"chat_template": "one"}},
            {"default": "file\n"},
        ),
        (
            {"chat_template.jinja": "file", "additional_chat_templates/rag.jinja": "more"},
            {"default": "file", "rag": "more"},
        ),
    ],
)
def test_where_chat_templates_come_from(
    tmp_path: Path, files: dict[str, Any], expected: dict[str, str]
) -> None:
    assert load(tmp_path, files).chat_templates == expected


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer.json": "{"}, r"tokenizer\.json: cannot be read as a tokenizer"),
        ({"tokenizer_config.json": "{"}, r"tokenizer_config\.json: not valid JSON"),
        ({"tokenizer_config.json": "[" * 100_000}, r"tokenizer_config\.json: not valid JSON \(.*recursion"),
        ({"chat_template.jinja": b"\xff"}, r"chat_template\.jinja: not UTF-8"),
        ({"tokenizer_config.json": "[]"}, r"tokenizer_config\.json: expected a JSON object, got list"),
        (
            {"tokenizer_config.json": {"bos_token": 5}},
            "bos_token should be a string or an object with 'content', got 5",
        ),
        ({"tokenizer_config.json": {"chat_template": 5}}, "chat_template should be a string or a list"),
        (
            {"tokenizer_config.json": {"chat_template": [{"name": "a"}]}},
            "chat_template should be a string or a list",
        ),
        (
            {"tokenizer_config.json": {"added_tokens_decoder": {"500": {"content": "<new>"}}}},
            "added token '<new>' should have id 500, but tokenizer.json puts it at 261",
        ),
    ],
)
def test_broken_folders_are_named(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load(tmp_path, files)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    source = folder(tmp_path, {"tokenizer_config.json": {}, "chat_template.jinja": ""})
    whole = Path.open

    def refuse(self: Path, *args: Any, **options: Any) -> Any:
        if self.name == name:
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return whole(self, *args, **options)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ModelError, match=f"{name}: cannot be read: Permission denied; check its permissions"):
        load_tokenizer(source)


@pytest.mark.parametrize(
    ("older", "hint"), [("tokenizer.model", "only the older tokenizer.model"), (None, "no tokenizer")]
)
def test_a_folder_without_tokenizer_json(tmp_path: Path, older: str | None, hint: str) -> None:
    if older:
        (tmp_path / older).write_bytes(b"")
    with pytest.raises(ModelError, match=f"{hint}.*save_pretrained.*or pass token ids"):
        load_tokenizer(Source("folder", tmp_path))


def test_a_llama_folder_equals_transformers(tmp_path: Path) -> None:
    backend = sentencepiece_like()
    backend.post_processor = TemplateProcessing(single="<s> $A", pair="$A $B", special_tokens=[("<s>", 1)])
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = load_tokenizer(Source("folder", tmp_path)), AutoTokenizer.from_pretrained(tmp_path)
    for text in ["the in a", "  the", "é€ 中!", "the</s>he", "", " ", "<s>the"]:
        expected = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == expected
        assert ours.encode(text) == (expected if text.startswith("<s>") else theirs.encode(text))
        for skip in (True, False):
            assert ours.decode(expected, skip) == theirs.decode(expected, skip_special_tokens=skip)


GPT2_MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "r l", "Ġwo rl", "Ġworl d", "Ã ©"]


def gpt2_folder(path: Path, **changes: Any) -> Source:
    """A vocabulary of single bytes and what the merges make, in the two files GPT-2 came in."""
    vocab = {char: i for i, char in enumerate(sorted(BYTE_CHARACTERS.values()))}
    for merge in GPT2_MERGES:
        vocab[merge.replace(" ", "")] = len(vocab)
    vocab["<|endoftext|>"] = len(vocab)
    files = {
        "config.json": json.dumps({"model_type": "gpt2"}),
        "vocab.json": json.dumps(vocab),
        "merges.txt": "\n".join(["#version: 0.2", *GPT2_MERGES, ""]),
        **changes,
    }
    for name, content in files.items():
        if content is not None:
            (path / name).write_text(content, encoding="utf-8")
    return Source("folder", path)


@pytest.mark.parametrize("prefix_space", [False, True])
def test_the_two_files_of_gpt2(tmp_path: Path, prefix_space: bool) -> None:
    config = json.dumps({"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": prefix_space})
    tokenizer = load_tokenizer(gpt2_folder(tmp_path, **{"tokenizer_config.json": config}))
    theirs = GPT2Tokenizer(
        vocab=json.loads((tmp_path / "vocab.json").read_text()),
        merges=[tuple(merge.split(" ")) for merge in GPT2_MERGES],
        add_prefix_space=prefix_space,
    )
    for text in ("hello world", " hello  world's 12é\n", "hello<|endoftext|>hello", ""):
        assert tokenizer.encode(text) == theirs(text)["input_ids"]
        assert tokenizer.decode(tokenizer.encode(text)) == theirs.decode(
            theirs(text)["input_ids"], skip_special_tokens=True
        )
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == 256 + len(GPT2_MERGES)
    assert len(tokenizer.encode("hello world")) == (3 if prefix_space else 2)


def test_two_files_of_another_model_or_broken_ones_are_refused(tmp_path: Path) -> None:
    other = json.dumps({"tokenizer_class": "Qwen2Tokenizer"})
    with pytest.raises(ModelError, match=r"no tokenizer.json there, only the older vocab.json"):
        load_tokenizer(gpt2_folder(tmp_path, **{"tokenizer_config.json": other}))
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ModelError, match=r"vocab.json and merges.txt make no tokenizer"):
        load_tokenizer(gpt2_folder(tmp_path, **{"merges.txt": "a b c\n"}))
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(ModelError, match=r"merges.txt: cannot be read"):
        load_tokenizer(gpt2_folder(tmp_path, **{"merges.txt": None}))
