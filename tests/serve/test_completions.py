"""POST /v1/completions over a scripted engine: what it says, and what it refuses."""

import asyncio
import json
import re
import threading
from dataclasses import replace

import pytest
from helpers.chat import tokenizer_with
from helpers.serve import (
    CARD,
    STATS,
    Answer,
    events_of,
    eventually,
    leaving_client,
    run,
    scripted_client,
    scripted_engine,
)
from helpers.tokenizers_by_hand import byte_level
from tokenizers import normalizers

from octavo.errors import OverloadedError
from octavo.sampling_params import SamplingParams
from octavo.serve.app import create_app
from octavo.serve.completions import _encode
from octavo.serve.messages import Abort, News
from octavo.serve.metrics import Metrics
from octavo.serve.protocol import CompletionRequest
from octavo.serve.settings import ServeSettings
from octavo.text.recipe import TokenizerRecipe
from octavo.text.tokenizer import Tokenizer

ANSWER = Answer(["ab", "c"], stop_reason=None, num_cached_tokens=1)


def post(body, answer=ANSWER, settings=None, path="/v1/completions"):
    """The response to `body`, a dict or the bytes themselves, and the link that saw the request."""

    async def test():
        async with scripted_client(answer, settings) as (client, link):
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            headers = {"content-type": "application/json"}
            return await client.post(path, content=content, headers=headers), link

    return run(test())


def streamed(body, answer=ANSWER):
    """The events of a stream, parsed, without the closing [DONE]."""
    response, _ = post({**body, "stream": True}, answer)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, last = events_of(response.text)
    assert last == "[DONE]"
    return [json.loads(event) for event in events]


def error_of(body, answer=ANSWER, status=400):
    response, link = post(body, answer)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    if status == 400:
        assert link.submitted == []
    return error


# What it says


