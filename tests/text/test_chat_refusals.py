"""What a chat cannot be rendered from, each named by argument."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from helpers.chat import CHATML, MISTRAL_STYLE, QWEN3_STYLE, SYSTEM, WEATHER, assistant, tokenizer_with, user

from octavo.errors import RequestError
from octavo.text.chat import render_chat

LOOP: list[Any] = []
LOOP.append(LOOP)


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages: the list is empty"),  # vllm#7283
        ("Hi", "messages: expected a list of dicts, got str"),
        ({"role": "user"}, r"messages: expected a list of dicts, got dict; put the one message in a list"),
        (5, "messages: expected a list of dicts, got int"),
        (None, "messages: expected a list of dicts, got NoneType"),
        ([user("a"), "b"], r"messages\[1\]: expected a dict with role and content, got str"),
        ([{"content": "a"}], r"messages\[0\].role: expected a string such as 'user', got None"),
        ([{"role": 1, "content": "a"}], r"messages\[0\].role: expected a string such as 'user', got 1"),
        ([{"role": "user"}], r"messages\[0\].content: expected a string or a list of text parts, got None"),
        ([assistant(None)], r"messages\[0\].content: .*only an assistant message with tool_calls"),
        ([user(5)], r"messages\[0\].content: expected a string or a list of text parts, got int"),
        ([user(["a"])], r"messages\[0\].content\[0\]: expected {'type': 'text', 'text': ...}, got str"),
        (
            [user([{"type": "image"}])],
            r"messages\[0\].content\[0\].type: only 'text' parts are supported, got 'image'",
        ),
        ([user([{"type": "text"}])], r"messages\[0\].content\[0\].text: expected a string, got NoneType"),
        (
            [user("a") | {"when": datetime(2030, 1, 1)}],
            r"messages\[0\].when: expected JSON data .*, got datetime",
        ),
        ([user("a") | {5: "b"}], r"messages\[0\]: expected keys that are strings, got 5"),
        (
            [user("a") | {"x": {(1, 2): "b"}}],
            r"messages\[0\].x: expected keys that are strings, got \(1, 2\)",
        ),
        ([user("a") | {"x": nested(5000)}], r"messages\[0\]\.x\[0\].*: nested more than 100 levels deep"),
        ([user("a") | {"x": LOOP}], r"messages\[0\]\.x\[0\].*: nested more than 100 levels deep"),
        ([user("a") | {"role": 10**5000}], r"messages\[0\].role: expected a string such as 'user', got <?"),
    ],
)
def test_bad_messages_are_named(messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        render_chat(tokenizer_with(default=CHATML), messages)


@pytest.mark.parametrize(
    ("template", "options", "message"),
    [
        (CHATML, {"tools": [WEATHER]}, "tools: this model's chat template does not read it"),
        (CHATML, {"documents": [{}]}, "documents: this model's chat template does not read it"),
        (
            QWEN3_STYLE,
            {"enable_thinkin": False},
            r"enable_thinkin: .* \(did you mean 'enable_thinking'\?\); it reads",
        ),
        (QWEN3_STYLE, {"tools": "weather"}, "tools: expected a list of dicts, got str"),
        (
            QWEN3_STYLE,
            {"tools": [len]},
            r"tools\[0\]: expected a dict \(a JSON schema\), got builtin_function",
        ),
        (CHATML, {"tokenizer": 5}, "tokenizer: this model's chat template does not read it"),
        (CHATML, {"messages": []}, "messages: this model's chat template does not read it"),
        (
            CHATML,
            {"chat_template": 5},
            "chat_template: expected Jinja source or the name of a template, got 5",
        ),
        (CHATML, {"chat_template": []}, r"chat_template: expected Jinja source or .*, got \[\]"),
        (CHATML, {"add_generation_prompt": "no"}, "add_generation_prompt: expected True or False, got 'no'"),
        (CHATML, {"add_generation_prompt": None}, "add_generation_prompt: expected True or False, got None"),
        (CHATML, {"continue_final_message": "x"}, "continue_final_message: expected True or False, got 'x'"),
        (
            QWEN3_STYLE,
            {"enable_thinking": nested(102)},
            "enable_thinking.*: nested more than 100 levels deep",
        ),
        (QWEN3_STYLE, {"continue_final_message": True}, "continue_final_message: cannot be combined with"),
        (
            "fixed",
            {"continue_final_message": True, "add_generation_prompt": False},
            "drops or rewrites the final",
        ),
        (
            "{{ messages[0].content | upper }}",
            {"continue_final_message": True, "add_generation_prompt": False},
            "drops or rewrites the final",
        ),
        ("{% for %}", {}, "chat_template: not a valid Jinja template"),
        ("{{ messages[5].content.x }}", {}, "messages: the chat template refused them: .*has no element 5"),
        (
            "{{ messages[0].content + 1 }}",
            {},
            r"the chat template failed on them \(TypeError: can only concatenate",
        ),
        ("{{ messages.append(1) }}", {}, "the chat template refused them: .*unsafe"),
        ("{{ ''.__class__.__mro__ }}", {}, "the chat template refused them: .*unsafe"),
        ("{{ dict.mro() }}", {}, "the chat template refused them: .*has no attribute 'mro'"),
        (
            "{% set ns = namespace(_a=1) %}",
            {},
            "the chat template refused them: a namespace cannot hold '_a'",
        ),
        ("{% set ns = namespace() %}{% set ns._a = 1 %}", {}, "a namespace cannot hold '_a'"),
    ],
)
def test_bad_options_and_templates_are_named(template: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        render_chat(tokenizer_with(default=template), [user("Hi")], **options)


@pytest.mark.parametrize(
    "message",
    [
        user("a") | {"role": ["x" * 10**6]},
        user("a") | {"x" * 10**6: len},
        user("a") | {("x" * 10**6,): 1},
        user([{"type": "x" * 10**6}]),
        user("a") | {"role": "x" * 10**6},
    ],
    ids=["role", "key", "tuple", "part", "template"],
)
def test_a_refusal_is_short_whatever_the_message(message: Any) -> None:
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('no ' + messages[0].role) }}{% endif %}"
    with pytest.raises(RequestError) as caught:
        render_chat(tokenizer_with(default=template), [message])
    assert len(str(caught.value)) < 800


def test_a_hundred_steps_down_are_fine() -> None:
    assert render_chat(tokenizer_with(default="{{ a }}"), [user("Hi")], a=nested(101)) == str(nested(101))


def test_an_empty_list_of_tools_is_no_tools() -> None:
    assert render_chat(tokenizer_with(default="{{ messages|length }}"), [user("Hi")], tools=[]) == "1"


def test_a_refusal_carries_the_templates_own_words() -> None:
    tokenizer = tokenizer_with(default=MISTRAL_STYLE)
    with pytest.raises(RequestError, match="refused them: Only user and assistant roles are supported!"):
        render_chat(tokenizer, [SYSTEM, user("Hi")])
    with pytest.raises(RequestError, match="refused them: Conversation roles must alternate"):
        render_chat(tokenizer, [user("Hi"), user("Hi")])


def test_no_template_and_no_default() -> None:
    with pytest.raises(
        RequestError, match=r"the model has no chat template.*pass chat_template=.*plain prompt"
    ):
        render_chat(tokenizer_with(), [user("Hi")])
    with pytest.raises(RequestError, match="several and no default; name one of rag, tool_use"):
        render_chat(tokenizer_with(tool_use="a", rag="b"), [user("Hi")])
