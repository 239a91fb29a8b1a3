"""The load generator of `octavo bench serve`: sends calls to an OpenAI-compatible server and times the
answers.

In an open loop calls leave when they are due, whatever became of those before, and every time counts from the
moment a call was due: a server that stalls is charged for all who would have waited. In a closed loop each of
a number of clients asks again as soon as it was answered. Needs no torch, and one core at most.
"""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from octavo.bench.serve_calls import Call
from octavo.bench.serve_http import Connection, Connections, Endpoint, ServerError, get
from octavo.errors import ConfigError

CHAT_PATH, COMPLETIONS_PATH = "/chat/completions", "/completions"


@dataclass(frozen=True)
class Target:
    """The server, and what all calls have in common.

    `extra_body` overrides fields of the request. `reads_stamps`: the pieces of text are times of
    `time.perf_counter()` on this machine, and how long each took to arrive is kept.
    """

    endpoint: Endpoint
    model: str
    api_key: str = field(default="", repr=False)
    is_chat: bool = True
    is_stream: bool = True
    temperature: float = 0.0
    ignore_eos: bool = True
    extra_body: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    timeout_s: float = 600.0
    reads_stamps: bool = False

    def request(self, call: Call) -> bytes:
        """The bytes that ask for `call`."""
        body: dict[str, Any] = {"model": self.model}
        if self.is_chat:
            body["messages"] = [{"role": "user", "content": call.prompt}]
        else:
            body["prompt"] = call.prompt
        body |= {"max_tokens": call.output_len, "temperature": self.temperature, "stream": self.is_stream}
        if self.is_stream:
            body["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            body["ignore_eos"] = True
        content = json.dumps(body | self.extra_body).encode()
        path = CHAT_PATH if self.is_chat else COMPLETIONS_PATH
        return self.endpoint.head("POST", path, self.all_headers, content) + content

    @property
    def all_headers(self) -> dict[str, str]:
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {**key, **self.headers}


@dataclass(slots=True, eq=False)
class Answer:
    """What became of one call. Times are seconds after the run's start; `text_s` of each piece of text.

    `error` is a short kind, empty when all went well; `is_dropped`: we hung up, as planned. Token counts are
    the server's own (`usage`), None where it gave none. `stamped_s` of each stamped token, of which a piece
    may hold several, and in `stamps_s` their delays.
    """

    due_s: float
    sent_s: float = 0.0
    end_s: float = 0.0
    text_s: array[float] = field(default_factory=lambda: array("d"))
    stamped_s: array[float] = field(default_factory=lambda: array("d"))
    stamps_s: array[float] = field(default_factory=lambda: array("d"))
    asked_tokens: int = 0
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    num_cached_tokens: int | None = None
    finish_reason: str | None = None
    error: str = ""
    detail: str = ""
    is_dropped: bool = False

    @property
    def is_ok(self) -> bool:
        return not self.error and not self.is_dropped

    @property
    def num_tokens(self) -> int:
        """Output tokens by `usage`, else the pieces of text that came."""
        return len(self.text_s) if self.num_output_tokens is None else self.num_output_tokens

    @property
    def ttft_s(self) -> float | None:
        return self.text_s[0] - self.due_s if self.text_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first piece; None below two."""
        if self.num_tokens < 2 or len(self.text_s) < 2:
            return None
        return (self.text_s[-1] - self.text_s[0]) / (self.num_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Times between successive pieces of text."""
        return [after - before for before, after in zip(self.text_s, self.text_s[1:], strict=False)]

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.due_s


@dataclass
class Load:
    """A finished run. `cpu_s` is the processor time the generator itself took.

    `is_cut`: it was cancelled (Ctrl-C), and calls that were open then are not among the answers.
    """

    answers: list[Answer]
    elapsed_s: float
    cpu_s: float
    num_connections: int
    started: float
    is_cut: bool = False


class _Exchange:
    """Reads the response to one call into its `Answer`."""

    def __init__(self, target: Target, call: Call, answer: Answer, started: float) -> None:
        self.answer = answer
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.connection: Connection | None = None
        self._target = target
        self._drop_after = call.drop_after if target.is_stream else None
        self._started = started
        self._status = 0
        self._is_stream = False
        self._has_done = False
        self._rest = b""

    def head(self, status: int, headers: dict[str, str]) -> None:
        self._status = status
        self._is_stream = "text/event-stream" in headers.get("content-type", "")

    def body(self, data: bytes, now: float) -> None:
        if not self._is_stream:
            self._rest += data
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and not self.done.done():
                self._event(line[5:].strip(), now)

    def end(self, now: float) -> None:
        if self._status != 200:
            self._finish(now, _kind_of(self._status, self._rest), self._rest[:300].decode(errors="replace"))
        elif not self._is_stream:
            self._event(self._rest, now)
            if not self.done.done():
                self._finish(now, "" if not self._target.is_stream else "not a stream")
        else:
            self._finish(now, "" if self._has_done else "stream without [DONE]")

    def lost(self, what: str, now: float) -> None:
        where = "before the answer" if not self._status else "in mid-answer"
        self._finish(now, f"connection lost {where}", what)

    def time_out(self) -> None:
        self._hang_up()
        self._finish(time.perf_counter(), "timeout", f"no end after {self._target.timeout_s:g} s")

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._has_done = True
            return
        try:
            event = json.loads(data)
            if not isinstance(event, dict):
                raise ValueError("not an object")
            error = event.get("error") or (event.get("object") == "error" and event)
            if error:
                kind = error.get("type") or error.get("code") if isinstance(error, dict) else None
                self._hang_up()
                self._finish(now, f"error event {kind or ''}".strip(), str(error)[:300])
                return
            self._take(event, now)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as problem:
            self._hang_up()
            self._finish(now, "malformed event", f"{type(problem).__name__}: {problem}: {data[:200]!r}")

    def _take(self, event: dict[str, Any], now: float) -> None:
        answer = self.answer
        usage = event.get("usage")
        if usage:
            answer.num_prompt_tokens = usage.get("prompt_tokens")
            answer.num_output_tokens = usage.get("completion_tokens")
            answer.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        for choice in event.get("choices") or ():
            part = choice.get("delta") or choice.get("message") or choice
            text = part.get("content") or part.get("text") or part.get("reasoning_content")
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
            if not (text or part.get("reasoning") or part.get("tool_calls")):
                continue
            answer.text_s.append(now - self._started)
            if self._target.reads_stamps:
                for stamp in text.split():
                    answer.stamped_s.append(now - self._started)
                    answer.stamps_s.append(now - float(stamp))
            if self._drop_after is not None and len(answer.text_s) >= self._drop_after:
                answer.is_dropped = True
                self._hang_up()
                self._finish(now)

    def _hang_up(self) -> None:
        if self.connection is not None:
            self.connection.hang_up()

    def _finish(self, now: float, error: str = "", detail: str = "") -> None:
        if not self.done.done():
            self.answer.end_s = now - self._started
            self.answer.error, self.answer.detail = error, detail
            self.done.set_result(None)


def _kind_of(status: int, body: bytes) -> str:
    """``http 429 rate_limit_exceeded`` for an OpenAI error body."""
    try:
        error = json.loads(body)["error"]
        return f"http {status} {error.get('code') or error.get('type') or ''}".strip()
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"http {status}"


class LoadGenerator:
    """One run against `target`; `answers` grows as calls end, `num_open` calls are on their way."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.answers: list[Answer] = []
        self.num_open = 0
        self._connections = Connections(target.endpoint)

    async def run(
        self, calls: Iterable[Call], *, concurrency: int | None = None, duration_s: float | None = None
    ) -> Load:
        """Send `calls`: when they are due, or without due times by `concurrency` clients in a closed loop.

        With due times `concurrency` bounds what is open at once, and waiting for a place counts. After
        `duration_s` no call is sent any more; those on their way are waited for. When it is cancelled it
        hangs up and returns what has been answered; with no answer it is CancelledError.
        """
        raise_file_limit()
        prepared: Iterator[tuple[Call, bytes | None]]
        if isinstance(calls, list):  # all work that can be done before the start is
            prepared = iter([(call, self.target.request(call)) for call in calls])
        else:
            prepared = ((call, None) for call in calls)
        first = next(prepared, None)
        if first is None:
            raise ConfigError("there is no call to send")
        gc.collect()
        gc.freeze()
        try:
            cpu_before = _cpu_s()
            self._started = started = time.perf_counter()
            self._deadline = started + duration_s if duration_s is not None else float("inf")
            is_cut = False
            try:
                if first[0].at_s is None:
                    await self._closed_loop(first, prepared, concurrency or 1)
                else:
                    await self._open_loop(first, prepared, concurrency)
            except asyncio.CancelledError:
                if not self.answers:
                    raise
                is_cut = True
            elapsed_s = max(answer.end_s for answer in self.answers)
            cpu_s = _cpu_s() - cpu_before
        finally:
            gc.unfreeze()
            self._connections.close()
        return Load(self.answers, elapsed_s, cpu_s, self._connections.num_opened, started, is_cut)

    async def _closed_loop(
        self, first: tuple[Call, bytes | None], rest: Iterator[tuple[Call, bytes | None]], concurrency: int
    ) -> None:
        pending = _chained(first, rest)

        async def client() -> None:
            for call, request in pending:
                request = request or self.target.request(call)
                now = time.perf_counter()
                if now >= self._deadline:
                    return
                await self._perform(call, request, now - self._started)

        await asyncio.gather(*(client() for _ in range(concurrency)))

    async def _open_loop(
        self, first: tuple[Call, bytes | None], rest: Iterator[tuple[Call, bytes | None]], most: int | None
    ) -> None:
        places = asyncio.Semaphore(most) if most else None

        async def perform(call: Call, request: bytes, due_s: float) -> None:
            if places is None:
                await self._perform(call, request, due_s)
            else:
                async with places:
                    await self._perform(call, request, due_s)

        async with asyncio.TaskGroup() as tasks:
            for call, request in _chained(first, rest):
                assert call.at_s is not None
                request = request or self.target.request(call)
                due = self._started + call.at_s
                if due >= self._deadline:
                    break
                delay = due - time.perf_counter()
                if delay > 0:
                    await asyncio.sleep(delay)
                tasks.create_task(perform(call, request, call.at_s))

    async def _perform(self, call: Call, request: bytes, due_s: float) -> None:
        answer = Answer(due_s, asked_tokens=call.output_len)
        self.num_open += 1
        loop = asyncio.get_running_loop()
        try:
            connection = self._connections.idle()
            while True:
                exchange = _Exchange(self.target, call, answer, self._started)
                timer = loop.call_later(self.target.timeout_s, exchange.time_out)
                try:
                    if connection is None:
                        async with asyncio.timeout(self.target.timeout_s):
                            connection = await self._connections.fresh()
                    answer.sent_s = time.perf_counter() - self._started
                    exchange.connection = connection
                    connection.send(request, exchange)
                    await exchange.done
                except asyncio.CancelledError:
                    if connection is not None:
                        connection.hang_up()
                    raise
                except (OSError, TimeoutError) as error:
                    kind = "connect timeout" if isinstance(error, TimeoutError) else "connect failed"
                    answer.error, answer.detail = kind, f"{type(error).__name__}: {error}"
                    answer.end_s = time.perf_counter() - self._started
                finally:
                    timer.cancel()
                if connection is None or not (answer.error and connection.was_stale):
                    break
                connection = None  # the server closed it while it was idle: ask again on a new one
                answer.error = answer.detail = ""
        finally:
            self.num_open -= 1
        self.answers.append(answer)


def _chained(
    first: tuple[Call, bytes | None], rest: Iterator[tuple[Call, bytes | None]]
) -> Iterator[tuple[Call, bytes | None]]:
    yield first
    yield from rest


async def only_model(target: Target) -> str:
    """The first model that the server lists. ServerError when it lists none."""
    status, content, _ = await get(target.endpoint, "/models", target.all_headers)
    if status != 200:
        detail = content[:200].decode(errors="replace")
        way_out = "give --api-key" if status == 401 else "give --model"
        raise ServerError(f"GET {target.endpoint.url}/models gave {status}: {detail}; {way_out}")
    try:
        name = json.loads(content)["data"][0]["id"]
    except (ValueError, KeyError, TypeError, IndexError):
        name = None
    if not isinstance(name, str):
        raise ServerError(f"{target.endpoint.url}/models lists no model; name it with --model")
    return name


def run_load(
    target: Target,
    calls: Iterable[Call],
    *,
    concurrency: int | None = None,
    duration_s: float | None = None,
    watch: Callable[[LoadGenerator], None] | None = None,
) -> Load:
    """`LoadGenerator.run` in an event loop of its own; `watch` is called once a second meanwhile."""

    async def run() -> Load:
        generator = LoadGenerator(target)
        watcher = asyncio.create_task(_each_second(watch, generator)) if watch else None
        try:
            return await generator.run(calls, concurrency=concurrency, duration_s=duration_s)
        finally:
            if watcher:
                watcher.cancel()

    return asyncio.run(run())


async def _each_second(watch: Callable[[LoadGenerator], None], generator: LoadGenerator) -> None:
    while True:
        await asyncio.sleep(1.0)
        watch(generator)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def raise_file_limit() -> None:
    """As many open files as the system lets this process have: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard and sys.platform != "darwin":  # macOS refuses its own hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