def test_a_whole_answer():
    response, link = post({"prompt": "ad", "model": "scripted"})
    body = response.json()
    assert body.pop("id").startswith("cmpl-")
    assert isinstance(body.pop("created"), int)
    assert body == {
        "object": "text_completion",
        "model": "scripted",
        "choices": [{"index": 0, "text": "abc", "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 3,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }
    assert link.submitted[0].prompt_token_ids == [0, 3]
    assert link.aborted == []


@pytest.mark.parametrize("prompt", ["ad", [0, 3], ["ad"], [[0, 3]]])
def test_every_form_of_one_prompt_means_the_same(prompt):
    _, link = post({"prompt": prompt})
    assert [one.prompt_token_ids for one in link.submitted] == [[0, 3]]


@pytest.mark.parametrize("stream", [False, True])
def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(stream):
    body = {"prompt": ["a", "b"], "n": 2}
    if stream:
        ends = [
            event["choices"][0]["index"]
            for event in streamed(body)
            if event["choices"][0]["finish_reason"] == "stop"
        ]
        assert sorted(ends) == [0, 1, 2, 3]
        return
    response, link = post(body)
    assert [choice["index"] for choice in response.json()["choices"]] == [0, 1, 2, 3]
    assert response.json()["usage"]["prompt_tokens"] == 2
    assert response.json()["usage"]["completion_tokens"] == 12
    assert [one.prompt_token_ids for one in link.submitted] == [[0], [1]]


def test_a_stream_says_the_same_as_the_whole_and_each_choice_ends_once():
    events = streamed({"prompt": "ad", "n": 2})
    texts = {0: "", 1: ""}
    for event in events:
        assert event["object"] == "text_completion"
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == {0: "abc", 1: "abc"}
    ends = [event["choices"][0]["finish_reason"] for event in events]
    assert ends.count("stop") == 2
    assert len({event["id"] for event in events}) == 1
    assert not any("usage" in event for event in events)


def test_pieces_without_text_are_not_sent():
    events = streamed({"prompt": "a"}, Answer(["a", "", "", "b", ""]))
    assert [event["choices"][0]["text"] for event in events] == ["a", "b", ""]


@pytest.mark.parametrize(
    ("options", "has_usage"),
    [
        ({}, False),
        ({"stream_options": None}, False),
        ({"stream_options": {"include_usage": False}}, False),
        ({"stream_options": {"include_usage": True}}, True),
    ],
)
def test_usage_is_sent_only_when_asked_for_and_then_last_apfel_100(options, has_usage):
    """The public report Arthur-Ficial/apfel#100."""
    events = streamed({"prompt": "ad", **options})
    with_usage = [event for event in events if event.get("usage")]
    assert len(with_usage) == has_usage
    assert all(len(event["choices"]) == 1 for event in events if not event.get("usage"))
    if has_usage:
        assert events[-1]["choices"] == []
        assert events[-1]["usage"]["total_tokens"] == 5
        assert all(event["usage"] is None for event in events[:-1])


@pytest.mark.parametrize("prompt", ["ad", [0, 3]])
def test_echo_puts_the_prompt_in_front(prompt):
    response, _ = post({"prompt": prompt, "echo": True})
    assert response.json()["choices"][0]["text"] == "adabc"
    events = streamed({"prompt": prompt, "echo": True, "n": 2})
    for index in (0, 1):
        texts = [e["choices"][0]["text"] for e in events if e["choices"][0]["index"] == index]
        assert texts[0] == "ad"
        assert "".join(texts) == "adabc"


def test_log_probabilities_in_both_modes():
    expected = {
        "tokens": ["a", "b", "c"],
        "token_logprobs": [-0.5, -0.5, -0.5],
        "top_logprobs": [{"a": -0.5, "b": -1.5}, {"b": -0.5, "c": -1.5}, {"c": -0.5, "d": -1.5}],
        "text_offset": [0, 1, 2],
    }
    response, _ = post({"prompt": "a", "logprobs": 2})
    assert response.json()["choices"][0]["logprobs"] == expected
    joined = {name: [] for name in expected}
    for event in streamed({"prompt": "a", "logprobs": 2}):
        for name, values in event["choices"][0]["logprobs"].items():
            joined[name] += values
    assert joined == expected


def test_options_reach_the_engine():
    options = {
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 3,
        "stop": ["x"],
        "presence_penalty": 0.5,
        "logit_bias": {"3": 2.5},
        "top_k": 4,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "ignore_eos": True,
        "min_tokens": 2,
        "cache_salt": "me",
        "priority": -2,
        "user": "ignored",
    }
    response, link = post({"prompt": "a", **options})
    assert response.status_code == 200, response.text
    (sent,) = link.submitted
    for name in ("max_tokens", "temperature", "top_p", "seed", "presence_penalty", "top_k", "min_p"):
        assert getattr(sent.params, name) == options[name]
    assert (sent.params.stop, sent.params.logit_bias) == (("x",), {3: 2.5})
    assert (sent.cache_salt, sent.priority) == ("me", -2)


def test_max_tokens_is_sixteen_when_not_said():
    for body in ({}, {"max_tokens": None}):
        _, link = post({"prompt": "a", **body})
        assert link.submitted[0].params.max_tokens == 16


# What it refuses


@pytest.mark.parametrize("value", [0, -1, 1.5, "8", 2**70, True])
def test_bad_max_tokens_are_named_vllm_19862(value):
    """The public report vllm#19862."""
    error = error_of({"prompt": "test", "temperature": 0, "max_tokens": value})
    assert error["param"] == "max_tokens"
    assert "max_tokens" in error["message"]


def test_huge_max_tokens_are_cut_to_the_room_there_is_vllm_19862():
    response, link = post({"prompt": "test", "max_tokens": 2147483648})
    assert response.status_code == 200
    assert link.submitted[0].params.max_tokens == 2147483648  # the scheduler cuts it


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_over_the_context_is_a_status_and_not_a_stream_vllm_19862(stream):
    error = error_of({"prompt": "a" * 200, "stream": stream})
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")


@pytest.mark.parametrize("stream", [False, True])
def test_what_only_the_engine_can_refuse_is_a_status_as_well(stream):
    response, _ = post(
        {"prompt": "a", "stream": stream}, Answer(refuse=("CapacityError", "prompt has too much"))
    )
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "prompt has too much"


@pytest.mark.parametrize("prompt", ["", [], [[]], ["a", ""], [[0], []]])
def test_empty_prompts_are_refused_vllm_7283(prompt):
    """The public report vllm#7283."""
    error = error_of({"prompt": prompt})
    assert error["param"] == "prompt"


@pytest.mark.parametrize(
    "bias", [{"52": 5}, {"-1": 5}, {"abc": 5}, {"0": 1e9}, {"0": "x"}, {"1_0": 1}, [1]], ids=str
)
def test_a_bad_logit_bias_is_named_vllm_16529(bias):
    """The public report vllm#16529."""
    assert error_of({"prompt": "a", "logit_bias": bias})["param"].startswith("logit_bias")


def test_the_last_valid_id_may_be_biased_vllm_16529():
    response, link = post({"prompt": "a", "logit_bias": {"51": 5}})
    assert response.status_code == 200
    assert link.submitted[0].params.logit_bias == {51: 5.0}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", "1"),
        ("top_p", 0),
        ("top_p", 1.5),
        ("n", 0),
        ("n", 2.0),
        ("stop", 3),
        ("stop", [""]),
        ("stop", ["a", 2]),
        ("logprobs", True),
        ("logprobs", 21),
        ("seed", 2**64),
        ("seed", "1"),
        ("presence_penalty", 2.1),
        ("best_of", 2),
        ("suffix", "x"),
        ("stream", "yes"),
        ("stream_options", {"include_usage": 1}),
        ("stream_options", {"what": True}),
        ("cache_salt", 3),
        ("priority", 1.5),
        ("min_p", 2),
        ("top_k", -5),
        ("prompt", 3),
        ("prompt", [1.5]),
        ("prompt", [True]),
        ("prompt", {"a": 1}),
        ("prompt", [["a"]]),
        ("what_is_this", 1),
        ("model", 3),
    ],
)
def test_bad_values_are_named(field, value):
    error = error_of({"prompt": "a", field: value})
    assert re.fullmatch(rf"{field}(\[\d\])*(\.(include_usage|what))?", error["param"])
    assert field in error["message"]
    assert error["type"] == "invalid_request_error"


def test_a_missing_prompt_is_named():
    assert error_of({})["param"] == "prompt"


def test_several_faults_are_told_at_once():
    message = error_of({"prompt": "a", "n": 0, "top_p": 3, "wrong": 1})["message"]
    assert all(name in message for name in ("n:", "top_p:", "wrong:"))


def test_ids_outside_the_vocabulary_are_refused_by_the_real_engine_only_but_numbers_are_checked_here():
    response, _ = post(
        {"prompt": [99]}, Answer(refuse=("RequestError", "prompt_token_ids[0] is 99, outside the vocabulary"))
    )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize(
    ("body", "part"),
    [
        (b"{", "not valid JSON"),
        (b"[]", "the body"),
        (b"null", "the body"),
        (b"", "empty"),
        (b'{"prompt": "\xff\xfe"}', "not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"prompt": "a", "n": 1' + b"0" * 5000 + b"}", "a number of more than 4300 digits"),
        (b'{"prompt": "a", "temperature": NaN}', "temperature"),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature"),
        (b'{"prompt": "\\ud800"}', "not valid Unicode"),
        (b'{"prompt": "a", "\\ud800": 1}', "\\ud800: this field is not known"),
        (b'{"prompt": "a", "Odd-Name[]": 1}', "Odd-Name[]: this field is not known"),
        (b'{"prompt": "a", "model": "\\ud800"}', "model"),
    ],
)
def test_bodies_that_are_no_good_json(body, part):
    assert part in error_of(body, status=400 if b"model" not in body else error_status(body))["message"]


def error_status(body):
    response, _ = post(body)
    assert response.status_code in (400, 404)
    return response.status_code


def test_a_body_of_another_type_is_told_what_to_send():
    async def test():
        async with scripted_client(ANSWER) as (client, _):
            # Any page can have a browser send these two anywhere without asking first.
            for headers in ({}, {"content-type": "text/plain"}):
                response = await client.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers)
                assert response.status_code == 400
                assert "application/json" in response.json()["error"]["message"]

    run(test())


