"""`octavo serve` as a process: its lines, its states, its signals, and what happens when something dies."""

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from helpers import serve_engines
from helpers.serve import (
    PATIENCE_S,
    NullListener,
    events_of,
    eventually,
    run,
    running_server,
    wait_until,
)

from octavo.config import EngineConfig
from octavo.errors import EngineError, ModelError
from octavo.sampling_params import SamplingParams
from octavo.serve import process as process_module
from octavo.serve.async_engine import AsyncEngine
from octavo.serve.process import EngineProcess
from octavo.serve.settings import ServeSettings

LONG = SamplingParams(max_tokens=10**9, ignore_eos=True)


async def real_engine(build, settings=None, listener=None):
    """An `AsyncEngine` over a real process that runs `build`."""
    engine = AsyncEngine(settings or ServeSettings(), listener or NullListener())
    process = EngineProcess(build, EngineConfig(model="scripted"), engine.receive, engine.lost)
    engine.start(process, lambda: None)
    return engine, process


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children_of(pid):
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return found


def engine_of(server):
    pids = children_of(server.process.pid)
    (engine,) = [pid for pid in pids if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return engine


# The engine process


def test_kill_9_in_the_middle_of_a_stream():
    async def test():
        listener = NullListener()
        engine, process = await real_engine(serve_engines.scripted, listener=listener)
        await engine.until_ready()
        generation = engine.submit([1, 2], LONG, request_id="a", stream=True)
        await anext(generation)
        waiting = engine.submit([1, 2], LONG, request_id="b")
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="killed by SIGKILL"):
            async for _ in generation:
                pass
        with pytest.raises(EngineError, match="killed by SIGKILL"):
            await waiting.result()
        assert engine.state == "dead"
        with pytest.raises(EngineError):
            engine.submit([1], LONG, request_id="c")
        await engine.close()

    run(test())


def test_an_engine_that_exits_by_itself_is_dead(tmp_path):
    async def test():
        engine, _ = await real_engine(functools.partial(serve_engines.scripted, folder=tmp_path))
        await engine.until_ready()
        generation = engine.submit([1, 2], LONG, request_id="a")
        (tmp_path / "exit").touch()
        with pytest.raises(EngineError, match="exit status 3"):
            await generation.result()
        await engine.close()

    run(test())


def test_a_step_that_hangs_makes_the_engine_stuck_until_it_goes_on(tmp_path):
    async def test():
        settings = ServeSettings(stuck_s=0.3)
        engine, _ = await real_engine(functools.partial(serve_engines.scripted, folder=tmp_path), settings)
        await engine.until_ready()
        (tmp_path / "hang").touch()
        generation = engine.submit([1, 2], LONG, request_id="a", stream=True)
        with pytest.raises(EngineError, match="no step for"):
            async for _ in generation:
                pass
        assert engine.state == "stuck"
        engine.settings = ServeSettings()  # however slowly it comes back
        (tmp_path / "hang").unlink()
        await eventually(lambda: engine.state == "ready")
        params = SamplingParams(max_tokens=3)
        assert (await engine.submit([1], params, request_id="b").result()).finish_reason == "length"
        await engine.close()

    run(test())


def test_an_engine_that_hangs_can_be_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(process_module, "EXIT_S", 1e6)  # patience would never end

    async def test():
        settings = ServeSettings(stuck_s=0.2)
        engine, process = await real_engine(
            functools.partial(serve_engines.scripted, folder=tmp_path), settings
        )
        await engine.until_ready()
        (tmp_path / "hang").touch()
        engine.submit([1, 2], LONG, request_id="a")
        await eventually(lambda: engine.state == "stuck")
        await engine.close()
        assert not is_running(process.pid)

    run(test())


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (serve_engines.unloadable, ModelError, "model: there is none"),
        (serve_engines.crashing, EngineError, "ZeroDivisionError: oh"),
    ],
)
def test_what_loading_fails_with_is_raised_here(build, error, message):
    async def test():
        engine, _ = await real_engine(build)
        with pytest.raises(error, match=message):
            await engine.until_ready()
        await engine.close()

    run(test())


