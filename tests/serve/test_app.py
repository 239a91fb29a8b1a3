"""The application as a whole: routing, errors, time, what every answer has."""

import asyncio

import pytest
from helpers.serve import Answer, run, run_timeless, scripted_client

from octavo.errors import (
    CapacityError,
    EngineDeadError,
    EngineError,
    ModelError,
    OverloadedError,
    RequestError,
    RequestTimeoutError,
)
from octavo.serve import guard
from octavo.serve.api_errors import ApiError, as_api_error
from octavo.serve.settings import ServeSettings


def ask(method, path, answer=None, settings=None, **options):
    async def test():
        async with scripted_client(answer or Answer(["a"]), settings) as (client, _):
            return await client.request(method, path, **options)

    return run(test())


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/models/other", 404),
        ("GET", "/v1/models/../../etc/passwd", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
    ],
)
def test_routing_errors_are_error_objects(method, path, status):
    response = ask(method, path)
    assert response.status_code == status
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"]


def test_models():
    settings = ServeSettings(served_model_names=("org/mine", "alias"))
    listed = ask("GET", "/v1/models", settings=settings).json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["org/mine", "alias"]
    one = ask("GET", "/v1/models/org/mine", settings=settings).json()
    assert one == listed["data"][0]
    assert (one["object"], one["max_model_len"]) == ("model", 200)


def test_health_and_ping_say_ready():
    for path in ("/health", "/ping"):
        response = ask("GET", path)
        assert (response.status_code, response.json()) == (200, {"status": "ready"})


def test_tokenize_and_back():
    response = ask("POST", "/tokenize", json={"prompt": "abc", "return_token_strs": True})
    assert response.json() == {
        "tokens": [0, 1, 2],
        "count": 3,
        "max_model_len": 200,
        "token_strs": ["a", "b", "c"],
    }
    assert ask("POST", "/detokenize", json={"tokens": [0, 1, 2]}).json() == {"prompt": "abc"}


def test_tools_that_chat_refuses_are_not_tokenised():
    tool = {"type": "function", "function": {"name": "f"}}
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [tool]}
    for path in ("/tokenize", "/v1/chat/completions"):
        response = ask("POST", path, settings=ServeSettings(tool_parser="none"), json=body)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["message"].startswith("tools: this server was started with")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": []}, "tools"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": "a"}, "messages"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"prompt": "a", "x": 1}, "x"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [52]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1.5]}, "tokens[0]"),
    ],
)
def test_bad_bodies_name_the_field(path, body, param):
    response = ask("POST", path, json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("name", ["tools", "chat_template", "add_generation_prompt", "messages"])
def test_template_variables_cannot_take_the_place_of_fields(name):
    body = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {name: "x"}}
    response = ask("POST", "/tokenize", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "chat_template_kwargs"


def test_an_answer_may_take_longer_than_its_body_may(monkeypatch):
    monkeypatch.setattr(guard, "BODY_TIMEOUT_S", 0.05)

    async def test():
        gate = asyncio.Event()
        async with scripted_client(Answer(["a"], gate=gate)) as (client, _):
            asking = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a"}))
            await asyncio.sleep(0.2)
            gate.set()
            response = await asking
            assert response.status_code == 200
            assert response.json()["choices"][0]["text"] == "a"

    run_timeless(test())


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RequestError("temperature must be at least 0, got -1"), 400, None),
        (CapacityError("prompt has 9 tokens; the KV cache holds 4"), 400, "context_length_exceeded"),
        (OverloadedError("full", 2.2), 429, "rate_limit_exceeded"),
        (RequestTimeoutError("long"), 408, "request_timeout"),
        (EngineError("dead"), 503, "service_unavailable"),
        (ApiError(404, "no"), 404, "not_found"),
        (ZeroDivisionError("secret"), 500, "internal_error"),
    ],
)
def test_each_error_has_its_status(error, status, code):
    told = as_api_error(error)
    assert (told.status, told.code) == (status, code)
    assert "secret" not in told.message
    assert told.response().status_code == status


def test_details_of_errors():
    assert as_api_error(RequestError("temperature must be at least 0")).param == "temperature"
    assert as_api_error(RequestError("each key of logit_bias must be an integer")).param == "logit_bias"
    assert as_api_error(RequestError("the step failed")).param is None
    assert as_api_error(OverloadedError("full", 2.2)).headers == {"Retry-After": "3"}
    assert as_api_error(EngineError("loading")).headers == {"Retry-After": "5"}
    # Neither gets better by asking again.
    for error, status in ((EngineDeadError("gone"), 503), (ModelError("no tokenizer"), 400)):
        told = as_api_error(error)
        assert (told.status, told.headers) == (status, {})
    assert ApiError(400, "odd \ud800").body()["error"]["message"] == "odd \\ud800"


def test_every_route_of_the_api_is_described():
    paths = ask("GET", "/openapi.json").json()["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/health"} <= paths.keys()
    assert paths["/v1/completions"]["post"]["responses"].keys() >= {"200", "400", "429", "503"}
    assert not any("422" in method["responses"] for path in paths.values() for method in path.values())