def test_another_model_is_not_found_and_no_path_is_looked_at(tmp_path):
    for name in ("other", str(tmp_path), "../scripted", "scripted "):
        error = error_of({"prompt": "a", "model": name}, status=404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")


def test_names_that_are_served():
    settings = ServeSettings(served_model_names=("mine", "alias"))
    for name in ("mine", "alias"):
        response, _ = post({"prompt": "a", "model": name}, settings=settings)
        assert response.json()["model"] == name
    response, _ = post({"prompt": "a"}, settings=settings)
    assert response.json()["model"] == "mine"
    response, _ = post({"prompt": "a", "model": "scripted"}, settings=settings)
    assert response.status_code == 404


def test_echo_with_logprobs_cannot_be_streamed():
    assert error_of({"prompt": "a", "echo": True, "logprobs": 1, "stream": True})["param"] == "echo"


def test_more_prompts_than_the_queue_could_ever_hold():
    settings = ServeSettings(max_waiting_requests=3)
    most = CARD.max_num_seqs + 3
    response, link = post({"prompt": ["a"] * most, "max_tokens": 1}, settings=settings)
    assert (response.status_code, len(link.submitted)) == (200, most)
    response, link = post({"prompt": ["a"] * (most + 1)}, settings=settings)
    assert response.status_code == 400
    assert f"takes at most {most} at once" in response.json()["error"]["message"]
    assert link.submitted == []


# Ends


def test_a_full_queue_is_429_with_retry_after_and_leaves_nothing_behind():
    async def test():
        gate = asyncio.Event()
        settings = ServeSettings(max_waiting_requests=2)
        held = Answer(["a"], gate=gate)
        async with scripted_client(held, settings, card=replace(CARD, max_num_seqs=1)) as (client, link):
            first = asyncio.create_task(client.post("/v1/completions", json={"prompt": ["a", "b"]}))
            await eventually(lambda: len(link.submitted) == 2)
            response = await client.post("/v1/completions", json={"prompt": ["c", "d"]})
            assert response.status_code == 429
            assert int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["code"] == "rate_limit_exceeded"
            assert (len(link.submitted), link.aborted) == (2, []), "nothing of the batch was taken"
            gate.set()
            assert (await first).status_code == 200

    run(test())


def test_a_timeout_is_408_and_is_not_to_be_tried_again():
    response, link = post(
        {"prompt": "a"}, Answer(["a"], gate=asyncio.Event()), ServeSettings(request_timeout_s=0.05)
    )
    assert response.status_code == 408
    assert response.headers["x-should-retry"] == "false"
    assert len(link.aborted) == 1


def test_a_failed_step_is_500_and_in_a_stream_an_event():
    failed = Answer(["a", "b"], error="the step failed: ZeroDivisionError: boom", finish_reason="error")
    response, _ = post({"prompt": "a"}, failed)
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "the step failed: ZeroDivisionError: boom"
    assert "Traceback" not in response.text
    events = streamed({"prompt": "a"}, failed)
    assert events[0]["choices"][0]["text"] == "a"
    assert events[-1]["error"]["message"] == "the step failed: ZeroDivisionError: boom"


def test_an_engine_that_dies_in_a_stream_ends_it_with_an_event_and_later_requests_with_503():
    async def test():
        gate = asyncio.Event()
        async with scripted_client(Answer(["a", "b"], gate=gate, gate_from=1)) as (client, link):
            body = {"prompt": "a", "stream": True}
            streaming = asyncio.create_task(client.post("/v1/completions", json=body))
            await eventually(lambda: link.submitted)
            for _ in range(20):
                await asyncio.sleep(0)
            link.engine.lost("the engine process ended (killed by SIGKILL)")
            response = await streaming
            *events, done = events_of(response.text)
            assert done == "[DONE]"
            assert json.loads(events[0])["choices"][0]["text"] == "a"
            assert json.loads(events[-1])["error"]["code"] == "service_unavailable"
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == 503
            assert response.json()["error"]["type"] == "service_unavailable_error"
            health = await client.get("/health")
            assert health.status_code == 503
            assert "SIGKILL" in health.json()["reason"]

    run(test())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("answer", ["held", "unaccepted", "in pieces"])
def test_a_client_that_goes_away_aborts_what_it_asked_for_once(stream, answer):
    async def test():
        gate = asyncio.Event()
        script = Answer(["a", "b"], gate=gate, gate_from=1 if answer == "in pieces" else 0)
        metrics = Metrics()
        engine, link = await scripted_engine(script, listener=metrics)
        app = create_app(engine, ServeSettings(), metrics)
        receive, gone = leaving_client(json.dumps({"prompt": ["a", "b"], "stream": stream}).encode())
        sent = []

        async def send(message):
            sent.append(message)

        heard = []
        if answer == "unaccepted":
            link.send = heard.append
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
            "scheme": "http",
        }
        serving = asyncio.create_task(app(scope, receive, send))
        await eventually(lambda: engine.num_active == 2)
        for _ in range(30):
            await asyncio.sleep(0)
        gone.set()
        await serving
        assert engine.num_active == 0
        aborted = link.aborted + [one.request_id for one in heard if isinstance(one, Abort)]
        assert len(aborted) == len(set(aborted)) == 2
        await engine.close()

    run(test())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [99]}, "prompt"),
        ({"prompt": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"prompt": "a", "structured_outputs": {"regex": "("}}, "structured_outputs"),
    ],
)
def test_what_the_engine_refuses_is_told_by_the_clients_own_field(fields, param):
    name = "prompt_token_ids[0]" if param == "prompt" else "structured_output"

    async def test():
        async with scripted_client(Answer(refuse=("RequestError", f"{name}: no good"))) as (client, _):
            return await client.post("/v1/completions", json=fields)

    response = run(test())
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_a_batch_that_never_fits_is_400_and_one_that_does_not_fit_now_is_429_and_submits_nothing():
    async def test():
        gate = asyncio.Event()
        settings = ServeSettings(max_waiting_tokens=10, max_waiting_requests=2)
        card = replace(CARD, max_num_seqs=1)
        async with scripted_client(Answer(["a"], gate=gate), settings, card=card) as (client, link):
            link.tell = lambda *told: None  # so that what was submitted goes on waiting
            never = await client.post("/v1/completions", json={"prompt": [[1] * 6, [2] * 6]})
            first = asyncio.create_task(client.post("/v1/completions", json={"prompt": [[1]]}))
            await eventually(lambda: len(link.submitted) == 1)
            by_tokens = await client.post("/v1/completions", json={"prompt": [[1] * 5, [2] * 5]})
            by_number = await client.post("/v1/completions", json={"prompt": [[1]] * 3})
            num_submitted = len(link.submitted)
            first.cancel()
            return never, by_tokens, by_number, num_submitted

    never, by_tokens, by_number, num_submitted = run(test())
    assert (never.status_code, never.json()["error"]["param"]) == (400, "prompt")
    assert "12 tokens in 2 prompts; this server takes at most 10" in never.json()["error"]["message"]
    assert (by_tokens.status_code, by_number.status_code, num_submitted) == (429, 429, 1)