def test_loading_can_be_given_up(monkeypatch):
    monkeypatch.setattr(process_module, "EXIT_S", 1e6)

    async def test():
        listener = NullListener()
        engine, process = await real_engine(serve_engines.endless, listener=listener)
        await eventually(lambda: any(name == "stage" for name, _ in listener.heard))
        await engine.close()
        assert not is_running(process.pid)

    run(test())


FOLLOW = """
import asyncio, sys
sys.path.insert(0, {tests!r})
from helpers import serve_engines
from helpers.serve import NullListener, eventually
from octavo.config import EngineConfig
from octavo.serve.async_engine import AsyncEngine
from octavo.serve.process import EngineProcess
from octavo.serve.settings import ServeSettings

async def main():
    listener = NullListener()
    engine = AsyncEngine(ServeSettings(), listener)
    build = serve_engines.{build}
    process = EngineProcess(build, EngineConfig(model="scripted"), engine.receive, engine.lost)
    engine.start(process, lambda: None)
    await eventually(lambda: any(name == "stage" for name, _ in listener.heard))
    print(process.pid, flush=True)
    {then}

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.parametrize("build", ["scripted", "endless"])
def test_the_engine_process_follows_a_front_that_is_killed(build, tmp_path):
    script = tmp_path / "front.py"
    tests = str(Path(__file__).parents[1])
    script.write_text(FOLLOW.format(tests=tests, build=build, then="await asyncio.sleep(600)"))
    with subprocess.Popen((sys.executable, script), stdout=subprocess.PIPE, text=True) as front:
        pid = int(front.stdout.readline())
        front.kill()
        front.wait()
    wait_until(lambda: not is_running(pid))


def test_a_front_that_fails_without_closing_its_engine_ends_it(tmp_path):
    script = tmp_path / "front.py"
    tests = str(Path(__file__).parents[1])
    script.write_text(FOLLOW.format(tests=tests, build="scripted", then="1 / 0"))
    done = subprocess.run((sys.executable, script), capture_output=True, text=True, check=False)
    assert "ZeroDivisionError" in done.stderr
    wait_until(lambda: not is_running(int(done.stdout)))


# The server


@pytest.fixture(scope="module")
def server(tiny):
    with running_server(*tiny, "--slow-reader", "1") as server:
        yield server


def first_piece(sock):
    """Waits until the stream has begun."""
    data = b""
    while b"data:" not in data:
        piece = sock.recv(4096)
        assert piece, data
        data += piece


def rest_of(sock, end=None):
    """What comes until `end` or until the server closes."""
    data = b""
    with sock:
        while (end is None or end not in data) and (piece := sock.recv(65536)):
            data += piece
    return data


ENDLESS = {"prompt": "a", "max_tokens": 30_000, "ignore_eos": True}


def test_the_ready_line_says_what_is_served_and_where(server):
    ready = [line for line in server.lines if line.startswith("octavo: ready")]
    assert len(ready) == 1
    assert "on cpu in float32, 4096 blocks of 16 tokens, at http://127.0.0.1:" in ready[0]
    assert server.get("/health").json() == {"status": "ready"}


@pytest.mark.parametrize("body", [{**ENDLESS, "stream": True}, ENDLESS], ids=["streamed", "whole"])
def test_a_client_that_leaves_is_aborted_mini_sglang_15(server, body):
    """The public report sgl-project/mini-sglang#15."""
    before = server.counts()["aborted"]
    sock = server.connect("/v1/completions", body)
    if body.get("stream"):
        first_piece(sock)
    wait_until(lambda: server.counts()["running"] == 1)
    sock.close()
    wait_until(server.is_idle)
    assert server.counts()["aborted"] == before + 1


def test_a_client_that_leaves_during_prefill_is_aborted(server):
    before = server.counts()["aborted"]
    sock = server.connect("/v1/completions", {**ENDLESS, "prompt": [1] * 32_000})
    wait_until(lambda: server.counts()["running"] == 1)
    sock.close()
    wait_until(server.is_idle)
    assert server.counts()["aborted"] == before + 1


def test_a_reader_that_never_reads_blocks_nobody_and_is_cut_off(server):
    num_files = len(os.listdir(f"/proc/{server.process.pid}/fd"))
    before = server.counts()["aborted"]
    body = {**ENDLESS, "stream": True, "n": 4, "logprobs": 5}
    with (
        server.connect("/v1/completions", body, buffer_bytes=4096),
        server.connect("/v1/completions", body, buffer_bytes=4096),
    ):
        wait_until(lambda: server.counts()["running"] == 2)
        while not server.is_idle():
            assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 3}).status_code == 200
        assert server.counts()["aborted"] == before + 2
        wait_until(lambda: len(os.listdir(f"/proc/{server.process.pid}/fd")) <= num_files)


