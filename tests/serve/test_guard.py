"""Keys, CORS, the body limit, request ids, the request log and traces, around the whole application."""

import asyncio
import contextlib
import hmac
import json
import logging
import sys
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import uvicorn
from helpers.serve import PATIENCE_S, Answer, eventually, run, run_timeless, scripted_client, scripted_engine
from starlette.responses import Response

from octavo.errors import ConfigError
from octavo.outputs import CompletionOutput, RequestMetrics, RequestOutput
from octavo.serve import access_log, guard
from octavo.serve.access_log import JsonLines, TextLines
from octavo.serve.app import create_app
from octavo.serve.guard import API_KEY_ENV, read_api_keys
from octavo.serve.metrics import Metrics
from octavo.serve.settings import ServeSettings

BODY = {"model": "scripted", "prompt": "ab"}
KEYS = ServeSettings(api_keys=("first-key", "second-key"))


def asked(settings, *requests, script=None):
    """The answers to (method, path, options), one after the other."""

    async def test():
        async with scripted_client(script or Answer(["a", "b"]), settings) as (client, _):
            return [await client.request(method, path, **options) for method, path, options in requests]

    return run(test())


def complete(**options):
    return ("POST", "/v1/completions", {"json": BODY, **options})


def with_header(*values):
    return complete(headers=[("Authorization", value) for value in values])


# Keys


def test_any_of_the_keys_lets_in_and_nothing_else_does():
    answers = asked(
        KEYS,
        with_header("Bearer first-key"),
        with_header("bearer  second-key "),
        with_header(),
        with_header("Bearer third-key"),
        with_header("Bearer first-ke"),
        with_header("Bearer first-keyy"),
        with_header("Bearer "),
        with_header("Basic first-key"),
        with_header("first-key"),
        with_header("Bearer first-key", "Bearer wrong"),
        with_header("Bearer first-key second-key"),
        with_header(b"Bearer \xff\xfe"),
    )
    assert [answer.status_code for answer in answers] == [200, 200] + [401] * 10
    for answer in answers[2:]:
        error = answer.json()["error"]
        assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")
        assert answer.headers["www-authenticate"] == "Bearer"
        assert "key" not in answer.text.replace("API key", "").replace("invalid_api_key", "").replace(
            "KEY", ""
        )


@pytest.mark.parametrize(
    ("values", "end"),
    [
        (["Bearer wrong"], "this API key is not known here; check the one your client sends"),
        ([], "'Authorization: Bearer KEY'"),
        (["first-key"], "'Authorization: Bearer KEY'; the one that came has another form"),
        (["Basic first-key"], "'Authorization: Bearer KEY'; the one that came has another form"),
        (["Bearer"], "'Authorization: Bearer KEY'; the one that came has another form"),
        (["Bearer first-key"] * 2, "'Authorization: Bearer KEY', once"),
    ],
)
def test_who_is_not_let_in_is_told_what_to_send(values, end):
    (answer,) = asked(KEYS, with_header(*values))
    assert answer.status_code == 401
    assert answer.json()["error"]["message"].endswith(end)


def test_everything_needs_a_key_but_the_page_and_whether_the_server_lives():
    def status(path):
        (answer,) = asked(KEYS, ("GET", path, {}))
        return answer.status_code

    for path in ("/metrics", "/v1/models", "/v1/engine/state", "/docs", "/openapi.json", "/nowhere", "/page"):
        assert status(path) == 401, path
    for path in ("/health", "/ping", "/", "/page/style.css"):
        assert status(path) == 200, path
    assert status("/page/../v1/models") in (401, 404)


def test_without_keys_everybody_may_ask():
    (answer,) = asked(ServeSettings(), with_header("Bearer anything"))
    assert answer.status_code == 200


def test_every_key_is_compared_in_full_whichever_matches(monkeypatch):
    compared = []
    compare = hmac.compare_digest
    monkeypatch.setattr(
        guard.hmac,
        "compare_digest",
        lambda one, other: compared.append((len(one), len(other))) or compare(one, other),
    )
    for key in ("first-key", "second-key", "x"):
        asked(KEYS, with_header(f"Bearer {key}"))
    assert compared == [(32, 32)] * 6