@pytest.mark.parametrize("prompt", [[1] * 200, [[1] * 200, [1]], "a" * 5000, ["a" * 5000]])
def test_a_prompt_that_never_fits_is_400_while_others_wait_too(prompt):
    async def test():
        settings = ServeSettings(max_waiting_tokens=1000)
        async with scripted_client(Answer(["a"], gate=asyncio.Event()), settings) as (client, link):
            link.tell = lambda *told: None
            first = asyncio.create_task(client.post("/v1/completions", json={"prompt": [1] * 150}))
            await eventually(lambda: len(link.submitted) == 1)
            answer = await client.post("/v1/completions", json={"prompt": prompt})
            first.cancel()
            return answer

    answer = run(test())
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_while_a_long_prompt_is_turned_into_tokens_others_are_answered(monkeypatch):
    begun, may_end = threading.Event(), threading.Event()
    encode = Tokenizer.encode

    def held(self, text, **options):
        if len(text) > 2000:
            begun.set()
            assert may_end.wait(30)  # on the event loop it would wait in vain
        return encode(self, text, **options)

    async def test():
        async with scripted_client(Answer(["a"])) as (client, _):
            monkeypatch.setattr(Tokenizer, "encode", held)
            text = "a" * 100 + "é" * 5000  # of which this tokenizer knows the letters
            long = asyncio.create_task(client.post("/v1/completions", json={"prompt": text}))
            await eventually(begun.is_set)
            short = await client.post("/v1/completions", json={"prompt": "a"})
            assert (short.status_code, long.done()) == (200, False)
            may_end.set()
            assert (await long).json()["usage"]["prompt_tokens"] == 100

    run(test())


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": "a" * 5000}, "prompt"),
        ("/v1/completions", {"prompt": ["b", "a" * 5000]}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 5000}]}, "messages"),
        ("/v1/responses", {"input": "a" * 5000}, "input"),
    ],
)
def test_a_text_that_is_surely_too_long_is_not_tokenised(path, body, field, monkeypatch):
    encode = Tokenizer.encode

    def short(self, text, **options):
        assert len(text) < 200
        return encode(self, text, **options)

    async def test():
        chats = tokenizer_with(default="{{ messages[0].content }}")
        async with scripted_client(Answer(["a"]), tokenizer=chats) as (client, link):
            monkeypatch.setattr(Tokenizer, "encode", short)
            answer = await client.post(path, json=body)
            fits = await client.post("/v1/completions", json={"prompt": "a" * 199, "max_tokens": 1})
            metrics = await client.get("/metrics")
            return answer, fits, metrics.text, len(link.submitted)

    answer, fits, metrics, num_submitted = run(test())
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", field)
    assert error["message"].startswith(
        "prompt has at least 5000 tokens; max_model_len=200 leaves room for at most 199"
    )
    assert (fits.status_code, num_submitted) == (200, 1)
    assert 'octavo_requests_refused_total{reason="invalid"} 1.0' in metrics


