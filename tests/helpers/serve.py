"""A server to test against: the real front over a scripted engine, and `octavo serve` as a subprocess.

Without a subprocess::

    def test_it():
        async def test():
            async with scripted_client(Answer(["Hel", "lo"])) as (client, engine):
                answer = await client.post("/v1/completions", json={"prompt": "a"})
        run(test())

With one::

    with running_server(model_folder, "--load-format", "dummy") as server:
        httpx.get(server.url + "/health")
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
from helpers.made_up_time import MadeUpTime
from helpers.text import letters_tokenizer

from octavo.engine.stats import EngineStats
from octavo.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, StreamChunk
from octavo.serve.async_engine import AsyncEngine
from octavo.serve.messages import (
    Abort,
    Accepted,
    Item,
    ModelCard,
    News,
    Ready,
    Refused,
    Submit,
    ToEngine,
    Watch,
)
from octavo.serve.settings import ServeSettings
from octavo.text.tokenizer import Tokenizer

T = TypeVar("T")

CARD = ModelCard(
    name="scripted",
    max_model_len=200,
    vocab_size=52,
    eos_token_ids=(51,),
    defaults={},
    num_blocks=64,
    block_size=4,
    kv_cache_dtype="float32",
    device="cpu",
    dtype="float32",
    max_num_seqs=8,
)
STATS = EngineStats(0, 0, 64, 0, 0, 0, 0, 0, 0, 0, 0)
DEADLINE_S = 240.0
"""Of an async test. All patience here is for what hangs: a busy machine may take a hundred times its time."""
PATIENCE_S = 120.0


def run(test: Coroutine[Any, Any, T], loop: Callable[[], asyncio.AbstractEventLoop] | None = None) -> T:
    """Runs an async test to its end, and not for ever."""

    async def bounded() -> T:
        async with asyncio.timeout(DEADLINE_S):
            return await test

    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(bounded())


def run_timeless(test: Coroutine[Any, Any, T]) -> T:
    """`run` in made-up time, which nothing but the test's own timers moves; no sockets, no processes."""
    return run(test, MadeUpTime)


def leaving_client(body: bytes) -> tuple[Callable[[], Awaitable[dict[str, Any]]], asyncio.Event]:
    """An ASGI `receive` that has a whole body to tell, and the event that tells it the client is gone."""
    gone = asyncio.Event()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    return receive, gone


async def eventually(holds: Callable[[], object]) -> None:
    """Waits until `holds()` is true."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.002)


@dataclass
class Answer:
    """What the scripted engine says: the pieces of its text, one a step, for each of `n` continuations.

    refuse: (class name, message) with which it is refused instead. gate: it must be set before each piece;
    `gate_from` is the first piece that waits for it. error: it ends as failed, with this message.
    """

    pieces: list[str] = field(default_factory=list)
    finish_reason: str = "stop"
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0
    refuse: tuple[str, str] | None = None
    error: str | None = None
    gate: asyncio.Event | None = None
    gate_from: int = 0


Script = Callable[[Submit], Answer]


class NullListener:
    """Remembers what it was told, as (method, argument)."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *arguments: self.heard.append((name, arguments[0]))


