"""The official client, a real server and a real model: what comes back is what the engine alone would say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.chat import user
from helpers.serve import running_server
from openai import OpenAI
from pydantic import BaseModel

from octavo import LLM, SamplingParams

pytestmark = pytest.mark.model

FRANCE: Any = [user("What is the capital of France?")]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["c", "f"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {name: {"type": "integer", "minimum": 0, "maximum": 99} for name in "ab"},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


class City(BaseModel):
    name: str
    country: str


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    with (
        running_server("smollm2-135m", "--max-model-len", "1024", "--num-blocks", "256") as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as one,
    ):
        yield one


def ask(client: OpenAI, messages: Any = FRANCE, **fields: Any) -> Any:
    return client.chat.completions.create(
        **{"model": "smollm2-135m", "messages": messages, "temperature": 0, "max_tokens": 40, **fields}
    )


def test_the_answer_is_the_engines_own_whole_and_streamed(client: OpenAI) -> None:
    with LLM("smollm2-135m", max_model_len=1024, num_blocks=256) as llm:
        (alone,) = llm.chat(FRANCE, SamplingParams(max_tokens=40), use_tqdm=False)
    assert "Paris" in alone.text
    whole = ask(client)
    assert whole.choices[0].message.content == alone.text
    assert whole.choices[0].finish_reason == alone.finish_reason
    assert whole.usage.prompt_tokens == len(alone.prompt_token_ids)
    assert whole.usage.completion_tokens == len(alone.token_ids)
    options = {"include_usage": True}
    *chunks, usage = ask(client, stream=True, n=2, logprobs=True, stream_options=options)
    for index in (0, 1):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert "".join(choice.delta.content or "" for choice in own) == alone.text
        entries = [entry for choice in own if choice.logprobs for entry in choice.logprobs.content]
        assert len(entries) == len(alone.token_ids)
    # The same prompt again: all its full blocks come from the cache.
    assert usage.usage.prompt_tokens_details.cached_tokens == len(alone.prompt_token_ids) // 16 * 16


def test_seeds_repeat_and_stops_stop(client: OpenAI) -> None:
    answers = [ask(client, temperature=1, seed=7, n=2, max_tokens=12).choices for _ in range(2)]
    texts = [[choice.message.content for choice in choices] for choices in answers]
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]
    stopped = ask(client, stop=[" of"]).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == ("The capital", "stop")


def test_formats_are_kept(client: OpenAI) -> None:
    describe: Any = [user("Describe Paris as JSON.")]
    answer = client.chat.completions.parse(
        model="smollm2-135m", messages=describe, temperature=0, max_tokens=200, response_format=City
    )
    assert isinstance(answer.choices[0].message.parsed, City)
    some = ask(client, describe, max_tokens=100, response_format={"type": "json_object"}).choices[0]
    assert isinstance(json.loads(some.message.content), dict)
    extra = {"structured_outputs": {"choice": ["Berlin (DE)", "Rome & co"]}}
    assert ask(client, extra_body=extra).choices[0].message.content in extra["structured_outputs"]["choice"]
    parsed = client.responses.parse(
        model="smollm2-135m", input="Describe Paris", temperature=0, text_format=City
    )
    assert isinstance(parsed.output_parsed, City)


@pytest.mark.parametrize("stream", [False, True])
def test_forced_calls_fit_their_schema(client: OpenAI, stream: bool) -> None:
    question: Any = [user("What is the weather in Paris, in celsius?")]
    fields: Any = {
        "model": "smollm2-135m", "messages": question, "temperature": 0, "max_tokens": 200,
        "tools": [WEATHER, ADD], "tool_choice": "required", "parallel_tool_calls": False,
    }  # fmt: skip
    if stream:
        with client.chat.completions.stream(**fields) as events:
            choice: Any = events.get_final_completion().choices[0]
    else:
        choice = client.chat.completions.create(**fields).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == ({"a", "b"} if call.function.name == "add" else {"city", "unit"})
    # The next turn has the call and its result in it.
    result = {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}
    after = ask(client, [*question, choice.message, result], tools=[WEATHER, ADD], max_tokens=8)
    assert after.choices[0].message.role == "assistant"


def test_a_named_function_is_called(client: OpenAI) -> None:
    named = {"type": "function", "function": {"name": "add"}}
    choice = ask(client, tools=[WEATHER, ADD], tool_choice=named, max_tokens=200).choices[0]
    (call,) = choice.message.tool_calls
    assert call.function.name == "add"
    assert all(0 <= value <= 99 for value in json.loads(call.function.arguments).values())