def test_ten_thousand_connections_opened_and_dropped(server):
    address = urlsplit(server.url)
    pid = server.process.pid
    num_files = len(os.listdir(f"/proc/{pid}/fd"))
    with httpx.Client(timeout=PATIENCE_S) as client:
        for at in range(10_000):
            sock = socket.create_connection((address.hostname, address.port), timeout=PATIENCE_S)
            if at % 3 == 1:
                sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Le")
            sock.close()
            if at % 1000 == 0:
                assert client.get(server.url + "/health").status_code == 200
    wait_until(lambda: len(os.listdir(f"/proc/{pid}/fd")) <= num_files + 2)


def test_a_prompt_of_five_megabytes_holds_nobody_up(server):
    text = "The quick brown fox. " * 250_000
    answers = []
    asking = threading.Thread(
        target=lambda: answers.append(server.post("/v1/completions", {"prompt": text, "max_tokens": 1}))
    )
    asking.start()
    with httpx.Client(timeout=PATIENCE_S) as client:
        while asking.is_alive():
            assert client.get(server.url + "/health").status_code == 200
    asking.join()
    assert answers[0].status_code == 400
    assert answers[0].json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\xff\xfe garbage\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: abc\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /%ff%fe/..%2f..%2fetc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=["garbage", "version", "length", "short body", "long path", "odd path"],
)
def test_odd_bytes_harm_nobody(server, data):
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=PATIENCE_S) as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        answer = sock.recv(65536)
        assert answer == b"" or answer.split()[1] in (b"200", b"400", b"404", b"408", b"431")
    assert server.get("/health").status_code == 200


def test_raw_bytes_of_a_stream(server):
    with server.connect(
        "/v1/completions", {"prompt": "a", "max_tokens": 3, "ignore_eos": True, "stream": True}
    ) as sock:
        data = b""
        while b"[DONE]" not in data:
            data += sock.recv(65536)
        while not data.endswith(b"0\r\n\r\n"):
            data += sock.recv(65536)
    head, _, rest = data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert b"content-type: text/event-stream; charset=utf-8" in head
    assert b"cache-control: no-cache" in head
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    *events, done = events_of(body.decode())
    assert done == "[DONE]"
    assert [json.loads(event)["choices"][0]["finish_reason"] for event in events][-1] == "length"


def test_a_signal_under_load_finishes_what_runs(tiny):
    """The engine process gets it as well: a terminal's Ctrl-C goes to the whole group."""
    body = {"prompt": "a", "max_tokens": 600, "ignore_eos": True, "stream": True}
    with running_server(*tiny) as server:
        streams = [server.connect("/v1/completions", body) for _ in range(8)]
        for sock in streams:
            first_piece(sock)
        engine = engine_of(server)
        os.kill(engine, signal.SIGSTOP)  # so that they run for as long as we look
        for pid in (*children_of(server.process.pid), server.process.pid):
            os.kill(pid, signal.SIGINT)
        wait_until(lambda: any("finishing" in line for line in server.lines))
        health = server.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "draining"})
        refused = server.post("/v1/completions", {"prompt": "a"})
        assert refused.status_code == 503
        os.kill(engine, signal.SIGCONT)
        for sock in streams:
            data = rest_of(sock)
            assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            assert b'"finish_reason":"length"' in data
            assert b'"error"' not in data
        assert server.wait() == 0
        assert server.lines[-1] == "octavo: stopped"
        assert "Traceback" not in server.said()


def test_a_second_signal_ends_at_once_and_says_so(tiny):
    with running_server(*tiny, "--drain", "60") as server:
        sock = server.connect("/v1/completions", {**ENDLESS, "stream": True})
        first_piece(sock)
        server.signal(signal.SIGTERM)
        wait_until(lambda: any("finishing" in line for line in server.lines))
        server.signal(signal.SIGTERM)
        data = rest_of(sock)
        error, done = events_of_raw(data)[-2:]
        assert json.loads(error)["error"]["message"] == "the server is shutting down"
        assert done == "[DONE]"
        assert server.wait() == 0


