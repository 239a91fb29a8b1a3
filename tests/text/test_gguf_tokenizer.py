from __future__ import annotations

import inspect
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from helpers.tokenizers_by_hand import (
    SENTENCEPIECE_SCORES,
    SENTENCEPIECE_TOKENS,
    SENTENCEPIECE_TYPES,
    SmolLMByHand,
    Source,
    sentencepiece_by_hand,
    smollm2_path,
    spelled,
    write_gguf,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN2_PATTERN
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX as QWEN35_PATTERN

from octavo.errors import ModelError
from octavo.gguf_file import GGUFFile
from octavo.text.gguf_pre_tokenizers import PRE_TOKENIZERS
from octavo.text.gguf_tokenizer import recipe_from_metadata
from octavo.text.tokenizer import Tokenizer, load_tokenizer

WORDS = [
    "Hello world",
    "I'm you're she'll WE'LL",
    "it's O'Neil's",
    "  two  spaces   three",
    "\ttab\n\nlines\r\n \n x",
    "trailing  ",
    "3.14159 and 1,000,000",
    "v2.0b12",
    "x=1;y=22;z=333",
    "¼½ Ⅻ ²³ ٣٤ 〇一二",
    "naïve café résumé",
    "café",
    "Straße ẞ",
    "Привет, мир!",
    "你好，世界。",
    "こんにちは 世界",
    "안녕하세요",
    "مرحبا بالعالم",
    "नमस्ते दुनिया",
    "🎉🎊 👩\u200d👩\u200d👧\u200d👦 🇫🇷",
    "a\xa0b\u2003c\u200bd",
    "def f(x):\n    return x**2  # squared",
    '{"a": [1, 2]}',
    "<b>tag</b> &amp;",
    "https://example.org/a?b=1&c=2",
    "------ ====== ######",
    "...!!!???",
    "\\u0041 \\n",
    "'s 't 're",
    "'S 'T",
    "''''",
    "\x00\x01",
    "\ufeffbom",
    "�",
    "Ünïcödé ÀÉÎ",
    "<",
    "im_start",
    ">user\nHi<",
    "im_end",
    ">\n",
    "a<",
    "im_end",
    ">b<",
    "endoftext",
    "><repo_name>",
    "<",
    "im_start",
    "",
    " ",
    "<",
    "",
    "><",
    "",
]
ALPHABET = "aB z0١'\n\t ~,éß中\u0301🎉½"


@cache
def smollm2() -> Tokenizer:
    return load_tokenizer(Source("gguf", smollm2_path()))


@cache
def smollm2_metadata() -> dict[str, Any]:
    with GGUFFile(smollm2_path()) as file:
        return file.values()


@cache
def by_hand() -> SmolLMByHand:
    metadata = smollm2_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == 3]
    return SmolLMByHand(tokens, metadata["tokenizer.ggml.merges"], special)


@cache
def smollm2_in_transformers() -> PreTrainedTokenizerFast:
    """The published tokenizer.json's shape: single digits, then GPT-2's byte-level rule."""
    tokens = smollm2_metadata()["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in smollm2_metadata()["tokenizer.ggml.merges"]]
    backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in tokens[:17]])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>", unk_token="<|endoftext|>"
    )


def texts() -> list[str]:
    return [*WORDS, *(a + b for a in WORDS[:18] for b in WORDS[::2]), "".join(WORDS)]


def test_smollm2_splits_as_its_rule_written_out_and_as_transformers() -> None:
    assert len(texts()) > 400
    for text in texts():
        ids = smollm2().encode(text)
        assert ids == by_hand().encode(text), text
        assert ids == smollm2_in_transformers().encode(text), text
        assert smollm2().decode(ids, skip_special_tokens=False) == text


@settings(deadline=None)  # other work shares the machine
@given(
    st.one_of(st.text(ALPHABET, max_size=24), st.text(st.characters(exclude_categories=["Cs"]), max_size=16))
)
@example("*\x1d:")  # the middle byte is not in the vocabulary: what is left merges
def test_smollm2_on_any_text(text: str) -> None:
    assert smollm2().encode(text) == by_hand().encode(text)


def test_smollm2_specials() -> None:
    tokenizer = smollm2()
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.special_tokens == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
    }
    assert tokenizer.encode("<|im_start|>") == [1]
    assert tokenizer.encode("Hello") == [19556]  # the file says: no BOS
    assert tokenizer.chat_template == smollm2_metadata()["tokenizer.chat_template"]


BYTES = [spelled(bytes([byte])) for byte in range(256)]
JOINED = ["12", "123", "Ġa", "ab", "Ã©"]
MERGES = ["1 2", "12 3", "Ġ a", "a b", "Ã ©"]