def test_keys_come_from_options_environment_and_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# for the team\n\nfile-one\n  file-two  \nopt\n")
    keys = read_api_keys(["opt"], file, {API_KEY_ENV: "env-one, env-two,"})
    assert keys == ("opt", "env-one", "env-two", "file-one", "file-two")
    assert read_api_keys(environ={}) == ()


@pytest.mark.parametrize(
    ("options", "content", "what"),
    [
        ((["two words"],), None, "api_keys: a key is empty, or has a space"),
        ((["clé-geheim"],), None, "api_keys"),
        (([""],), None, "api_keys"),
        ((), "geheim one\n", "api_key_file .*: a key is empty, or has a space"),
        ((), "# nothing\n\n", "holds no key"),
        ((), b"\xff\xfe", "cannot be read: it is not UTF-8"),
        ((), None, "cannot be read: No such file"),
    ],
)
def test_a_key_that_cannot_be_one_is_refused_without_showing_it(tmp_path, options, content, what):
    file = tmp_path / "keys" if not options else None
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=what) as refused:
        read_api_keys(*(options or ((),)), file, {})
    assert "geheim" not in str(refused.value)
    assert "two words" not in str(refused.value)


def test_a_file_that_never_ends_is_no_key_file():
    with pytest.raises(ConfigError, match="api_key_file: '/dev/zero' has more than 1,048,576 characters"):
        read_api_keys(file=Path("/dev/zero"), environ={})


@pytest.mark.parametrize("value", ["", " ", ",", " , "])
def test_a_variable_that_is_set_and_holds_no_key_does_not_leave_the_server_open(value):
    with pytest.raises(ConfigError, match="OCTAVO_API_KEY is set and holds no key; put one in, or unset it"):
        read_api_keys(environ={API_KEY_ENV: value})


# CORS


def preflight(origin):
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    return (
        "OPTIONS",
        "/v1/completions",
        {"headers": {**headers, "Access-Control-Request-Headers": "authorization"}},
    )


def test_only_listed_origins_may_ask_from_a_browser():
    settings = replace(KEYS, cors_origins=("https://good.example",))
    good, bad, refused = asked(
        settings,
        preflight("https://good.example"),
        preflight("https://bad.example"),
        complete(headers={"Origin": "https://good.example"}),
    )
    assert (good.status_code, good.headers["access-control-allow-origin"]) == (200, "https://good.example")
    assert "authorization" in good.headers["access-control-allow-headers"]
    assert bad.status_code == 400
    assert "access-control-allow-origin" not in bad.headers
    # The page at the other origin can read why it was refused.
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (
        401,
        "https://good.example",
    )
    assert "x-request-id" in refused.headers["access-control-expose-headers"].lower()


def test_a_page_of_a_listed_origin_can_read_why_the_server_failed():
    def fails(submit):
        raise AssertionError("on purpose")

    async def test():
        settings = ServeSettings(cors_origins=("https://good.example",))
        async with scripted_client(Answer(["a"]), settings) as (client, link):
            link.send = fails
            return await client.post(
                "/v1/completions", json=BODY, headers={"Origin": "https://good.example", "X-Request-Id": "me"}
            )

    answer = run(test())
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert answer.headers["access-control-allow-origin"] == "https://good.example"
    assert answer.headers["x-request-id"] == "me"


def test_by_default_no_other_origin_may_ask():
    answers = asked(
        ServeSettings(), preflight("https://x.example"), complete(headers={"Origin": "https://x.example"})
    )
    for answer in answers:
        assert "access-control-allow-origin" not in answer.headers
    assert answers[0].status_code == 405


# Bodies


def sized(size):
    """A valid body of so many bytes."""
    empty = json.dumps({**BODY, "user": ""})
    return json.dumps({**BODY, "user": "x" * (size - len(empty))}).encode()


async def in_chunks(content, size=1000):
    for i in range(0, len(content), size):
        yield content[i : i + size]


JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize("is_chunked", [False, True], ids=["length", "chunks"])
def test_the_limit_on_bodies_is_exact(is_chunked):
    async def test():
        settings = ServeSettings(max_body_bytes=5000)
        async with scripted_client(Answer(["a"]), settings) as (client, link):
            answers = []
            for size in (5000, 5001, 50_000):
                content = in_chunks(sized(size)) if is_chunked else sized(size)
                answers.append(await client.post("/v1/completions", content=content, headers=JSON))
            return answers, len(link.submitted)

    (fits, over, far_over), num_submitted = run(test())
    assert (fits.status_code, num_submitted) == (200, 1)
    for answer in (over, far_over):
        assert answer.status_code == 413
        error = answer.json()["error"]
        assert (error["code"], error["type"]) == ("request_too_large", "invalid_request_error")
        assert "5,000 bytes" in error["message"]
        assert answer.headers["connection"] == "close"


@pytest.mark.parametrize("length", ["9" * 30, "9" * 5000])
def test_an_absurd_length_is_too_large(length):
    (answer,) = asked(ServeSettings(), complete(headers={"Content-Length": length}))
    assert answer.status_code == 413


@pytest.mark.parametrize("length", ["-1", "²".encode("latin-1"), "1e3", ""])
def test_a_length_that_is_none_is_left_to_the_body(length):
    (answer,) = asked(ServeSettings(), complete(headers={"Content-Length": length}))
    assert answer.status_code == 200


def test_of_an_endless_body_only_so_much_is_taken_in(monkeypatch):
    monkeypatch.setattr(guard, "MAX_DISCARDED_BYTES", 2000)
    num_taken, sent = 0, []

    async def receive():
        nonlocal num_taken
        await asyncio.sleep(0)
        num_taken += 100
        return {"type": "http.request", "body": b"x" * 100, "more_body": True}

    async def send(message):
        sent.append(message)

    async def test():
        async with asyncio.timeout(10):
            await guard.BodyLimit(None, max_bytes=1000, idle_s=30)(
                {"type": "http", "headers": []}, receive, send
            )

    run(test())
    assert sent[0]["status"] == 413
    assert num_taken <= 1100 + 2100


@contextlib.asynccontextmanager
async def over_sockets(script, settings):
    """The base URL of the application in a real HTTP server of this event loop."""
    metrics = Metrics()
    engine, link = await scripted_engine(script, settings, listener=metrics)
    config = uvicorn.Config(
        create_app(engine, settings, metrics), port=0, lifespan="off", log_config=None, access_log=False
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    await eventually(lambda: server.started)
    try:
        yield server.servers[0].sockets[0].getsockname()[1], link
    finally:
        server.should_exit = True
        await serving
        await engine.close()


@pytest.mark.parametrize("is_chunked", [False, True], ids=["length", "chunks"])
def test_a_client_that_sends_far_too_much_can_still_read_why(is_chunked):
    async def test():
        settings = ServeSettings(max_body_bytes=10_000)
        async with over_sockets(Answer(["a"]), settings) as (port, _), httpx.AsyncClient() as client:
            content = sized(20_000_000)
            if is_chunked:
                content = in_chunks(content, 100_000)
            url = f"http://127.0.0.1:{port}/v1/completions"
            return await client.post(url, content=content, headers=JSON, timeout=PATIENCE_S)

    assert run(test()).status_code == 413


def test_a_client_that_asks_before_it_sends_is_refused_at_once():
    async def test():
        async with over_sockets(Answer(["a"]), ServeSettings(max_body_bytes=100)) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 101\r\n"
                b"Expect: 100-continue\r\n\r\n"
            )
            answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
            writer.close()
            return answer

    assert run(test()).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    ("whole_s", "idle_s", "problem"),
    [
        (0.2, 30.0, b"the body did not arrive within 0.2 s"),
        (60.0, 0.2, b"the body stopped arriving for 0.2 s (--idle-connection)"),
    ],
)
def test_a_body_that_never_ends_is_given_up(monkeypatch, whole_s, idle_s, problem):
    monkeypatch.setattr(guard, "BODY_TIMEOUT_S", whole_s)

    async def test():
        async with over_sockets(Answer(["a"]), ServeSettings(idle_connection_s=idle_s)) as (port, link):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
            writer.close()
            return answer, link.submitted

    answer, submitted = run(test())
    assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert problem in answer
    assert submitted == []