def events_of_raw(data):
    """The events in the bytes of a chunked answer; chunks end where events do."""
    return [part.partition(b"\n\n")[0].decode() for part in data.split(b"data: ")[1:]]


def test_a_signal_while_loading_ends_it(tiny):
    with running_server(*tiny, wait_ready=False) as server:
        wait_until(lambda: any("listening at" in line for line in server.lines))
        url = next(line for line in server.lines if "listening at" in line).split()[-1]
        loading = httpx.get(url + "/health", timeout=PATIENCE_S)
        if loading.status_code == 503:
            assert loading.json() == {"status": "loading"}
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        assert "Traceback" not in server.said()


def test_the_engine_killed_under_the_server(tiny):
    with running_server(*tiny) as server:
        sock = server.connect("/v1/completions", {**ENDLESS, "stream": True})
        first_piece(sock)
        os.kill(engine_of(server), signal.SIGKILL)
        data = rest_of(sock, b"[DONE]")
        assert "killed by SIGKILL" in json.loads(events_of_raw(data)[-2])["error"]["message"]
        health = server.get("/health")
        assert health.status_code == 503
        assert health.json()["status"] == "dead"
        assert server.post("/v1/completions", {"prompt": "a"}).status_code == 503
        server.signal(signal.SIGTERM)
        assert server.wait() == 1, "whoever starts it again is to see that it failed"
        reason = "the engine process ended (killed by SIGKILL)"
        (line,) = [line for line in server.lines if "state=dead" in line]
        assert "error" in line.lower()
        assert reason in line
        assert server.lines[-1] == f"octavo: error: the engine died: {reason}"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("{folder}/nothing", "no file or folder at"),
        ("{folder}", "is no model: there is no config.json in it"),
        ("NO_SUCH_MODEL", "nothing is known under the name 'NO_SUCH_MODEL'"),
    ],
)
def test_a_model_that_cannot_be_there_ends_the_command_before_it_listens(model, message, tmp_path):
    with running_server(model.format(folder=tmp_path), wait_ready=False) as server:
        assert server.wait() == 1
        (said,) = server.lines
        assert said.startswith("octavo: error: model: ")
        assert message in said


def test_a_port_in_use_is_said_before_the_model_loads(tiny, server):
    port = urlsplit(server.url).port
    arguments = (sys.executable, "-m", "octavo", "serve", *map(str, tiny), "--port", str(port))
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"cannot listen at 127.0.0.1:{port}" in done.stderr
    assert done.stdout == ""


# What the front holds

NO_TORCH = """
import asyncio, sys
from octavo.config import EngineConfig
from octavo.serve.app import create_app
from octavo.serve.async_engine import AsyncEngine
from octavo.serve.metrics import Metrics
from octavo.serve.settings import ServeSettings
import octavo.serve.run, httpx

async def main():
    config = EngineConfig(model={model!r}, load_format="dummy", num_threads=1, num_blocks=256)
    metrics = Metrics()
    engine = AsyncEngine.create(config, ServeSettings(), metrics)
    await engine.until_ready()
    transport = httpx.ASGITransport(create_app(engine, ServeSettings(), metrics))
    async with httpx.AsyncClient(transport=transport, base_url="http://octavo") as client:
        for path, body in (
            ("/v1/completions", {{"prompt": "a" * 3000, "max_tokens": 2, "logprobs": 1}}),
            ("/v1/chat/completions", {{"messages": [{{"role": "user", "content": "a"}}], "max_tokens": 2}}),
            ("/tokenize", {{"prompt": "a"}}),
        ):
            response = await client.post(path, json=body)
            assert response.status_code == 200, response.text
        for path in ("/metrics", "/v1/engine/state", "/v1/models", "/openapi.json"):
            assert (await client.get(path)).status_code == 200
    await engine.close()
    print(sorted({{"torch", "numba", "transformers", "triton"}} & sys.modules.keys()))

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_the_front_never_loads_torch(tiny_folder, tmp_path):
    script = tmp_path / "front.py"
    script.write_text(NO_TORCH.format(model=str(tiny_folder)))
    done = subprocess.run((sys.executable, script), capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr
