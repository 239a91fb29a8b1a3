"""What the client is told of a value of a wrong kind or size, in the words of our other errors."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from helpers.serve import Answer, run, scripted_client
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from octavo.serve.expected import problem

HI = [{"role": "user", "content": "Hi"}]


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
        (
            "completions",
            {"prompt": "a", "seed": "a" * 5000},
            f"seed: expected an integer, got '{'a' * 97}...{'a' * 98}'",
        ),
    ],
)
def test_the_field_what_was_expected_and_what_came(path: str, body: Any, message: str) -> None:
    async def test() -> tuple[int, dict[str, Any]]:
        async with scripted_client(Answer(["a"])) as (client, _):
            answer = await client.post(f"/v1/{path}", json=body)
            return answer.status_code, answer.json()["error"]

    status, error = run(test())
    assert (status, error["message"]) == (400, message)


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