def test_a_body_that_goes_on_arriving_is_bounded_as_a_whole():
    async def test():
        begun = asyncio.get_running_loop().time()
        answers = []

        async def receive():
            await asyncio.sleep(20)
            return {"type": "http.request", "body": b"x", "more_body": True}

        async def send(message):
            answers.append(message)

        limit = guard.BodyLimit(None, max_bytes=1000, idle_s=30)
        await limit({"type": "http", "headers": []}, receive, send)
        return answers[0]["status"], asyncio.get_running_loop().time() - begun

    assert run_timeless(test()) == (408, guard.BODY_TIMEOUT_S)


def test_when_to_try_again_is_when_the_first_of_the_bodies_that_stopped_is_given_up(monkeypatch):
    monkeypatch.setattr(guard, "NUM_LARGE_BODIES", 1)
    monkeypatch.setattr(guard, "SMALL_BODY_BYTES", 100)

    async def test():
        limit = guard.BodyLimit(None, max_bytes=1000, idle_s=30)

        async def ask(*sizes):
            answers = []
            bodies = [{"type": "http.request", "body": b"x" * size, "more_body": True} for size in sizes]

            async def receive():
                if not bodies:
                    await asyncio.Event().wait()
                return bodies.pop(0)

            async def send(message):
                answers.append(message)

            await limit({"type": "http", "headers": []}, receive, send)
            return answers[0]

        stopped = asyncio.create_task(ask(900))
        await asyncio.sleep(12)
        refused = await ask(101)  # which takes 5 s: what it still sends is waited for
        return refused["status"], dict(refused["headers"])[b"retry-after"], (await stopped)["status"]

    assert run_timeless(test()) == (429, b"13", 408)


def test_a_client_that_leaves_in_the_middle_of_its_body_harms_nobody():
    async def test():
        async with over_sockets(Answer(["a"]), ServeSettings()) as (port, link):
            for _ in range(20):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
                writer.transport.abort()
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
                answer = await client.post("/v1/completions", json=BODY)
            return answer.status_code, len(link.submitted)

    assert run(test()) == (200, 1)


def test_only_so_many_large_bodies_arrive_at_once_and_small_ones_always(monkeypatch):
    monkeypatch.setattr(guard, "NUM_LARGE_BODIES", 2)
    monkeypatch.setattr(guard, "SMALL_BODY_BYTES", 100)
    settings = ServeSettings(max_body_bytes=1000)
    limits = []

    class Watched(guard.BodyLimit):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            limits.append(self)

    def num_arriving():
        return sum(one._num_arriving_bytes for one in limits)

    monkeypatch.setattr(guard, "BodyLimit", Watched)

    async def test():
        async with over_sockets(Answer(["a"]), settings) as (port, _):
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\n\r\n"
            arriving = []
            for num_bytes in (998, 998, 110):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                arriving.append((reader, writer))
                writer.write(head + b" " * num_bytes)
                if num_bytes == 998:
                    await eventually(lambda: num_arriving() == 998 * len(arriving))
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
                small = await client.post("/v1/completions", json=BODY)
                refused, refused_writer = arriving[-1]
                refused_writer.write(b" " * 889)  # it is heard to its end before it is answered
                status = (await asyncio.wait_for(refused.readuntil(b"\r\n\r\n"), PATIENCE_S)).lower()
                for _, writer in arriving:
                    writer.close()
                    await writer.wait_closed()
                await eventually(lambda: num_arriving() == 0)
                large = await client.post("/v1/completions", content=sized(900), headers=JSON)
            return small.status_code, status, large.status_code

    small, refused, large = run(test())
    assert (small, large) == (200, 200)
    assert refused.startswith(b"http/1.1 429")
    assert 1 <= int(refused.partition(b"retry-after: ")[2].partition(b"\r\n")[0]) <= 30


