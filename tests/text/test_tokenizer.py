from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.tokenizers_by_hand import Source, byte_level
from tokenizers.processors import TemplateProcessing

from octavo.errors import ModelError, RequestError
from octavo.text.chat import render_chat
from octavo.text.recipe import TokenizerRecipe
from octavo.text.tokenizer import Tokenizer, load_tokenizer

BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
LLAMA3_STYLE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


def recipe(post_bos: bool = False, post_eos: bool = False, **fields: Any) -> TokenizerRecipe:
    backend = byte_level(
        {0: b"Hello"}, special=[BOS, EOS, "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    )
    if post_bos or post_eos:
        single = f"{BOS + ' ' if post_bos else ''}$A{' ' + EOS if post_eos else ''}"
        ids = [(token, backend.token_to_id(token)) for token in (BOS, EOS)]
        backend.post_processor = TemplateProcessing(single=single, pair="$A $B", special_tokens=ids)
    specials = {"bos_token": BOS, "eos_token": EOS}
    made = TokenizerRecipe(
        backend, "the model", special_tokens=specials, chat_templates={"default": LLAMA3_STYLE}
    )
    return replace(made, **fields)


def test_llama3_gets_one_bos_by_every_route() -> None:
    # vllm#27515
    tokenizer = Tokenizer(recipe(post_bos=True))
    bos = tokenizer.bos_token_id
    prompt = render_chat(tokenizer, [{"role": "user", "content": "Hello"}])
    by_chat = tokenizer.encode(prompt, add_special_tokens=False)
    by_completion = tokenizer.encode(prompt)
    plain = tokenizer.encode("Hello")
    assert by_chat == by_completion
    assert [ids.count(bos) for ids in (by_chat, by_completion, plain)] == [1, 1, 1]
    assert by_chat[0] == plain[0] == bos
    assert tokenizer.encode("") == [bos]


def test_qwen3_gets_none() -> None:
    tokenizer = Tokenizer(recipe(add_bos_token=False, special_tokens={"eos_token": EOS}))
    assert tokenizer.bos_token_id is None
    assert tokenizer.encode("Hello") == tokenizer.encode("Hello", add_special_tokens=False)
    assert tokenizer.encode("") == []


@pytest.mark.parametrize(
    ("post", "stated", "expected"),
    [
        ((False, False), (None, None), "Hello"),
        ((True, False), (None, None), BOS + "Hello"),
        ((True, True), (None, None), BOS + "Hello" + EOS),
        ((False, True), (None, None), "Hello" + EOS),
        ((True, True), (False, False), "Hello"),
        ((False, False), (True, None), BOS + "Hello"),
        ((False, False), (None, True), "Hello" + EOS),
        ((True, False), (True, False), BOS + "Hello"),
    ],
)
def test_the_configuration_outranks_the_post_processor(
    post: tuple[bool, bool], stated: tuple[bool | None, bool | None], expected: str
) -> None:
    tokenizer = Tokenizer(recipe(*post, add_bos_token=stated[0], add_eos_token=stated[1]))
    assert tokenizer.encode("Hello") == tokenizer.encode(expected, add_special_tokens=False)
    assert tokenizer.encode(expected) == tokenizer.encode(expected, add_special_tokens=False)


def test_a_bos_that_is_no_token_cannot_be_added() -> None:
    with pytest.raises(ModelError, match=r"the model: add_bos_token is true, but bos_token.*got '<none>'"):
        Tokenizer(recipe(add_bos_token=True, special_tokens={"bos_token": "<none>"}))


def test_limits_of_the_training_run_do_not_cut_prompts() -> None:
    made = recipe()
    made.backend.enable_truncation(4)
    made.backend.enable_padding(length=16)
    assert len(Tokenizer(made).encode("a" * 10)) == 10


def test_bad_text_and_ids_are_named() -> None:
    tokenizer = Tokenizer(recipe())
    with pytest.raises(RequestError, match="prompt: expected a string to encode, got int"):
        tokenizer.encode(5)  # type: ignore[arg-type]  # the point of the test
    with pytest.raises(RequestError, match="prompt: not valid Unicode"):
        tokenizer.encode("a\ud800b")
    for bad in (-1, 2**40):
        with pytest.raises(RequestError, match=f"expected ids of 0 to 261, got {bad}"):
            tokenizer.decode([1, bad])
    assert tokenizer.decode([0, tokenizer.vocab_size, 0]) == "HelloHello"


def test_tokens_one_by_one() -> None:
    tokenizer = Tokenizer(recipe())
    assert tokenizer.token_to_id("Hello") == 0
    assert tokenizer.token_to_id("none") is None
    half = tokenizer.encode("é")[0]
    assert (tokenizer.token_bytes(half), tokenizer.token_text(half)) == (b"\xc3", "\N{REPLACEMENT CHARACTER}")
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert tokenizer.token_text(tokenizer.eos_token_id or 0) == EOS
    assert tokenizer.vocab_size == 1 + 256 + 5


def test_a_dummy_model_has_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"kind 'dummy' has no tokenizer.*Pass token ids"):
        load_tokenizer(Source("dummy", tmp_path))


def test_importing_the_room_is_cheap() -> None:
    code = (
        "import sys\n"
        "from octavo.text import chat, detokenizer, stop, tokenizer\n"
        "loaded = {'torch', 'transformers', 'tokenizers', 'jinja2', 'numpy', 'gguf'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_tokenizer_and_a_template_need_neither_torch_nor_transformers() -> None:
    from helpers.tokenizers_by_hand import smollm2_path

    code = (
        "import sys, types, pathlib\n"
        "from octavo.text.tokenizer import load_tokenizer\n"
        "from octavo.text.chat import render_chat\n"
        f"path = pathlib.Path({str(smollm2_path())!r})\n"
        "tokenizer = load_tokenizer(types.SimpleNamespace(kind='gguf', path=path))\n"
        "render_chat(tokenizer, [{'role': 'user', 'content': 'Hi'}])\n"
        "loaded = {'torch', 'transformers', 'gguf'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