@pytest.mark.parametrize(
    ("num_prompts", "n", "status", "problem"),
    [
        (6, 1, 200, ""),
        (4, 3, 400, "prompt holds 4 prompts with n=3 each; this server takes at most 3 at once"),
        (3, 3, 200, ""),
        (4, 5, 400, "prompt holds 4 prompts with n=5 each; this server takes at most 3 at once"),
        (3, 5, 200, ""),  # the engine has a word to say to that n
    ],
)
def test_prompts_with_several_continuations_are_taken_if_they_ever_find_rows(num_prompts, n, status, problem):
    async def test():
        settings, card = ServeSettings(max_waiting_requests=2), replace(CARD, max_num_seqs=4)
        async with scripted_client(Answer(["a"] * n), settings, card=card) as (client, link):
            body = {"prompt": [[1]] * num_prompts, "n": n, "temperature": 1.0}
            return await client.post("/v1/completions", json=body), len(link.submitted)

    answer, submitted = run(test())
    assert (answer.status_code, submitted) == (status, num_prompts if status == 200 else 0), answer.text
    assert problem in answer.text


def test_of_prompts_that_find_no_rows_now_none_is_taken():
    async def test():
        settings, card = ServeSettings(max_waiting_requests=2), replace(CARD, max_num_seqs=4)
        engine, link = await scripted_engine(Answer(gate=asyncio.Event()), settings, card=card)
        runs = engine.submit([1], SamplingParams(n=2, temperature=1.0), request_id="runs")
        engine.receive(News([], STATS, 0.001, 1, ("runs",)))
        with pytest.raises(OverloadedError, match="0 requests are waiting, of at most 2"):
            await _encode(CompletionRequest(prompt=[[1]] * 3, n=3), engine, settings)
        assert len(await _encode(CompletionRequest(prompt=[[1]] * 2, n=3), engine, settings)) == 2
        assert len(await _encode(CompletionRequest(prompt=[[1]] * 3, n=2), engine, settings)) == 3
        assert len(link.submitted) == 1
        runs.abort()
        await engine.close()

    run(test())


