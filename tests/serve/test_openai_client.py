"""The official `openai` client, unchanged, sync and async: whole answers, its stream helpers, its errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest
from helpers.chat import QWEN3_STYLE, WEATHER, tokenizer_with, user
from helpers.live import BIG_CARD, LiveServer, live_server
from helpers.serve import Answer, wait_until
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from octavo.errors import EngineError
from octavo.serve.messages import Submit
from octavo.serve.settings import ServeSettings

QWEN3 = tokenizer_with(default=QWEN3_STYLE)
MODEL = "scripted"
HI: Any = [user("Hi")]
CALL = ['<tool_call>\n{"name": "weather", "arguments": {"city"', ': "Bonn"}}\n</tool_call>']
THOUGHT = ["<think>\nHm", "m.\n</think>\n\n"]
TOOLS: Any = [WEATHER]
FLAT_TOOLS: Any = [{"type": "function", "strict": None, **WEATHER["function"]}]


class City(BaseModel):
    city: str


class Weather(BaseModel):
    """Weather of a city."""

    city: str


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(QWEN3) as live:
        yield live


@pytest.fixture
def client(server: LiveServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as one:
        yield one


def test_models(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == client.models.retrieve(MODEL).id == MODEL


def test_a_chat_and_its_next_turn(server: LiveServer, client: OpenAI) -> None:
    server.answer = Answer([*THOUGHT, "Let me look.", *CALL])
    first = client.chat.completions.create(model=MODEL, messages=HI, tools=TOOLS).choices[0]
    assert first.finish_reason == "tool_calls"
    assert first.message.content == "Let me look."
    assert first.message.tool_calls is not None
    call = first.message.tool_calls[0]
    assert call.type == "function"
    assert json.loads(call.function.arguments) == {"city": "Bonn"}
    # The answer's own message object goes back as it is.
    server.answer = Answer(["12 degrees"])
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "12"}
    second = client.chat.completions.create(model=MODEL, messages=[*HI, first.message, result], tools=TOOLS)  # type: ignore[list-item]
    assert second.choices[0].message.content == "12 degrees"
    prompt = QWEN3.decode(server.submitted[-1].prompt_token_ids)
    assert "<think>\nHmm.\n</think>\n\nLet me look.\n<tool_call>" in prompt
    assert "<tool_response>\n12\n</tool_response>" in prompt


def test_every_parameter_of_the_client_arrives(server: LiveServer, client: OpenAI) -> None:
    server.answer = Answer(["x"])
    client.chat.completions.create(
        model=MODEL, messages=HI, frequency_penalty=0.5, logit_bias={"5": -2}, logprobs=True, top_logprobs=3,
        max_completion_tokens=7, n=2, presence_penalty=0.25, seed=3, stop=["a", "b"], temperature=0.5,
        top_p=0.5, user="me", metadata={"a": "b"}, store=False, service_tier="auto", parallel_tool_calls=True,
        extra_body={"top_k": 4, "min_p": 0.1, "repetition_penalty": 1.5, "ignore_eos": True, "priority": -2,
                    "cache_salt": "salt", "min_tokens": 1},
    )  # fmt: skip
    submit: Submit = server.submitted[-1]
    params = submit.params
    assert (params.n, params.seed, params.stop, params.max_tokens) == (2, 3, ("a", "b"), 7)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.5, 4, 0.1)
    assert (params.frequency_penalty, params.presence_penalty, params.repetition_penalty) == (0.5, 0.25, 1.5)
    assert (params.logit_bias, params.logprobs) == ({5: -2.0}, 3)
    assert (params.ignore_eos, params.min_tokens) == (True, 1)
    assert (submit.priority, submit.cache_salt) == (-2, "salt")


def test_the_chat_stream_helper(server: LiveServer, client: OpenAI) -> None:
    server.answer = Answer([*THOUGHT, "Hi", " you", *CALL])
    with client.chat.completions.stream(
        model=MODEL, messages=HI, tools=TOOLS, stream_options={"include_usage": True}
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    kinds = [event.type for event in events if event.type != "chunk"]
    assert kinds.count("content.done") == kinds.count("tool_calls.function.arguments.done") == 1
    (done,) = (event for event in events if event.type == "tool_calls.function.arguments.done")
    assert (done.name, json.loads(done.arguments)) == ("weather", {"city": "Bonn"})
    choice = final.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Hi you"
    assert choice.message.reasoning_content == "Hmm."  # type: ignore[attr-defined]
    assert final.usage is not None
    assert final.usage.completion_tokens == len("".join([*THOUGHT, "Hi you", *CALL]))


def test_chat_parse(server: LiveServer, client: OpenAI) -> None:
    server.answer = Answer(['{"city": ', '"Bonn"}'])
    answer = client.chat.completions.parse(model=MODEL, messages=HI, response_format=City)
    assert answer.choices[0].message.parsed == City(city="Bonn")
    constraint = server.submitted[-1].params.structured_output
    assert constraint is not None
    assert '"city"' in (constraint.lark or "")
    tool = openai.pydantic_function_tool(Weather, name="weather")
    server.answer = Answer(CALL)
    called = client.chat.completions.parse(model=MODEL, messages=HI, tools=[tool])
    assert called.choices[0].message.tool_calls is not None
    assert called.choices[0].message.tool_calls[0].function.parsed_arguments == Weather(city="Bonn")
    # That tool is strict: what a call may look like is part of the request.
    assert server.submitted[-1].params.structured_output is not None
    # And what parse() adds to the message may be sent back.
    server.answer = Answer(["x"])
    client.chat.completions.create(model=MODEL, messages=[*HI, called.choices[0].message])


def test_parse_tells_of_an_answer_cut_off(server: LiveServer, client: OpenAI) -> None:
    server.answer = Answer(['{"ci'], "length")
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=MODEL, messages=HI, response_format=City)


def test_completions(server: LiveServer, client: OpenAI) -> None:
    server.answer = Answer(["a", "b"])
    answer = client.completions.create(model=MODEL, prompt=["x", "y"], n=1, logprobs=2)
    assert [choice.text for choice in answer.choices] == ["ab", "ab"]
    streamed = client.completions.create(model=MODEL, prompt="x", stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == "ab"


def test_responses_and_their_next_turn(server: LiveServer, client: OpenAI) -> None:
    server.answer = Answer([*THOUGHT, "Look.", *CALL])
    first = client.responses.create(model=MODEL, input="Hi", tools=FLAT_TOOLS, instructions="Be brief.")
    assert first.output_text == "Look."
    call = first.output[-1]
    assert call.type == "function_call"
    server.answer = Answer(["12 degrees"])
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "12"}
    conversation: Any = [user("Hi"), *first.output, result]
    second = client.responses.create(model=MODEL, input=conversation, tools=FLAT_TOOLS)
    assert second.output_text == "12 degrees"
    prompt = QWEN3.decode(server.submitted[-1].prompt_token_ids)
    assert "<think>\nHmm.\n</think>\n\nLook.\n<tool_call>" in prompt


def test_the_responses_stream_helper(server: LiveServer, client: OpenAI) -> None:
    server.answer = Answer([*THOUGHT, "Hi", "!", *CALL])
    with client.responses.stream(model=MODEL, input="Hi", tools=FLAT_TOOLS) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert texts == ["Hi", "!"]
    assert (final.status, final.output_text) == ("completed", "Hi!")
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]


def test_responses_parse(server: LiveServer, client: OpenAI) -> None:
    server.answer = Answer(['{"city": "Bonn"}'])
    assert client.responses.parse(model=MODEL, input="Hi", text_format=City).output_parsed == City(
        city="Bonn"
    )


def test_the_async_client(server: LiveServer) -> None:
    server.answer = Answer([*THOUGHT, "Hi", "!"])

    async def test() -> None:
        async with AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120
        ) as client:
            whole = await client.chat.completions.create(model=MODEL, messages=HI)
            assert whole.choices[0].message.content == "Hi!"
            chunks = [
                c async for c in await client.chat.completions.create(model=MODEL, messages=HI, stream=True)
            ]
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hi!"
            async with client.chat.completions.stream(model=MODEL, messages=HI) as stream:
                assert (await stream.get_final_completion()).choices[0].message.content == "Hi!"
            async with client.responses.stream(model=MODEL, input="Hi") as responses:
                assert (await responses.get_final_response()).output_text == "Hi!"
            answers = await asyncio.gather(
                *(client.completions.create(model=MODEL, prompt="x") for _ in range(8))
            )
            assert {answer.choices[0].text for answer in answers} == {"".join([*THOUGHT, "Hi!"])}

    asyncio.run(test())


# Errors


def test_each_status_raises_the_clients_own_class(server: LiveServer, client: OpenAI) -> None:
    server.answer = Answer(["x"])
    chat: Any = client.chat.completions.create
    with pytest.raises(openai.NotFoundError) as not_found:
        chat(model="gpt-9", messages=HI)
    assert (not_found.value.code, not_found.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        chat(model=MODEL, messages=HI, extra_body={"temprature": 1})
    assert (bad.value.param, bad.value.type) == ("temprature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as long:
        chat(model=MODEL, messages=[user("x" * 5000)], stream=True)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="input"):
        client.responses.create(model=MODEL, input=[])
    server.answer = Answer(refuse=("CapacityError", "prompt has 900 tokens; the KV cache holds 64"))
    with pytest.raises(openai.BadRequestError):
        chat(model=MODEL, messages=HI)
    server.answer = Answer(["a"], "error", error="the logits are NaN")
    with pytest.raises(openai.InternalServerError, match="the logits are NaN"):
        chat(model=MODEL, messages=HI)


@pytest.mark.parametrize("endpoint", ["chat", "responses", "completions"])
def test_an_error_within_a_stream_is_raised(server: LiveServer, client: OpenAI, endpoint: str) -> None:
    server.answer = Answer(["a", "b"], "error", error="the logits are NaN")
    ask: Any = {
        "chat": lambda: client.chat.completions.create(model=MODEL, messages=HI, stream=True),
        "responses": lambda: client.responses.create(model=MODEL, input="Hi", stream=True),
        "completions": lambda: client.completions.create(model=MODEL, prompt="Hi", stream=True),
    }[endpoint]
    with pytest.raises(openai.APIError, match="the logits are NaN"):
        list(ask())


def test_a_wrong_key_is_an_authentication_error() -> None:
    with live_server(QWEN3, ServeSettings(api_keys=("right",))) as server:
        for key in ("right", "wrong"):
            with OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=120) as client:
                if key == "right":
                    assert client.chat.completions.create(model=MODEL, messages=HI).choices
                    continue
                with pytest.raises(openai.AuthenticationError):
                    client.chat.completions.create(model=MODEL, messages=HI)


def test_a_full_queue_is_a_rate_limit_error_and_a_dead_engine_unavailable() -> None:
    waits = Answer(["x"] * 3, gate_from=0)
    card = replace(BIG_CARD, max_num_seqs=1)
    with live_server(QWEN3, ServeSettings(max_waiting_requests=1), card=card) as server:

        def script(submit: Submit) -> Answer:
            waits.gate = waits.gate or asyncio.Event()
            return waits

        server.answer = script
        with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
            first = client.chat.completions.create(model=MODEL, messages=HI, stream=True)
            client.chat.completions.create(model=MODEL, messages=HI, stream=True)
            with pytest.raises(openai.RateLimitError) as caught:
                client.chat.completions.create(model=MODEL, messages=HI)
            assert int(caught.value.response.headers["retry-after"]) >= 1
            assert server.link is not None
            engine = server.link.engine
            engine._loop.call_soon_threadsafe(engine.lost, "the engine process was killed")
            with pytest.raises(openai.APIError, match="the engine process was killed"):
                list(first)
            wait_until(lambda: engine.state == "dead")
            with pytest.raises(openai.InternalServerError) as dead:
                client.chat.completions.create(model=MODEL, messages=HI)
            assert dead.value.status_code == 503
            assert isinstance(engine.death, EngineError)
