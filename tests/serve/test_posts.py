"""Bodies are read past FastAPI: what its users know of it holds all the same."""

import asyncio
import json

import httpx
import pytest
from fastapi import APIRouter, Depends, Request
from helpers.chat import CHATML, tokenizer_with
from helpers.live import BIG_CARD
from helpers.serve import Answer, eventually, leaving_client, run, scripted_client
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.routing import Mount

from octavo.errors import EngineError, shown
from octavo.serve.api_errors import ApiError
from octavo.serve.app import create_app
from octavo.serve.models import DetokenizeRequest
from octavo.serve.posts import Posts, read_body
from octavo.serve.protocol import CompletionRequest
from octavo.serve.settings import ServeSettings

BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "abc"}]},
    "/v1/completions": {"prompt": "abc"},
    "/v1/responses": {"input": "abc"},
    "/tokenize": {"prompt": "abc"},
    "/detokenize": {"tokens": [0, 1]},
}


def asked(method, path, content=b"", kind="application/json"):
    """The one answer to a request, to an engine that says "a"."""

    async def test():
        text = tokenizer_with(default=CHATML)
        async with scripted_client(Answer(["a"]), tokenizer=text, card=BIG_CARD) as (client, _):
            headers = {} if kind is None else {"content-type": kind}
            return await client.request(method, path, content=content, headers=headers)

    return run(test())


def read(content, kind="application/json"):
    headers = Headers({} if kind is None else {"content-type": kind})
    return read_body(content, headers, CompletionRequest)


def problem(content, kind="application/json"):
    """The message and code of the error that such a body is."""
    with pytest.raises(ApiError) as caught:
        read(content, kind)
    assert caught.value.status == 400
    return caught.value.message, caught.value.code


@pytest.mark.parametrize("path", BODIES)
def test_every_route_with_a_body_answers_and_says_what_it_does_not_take(path):
    content = json.dumps(BODIES[path]).encode()
    answer = asked("POST", path, content)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json"), answer.text

    answer = asked("POST", path, json.dumps({**BODIES[path], "nonsense": 1}).encode())
    assert answer.status_code == 400
    assert answer.json() == {
        "error": {
            "message": "nonsense: this field is not known",
            "type": "invalid_request_error",
            "param": "nonsense",
            "code": None,
        }
    }
    for method in ("GET", "PUT", "DELETE"):
        answer = asked(method, path)
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    answer = asked("POST", path + "/", content)
    assert (answer.status_code, answer.headers["location"]) == (307, "http://octavo" + path)


def test_the_description_has_every_such_route_with_its_body():
    described = asked("GET", "/openapi.json").json()["paths"]
    models = {
        path: about["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"].split("/")[-1]
        for path, about in described.items()
        if "post" in about
    }
    assert models == {
        "/v1/chat/completions": "ChatRequest",
        "/v1/completions": "CompletionRequest",
        "/v1/responses": "ResponsesRequest",
        "/tokenize": "TokenizeRequest",
        "/detokenize": "DetokenizeRequest",
    }
    answers = described["/v1/completions"]["post"]["responses"]
    assert answers.keys() == {"200", "400", "401", "404", "408", "413", "429", "500", "503"}
    assert answers["200"]["content"].keys() == {"application/json", "text/event-stream"}
    answers = described["/detokenize"]["post"]["responses"]
    assert answers["200"]["content"]["application/json"]["schema"]["type"] == "object"


@pytest.mark.parametrize(
    "kind",
    ["application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json", " application/json "],
)
def test_what_means_json_is_json(kind):
    assert read(b'{"prompt": "a"}', kind).prompt == "a"


@pytest.mark.parametrize(
    "kind", ["text/json", "application/x-www-form-urlencoded", "json", "application/json/x", "", None]
)
def test_what_means_something_else_is_refused(kind):
    told = "none" if kind is None else shown(kind)
    message = f"the Content-Type of the body must be application/json, got {told}"
    assert problem(b'{"prompt": "a"}', kind) == (message, None)


# The quick reader of JSON takes none of these, and what it does not take must not be an error.
@pytest.mark.parametrize(
    ("content", "prompt"),
    [
        (b'{"prompt": "\\ud800"}', "\ud800"),
        ('{"prompt": "é"}'.encode("utf-16"), "é"),
        (b'{"prompt": "a", "store": ' + b"[" * 300 + b"]" * 300 + b"}", "a"),
    ],
)
def test_odd_json_is_json(content, prompt):
    assert read(content).prompt == prompt