@pytest.mark.parametrize("times", [1, 400, 3000])
@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", '{"prompt": "%s"}', "prompt"),
        ("/v1/completions", '{"prompt": ["b", "%s"]}', "prompt"),
        (
            "/v1/chat/completions",
            '{"messages": [{"role": "user", "content": "%s"}]}',
            "messages[0].content",
        ),
        ("/v1/responses", '{"input": "%s"}', "input"),
        ("/tokenize", '{"prompt": "%s"}', "prompt"),
    ],
)
def test_lone_surrogates_are_told_so_in_a_text_of_any_length(path, body, field, times):
    """And with NFC, which no such text has."""

    async def test():
        backend = byte_level({})
        backend.normalizer = normalizers.NFC()
        templates = {"default": "{{ messages[0].content }}"}
        chats = Tokenizer(TokenizerRecipe(backend, "the model", special_tokens={}, chat_templates=templates))
        async with scripted_client(Answer(["a"]), tokenizer=chats) as (client, _):
            text = body % ("\\u00e9" + "\\ud800" * times)
            return await client.post(path, content=text, headers={"content-type": "application/json"})

    answer = run(test())
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, field, None)
    assert error["message"] == f"{field}: not valid Unicode: it holds lone surrogates; remove them"


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_a_balancer_may_ask_for_the_head_alone(path):
    async def test():
        async with scripted_client(Answer()) as (client, _):
            return await client.head(path)

    assert run(test()).status_code == 200