class ScriptedLink:
    """Stands in for the engine process: answers messages on the same event loop.

    `submitted` and `aborted` hold what came; `watching` says whether the observer is on.
    """

    def __init__(self, engine: AsyncEngine, script: Script, tokenizer: Tokenizer) -> None:
        self.engine = engine
        self.script = script
        self.tokenizer = tokenizer
        self.submitted: list[Submit] = []
        self.aborted: list[str] = []
        self.watching = False
        self.is_silent = False
        """When set, nothing is answered any more: an engine that hangs."""
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def send(self, message: ToEngine) -> None:
        if self.is_silent:
            return
        if isinstance(message, Submit):
            self.submitted.append(message)
            self._tasks[message.request_id] = asyncio.get_running_loop().create_task(self._answer(message))
        elif isinstance(message, Abort):
            self.aborted.append(message.request_id)
            task = self._tasks.get(message.request_id)
            if task is not None and not task.done():
                task.cancel()
        elif isinstance(message, Watch):
            self.watching = message.is_on

    async def close(self, *, is_patient: bool) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def tell(self, request_id: str, chunks: list[StreamChunk], output: RequestOutput | None = None) -> None:
        news = News([Item(request_id, chunks, output)], STATS, 0.001, 1, (request_id,))
        if not self.is_silent:
            self.engine.receive(news)

    async def _answer(self, submit: Submit) -> None:
        await asyncio.sleep(0)
        answer = self.script(submit)
        if answer.refuse is not None:
            self.engine.receive(Refused(submit.request_id, *answer.refuse))
            return
        self.engine.receive(Accepted((submit.request_id,)))
        n = submit.params.n
        outputs = [CompletionOutput(index, "", [], None) for index in range(n)]
        output = RequestOutput(
            submit.request_id,
            None,
            [],
            outputs,
            answer.num_cached_tokens,
            RequestMetrics(0.001, 0.002, 0.003, 0.01, 0),
            error=answer.error,
        )
        try:
            for at, piece in enumerate(answer.pieces):
                for _ in range(8):  # so that a reader takes each piece by itself
                    await asyncio.sleep(0)
                if answer.gate is not None and at >= answer.gate_from:
                    await answer.gate.wait()
                chunks = [self._chunk(submit, one, piece) for one in outputs]
                if at == len(answer.pieces) - 1:
                    self._finish(outputs, answer)
                    chunks = [
                        replace(
                            chunk,
                            finish_reason=one.finish_reason,
                            stop_reason=answer.stop_reason,
                            error=answer.error,
                        )
                        for one, chunk in zip(outputs, chunks, strict=True)
                    ]
                    self.tell(submit.request_id, chunks if submit.stream else [], output)
                else:
                    self.tell(submit.request_id, chunks if submit.stream else [])
        except asyncio.CancelledError:
            for one in outputs:
                one.finish_reason = "abort"
            self.tell(submit.request_id, [], output)
            raise

    def _chunk(self, submit: Submit, one: CompletionOutput, piece: str) -> StreamChunk:
        token_ids = self.tokenizer.encode(piece, add_special_tokens=False)
        one.text += piece
        one.token_ids += token_ids
        logprobs = None
        if submit.params.logprobs is not None:
            logprobs = [self._logprobs(token_id, submit.params.logprobs) for token_id in token_ids]
            one.logprobs = (one.logprobs or []) + logprobs
        return StreamChunk(one.index, piece, token_ids, logprobs=logprobs)

    def _logprobs(self, token_id: int, num: int) -> dict[int, Logprob]:
        """The chosen token first with -0.5, then the ids after it with -1.5, -2.5, ..."""
        return {
            (other := (token_id + i) % self.tokenizer.vocab_size): Logprob(
                -0.5 - i, i + 1, self.tokenizer.token_text(other)
            )
            for i in range(max(num, 1))
        }

    @staticmethod
    def _finish(outputs: list[CompletionOutput], answer: Answer) -> None:
        for one in outputs:
            one.finish_reason = "error" if answer.error else answer.finish_reason  # type: ignore[assignment]
            one.stop_reason = answer.stop_reason


async def scripted_engine(
    script: Script | Answer,
    settings: ServeSettings | None = None,
    *,
    card: ModelCard = CARD,
    tokenizer: Tokenizer | None = None,
    listener: Any = None,
) -> tuple[AsyncEngine, ScriptedLink]:
    """A ready `AsyncEngine` whose answers are scripted: one for all requests, or a function of each."""
    text = tokenizer or letters_tokenizer(52)
    engine = AsyncEngine(settings or ServeSettings(), listener or NullListener())
    link = ScriptedLink(engine, script if callable(script) else lambda submit: script, text)
    engine.start(link, lambda: text)
    engine.receive(Ready(card))
    await engine.until_ready()
    return engine, link


