from __future__ import annotations

import copy
from datetime import datetime
from functools import cache
from typing import Any

import pytest
from helpers.chat import (
    CALL,
    LLAMA3_STYLE,
    PARTS,
    QWEN3_STYLE,
    RAG,
    SPECIALS,
    SYSTEM,
    TEMPLATES,
    TOOL_TALK,
    WEATHER,
    assistant,
    tokenizer_with,
    user,
)
from helpers.tokenizers_by_hand import Source, byte_level, smollm2_path
from transformers import PreTrainedTokenizerFast

from octavo.text.chat import render_chat
from octavo.text.template import compile_template
from octavo.text.tokenizer import load_tokenizer


@cache
def in_transformers() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=byte_level({}), **SPECIALS)


def both(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    """Our rendering, after checking that it is Transformers'."""
    options.setdefault("add_generation_prompt", True)
    expected = in_transformers().apply_chat_template(
        copy.deepcopy(messages), chat_template=template, tokenize=False, **options
    )
    ours = render_chat(tokenizer_with(default=template), messages, **options)
    assert ours == expected
    return ours


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("generation_prompt", [True, False])
@pytest.mark.parametrize(
    "messages",
    [
        [user("Say hi")],
        [user(" <b>\"hi\"</b> & 'you' {{ 1 + 1 }}\n"), assistant("Grüß dich \n"), user("日本語?")],
        [user("")],
    ],
    ids=["one", "three", "empty"],
)
def test_rendered_as_transformers_renders_it(
    name: str, messages: list[dict[str, Any]], generation_prompt: bool
) -> None:
    both(TEMPLATES[name], messages, add_generation_prompt=generation_prompt)


@pytest.mark.parametrize("name", ["chatml", "qwen3", "llama3", "parts"])
def test_a_system_message_as_transformers_renders_it(name: str) -> None:
    assert "Be brief." in both(TEMPLATES[name], [SYSTEM, user("Hi")])


@pytest.mark.parametrize("name", ["qwen3", "llama3"])
def test_tool_calls_as_transformers_renders_them(name: str) -> None:
    assert "Köln" in both(TEMPLATES[name], TOOL_TALK)


def test_tools_are_written_as_plain_json() -> None:
    text = both(QWEN3_STYLE, [SYSTEM, user("Hi")], tools=[WEATHER])
    assert '"description": "Says <what> it\'s like & where; für Köln"' in text


@pytest.mark.parametrize(
    ("options", "end"),
    [
        ({"enable_thinking": False}, "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ({"enable_thinking": True}, "<|im_start|>assistant\n"),
        ({}, "<|im_start|>assistant\n"),
    ],
)
def test_thinking_can_be_turned_off(options: dict[str, Any], end: str) -> None:
    # vllm#19839
    text = both(QWEN3_STYLE, [user("Say hi")], **options)
    assert text == "<|im_start|>user\nSay hi<|im_end|>\n" + end


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_goes_by_several_names(field: str) -> None:
    messages = [user("2+2?"), assistant("4", **{field: "easy"})]
    assert "<think>\neasy\n</think>\n\n4" in both(QWEN3_STYLE, messages)
    assert both("{{ messages[1].thinking }} {{ messages[1].content }}", messages) == "easy 4"


def test_template_variables() -> None:
    assert "Today Date: 1 May 2030" in both(LLAMA3_STYLE, [user("Hi")], date_string="1 May 2030")
    year = str(datetime.now().year)
    assert both("{{ strftime_now('%Y') }}{{ messages[0].content }}", [user("!")]) == year + "!"
    assert (
        both("{{ bos_token }}{{ pad_token }}{{ sep_token }}{{ messages|length }}", [user("!")]) == "<s><pad>1"
    )
    assert both("{{ eos_token }}{{ messages|length }}", [user("!")], eos_token="<e>") == "<e>1"
    assert both("{{ dict(a=1, b=messages|length) | tojson }}", [user("!")]) == '{"a": 1, "b": 1}'
    assert (
        both("{% set n = namespace(self=messages|length) %}{% set n.b = 2 %}{{ n.self + n.b }}", [user("!")])
        == "3"
    )


def test_documents() -> None:
    documents = [{"title": "A", "text": "x"}, {"title": "B", "text": "y"}]
    assert both(RAG, [user("?")], documents=documents) == "A: x\nB: y\n?False"


@pytest.mark.parametrize(
    ("value", "call", "expected"),
    [
        ({"b": "ü<", "a": [1.5, None, True]}, "tojson", '{"b": "ü<", "a": [1.5, null, true]}'),
        ({"b": 1, "a": 2}, "tojson(sort_keys=true)", '{"a": 2, "b": 1}'),
        (["ü"], "tojson(ensure_ascii=true)", '["\\u00fc"]'),
        ([1, 2], "tojson(indent=2)", "[\n  1,\n  2\n]"),
        ([1, 2], "tojson(separators=(',', ':'))", "[1,2]"),
    ],
)
def test_tojson(value: Any, call: str, expected: str) -> None:
    assert both("{{ value | " + call + " }}{{ messages[0].content }}", [user("")], value=value) == expected


@pytest.mark.parametrize("name", ["chatml", "qwen3", "llama3", "parts"])
@pytest.mark.parametrize("text", ["The answer is", "The answer is ", " \n"])
def test_the_last_message_can_be_continued(name: str, text: str) -> None:
    options = {"add_generation_prompt": False, "continue_final_message": True}
    ours = both(TEMPLATES[name], [user("Q"), assistant(text)], **options)
    assert ours.endswith(text.rstrip() if name == "llama3" else text)


def test_parts_that_the_template_reads_itself() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert both(PARTS, [user(parts)]) == "<user>[text:one][text:two]"
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert both(PARTS, [assistant(parts)], **options) == "<assistant>[text:one][text:two"


def test_parts_are_joined_where_it_does_not() -> None:
    # Qwen3's template takes content that is no string for an empty one.
    parts = [{"type": "text", "text": "one"}, {"text": "two"}]
    tokenizer = tokenizer_with(default=QWEN3_STYLE)
    assert render_chat(tokenizer, [user(parts)], add_generation_prompt=False) == (
        "<|im_start|>user\none\ntwo<|im_end|>\n"
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{% for m in messages %}{% for p in m['content'] %}{{ p.text }}{% endfor %}{% endfor %}", True),
        (
            "{% for m in messages %}{% set c = m.content %}{% for p in c %}{{ p }}{% endfor %}{% endfor %}",
            True,
        ),
        ("{% for m in messages %}{% for t in m.tool_calls %}{{ t }}{% endfor %}{% endfor %}", False),
    ],
)
def test_whether_a_template_reads_parts(source: str, expected: bool) -> None:
    assert compile_template(source).reads_parts is expected


def test_smollm2_from_its_file() -> None:
    tokenizer = load_tokenizer(Source("gguf", smollm2_path()))
    assert render_chat(tokenizer, [user("Hi")]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render_chat(tokenizer, [SYSTEM, user("Hi")], add_generation_prompt=False) == (
        "<|im_start|>system\n  Be brief. <|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    )


def test_named_templates() -> None:
    tokenizer = tokenizer_with(default="plain", tool_use="with {{ tools[0].function.name }}")
    assert render_chat(tokenizer, [user("Hi")]) == "plain"
    assert render_chat(tokenizer, [user("Hi")], tools=[WEATHER]) == "with weather"
    assert render_chat(tokenizer, [user("Hi")], chat_template="tool_use", tools=[WEATHER]) == "with weather"
    assert render_chat(tokenizer, [user("Hi")], chat_template="own {{ messages[0].content }}") == "own Hi"


def test_the_callers_messages_are_left_alone() -> None:
    messages = [user([{"text": "a"}]), assistant(None, tool_calls=[CALL]), assistant("b", reasoning="c")]
    before = copy.deepcopy(messages)
    options = {"add_generation_prompt": False, "continue_final_message": True, "tools": [WEATHER]}
    render_chat(tokenizer_with(default=QWEN3_STYLE), messages, **options)
    assert messages == before
