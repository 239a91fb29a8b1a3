"""/v1/responses over a scripted engine: its items, whole and as events, and what it makes of its input."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from helpers.chat import QWEN3_STYLE, WEATHER, tokenizer_with
from helpers.live import BIG_CARD
from helpers.serve import Answer, Script, run, scripted_client

from octavo.serve.api_errors import ApiError
from octavo.serve.chat_protocol import template_messages
from octavo.serve.responses_protocol import ResponsesRequest

QWEN3 = tokenizer_with(default=QWEN3_STYLE)
TOOL = {"type": "function", **WEATHER["function"]}
THOUGHT = ["<think>\nHm", "m.\n</think>\n\n"]
CALL = ['<tool_call>\n{"name": "weather", "arguments": {"city"', ': "Bonn"}}\n</tool_call>']


def ask(script: Answer | Script, **fields: Any) -> httpx.Response:
    async def post() -> httpx.Response:
        async with scripted_client(script, card=BIG_CARD, tokenizer=QWEN3) as (client, _):
            return await client.post("/v1/responses", json={"input": "Hi", **fields})

    return run(post())


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream; each says its name twice, and they are numbered from 0."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event.pop("sequence_number") for event in events] == list(range(len(events)))
    return events


def as_chat(items: Any, **fields: Any) -> list[dict[str, Any]]:
    body = ResponsesRequest.model_validate({"input": items, **fields})
    return template_messages(body.as_chat().messages)


# What is asked


def test_a_text_and_instructions_are_messages() -> None:
    assert as_chat("Hi", instructions="Be brief.") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]


def test_items_of_a_turn_are_one_message() -> None:
    call = {"type": "function_call", "name": "f", "arguments": "{}"}
    function = {"type": "function", "function": {"name": "f", "arguments": {}}}
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "role": "user", "content": "Hi"},
        {
            "type": "reasoning", "id": "rs_1", "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm"}],
        },
        {
            "type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
            "content": [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}],
        },
        {**call, "call_id": "a", "id": "fc_1", "status": "completed"},
        {**call, "call_id": "b"},
        {"type": "function_call_output", "call_id": "a", "output": "1"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "2"}]},
        {"role": "assistant", "content": "So"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "user", "content": [{"type": "input_text", "text": text} for text in "xy"]},
    ]  # fmt: skip
    assert as_chat(items) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": "Hello",
            "reasoning_content": "Hm",
            "tool_calls": [{"id": "a", **function}, {"id": "b", **function}],
        },
        {"role": "tool", "content": "1", "tool_call_id": "a"},
        {"role": "tool", "content": "2", "tool_call_id": "b"},
        {"role": "assistant", "content": "So"},
        {"role": "assistant", "content": "no"},
        {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]},
    ]


def test_a_turn_of_reasoning_without_text_is_a_turn() -> None:
    assert as_chat([{"type": "reasoning", "summary": []}]) == [
        {"role": "assistant", "content": "", "reasoning_content": ""}
    ]


def test_options_mean_what_they_mean_in_a_chat() -> None:
    schema = {"type": "object", "properties": {}}
    body = ResponsesRequest.model_validate(
        {
            "input": "Hi", "max_output_tokens": 7, "temperature": 0.5, "top_k": 3, "seed": 1, "stop": "x",
            "logit_bias": {"1": 2}, "tools": [TOOL], "tool_choice": {"type": "function", "name": "weather"},
            "parallel_tool_calls": False, "top_logprobs": 2,
            "reasoning": {"effort": "none", "summary": "auto"},
            "text": {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}},
            "include": ["message.output_text.logprobs", "reasoning.encrypted_content"], "store": False,
        }
    )  # fmt: skip
    chat = body.as_chat()
    assert (chat.limit, chat.temperature, chat.top_k, chat.seed, chat.stop) == (7, 0.5, 3, 1, "x")
    assert (chat.num_logprobs, chat.reasoning_effort, chat.logit_bias) == (2, "none", {"1": 2})
    assert chat.tools is not None
    assert chat.tools[0].function.name == "weather"
    assert chat.tool_choice is not None
    assert chat.parallel_tool_calls is False
    assert chat.response_format is not None
    assert chat.response_format.json_schema is not None
    assert chat.response_format.json_schema.schema_ == schema
    only = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
    allowed = ResponsesRequest.model_validate({"input": "Hi", "tools": [TOOL], "tool_choice": only}).as_chat()
    assert not isinstance(allowed.tool_choice, str)
    assert allowed.tool_choice is not None
    assert allowed.tool_choice.type == "allowed_tools"


def test_two_functions_of_one_name_are_refused() -> None:
    body = ResponsesRequest.model_validate({"input": "Hi", "tools": [TOOL, TOOL]})
    with pytest.raises(ApiError, match="two functions are named 'weather'"):
        body.as_chat()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": "message", "role": "user", "content": [{"type": "input_image"}]}]}, None),
        ({"tools": [{"type": "web_search"}]}, "tools[0].name"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_what_is_not_served_is_400_with_its_field(fields: dict[str, Any], param: str | None) -> None:
    answer = ask(Answer(["a"]), **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert param is None or error["param"] == param


# What is answered


def test_a_whole_response() -> None:
    response = ask(Answer(["Hel", "lo"], num_cached_tokens=8), temperature=0.5, metadata={"a": "b"}).json()
    assert response["id"].startswith("resp_")
    assert response["object"] == "response"
    assert (response["status"], response["error"], response["incomplete_details"]) == (
        "completed",
        None,
        None,
    )
    assert (response["temperature"], response["top_p"], response["store"]) == (0.5, 1.0, False)
    assert (response["metadata"], response["tool_choice"], response["tools"]) == ({"a": "b"}, "auto", [])
    (message,) = response["output"]
    assert message.pop("id").startswith("msg_")
    assert message == {
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}],
    }
    usage = response["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == 8
    assert (usage["output_tokens"], usage["output_tokens_details"]) == (5, {"reasoning_tokens": 0})
    assert usage["total_tokens"] == usage["input_tokens"] + 5


def test_reasoning_text_and_calls_are_items_in_their_order() -> None:
    response = ask(Answer([*THOUGHT, "Look: ", *CALL, *CALL]), tools=[TOOL]).json()
    items = response["output"]
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call", "function_call"]
    assert items[0]["content"] == [{"type": "reasoning_text", "text": "Hmm."}]
    assert items[0]["summary"] == []
    assert items[1]["content"][0]["text"] == "Look:"
    assert (items[2]["name"], items[2]["arguments"]) == ("weather", '{"city": "Bonn"}')
    assert len({item["id"] for item in items} | {item.get("call_id") for item in items[2:]}) == 6
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == len("".join(THOUGHT).rstrip())


@pytest.mark.parametrize("calls", [[], [*CALL]])
def test_log_probabilities_of_a_message_are_its_own_however_it_is_sent(calls: list[str]) -> None:
    whole = [*THOUGHT, "yes", " ", *calls]
    for pieces in (whole, ["".join(whole)], list("".join(whole))):
        fields = {"include": ["message.output_text.logprobs"], "tools": [TOOL]}
        response = ask(Answer(pieces), **fields).json()
        events = events_of(ask(Answer(pieces), stream=True, **fields))
        (told,) = [event for event in events if event["type"] == "response.output_text.done"]
        for logprobs in (response["output"][1]["content"][0]["logprobs"], told["logprobs"]):
            assert "".join(one["token"] for one in logprobs).strip() == "yes"


def test_an_answer_cut_off_is_incomplete() -> None:
    response = ask(Answer(["Hel"], "length"), max_output_tokens=3).json()
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"
    assert response["completed_at"] is None


def test_logprobs_are_those_of_the_text() -> None:
    part = ask(Answer(["ab"]), include=["message.output_text.logprobs"], top_logprobs=1).json()["output"][0][
        "content"
    ][0]
    assert [entry["token"] for entry in part["logprobs"]] == ["a", "b"]
    assert len(part["logprobs"][0]["top_logprobs"]) == 1


def test_the_events_of_a_stream_in_their_order() -> None:
    events = events_of(ask(Answer([*THOUGHT, "Hi", "!", *CALL]), stream=True, tools=[TOOL]))
    assert [(event["type"].removeprefix("response."), event.get("output_index")) for event in events] == [
        ("created", None),
        ("in_progress", None),
        ("output_item.added", 0),
        ("content_part.added", 0),
        ("reasoning_text.delta", 0),
        ("reasoning_text.delta", 0),
        ("reasoning_text.done", 0),
        ("content_part.done", 0),
        ("output_item.done", 0),
        ("output_item.added", 1),
        ("content_part.added", 1),
        ("output_text.delta", 1),
        ("output_text.delta", 1),
        ("output_text.done", 1),
        ("content_part.done", 1),
        ("output_item.done", 1),
        ("output_item.added", 2),
        ("function_call_arguments.delta", 2),
        ("function_call_arguments.delta", 2),
        ("function_call_arguments.done", 2),
        ("output_item.done", 2),
        ("completed", None),
    ]
    created, completed = events[0]["response"], events[-1]["response"]
    assert (created["status"], created["output"], created["usage"]) == ("in_progress", [], None)
    assert completed["status"] == "completed"
    assert completed["id"] == created["id"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert completed["output"] == done
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item["id"] for item in added] == [item["id"] for item in done]
    assert [item["status"] for item in added] == ["in_progress"] * 3
    assert added[0]["content"] == added[1]["content"] == []
    assert added[2]["arguments"] == ""
    assert [event["delta"] for event in events if event["type"].endswith("_text.delta")] == [
        "Hm",
        "m.",
        "Hi",
        "!",
    ]
    assert events[13]["text"] == "Hi!"
    assert events[19]["arguments"] == '{"city": "Bonn"}'
    assert all(event["item_id"] in {item["id"] for item in done} for event in events if "item_id" in event)


def test_a_stream_cut_off_ends_incomplete() -> None:
    events = events_of(ask(Answer(["Hel"], "length"), stream=True))
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


def test_streamed_logprobs_are_those_of_the_text() -> None:
    fields = {"top_logprobs": 1, "stream": True}
    events = events_of(ask(Answer(["<think>a</think>", "b", "c"]), **fields))
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [[entry["token"] for entry in event["logprobs"]] for event in deltas] == [["b"], ["c"]]
    done = next(event for event in events if event["type"] == "response.output_text.done")
    assert [entry["token"] for entry in done["logprobs"]] == ["b", "c"]


def test_a_failure_is_an_event_and_an_error() -> None:
    failed = Answer(["a", "b"], "error", error="the logits are NaN")
    answer = ask(failed, stream=True)
    *_, event, error = answer.text.removesuffix("\n\n").split("\n\n")
    assert event.startswith("event: response.failed\n")
    response = json.loads(event.split("data: ")[1])["response"]
    assert (response["status"], response["error"]["message"]) == ("failed", "the logits are NaN")
    assert json.loads(error.removeprefix("data: "))["error"]["message"] == "the logits are NaN"
    assert ask(failed).status_code == 500
    text = {"format": {"type": "json_object"}}
    for stream in (False, True):
        refusal = Answer(refuse=("RequestError", "structured_output: too big"))
        refused = ask(refusal, stream=stream, text=text)
        assert refused.status_code == 400
        assert refused.json()["error"]["message"] == "text.format: too big"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"metadata": {"a": "\ud800"}}, "metadata"),
        ({"metadata": {"\ud800": "a"}, "stream": True}, "metadata"),
        ({"user": "\ud800"}, "user"),
        ({"text": {"format": {"type": "text", "description": "\ud800"}}}, "text"),
        (
            {"tool_choice": "none", "tools": [{"type": "function", "name": "f", "description": "\ud800"}]},
            "tools",
        ),
    ],
)
def test_what_a_response_repeats_must_be_unicode(fields, param):
    async def test():
        async with scripted_client(Answer(["a"]), card=BIG_CARD, tokenizer=QWEN3) as (client, link):
            content = json.dumps({"input": "a", **fields})
            answer = await client.post(
                "/v1/responses", content=content, headers={"Content-Type": "application/json"}
            )
            return answer, link.submitted

    answer, submitted = run(test())
    assert (answer.status_code, answer.json()["error"]["param"], submitted) == (400, param, [])


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"role": "user"}, "input[0].content"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[0].content[0].text"),
        ({"type": "function_call_output", "call_id": 5, "output": "a"}, "input[0].call_id"),
    ],
)
def test_what_is_wrong_with_an_item_is_told_with_its_place(item: dict[str, Any], param: str) -> None:
    error = ask(Answer(["a"]), input=[item]).json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")