def test_of_a_field_that_comes_twice_the_last_counts():
    assert read(b'{"prompt": "a", "prompt": [1, 2]}').prompt == [1, 2]


@pytest.mark.parametrize(
    ("content", "message", "code"),
    [
        (b"", "the body is empty; expected a JSON object", None),
        (b"null", "the body: expected an object, got null", None),
        (b"[]", "the body: expected an object, got []", None),
        (
            b'{"prompt":\n  a}',
            "the body is not valid JSON: Expecting value at line 2, column 3",
            "invalid_json",
        ),
        (b'{"prompt": "\xff"}', "the body is not UTF-8: invalid start byte", None),
        (b"[" * 100_000, "the body is nested too deeply", None),
        (
            b'{"n": ' + b"1" * 5000 + b"}",
            "the body holds a number of more than 4300 digits; send fewer",
            None,
        ),
        (
            b'{"temperature": NaN}',
            "temperature: expected a finite number, got nan; prompt: this field is missing",
            None,
        ),
    ],
)
def test_a_body_that_cannot_be_read_says_why(content, message, code):
    assert problem(content) == (message, code)


def test_what_a_route_raises_is_its_answer_and_no_failure_of_the_server():
    router = APIRouter()

    @router.post("/x")
    async def refuse(request: Request, body: DetokenizeRequest) -> Response:
        raise {1: ApiError(404, "no"), 2: EngineError("dead"), 3: ZeroDivisionError()}[body.tokens[0]]

    async def test(token_id):
        sent = []
        messages = [{"type": "http.request", "body": b'{"tokens": [%d]}' % token_id}]

        async def receive():
            return messages.pop() if messages else await asyncio.Event().wait()

        async def send(message):
            sent.append(message)

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/x", "headers": headers}
        await Posts(None, [router])(scope, receive, send)
        return sent[0]["status"]

    assert run(test(1)) == 404
    assert run(test(2)) == 503
    with pytest.raises(ZeroDivisionError):
        run(test(3))


@pytest.mark.parametrize(
    ("path", "options"), [("/x/{y}", {}), ("/x", {"dependencies": [Depends(lambda: None)]})]
)
def test_a_route_that_needs_more_of_fastapi_is_not_taken(path, options):
    router = APIRouter()

    @router.post(path, **options)
    async def answer(request: Request, body: DetokenizeRequest) -> Response:
        return Response()

    with pytest.raises(AssertionError):
        Posts(None, [router])


def test_below_the_prefix_of_another_application_bodies_are_read_likewise():
    async def test():
        async with scripted_client(Answer(["a"])) as (_, link):
            app = create_app(link.engine, ServeSettings(), link.engine._listener)
            outer = httpx.ASGITransport(Starlette(routes=[Mount("/under", app)]))
            async with httpx.AsyncClient(transport=outer, base_url="http://octavo") as client:
                return [
                    await client.post("/under/v1/completions", json=body)
                    for body in ({"prompt": "abc"}, {"prompt": "abc", "nonsense": 1})
                ]

    answer, refused = run(test())
    assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, "a")
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["message"] == "nonsense: this field is not known"


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_client_that_leaves_before_its_answer_has_none_and_its_work_is_cancelled(path, monkeypatch):
    async def test():
        async with scripted_client(Answer(["a"], gate=asyncio.Event())) as (_, link):
            engine = link.engine
            is_waiting = asyncio.Event()

            async def never(size, work, **options):
                is_waiting.set()
                await asyncio.Event().wait()

            monkeypatch.setattr(engine, "off_loop", never)
            receive, gone = leaving_client(json.dumps(BODIES[path]).encode())
            sent = []

            async def send(message):
                sent.append(message)

            app = create_app(engine, ServeSettings(), engine._listener)
            headers = [(b"content-type", b"application/json")]
            scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
            serving = asyncio.create_task(app(scope, receive, send))
            await is_waiting.wait()
            gone.set()
            await serving
            assert [message.get("status") for message in sent] == [499, None]
            assert link.submitted == []
            await eventually(lambda: engine.num_active == 0)

    run(test())