def byte_level_metadata(pre: str | None, extra: dict[str, Any] | None = None) -> dict[str, Any]:
    """Single bytes, a few merges, a token no merge makes, control tokens at 262-264, an added one at 265."""
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*BYTES, *JOINED, "xyz", "<s>", "</s>", "<eot>", "[x y]"],
        "tokenizer.ggml.token_type": [1] * 262 + [3, 3, 3, 4],
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 262,
        "tokenizer.ggml.eos_token_id": 263,
    }
    if pre is not None:
        metadata["tokenizer.ggml.pre"] = pre
    return metadata | (extra or {})


def tokenizer_of(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer(recipe_from_metadata(metadata, "model.gguf"))


def words(metadata: dict[str, Any], text: str) -> list[str]:
    """How the vocabulary spells the tokens of `text`."""
    backend = recipe_from_metadata(metadata, "model.gguf").backend
    tokens: list[str] = backend.encode(text, add_special_tokens=False).tokens
    return tokens


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["1", "2", "3", "Ġa"]),
        ("qwen2", ["1", "2", "3", "Ġa"]),
        ("llama-bpe", ["123", "Ġa"]),
        ("gpt-2", ["123", "Ġa"]),
        ("default", ["123", "Ġa"]),
        (None, ["123", "Ġa"]),
    ],
)
def test_digits_by_rule(pre: str | None, expected: list[str]) -> None:
    assert words(byte_level_metadata(pre), "123 a") == expected


# Each piece of text that the rule keeps together, spelled in bytes.
SPLITS = {
    "smollm": ["I", "'m", "Ġ", "1", "2", ".", "5", "Ġ", "Ġx", "!!", "Ċ"],
    "gpt-2": ["I", "'m", "Ġ12", ".", "5", "Ġ", "Ġx", "!!", "Ċ"],
    "llama-bpe": ["I", "'m", "Ġ", "12", ".", "5", "Ġ", "Ġx", "!!Ċ"],
    "qwen2": ["I", "'m", "Ġ", "1", "2", ".", "5", "Ġ", "Ġx", "!!Ċ"],
    "tekken": ["I", "'m", "Ġ", "1", "2", ".", "5", "Ġ", "Ġx", "!!Ċ"],
    "gpt-4o": ["I'm", "Ġ", "12", ".", "5", "Ġ", "Ġx", "!!Ċ"],
    "deepseek-v3": ["I", "'m", "Ġ", "12", ".", "5", "Ġ", "Ġx", "!!Ċ"],
    "default": ["I", "'", "m", "Ġ", "12", ".", "5", "Ġ", "Ġx", "!!", "Ċ"],
}


@pytest.mark.parametrize("pre", SPLITS)
def test_pieces_by_rule(pre: str) -> None:
    pieces = PRE_TOKENIZERS[pre].build().pre_tokenize_str("I'm 12.5  x!!\n")
    assert [piece for piece, _ in pieces] == SPLITS[pre]


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_rule_keeps_every_byte(pre: str) -> None:
    tokenizer = tokenizer_of(byte_level_metadata(pre))
    for text in WORDS:
        if "<" not in text and text != "cafe\u0301":
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_llama_bpe_takes_whole_words_and_a_bos() -> None:
    metadata = byte_level_metadata("llama-bpe")
    tokenizer = tokenizer_of(metadata)
    assert tokenizer.encode("xyz") == [262, 261]
    assert words({**metadata, "tokenizer.ggml.pre": "gpt-2"}, "xyz") == ["x", "y", "z"]


def test_bos_and_eos_follow_the_file() -> None:
    stated = {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True}
    assert tokenizer_of(byte_level_metadata("llama-bpe", stated)).encode("12") == [256, 263]
    assert tokenizer_of(byte_level_metadata("qwen2")).encode("12") == [BYTES.index("1"), BYTES.index("2")]


def test_only_qwen_text_is_composed() -> None:
    assert words(byte_level_metadata("qwen2"), "e\u0301") == ["Ã©"]
    assert words(byte_level_metadata("gpt-2"), "e\u0301") == [
        "e",
        spelled(b"\xcc"),
        spelled(b"\x81"),
    ]


def test_token_types() -> None:
    tokenizer = tokenizer_of(byte_level_metadata("gpt-2", {"tokenizer.ggml.eot_token_id": 264}))
    ids = tokenizer.encode("<s>a[x y]</s><eot>")
    assert ids == [262, BYTES.index("a"), 265, 263, 264]
    assert tokenizer.decode(ids) == "a[x y]"  # control tokens are special, user-defined ones are text
    assert tokenizer.eos_token_id == 263
    assert tokenizer.eos_token_ids == {263, 264}


def test_empty_tokens_get_names() -> None:
    metadata = byte_level_metadata("gpt-2")
    metadata["tokenizer.ggml.tokens"] += ["", ""]
    backend = recipe_from_metadata(metadata, "model.gguf").backend
    assert [backend.id_to_token(token_id) for token_id in (266, 267)] == ["[EMPTY_266]", "[EMPTY_267]"]


