"""What the client is told of a value of a wrong kind or size, in the words of our other errors."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import pytest
from helpers.chat import CHATML, tokenizer_with
from helpers.live import BIG_CARD
from helpers.serve import Answer, run, scripted_client
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from octavo.serve.expected import problem

PROMPTS = "a string, a list of strings, a list of token ids, or a list of such lists"
CHOICES = "'none', 'auto', 'required', or an object of type 'function' or 'allowed_tools'"
NO_TEXT = "not valid Unicode: it holds"
HI = [{"role": "user", "content": "Hi"}]


def refusal(path: str, body: Any, **options: Any) -> dict[str, Any]:
    """The error that the body is answered with."""

    async def test() -> dict[str, Any]:
        async with scripted_client(Answer(["a"]), **options) as (client, _):
            # With escapes, which httpx leaves out: half a character cannot be without them.
            headers = {"content-type": "application/json"}
            answer = await client.post(f"/v1/{path}", content=json.dumps(body), headers=headers)
            assert answer.status_code == 400, answer.text
            return dict(answer.json()["error"])

    return run(test())


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("completions", {"prompt": "a", "max_tokens": "x"}, "max_tokens: expected an integer, got 'x'"),
        ("completions", {"prompt": "a", "max_tokens": 1.5}, "max_tokens: expected an integer, got 1.5"),
        ("completions", {"prompt": "a", "max_tokens": 0}, "max_tokens: expected at least 1, got 0"),
        ("completions", {"prompt": "a", "top_p": 0}, "top_p: expected more than 0, got 0"),
        ("completions", {"prompt": "a", "temperature": []}, "temperature: expected a number, got []"),
        ("completions", {"prompt": "a", "stream": "maybe"}, "stream: expected true or false, got 'maybe'"),
        ("completions", {"prompt": "a", "stop": [""]}, "stop[0]: expected at least 1 character, got ''"),
        ("completions", {"prompt": "a", "logit_bias": []}, "logit_bias: expected an object, got []"),
        (
            "completions",
            {"prompt": "a", "logit_bias": {"x": 1}},
            "logit_bias: expected keys that are token ids, such as \"1234\", got 'x'",
        ),
        ("completions", {}, "prompt: this field is missing"),
        ("completions", {"prompt": "a", "promt": "b"}, "promt: this field is not known"),
        ("completions", [1], "the body: expected an object, got [1]"),
        ("chat/completions", {"messages": "hi"}, "messages: expected a list, got 'hi'"),
        ("chat/completions", {"messages": []}, "messages: expected at least 1 item, got []"),
        (
            "chat/completions",
            {"messages": HI, "tool_choice": "perhaps"},
            "tool_choice: expected 'none', 'auto' or 'required', got 'perhaps'",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0]: expected 'type' to be one of 'text', 'refusal', got {'type': 'image'}",
        ),
        ("responses", {"input": "a", "background": True}, "background: expected false, got true"),
        ("completions", {"prompt": None}, f"prompt: expected {PROMPTS}, got null"),
        ("completions", {"prompt": {}}, f"prompt: expected {PROMPTS}, got {{}}"),
        ("completions", {"prompt": [1.5]}, f"prompt: expected {PROMPTS}, got [1.5]"),
        ("completions", {"prompt": [True]}, f"prompt: expected {PROMPTS}, got [true]"),
        ("completions", {"prompt": [1, "a"]}, "prompt[1]: expected an integer, got 'a'"),
        ("completions", {"prompt": "a", "stop": 5}, "stop: expected a string or a list of strings, got 5"),
        (
            "completions",
            {"prompt": "a", "structured_outputs": {"json": 5}},
            "structured_outputs.json: expected an object or a string, got 5",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": 5}]},
            "messages[0].content: expected a string or a list of text parts, got 5",
        ),
        ("chat/completions", {"messages": HI, "tool_choice": 5}, f"tool_choice: expected {CHOICES}, got 5"),
        ("responses", {"input": "a", "tool_choice": {}}, f"tool_choice: expected {CHOICES}, got {{}}"),
        ("responses", {"input": 5}, "input: expected a string or a list of items, got 5"),
        (
            "responses",
            {"input": [{"role": "user", "content": None}]},
            "input[0].content: expected a string or a list of text parts, got null",
        ),
        (
            "completions",
            {"prompt": "a", "seed": "a" * 5000},
            f"seed: expected an integer, got '{'a' * 97}...{'a' * 98}'",
        ),
    ],
)
def test_the_field_what_was_expected_and_what_came(path: str, body: Any, message: str) -> None:
    assert refusal(path, body)["message"] == message


HALF = "\ud800"
"""Half a character: JSON can write it, and no text can hold it."""


def function(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **fields}}]}


@pytest.mark.parametrize(
    ("path", "body", "param", "problem"),
    [
        ("completions", {"prompt": "a", "stop": HALF}, "stop", NO_TEXT),
        ("completions", {"prompt": "a", "stop": ["b", HALF]}, "stop[1]", NO_TEXT),
        ("completions", {"prompt": "a", "cache_salt": HALF}, "cache_salt", NO_TEXT),
        ("completions", {"prompt": "a", HALF: 1}, r"\ud800", "this field is not known"),
        (
            "completions",
            {"prompt": "a", "stream_options": {HALF: 1}},
            r"stream_options.\ud800",
            "this field is not known",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": HALF}]},
            "messages[0].content",
            NO_TEXT,
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "a", HALF: 1}]},
            r"messages[0].\ud800",
            "this field is not known",
        ),
        ("chat/completions", function(name=HALF), "tools[0].function.name", NO_TEXT),
        ("chat/completions", function(description=HALF), "tools[0].function.description", NO_TEXT),
        ("chat/completions", function(parameters={"a": HALF}), "tools[0].function.parameters", NO_TEXT),
        (
            "chat/completions",
            {"chat_template_kwargs": {"style": HALF}},
            "chat_template_kwargs.style",
            NO_TEXT,
        ),
        ("chat/completions", {"documents": [{"a": {HALF: 1}}]}, r"documents[0].a.\ud800", NO_TEXT),
        ("responses", {"input": [{"role": "user", "content": HALF}]}, "input", NO_TEXT),
        ("responses", {"input": "a", "instructions": HALF}, "instructions", NO_TEXT),
        ("responses", {"input": [{"role": HALF, "content": "a"}]}, "input[0].role", NO_TEXT),
        (
            "responses",
            {"input": "a", "chat_template_kwargs": {"style": HALF}},
            "chat_template_kwargs.style",
            NO_TEXT,
        ),
        ("../tokenize", {"messages": [{"role": "user", "content": HALF}]}, "messages[0].content", NO_TEXT),
    ],
)
def test_a_text_that_is_no_unicode_is_told_of_by_its_place(
    path: str, body: dict[str, Any], param: str, problem: str
) -> None:
    if path == "chat/completions":
        body = {"messages": HI, **body}
    template = "{{ messages|tojson }}{{ style }}{{ documents|tojson }}{{ tools|tojson }}<tool_call>"
    error = refusal(path, body, tokenizer=tokenizer_with(default=template), card=BIG_CARD)
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: {problem}")


def test_half_a_character_in_a_schema_is_told_in_our_words() -> None:
    error = refusal("completions", {"prompt": "a", "structured_outputs": {"json": {"const": HALF}}})
    assert error["message"].startswith("structured_outputs.json is not valid Unicode")


def test_fields_that_the_model_has_no_use_for_are_named() -> None:
    options = {"tokenizer": tokenizer_with(default=CHATML), "card": BIG_CARD}
    error = refusal("chat/completions", {"messages": HI, "documents": [{"text": "a"}]}, **options)
    assert error["param"] == "documents"
    assert error["message"] == "documents: this model's chat template does not read it; leave it out"
    error = refusal("responses", {"input": "a", "reasoning": {"effort": "low"}}, **options)
    assert error["param"] == "reasoning.effort"
    assert error["message"].startswith("reasoning.effort: this model's chat template knows neither")


class Cat(BaseModel):
    kind: Literal["cat"]


class Dog(BaseModel):
    kind: Literal["dog"]


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (Annotated[int, Field(lt=3)], 3, "expected less than 3, got 3"),
        (Annotated[str, Field(max_length=2)], "abc", "expected at most 2 characters, got 'abc'"),
        (Annotated[list[int], Field(max_length=1)], [1, 2], "expected at most 1 item, got [1, 2]"),
        (Annotated[float, Field(allow_inf_nan=False)], float("inf"), "expected a finite number, got inf"),
        (None, 3, "expected null, got 3"),
        (Literal["x", True, False, None], 3, "expected 'x', true, false or null, got 3"),
        (
            Literal["None", "isn't True"],
            ["True, False", None, {"it's None": False}, "isn't", True],
            "expected 'None' or \"isn't True\", "
            "got ['True, False', null, {\"it's None\": false}, \"isn't\", true]",
        ),
        (int, None, "expected an integer, got null"),
        (bytes, 3, "expected a valid bytes, got 3"),
        (
            Annotated[Cat | Dog, Field(discriminator="kind")],
            {},
            "expected an object with 'kind', got {}",
        ),
    ],
)
def test_what_no_body_of_ours_can_be_wrong_in_yet(kind: Any, given: Any, message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(kind).validate_python(given, strict=True)
    (error,) = caught.value.errors()
    assert problem(error) == message
