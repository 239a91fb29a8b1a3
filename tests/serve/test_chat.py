"""/v1/chat/completions over a scripted engine: whole answers, and streams to the byte."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from helpers.chat import CHATML, QWEN3_STYLE, WEATHER, tokenizer_with, user
from helpers.live import BIG_CARD
from helpers.serve import Answer, Script, events_of, eventually, run, scripted_client

from octavo.outputs import StreamChunk
from octavo.serve.settings import ServeSettings
from octavo.text.tokenizer import Tokenizer

QWEN3 = tokenizer_with(default=QWEN3_STYLE)
PLAIN = tokenizer_with(default=CHATML)
URL = "/v1/chat/completions"
CALL_PIECES = ["<tool", '_call>\n{"name": "weather", "arguments": {"city"', ': "Bonn"}}\n</tool_call>']
THOUGHT_PIECES = ["<thi", "nk>\nHm", "m.\n</think", ">\n\nHi ", "you"]


def ask(
    script: Answer | Script, *, tokenizer: Any = QWEN3, settings: ServeSettings | None = None, **fields: Any
) -> httpx.Response:
    return ask_all(script, [fields], tokenizer=tokenizer, settings=settings)[0]


def ask_all(
    script: Answer | Script,
    bodies: list[dict[str, Any]],
    *,
    tokenizer: Any = QWEN3,
    settings: ServeSettings | None = None,
) -> list[httpx.Response]:
    async def post() -> list[httpx.Response]:
        options = {"card": BIG_CARD, "tokenizer": tokenizer}
        async with scripted_client(script, settings, **options) as (client, _):
            return [await client.post(URL, json={"messages": [user("Hi")], **body}) for body in bodies]

    return run(post())


def message_of(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return {**choice["message"], "finish_reason": choice["finish_reason"]}


def chunks_of(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, done = events_of(answer.text)
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


# Whole


def test_a_whole_answer() -> None:
    answer = ask(Answer(["Hel", "lo"], num_cached_tokens=16)).json()
    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"]) == ("chat.completion", "scripted")
    (choice,) = answer["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": "Hello", "refusal": None},
        "logprobs": None,
        "finish_reason": "stop",
    }
    num_prompt = len("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert answer["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 5,
        "total_tokens": num_prompt + 5,
        "prompt_tokens_details": {"cached_tokens": 16},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_every_choice_is_told_and_counted() -> None:
    answer = ask(Answer(["ab"], "length"), n=3, tokenizer=PLAIN).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert answer["usage"]["completion_tokens"] == 6
    assert "completion_tokens_details" not in answer["usage"]


def test_calls_and_reasoning_are_taken_out_of_the_text() -> None:
    message = message_of(ask(Answer([*THOUGHT_PIECES, "\n", *CALL_PIECES]), tools=[WEATHER]))
    (call,) = message.pop("tool_calls")
    assert call.pop("id").startswith("call_")
    assert call == {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
    assert message == {
        "role": "assistant",
        "content": "Hi you",
        "refusal": None,
        "reasoning_content": "Hmm.",
        "finish_reason": "tool_calls",
    }


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_without_thinking_the_answer_is_content(stream: bool) -> None:
    """vllm#19839: all of it was told as reasoning, and content was null."""
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    answers = ask_all(Answer(["Hi ", "there"]), [{**off, "stream": stream}, {"stream": stream}])
    for answer in answers:  # a model that thinks only when it is to may leave it out without being asked to
        if stream:
            messages = [chunk["choices"][0]["delta"] for chunk in chunks_of(answer)]
        else:
            messages = [message_of(answer)]
        assert "".join(message.get("content") or "" for message in messages) == "Hi there"
        assert not any("reasoning_content" in message for message in messages)
    assert message_of(ask(Answer(THOUGHT_PIECES)))["reasoning_content"] == "Hmm."


def test_content_is_null_beside_calls_alone() -> None:
    message = message_of(ask(Answer(CALL_PIECES), tools=[WEATHER]))
    assert message["content"] is None
    assert "reasoning_content" not in message


def test_calls_are_text_where_no_tools_were_offered() -> None:
    for fields in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        message = message_of(ask(Answer(CALL_PIECES), **fields))
        assert message["content"] == "".join(CALL_PIECES)
        assert message["finish_reason"] == "stop"


def test_an_answer_cut_off_says_length_whatever_it_was_doing() -> None:
    cut = message_of(ask(Answer(CALL_PIECES[:2], "length"), tools=[WEATHER]))
    assert cut["finish_reason"] == "length"
    assert cut["tool_calls"][0]["function"]["arguments"] == '{"city"'
    thinking = message_of(ask(Answer(THOUGHT_PIECES[:2], "length")))
    assert (thinking["content"], thinking["reasoning_content"]) == (None, "Hm")