# Request ids


def test_a_safe_request_id_comes_back_and_another_is_replaced():
    given = ["abc-123_X.y:z/7=", "a" * 128]
    unsafe = ["a" * 129, "with space", 'q"uote', "", "-dash", "é".encode(), "a;b", "\t"]
    answers = asked(ServeSettings(), *(complete(headers={"X-Request-Id": value}) for value in given + unsafe))
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert ids[: len(given)] == given
    made = ids[len(given) :]
    assert all(len(one) == 32 and one.isalnum() for one in made)
    assert len(set(made)) == len(unsafe)


def test_two_ids_are_none_and_every_answer_has_one():
    two, refused, missing = asked(
        KEYS,
        complete(
            headers=[("X-Request-Id", "a"), ("X-Request-Id", "b"), ("Authorization", "Bearer first-key")]
        ),
        complete(headers={"X-Request-Id": "mine"}),
        ("GET", "/nowhere", {"headers": {"Authorization": "Bearer first-key"}}),
    )
    assert len(two.headers["x-request-id"]) == 32
    assert (refused.status_code, refused.headers["x-request-id"]) == (401, "mine")
    assert (missing.status_code, len(missing.headers["x-request-id"])) == (404, 32)


def test_the_client_may_use_one_id_for_many_requests_at_once():
    async def test():
        async with scripted_client(Answer(["a", "b"])) as (client, _):
            asking = [
                client.post("/v1/completions", json=BODY, headers={"X-Request-Id": "same"}) for _ in range(5)
            ]
            return [answer.status_code for answer in await asyncio.gather(*asking)]

    assert run(test()) == [200] * 5


# The log


@pytest.fixture
def lines():
    """What the server logs meanwhile, as (JSON object, text line)."""
    found = []

    class Keep(logging.Handler):
        def emit(self, record):
            found.append((json.loads(JsonLines().format(record)), TextLines().format(record)))

    handler = Keep()
    logger = logging.getLogger("octavo.serve")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_one_line_tells_of_a_request_and_nothing_of_its_content(lines):
    secret = {**BODY, "prompt": "ab", "user": "Geheim"}
    headers = {"X-Request-Id": "me", "Authorization": "Bearer first-key"}
    asked(
        KEYS,
        ("POST", "/v1/completions?token=Geheim", {"json": secret, "headers": headers}),
        ("GET", "/health", {}),
        script=Answer(["Geheim", "b"], num_cached_tokens=1),
    )
    ((line, text),) = [pair for pair in lines if pair[0]["message"] == "request"]  # /health is quiet
    expected = {
        "level": "info",
        "logger": "octavo.serve.requests",
        "request_id": "me",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "client": "127.0.0.1",
        "finish_reason": "stop",
        "prompt_tokens": 2,
        "cached_tokens": 1,
        "queue_s": 0.001,
        "ttft_s": 0.002,
        "e2e_s": 0.01,
    }
    assert expected.items() <= line.items()
    assert line["duration_s"] > 0
    assert line["time"].endswith("Z")
    assert "request_id=me method=POST path=/v1/completions status=200" in text
    everything = json.dumps(lines)
    assert "Geheim" not in everything
    assert "first-key" not in everything


@pytest.mark.parametrize("cors_origins", [(), ("*",)], ids=["bare", "cors"])
def test_every_byte_of_a_stream_is_counted(lines, cors_origins):
    stream = complete(json={**BODY, "stream": True})
    (answer,) = asked(ServeSettings(cors_origins=cors_origins), stream, script=Answer(["a", "b", "c"]))
    assert answer.text.count("data: ") == 4
    (line,) = [line for line, _ in lines if line["message"] == "request"]
    assert line["response_bytes"] == len(answer.content)
    assert 0 < line["first_byte_s"] <= line["duration_s"]
    assert "incomplete" not in line