def test_named_chat_templates() -> None:
    templates = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "with tools"}
    tokenizer = tokenizer_of(byte_level_metadata("gpt-2", templates))
    assert tokenizer.chat_template == "plain"
    assert tokenizer.chat_templates == {"default": "plain", "tool_use": "with tools"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"tokenizer.ggml.pre": "smolm"},
            r"pre 'smolm' is not known \(did you mean 'smollm'\?\).*Hugging Face folder",
        ),
        ({"tokenizer.ggml.model": "t5"}, r"model 't5' is not supported \(expected 'gpt2' or 'llama'\)"),
        ({"tokenizer.ggml.model": None}, r"model None is not supported"),
        ({"tokenizer.ggml.tokens": []}, "no vocabulary"),
        ({"tokenizer.ggml.tokens": [*BYTES, "a", "12"]}, "the vocabulary holds 'a' more than once"),
        (
            {"tokenizer.ggml.tokens": BYTES, "tokenizer.ggml.token_type": []},
            "the merges do not fit the vocabulary",
        ),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges is missing"),
        ({"tokenizer.ggml.merges": ["12"]}, "the merges do not fit the vocabulary"),
        ({"tokenizer.ggml.eos_token_id": 266}, r"eos_token_id is 266, outside the vocabulary of 266 tokens"),
        ({"tokenizer.ggml.eot_token_id": 9999}, r"eot_token_id is 9999, outside the vocabulary"),
        (
            {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None},
            "add_bos_token is true, but",
        ),
    ],
)
def test_what_cannot_be_right_is_refused(change: dict[str, Any], message: str) -> None:
    metadata = {
        key: value for key, value in (byte_level_metadata("gpt-2") | change).items() if value is not None
    }
    with pytest.raises(ModelError, match=r"model\.gguf: .*" + message):
        tokenizer_of(metadata)


def sentencepiece_metadata(extra: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": SENTENCEPIECE_TOKENS,
        "tokenizer.ggml.scores": SENTENCEPIECE_SCORES,
        "tokenizer.ggml.token_type": SENTENCEPIECE_TYPES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | (extra or {})


@settings(deadline=None)  # other work shares the machine
@given(st.text("thein abrs.é中€", min_size=1, max_size=20))
def test_sentencepiece_merges_by_score(text: str) -> None:
    ids = tokenizer_of(sentencepiece_metadata()).encode(text)
    assert ids == [1, *sentencepiece_by_hand(text, SENTENCEPIECE_TOKENS, SENTENCEPIECE_SCORES)]


def test_sentencepiece_spaces_bytes_and_specials() -> None:
    metadata = sentencepiece_metadata()
    tokenizer = tokenizer_of(metadata)
    assert words(metadata, "the  abab") == ["▁the▁", "▁a", "b", "ab"]
    assert words(metadata, "€") == ["▁", "<0xE2>", "<0x82>", "<0xAC>"]
    assert tokenizer.decode(tokenizer.encode("the  ab€ in</s>")) == "the  ab€ in"
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"


def test_the_spelling_of_a_byte_token_is_not_the_byte() -> None:
    parts = ["<", "0", "x", "4", "1", ">", "<0", "<0x", "<0x4", "1>"]
    metadata = sentencepiece_metadata()
    metadata["tokenizer.ggml.tokens"] = SENTENCEPIECE_TOKENS + parts
    metadata["tokenizer.ggml.scores"] = [*SENTENCEPIECE_SCORES, *(-100.0 - i for i in range(len(parts)))]
    metadata["tokenizer.ggml.token_type"] = SENTENCEPIECE_TYPES + [1] * len(parts)
    assert words(metadata, "<0x41>") == ["▁", "<0x4", "1>"]


def test_sentencepiece_without_a_prefix_space() -> None:
    metadata = sentencepiece_metadata({"tokenizer.ggml.add_space_prefix": False})
    tokenizer = tokenizer_of(metadata)
    assert words(metadata, "he in") == ["he", "▁in"]
    assert tokenizer.decode(tokenizer.encode(" in")) == " in"


@pytest.mark.parametrize("scores", [None, [0.0]])
def test_sentencepiece_needs_its_scores(scores: list[float] | None) -> None:
    metadata = sentencepiece_metadata()
    del metadata["tokenizer.ggml.scores"]
    with pytest.raises(ModelError, match=rf"expected {len(SENTENCEPIECE_TOKENS)} tokenizer.ggml.scores, got"):
        tokenizer_of(metadata | ({} if scores is None else {"tokenizer.ggml.scores": scores}))


def test_from_a_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", sentencepiece_metadata())
    tokenizer = load_tokenizer(Source("gguf", path))
    assert tokenizer.encode("the") == [1, SENTENCEPIECE_TOKENS.index("▁the")]
    assert tokenizer.origin == str(path)


def test_the_patterns_are_those_of_transformers() -> None:
    llama3 = inspect.signature(TikTokenConverter).parameters["pattern"].default
    expected = {"qwen2": QWEN2_PATTERN, "qwen35": QWEN35_PATTERN, "llama-bpe": llama3}
    assert {name: PRE_TOKENIZERS[name].patterns for name in expected} == {
        name: (pattern,) for name, pattern in expected.items()
    }