def test_reasoning_tokens_are_counted() -> None:
    usage = ask(Answer(THOUGHT_PIECES)).json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len("<think>\nHmm.\n</think>")}
    assert usage["completion_tokens"] == len("".join(THOUGHT_PIECES))
    cut = ask(Answer(THOUGHT_PIECES[:2], "length")).json()["usage"]
    assert cut["completion_tokens_details"]["reasoning_tokens"] == cut["completion_tokens"]


def test_logprobs_have_one_entry_per_token() -> None:
    answer = ask(Answer(["ab", "c"]), logprobs=True, top_logprobs=2, tokenizer=PLAIN).json()
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["refusal"] is None
    assert [entry["token"] for entry in logprobs["content"]] == ["a", "b", "c"]
    assert [entry["bytes"] for entry in logprobs["content"]] == [[97], [98], [99]]
    assert {len(entry["top_logprobs"]) for entry in logprobs["content"]} == {2}


# Streamed


def test_a_stream_is_role_text_and_one_end() -> None:
    chunks = chunks_of(ask(Answer(["Hel", "", "lo"]), stream=True))
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert all(set(chunk) == {"id", "object", "created", "model", "choices"} for chunk in chunks)
    assert [chunk["choices"] for chunk in chunks] == [
        [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]
        for delta, reason in [
            ({"role": "assistant", "content": ""}, None),
            ({"content": "Hel"}, None),
            ({"content": "lo"}, None),
            ({}, "stop"),
        ]
    ]


def test_a_stream_without_text_has_a_role_and_an_end() -> None:
    chunks = chunks_of(ask(Answer([""], "length"), stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [{"role": "assistant", "content": ""}, {}]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_reasoning_and_calls_are_streamed_as_what_they_are() -> None:
    chunks = chunks_of(
        ask(
            Answer([*THOUGHT_PIECES, *CALL_PIECES, CALL_PIECES[0], *CALL_PIECES[1:]]),
            stream=True,
            tools=[WEATHER],
        )
    )
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    ids = [call.pop("id") for delta in deltas for call in delta.get("tool_calls", ()) if "id" in call]
    assert len(set(ids)) == 2

    def named(index: int) -> dict[str, Any]:
        function = {"name": "weather", "arguments": ""}
        return {"tool_calls": [{"index": index, "type": "function", "function": function}]}

    def arguments(index: int, text: str) -> dict[str, Any]:
        return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}

    assert deltas == [
        {"role": "assistant", "content": None},
        {"reasoning_content": "Hm"},
        {"reasoning_content": "m."},
        {"content": "Hi"},
        {"content": " you"},
        named(0),
        arguments(0, '{"city"'),
        arguments(0, ': "Bonn"}'),
        named(1),
        arguments(1, '{"city"'),
        arguments(1, ': "Bonn"}'),
        {},
    ]  # fmt: skip
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["tool_calls"]


def test_streamed_pieces_join_to_the_whole_answer() -> None:
    pieces = list('<think>\na</think>\n\nHi <there \n<tool_call>{"name": "f", "arguments": {}}</tool_call> x')
    whole = message_of(ask(Answer(pieces), tools=[WEATHER]))
    deltas = [
        chunk["choices"][0]["delta"] for chunk in chunks_of(ask(Answer(pieces), tools=[WEATHER], stream=True))
    ]
    assert "".join(delta.get("content") or "" for delta in deltas) == whole["content"] == "Hi <therex"
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == whole["reasoning_content"]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert "".join(call["arguments"] for call in calls) == "{}"


def test_each_choice_of_a_stream_has_its_own_role_and_end() -> None:
    chunks = chunks_of(ask(Answer(["a", "b"]), stream=True, n=2))
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for index in (0, 1):
        own = [choice for choice in choices if choice["index"] == index]
        assert [("role" in choice["delta"], choice["finish_reason"]) for choice in own] == [
            (True, None),
            (False, None),
            (False, None),
            (False, "stop"),
        ]


def test_streamed_logprobs_are_those_of_the_whole_answer() -> None:
    fields = {"logprobs": True, "top_logprobs": 1, "tools": [WEATHER]}
    pieces = ["ab", "<tool", "", "x", "c"]
    whole = ask(Answer(pieces), **fields).json()["choices"][0]["logprobs"]["content"]
    chunks = chunks_of(ask(Answer(pieces), stream=True, **fields))
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry for part in streamed if part for entry in part["content"]] == whole
    assert len(whole) == len("".join(pieces))


def test_usage_is_null_until_the_chunk_that_has_it() -> None:
    options = {"include_usage": True, "include_obfuscation": False}
    *others, last = chunks_of(ask(Answer(["a"], num_cached_tokens=4), stream=True, stream_options=options))
    assert all(chunk["usage"] is None for chunk in others)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 1
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


# Errors