def test_a_path_cannot_forge_a_line(lines):
    asked(ServeSettings(), ("GET", "/x%0Astatus=200 level=info%1b[31m", {}), ("GET", "/" + "y" * 5000, {}))
    (line, text), (long, _) = [pair for pair in lines if pair[0]["message"] == "request"]
    assert line["path"] == "/x\nstatus=200 level=info\x1b[31m"
    assert "\n" not in text
    assert "\x1b" not in text
    assert r'path="/x\nstatus=200 level=info\u001b[31m"' in text
    assert len(long["path"]) == 203


def test_what_nobody_caught_is_told_with_its_id_and_logged(lines):
    async def test():
        metrics = Metrics()
        engine, _ = await scripted_engine(Answer(["a"]), listener=metrics)
        app = create_app(engine, ServeSettings(), metrics)

        async def broken():
            raise RuntimeError("Geheim")

        app.add_api_route("/broken", broken)
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            answer = await client.get("/broken", headers={"X-Request-Id": "mine"})
        await engine.close()
        return answer

    answer = run(test())
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "mine")
    assert answer.json()["error"]["type"] == "server_error"
    assert "Geheim" not in answer.text
    assert "Traceback" not in answer.text
    (failure,) = [line for line, _ in lines if line["level"] == "error"]
    assert failure["request_id"] == "mine"
    assert "RuntimeError: Geheim" in failure["exception"]
    (ended,) = [line for line, _ in lines if line["message"] == "request"]
    assert (ended["status"], ended["request_id"]) == (500, "mine")


def test_a_client_that_leaves_is_told_of(lines):
    gate = asyncio.Event()

    async def test():
        answer = Answer(["a", "b", "c"], gate=gate, gate_from=1)
        async with over_sockets(answer, ServeSettings()) as (port, link):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            body = json.dumps({**BODY, "stream": True}).encode()
            head = f"Host: x\r\nX-Request-Id: me\r\nContent-Length: {len(body)}\r\n"
            kind = b"Content-Type: application/json\r\n\r\n"
            writer.write(b"POST /v1/completions HTTP/1.1\r\n" + head.encode() + kind + body)
            await reader.readuntil(b"data: ")
            writer.close()
            await eventually(lambda: link.aborted)
            await eventually(lambda: any(line["message"] == "request" for line, _ in lines))
            await eventually(lambda: not link.engine._listener._log)

    run(test())
    told = [line for line, _ in lines if line["message"] in ("request", "generation")]
    assert {line["request_id"] for line in told} == {"me"}
    (request,) = [line for line in told if line["message"] == "request"]
    assert request["incomplete"] is True
    reasons = {line.get("finish_reason") for line in told}
    assert "abort" in reasons


def test_a_generation_that_ends_after_its_request_gets_a_line_of_its_own(lines):
    log = access_log.GenerationLog()

    async def app(scope, receive, send):
        for name in ("early", "late"):
            log.submitted(name)
        log.finished(output("early", 2))
        await Response()(scope, receive, send)

    def output(name, num_tokens):
        completion = CompletionOutput(0, "", [0] * num_tokens, "abort")
        metrics = RequestMetrics(0.1, None, None, 0.5, 0)
        return RequestOutput(name, None, [1, 2], [completion], 0, metrics)

    async def test():
        transport = httpx.ASGITransport(app=access_log.RequestLog(app))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            await client.get("/", headers={"X-Request-Id": "me"})
        log.finished(output("late", 7))
        log.finished(output("late", 7))  # it is known once

    run(test())
    told = [(line["message"], line["request_id"], line["output_tokens"]) for line, _ in lines]
    assert told == [("request", "me", 2), ("generation", "me", 7)]


def test_the_line_of_a_request_waits_for_what_is_ready_before_it(lines):
    told_before = []

    async def app(scope, receive, send):
        asyncio.get_running_loop().call_soon(lambda: told_before.append(len(lines)))
        await Response()(scope, receive, send)

    async def send(message):
        pass

    async def test():
        scope = {"type": "http", "method": "GET", "path": "/x", "headers": []}
        await access_log.RequestLog(app)(scope, None, send)
        assert lines == []
        await asyncio.sleep(0)

    run(test())
    assert told_before == [0]
    assert [line["path"] for line, _ in lines] == ["/x"]