@contextlib.asynccontextmanager
async def scripted_client(
    script: Script | Answer, settings: ServeSettings | None = None, **options: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, ScriptedLink]]:
    """An HTTP client of the whole application over a scripted engine; no socket, and whole answers only."""
    from octavo.serve.app import create_app
    from octavo.serve.metrics import Metrics

    settings = settings or ServeSettings()
    metrics = Metrics()
    engine, link = await scripted_engine(script, settings, listener=metrics, **options)
    transport = httpx.ASGITransport(app=create_app(engine, settings, metrics), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://octavo") as client:
        try:
            yield client, link
        finally:
            await engine.close()


def events_of(body: str) -> list[str]:
    """The data of each server-sent event of a body."""
    assert body.endswith("\n\n"), body[-80:]
    events = body.removesuffix("\n\n").split("\n\n")
    return ["\n".join(line.removeprefix("data: ") for line in event.split("\n")) for event in events]


class RunningServer:
    """`octavo serve` as a subprocess. `url` is known once it is ready; `lines` is what it has said so far."""

    def __init__(self, arguments: list[str], environ: dict[str, str] | None = None) -> None:
        self.lines: list[str] = []
        self.url = ""
        self._ready: queue.Queue[str | None] = queue.Queue()
        self.process = subprocess.Popen(
            (sys.executable, "-m", "octavo", "serve", *arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})},
        )
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if match := re.search(r"ready.* (http://\S+)", line):
                self._ready.put(match[1])
        self._ready.put(None)

    def wait_ready(self) -> None:
        try:
            url = self._ready.get(timeout=PATIENCE_S)
        except queue.Empty:
            url = None
        assert url is not None, f"the server did not get ready:\n{self.said()}"
        self.url = url

    def said(self) -> str:
        return "\n".join(self.lines)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=PATIENCE_S)

    def post(self, path: str, body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=PATIENCE_S)

    def connect(self, path: str, body: Any, buffer_bytes: int | None = None) -> socket.socket:
        """A raw connection that has sent this request. To close it is to leave."""
        address = urlsplit(self.url)
        sock = socket.socket()
        if buffer_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        sock.settimeout(PATIENCE_S)
        sock.connect((address.hostname, address.port))
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: octavo\r\nContent-Type: application/json\r\n"
        sock.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        return sock

    def counts(self) -> dict[str, float]:
        """What /metrics says of requests and blocks."""
        lines = [line for line in self.get("/metrics").text.splitlines() if not line.startswith("#")]
        values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}
        return {
            "running": values["octavo_requests_running"],
            "waiting": values["octavo_requests_waiting"],
            "owned": values['octavo_kv_cache_blocks{state="owned"}'],
            "aborted": values['octavo_requests_total{finish_reason="abort"}'],
        }

    def is_idle(self) -> bool:
        now = self.counts()
        return now["running"] == now["waiting"] == now["owned"] == 0

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """Its exit status."""
        status = self.process.wait(PATIENCE_S)
        self._reading.join(PATIENCE_S)
        return status

    def stop(self) -> None:
        if self.process.poll() is None:
            self.signal()
            try:
                self.wait()
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextlib.contextmanager
def running_server(
    *arguments: object, environ: dict[str, str] | None = None, wait_ready: bool = True
) -> Iterator[RunningServer]:
    """`octavo serve ARGUMENTS` on a free port, until the block is left."""
    server = RunningServer([*map(str, arguments), "--port", "0"], environ)
    try:
        if wait_ready:
            server.wait_ready()
        yield server
    finally:
        server.stop()


def wait_until(holds: Callable[[], object]) -> None:
    """`eventually` for tests that are not async."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.01)