def test_a_refusal_of_the_engine_is_a_status_even_for_a_stream() -> None:
    for stream in (False, True):
        error = error_of(ask(Answer(refuse=("RequestError", "n=9 can never run")), stream=stream), 400)
        assert error["message"] == "n=9 can never run"
        assert error["param"] == "n"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"tools": [WEATHER], "tool_choice": "required"}, "tools"),
    ],
)
def test_a_grammar_that_the_engine_refuses_is_told_by_the_clients_own_field(
    fields: dict[str, Any], param: str
) -> None:
    refusal = Answer(refuse=("RequestError", "structured_output: it cannot be used: too big"))
    for stream in (False, True):
        error = error_of(ask(refusal, stream=stream, **fields), 400)
        assert error["message"] == f"{param}: it cannot be used: too big"
        assert error["param"] == param


def test_a_choice_that_failed_is_an_error_never_an_answer() -> None:
    failed = Answer(["a", "b"], "error", error="row 0: the logits are NaN")
    error = error_of(ask(failed), 500)
    assert error["message"] == "row 0: the logits are NaN"
    *events, done = events_of(ask(failed, stream=True).text)
    assert done == "[DONE]"
    assert json.loads(events[-1])["error"]["message"] == "row 0: the logits are NaN"
    assert not any('"finish_reason":"' in event for event in events)


@pytest.mark.parametrize("path", [URL, "/v1/completions"])
def test_a_stream_says_why_one_of_its_choices_failed_before_the_others_end(path: str) -> None:
    async def test() -> dict[str, Any]:
        waits = asyncio.Event()
        options = {"card": BIG_CARD, "tokenizer": QWEN3}
        async with scripted_client(Answer(["a"], gate=waits), **options) as (client, link):
            prompt = {"messages": [user("Hi")]} if path == URL else {"prompt": "Hi"}
            asking = asyncio.ensure_future(client.post(path, json={**prompt, "n": 2, "stream": True}))
            await eventually(lambda: link.submitted)
            request_id = link.submitted[0].request_id
            await eventually(lambda: link.engine._generations[request_id].is_accepted)
            why = "the options ask for too much: no token is left"
            link.tell(request_id, [StreamChunk(0, "", [], "error", error=why)])
            *_, told, done = events_of((await asking).text)
            assert done == "[DONE]"
            assert link.aborted == [request_id]
            error: dict[str, Any] = json.loads(told)["error"]
            return error

    error = run(test())
    assert error["message"] == "the options ask for too much: no token is left"
    assert error["type"] == "invalid_request_error"


def test_a_wrong_model_is_404_before_anything_else() -> None:
    error = error_of(ask(Answer(["a"]), model="../../etc/passwd", temperature=9), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")


def test_a_prompt_beyond_the_context_is_400_before_the_stream_begins() -> None:
    for stream in (False, True):
        error = error_of(ask(Answer(["a"]), messages=[user("x" * 5000)], stream=stream), 400)
        assert error["code"] == "context_length_exceeded"


def test_priority_and_salt_go_along() -> None:
    seen: list[Any] = []

    def script(submit: Any) -> Answer:
        seen.append((submit.priority, submit.cache_salt, submit.stream))
        return Answer(["a"])

    ask_all(script, [{}, {"priority": -3, "cache_salt": "me", "stream": True}])
    assert seen == [(0, "", False), (-3, "me", True)]


def test_a_handler_that_is_cancelled_aborts_its_request() -> None:
    async def test() -> None:
        options = {"card": BIG_CARD, "tokenizer": QWEN3}
        async with scripted_client(Answer(["a"], gate=asyncio.Event()), **options) as (client, link):
            asking = asyncio.ensure_future(client.post(URL, json={"messages": [user("Hi")]}))
            await eventually(lambda: link.submitted)
            asking.cancel()
            await eventually(lambda: link.aborted)
            assert link.aborted == [link.submitted[0].request_id]

    run(test())


@pytest.mark.parametrize(
    ("message", "param", "problem"),
    [
        ({"role": "user"}, "messages[1].content", "expected a string or a list of text parts, got null"),
        ({"role": "user", "content": None}, "messages[1].content", "expected a string or a list of text"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text", "this field is mis"),
        (
            {"role": "user", "content": [{"type": "text", "text": 5}]},
            "messages[1].content[0].text",
            "expected",
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "a", "more": 1}]},
            "messages[1].content[0].more",
            "this field is not known",
        ),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": 5}]},
            "messages[1].content[0].refusal",
            "expected a string, got 5",
        ),
    ],
)
def test_what_is_wrong_with_a_message_is_told_with_its_place(
    message: dict[str, Any], param: str, problem: str
) -> None:
    error = error_of(ask(Answer(["a"]), messages=[user("Hi"), message]), 400)
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: {problem}")


def test_messages_that_are_too_long_are_told_as_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a count of the bytes says nothing and they must be tokenised, too."""
    monkeypatch.setattr(Tokenizer, "fewest_tokens", lambda self, text: 0)
    error = error_of(ask(Answer(["a"]), messages=[user("a" * BIG_CARD.max_model_len)]), 400)
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
    assert error["message"].startswith("prompt has 4")