@pytest.mark.parametrize(("kind", "told"), [(None, "none"), ("text/plain", "'text/plain'")])
def test_a_content_type_that_is_not_json_is_told_as_it_came(kind, told):
    async def test():
        async with scripted_client(Answer(["a"])) as (client, _):
            headers = {} if kind is None else {"Content-Type": kind}
            return await client.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers)

    answer = run(test())
    assert answer.status_code == 400
    message = f"the Content-Type of the body must be application/json, got {told}"
    assert answer.json()["error"]["message"] == message


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            b'{"prompt": "a",\n "n": 1,}',
            "Expecting property name enclosed in double quotes at line 2, column 9",
        ),
        (b'{"prompt": "a" "b"}', "Expecting ',' delimiter at line 1, column 16"),
        (b'{"prompt": "a', "Unterminated string starting at line 1, column 12"),
        ('{"prompt": "é" 1}'.encode(), "Expecting ',' delimiter at line 1, column 16"),
    ],
)
def test_the_place_where_a_body_is_no_json_is_told(body, message):
    response, _ = post(body)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "invalid_json")
    assert error["message"].startswith(f"the body is not valid JSON: {message}")


TOO_LONG = "has 140,000 characters; the limit is 131,072; shorten it"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 10**30}, f"max_tokens: expected a 64-bit integer, got {10**30}"),
        ({"seed": -(10**30)}, f"seed: expected a 64-bit integer, got {-(10**30)}"),
        ({"n": -(10**30)}, f"n: expected at least 1, got {-(10**30)}"),
        ({"prompt": [1, -5]}, "prompt[1] is -5, outside the vocabulary (0 to 51)"),
        ({"prompt": [1, 51, 52]}, "prompt[2] is 52, outside the vocabulary (0 to 51)"),
        ({"prompt": [[1, 2], [3, 10**30]]}, f"prompt[1][1] is {10**30}, outside the vocabulary (0 to 51)"),
        ({"prompt": [[1, -1]]}, "prompt[0][1] is -1, outside the vocabulary (0 to 51)"),
        ({"structured_outputs": {"grammar": "x" * 140_000}}, f"structured_outputs.grammar {TOO_LONG}"),
        ({"structured_outputs": {"choice": ["x" * 140_000]}}, f"structured_outputs.choice {TOO_LONG}"),
        ({"structured_outputs": {"regex": "x" * 140_000}}, f"structured_outputs.regex {TOO_LONG}"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json is not JSON: Expecting"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"x-guidance": 1}}}},
            "response_format.json_schema.schema holds 'x-guidance'",
        ),
    ],
)
def test_what_is_wrong_is_told_in_the_words_of_the_request(fields, message):
    response, link = post({"prompt": "a", **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"], link.submitted) == (400, next(iter(fields)), [])
    assert error["message"].startswith(message)


@pytest.mark.parametrize(
    ("fields", "refusal", "message"),
    [
        ({"structured_outputs": {"grammar": "x"}}, "lark cannot", "structured_outputs.grammar cannot"),
        ({"structured_outputs": {"choice": ["x"]}}, "regex cannot", "structured_outputs.choice cannot"),
        ({"structured_outputs": {"json": {}}}, "json_schema cannot", "structured_outputs.json cannot"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "json_schema cannot",
            "response_format.json_schema.schema cannot",
        ),
        ({"structured_outputs": {"regex": "x"}}, "the tokenizer", "structured_outputs: the tokenizer"),
    ],
)
def test_a_grammar_that_the_engine_refuses_is_called_what_the_client_calls_it(fields, refusal, message):
    answer = Answer(refuse=("RequestError", f"structured_output: {refusal} be used: why"))
    response, _ = post({"prompt": "a", **fields}, answer)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, next(iter(fields)))
    assert error["message"] == f"{message} be used: why"
