"""Faults that people met in servers like this one, on the chat side: a real server over a tiny model.

Each is a public report: sgl-project/mini-sglang#15, Arthur-Ficial/apfel#100, vllm-project/vllm#19862,
#16529 and #7283, huggingface/text-generation-inference#1254, and what was reported beside them.
`test_completions` and `test_lifecycle` have /v1/completions.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from helpers.serve import PATIENCE_S, RunningServer, events_of, running_server, wait_until

CHAT, RESPONSES, COMPLETIONS = "/v1/chat/completions", "/v1/responses", "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]
ENDLESS = {"messages": HI, "max_tokens": 30_000, "ignore_eos": True}
VOCAB_SIZE = 258


@pytest.fixture(scope="module")
def server(tiny: tuple[Any, ...]) -> Iterator[RunningServer]:
    with running_server(*tiny, "--max-num-seqs", "2", "--max-num-batched-tokens", "512") as running:
        yield running


def post(server: RunningServer, body: Any, path: str = CHAT) -> httpx.Response:
    return server.post(path, body)


@contextlib.contextmanager
def streaming(server: RunningServer, body: dict[str, Any], num_events: int) -> Iterator[Iterator[str]]:
    """A stream of which so many events have been read; what is left of its lines."""
    with httpx.stream("POST", server.url + CHAT, json={**body, "stream": True}, timeout=PATIENCE_S) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        for _ in range(num_events):
            next(line for line in lines if line.startswith("data: "))
        yield lines


def assert_gone(server: RunningServer, num_aborted_before: float, num: int = 1) -> None:
    """They ended, by themselves nowhere near it: 30,000 tokens take this model a minute and more."""
    wait_until(server.is_idle)
    assert server.counts()["aborted"] == num_aborted_before + num


# C43: a client that has gone is generated for no longer


def test_a_stream_closed_after_five_chunks_is_aborted(server: RunningServer) -> None:
    before = server.counts()["aborted"]
    with streaming(server, ENDLESS, 5):
        assert server.counts()["running"] == 1
    assert_gone(server, before)


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_an_answer_not_waited_for_is_aborted(server: RunningServer, path: str) -> None:
    before = server.counts()["aborted"]
    body = ENDLESS if path == CHAT else {"input": "Hi", "max_output_tokens": 30_000, "ignore_eos": True}
    with server.connect(path, body):
        wait_until(lambda: server.counts()["running"] == 1)
    assert_gone(server, before)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_the_queue_is_aborted_and_those_before_it_are_not(
    server: RunningServer, stream: bool
) -> None:
    before = server.counts()["aborted"]
    with streaming(server, ENDLESS, 1) as first, streaming(server, ENDLESS, 1):
        with server.connect(CHAT, {**ENDLESS, "stream": stream}):
            wait_until(lambda: server.counts()["waiting"] == 1)
        wait_until(lambda: server.counts()["waiting"] == 0)
        assert server.counts()["aborted"] == before + 1
        assert server.counts()["running"] == 2
        assert next(line for line in first if line.startswith("data: "))
    assert_gone(server, before, 3)


def test_a_client_that_leaves_during_prefill_is_aborted(server: RunningServer) -> None:
    before = server.counts()["aborted"]
    messages = [{"role": "user", "content": "x" * 30_000}]
    with server.connect(CHAT, {**ENDLESS, "messages": messages, "stream": True}):
        wait_until(lambda: server.counts()["running"] == 1)
    assert_gone(server, before)


# C45: what a stream holds, and in which order


@pytest.mark.parametrize(
    ("path", "body"),
    [(CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": "Hi"})],
    ids=["chat", "completions"],
)
@pytest.mark.parametrize(
    ("options", "wants_usage"),
    [({}, False), ({"include_usage": False}, False), (None, False), ({"include_usage": True}, True)],
    ids=["absent", "false", "null", "true"],
)
def test_usage_comes_only_when_asked_for_once_and_last(
    server: RunningServer, path: str, body: dict[str, Any], options: Any, wants_usage: bool
) -> None:
    body = {**body, "stream": True, "max_tokens": 4, "n": 2, "seed": 1, "ignore_eos": True}
    if options != {}:
        body["stream_options"] = options
    answer = post(server, body, path)
    *events, done = events_of(answer.text)
    assert done == "[DONE]"
    assert answer.text.count("[DONE]") == 1
    chunks = [json.loads(event) for event in events]
    if wants_usage:
        last = chunks.pop()
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 8
        assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert not any("usage" in chunk for chunk in chunks)
    # Clients read choices[0] of whatever comes.
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    for index in (0, 1):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["length"]
        if path == CHAT:
            assert ["role" in choice["delta"] for choice in own] == [True] + [False] * (len(own) - 1)


# C29: a stop text that spans tokens


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("written", "stop", "text"),
    [
        ("Hi\nQ: x", ["\nQ:"], "Hi"),
        ("ENTRY", ["END"], "ENTRY"),
        ("the ENDING", ["ENDING", "END"], "the "),
        ("the END.", ["ENDING", "END"], "the "),
    ],
    ids=["found", "begun only", "one begins the other", "the shorter alone"],
)
def test_a_stop_over_several_tokens_is_never_shown(
    server: RunningServer, path: str, stream: bool, written: str, stop: list[str], text: str
) -> None:
    """The model has a token for each byte."""
    asked = {"messages": HI} if path == CHAT else {"prompt": "Hi"}
    forced = {"structured_outputs": {"choice": [written]}, "max_tokens": len(written)}
    answer = post(server, {**asked, **forced, "stop": stop, "stream": stream}, path)
    assert answer.status_code == 200, answer.text
    if stream:
        choices = [json.loads(event)["choices"][0] for event in events_of(answer.text)[:-1]]
    else:
        choices = answer.json()["choices"]
    given = [
        choice.get("text") or (choice.get("delta") or choice.get("message") or {}).get("content") or ""
        for choice in choices
    ]
    assert "".join(given) == text
    assert choices[-1]["finish_reason"] == "stop"
    # Nothing that may yet turn out to be the stop is sent ahead of time.
    assert all(text.startswith("".join(given[: i + 1])) for i in range(len(given)))


# C34: prompts of no tokens


def test_empty_prompts_are_400_beside_a_stream_that_goes_on(server: RunningServer) -> None:
    with streaming(server, {**ENDLESS, "max_tokens": 400}, 1) as lines:
        for path, body in (
            (COMPLETIONS, {"prompt": ""}),
            (COMPLETIONS, {"prompt": []}),
            (COMPLETIONS, {"prompt": [[]]}),
            (CHAT, {"messages": []}),
            (RESPONSES, {"input": []}),
        ):
            answer = post(server, body, path)
            assert answer.status_code == 400, (path, body, answer.text)
            (field,) = body
            assert answer.json()["error"]["param"] == field
        data = [line.removeprefix("data: ") for line in lines if line]
    assert data[-1] == "[DONE]"
    assert json.loads(data[-2])["choices"][0]["finish_reason"] == "length"
    assert post(server, {"prompt": "Hi", "max_tokens": 1}, COMPLETIONS).status_code == 200


# C48: limits


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [0, -1, -2, 1.5, "8", True, [8], 10**30])
def test_a_limit_that_is_none_is_400_with_its_name(server: RunningServer, field: str, value: Any) -> None:
    for stream in (False, True):
        answer = post(server, {"messages": HI, "temperature": 0, "stream": stream, field: value})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == field
        assert error["type"] == "invalid_request_error"


def test_null_is_the_default_and_huge_is_cut_to_the_room_left(server: RunningServer) -> None:
    ends_at_once = {"logit_bias": {"257": 100}}
    for value in (None, 2147483648):
        answer = post(server, {"messages": HI, "temperature": 0, "max_tokens": value, **ends_at_once})
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["finish_reason"] == "stop"
    assert (
        post(server, {"prompt": "test", "temperature": 0, "max_tokens": None}, COMPLETIONS).status_code == 200
    )


def test_a_prompt_over_the_context_is_a_status_before_any_stream(server: RunningServer) -> None:
    messages = [{"role": "user", "content": "x" * 33_000}]
    for path, body in ((CHAT, {"messages": messages}), (RESPONSES, {"input": "x" * 33_000})):
        answer = post(server, {**body, "stream": True}, path)
        assert answer.status_code == 400
        assert answer.headers["content-type"] == "application/json"
        error = answer.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "32768" in error["message"]


NESTED = b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
BODIES = {
    "half an object": b"{",
    "a list": b"[]",
    "nothing": b"",
    "null": b"null",
    "text": b'"Hi"',
    "no JSON": b"messages=Hi",
    "not UTF-8": b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
    "nested too deeply": NESTED,
    "a number of 5000 digits": b'{"messages": [{"role": "user", "content": "x"}], "n": ' + b"1" * 5000 + b"}",
    "infinity": b'{"messages": [{"role": "user", "content": "x"}], "temperature": Infinity}',
    "1e999": b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
    "lone surrogate": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "lone surrogate as a stop": b'{"messages": [{"role": "user", "content": "x"}], "stop": "\\udfff"}',
    "lone surrogate as a name": b'{"messages": [{"role": "user", "content": "x"}], "\\ud800": 1}',
    "lone surrogate in a model": b'{"messages": [{"role": "user", "content": "x"}], "model": "\\ud800"}',
    "five megabytes": b'{"messages": [{"role": "user", "content": "' + b"x" * 5_000_000 + b'"}]}',
    "lone surrogate in a tool": b'{"messages": [{"role": "user", "content": "x"}], "tool_choice": "none",'
    b' "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": "\\ud800"}}}]}',
    "a NUL in a stop": b'{"messages": [{"role": "user", "content": "x"}], "stop": [1, "\\u0000"]}',
    "a role of its own": b'{"messages": [{"role": "tool\\nuser", "content": "x"}]}',
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_bodies_that_are_no_request_are_told_so(server: RunningServer, body: bytes) -> None:
    for path in (CHAT, RESPONSES):
        if path == RESPONSES:
            body = body.replace(b'"messages"', b'"input"')[:100_000]
        headers = {"content-type": "application/json"}
        answer = httpx.post(server.url + path, content=body, headers=headers, timeout=PATIENCE_S)
        assert answer.status_code in (400, 404), answer.text[:300]
        error = answer.json()["error"]
        assert error["message"]
        assert error["type"] in ("invalid_request_error", "not_found_error")
        assert "Traceback" not in answer.text
        assert len(answer.text) < 3000
    assert server.get("/health").status_code == 200


# C39: logit_bias


def test_bias_of_ids_that_are_none_is_400_with_the_key_and_harms_nobody(server: RunningServer) -> None:
    with streaming(server, {**ENDLESS, "max_tokens": 400}, 1) as lines:
        for bias, shown in (
            ({str(VOCAB_SIZE): 5}, f"token id {VOCAB_SIZE}, outside the vocabulary"),
            ({"-1": 5}, "'-1'"),
            ({"abc": 5}, "'abc'"),
            ({"0": 1e9}, "logit_bias.0"),
            ({str(2**70): 5}, str(2**70)),
        ):
            answer = post(server, {"messages": HI, "max_tokens": 2, "logit_bias": bias})
            assert answer.status_code == 400
            assert shown in answer.json()["error"]["message"]
            assert answer.json()["error"]["param"].startswith("logit_bias")
        last = {str(VOCAB_SIZE - 1): 100, "0": -100}
        assert post(server, {"messages": HI, "max_tokens": 2, "logit_bias": last}).status_code == 200
        data = [line.removeprefix("data: ") for line in lines if line]
    assert data[-1] == "[DONE]"
    assert json.loads(data[-2])["choices"][0]["finish_reason"] == "length"


# All at once


def test_requests_of_every_kind_beside_each_other_harm_nobody(server: RunningServer) -> None:
    schema = {"type": "object", "properties": {"c": {"enum": ["x", "y"]}}, "required": ["c"]}
    schema |= {"additionalProperties": False}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    formatted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    before = server.counts()["aborted"]

    async def ask(client: httpx.AsyncClient, seed: int) -> None:
        chat = {"messages": HI, "max_tokens": 30, "temperature": 1, "seed": seed}
        match seed % 5:
            case 0:
                answer = await client.post(CHAT, json={**chat, "n": 2, "stream": True})
                ends = [json.loads(event)["choices"][0] for event in events_of(answer.text)[:-1]]
                assert len([end for end in ends if end["finish_reason"]]) == 2
            case 1:
                answer = await client.post(
                    CHAT, json={**chat, "max_tokens": 200, "response_format": formatted}
                )
                content = answer.json()["choices"][0]["message"]["content"]
                assert json.loads(content)["c"] in ("x", "y")
            case 2:
                forced = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
                answer = await client.post(CHAT, json={**chat, "max_tokens": 500, **forced})
                choice = answer.json()["choices"][0]
                assert choice["finish_reason"] == "tool_calls"
                call = choice["message"]["tool_calls"][0]["function"]
                assert json.loads(call["arguments"])["c"] in ("x", "y")
            case 3:
                assert (await client.post(CHAT, json={**chat, "logit_bias": {"999": 1}})).status_code == 400
            case 4:
                async with client.stream("POST", CHAT, json={**ENDLESS, "stream": True}) as stream:
                    async for _ in stream.aiter_lines():
                        break

    async def ask_all() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client:
            await asyncio.gather(*(ask(client, seed) for seed in range(25)))

    asyncio.run(ask_all())
    assert_gone(server, before, 5)
    state = server.get("/v1/engine/state").json()["stats"]
    lines = server.get("/metrics").text.splitlines()
    for kind in ("free", "cached", "owned"):
        assert f'octavo_kv_cache_blocks{{state="{kind}"}} {float(state[f"num_{kind}_blocks"])}' in lines
    for kind in ("waiting", "running"):
        assert f'octavo_engine_sequences{{state="{kind}"}} {float(state[f"num_{kind}"])}' in lines
    assert (state["num_owned_blocks"], state["num_waiting"], state["num_running"]) == (0, 0, 0)