def test_the_log_is_set_up_in_the_format_asked_for(capsys):
    loggers = [logging.getLogger(name) for name in ("octavo", "uvicorn", "uvicorn.access")]
    before = [(one.handlers[:], one.propagate, one.level, one.disabled) for one in loggers]
    try:
        for log_format in ("json", "text"):
            access_log.configure(log_format)
            access_log.configure(log_format)  # twice is once
            logging.getLogger("octavo.serve").info("hello %s", "there")
            logging.getLogger("uvicorn.error").warning("careful")
            logging.getLogger("uvicorn.access").info("GET /?token=secret")
    finally:
        for one, (handlers, propagate, level, disabled) in zip(loggers, before, strict=True):
            one.handlers[:], one.propagate, one.disabled = handlers, propagate, disabled
            one.setLevel(level)
    written = capsys.readouterr().err.splitlines()
    assert [json.loads(line)["message"] for line in written[:2]] == ["hello there", "careful"]
    assert [line.split(" ", 1)[1] for line in written[2:]] == ["info hello there", "warning careful"]


# Traces


@pytest.fixture
def spans(monkeypatch):
    """Spans that have ended, whatever collector was named."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from octavo.serve.tracing import Tracer

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(Tracer, "create", classmethod(lambda cls, endpoint: cls(provider)))
    yield exporter.get_finished_spans
    provider.shutdown()


TRACED = ServeSettings(otlp_endpoint="http://localhost:4318")


def test_a_request_its_generation_and_its_phases_are_one_trace(spans):
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {"traceparent": parent, "X-Request-Id": "me"}
    asked(TRACED, complete(headers=headers), ("GET", "/health", {}))
    found = {span.name: span for span in spans()}
    assert set(found) == {"POST /v1/completions", "generation", "queue", "prefill", "decode"}
    assert {f"{span.context.trace_id:032x}" for span in found.values()} == {parent.split("-")[1]}
    request, generation = found["POST /v1/completions"], found["generation"]
    assert f"{request.parent.span_id:016x}" == parent.split("-")[2]
    assert generation.parent.span_id == request.context.span_id
    assert request.attributes["http.response.status_code"] == 200
    assert request.attributes["octavo.request_id"] == "me"
    assert generation.attributes["gen_ai.usage.input_tokens"] == 2
    assert generation.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    start = generation.start_time
    for name, begin_ms, end_ms in (("queue", 0, 1), ("prefill", 1, 2), ("decode", 2, 10)):
        span = found[name]
        assert span.parent.span_id == generation.context.span_id
        assert (span.start_time - start, span.end_time - start) == (begin_ms * 1_000_000, end_ms * 1_000_000)
    assert "ab" not in [value for span in found.values() for value in span.attributes.values()]


def test_a_request_that_fails_is_an_error_in_its_trace(spans):
    asked(TRACED, complete(), script=Answer(["a"], error="the step failed"))
    (request,) = [span for span in spans() if span.name == "POST /v1/completions"]
    assert request.attributes["http.response.status_code"] >= 500
    assert not request.status.is_ok


def test_without_opentelemetry_tracing_is_refused(monkeypatch):
    from octavo.serve.tracing import Tracer

    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'octavo\[otel\]'"):
        Tracer.create("http://localhost:4318")


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("http://c:4318/", "http://c:4318/v1/traces"),
        ("https://c/otlp/traces", "https://c/otlp/traces"),
    ],
)
def test_the_collector_is_asked_at_its_usual_path(monkeypatch, given, used):
    from opentelemetry.exporter.otlp.proto.http import trace_exporter
    from opentelemetry.sdk.trace.export import SpanExporter

    from octavo.serve.tracing import Tracer

    endpoints = []

    class Exporter(SpanExporter):
        def __init__(self, endpoint):
            endpoints.append(endpoint)

        def shutdown(self):
            pass

    monkeypatch.setattr(trace_exporter, "OTLPSpanExporter", Exporter)
    Tracer.create(given)
    assert endpoints == [used]
