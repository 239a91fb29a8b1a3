"""Streams whose pieces go straight to the connection: the same bytes, the same care for slow clients."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import re
import socket
import sys
import weakref
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.chat import CHATML, QWEN3_STYLE, tokenizer_with
from helpers.live import BIG_CARD
from helpers.serve import STATS, Answer, ScriptedLink, eventually, run, run_timeless, scripted_engine
from uvicorn.protocols.http import httptools_impl
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from octavo.errors import EngineError
from octavo.outputs import CompletionOutput, RequestMetrics, RequestOutput, StreamChunk
from octavo.serve import direct
from octavo.serve import run as serving
from octavo.serve.app import create_app
from octavo.serve.direct import DirectWriter
from octavo.serve.generation import Generation
from octavo.serve.messages import Item, News, Tokens
from octavo.serve.metrics import Metrics
from octavo.serve.run import _Uvicorn, _uvicorn_config, listen
from octavo.serve.settings import ServeSettings
from octavo.serve.sse import GenerationStream

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXTS = ["Hel", 'lo "you"\n', "", "é\\🦉", "\u2028\x7f"]


class Served:
    """The whole application at a port, over an engine that says what `token` and `end` tell it to."""

    def __init__(self, link: ScriptedLink, address: tuple[str, int], writes: list[bytes]) -> None:
        self.link = link
        self.writes = writes
        """What was written directly."""
        self._address = address
        self.writers: list[asyncio.StreamWriter] = []

    async def ask(
        self, path: str, body: dict[str, Any], limit: int = 2**16
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A stream that the engine has accepted."""
        data = json.dumps({**body, "stream": True}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**14)  # or all of a long answer may fit
        await asyncio.get_running_loop().sock_connect(sock, self._address)
        reader, writer = await asyncio.open_connection(sock=sock, limit=limit)
        self.writers.append(writer)
        num_before = len(self.link.submitted)
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        await eventually(lambda: len(self.link.submitted) > num_before)
        return reader, writer

    def token(self, *texts: str, at: int = 0) -> None:
        """A step with one more token; several texts are steps that come together."""
        ids = [self.link.submitted[at].request_id]
        news = [News([], STATS, 0.001, 1, (), Tokens(ids, [text], [0])) for text in texts]
        self.link.engine.receive(*news)

    def end(self, at: int = 0) -> None:
        request_id = self.link.submitted[at].request_id
        choice = CompletionOutput(0, "", [0] * 5, "stop")
        output = RequestOutput(request_id, None, [], [choice], 0, RequestMetrics(0.0, 0.0, 0.0, 0.0, 0))
        news = News([Item(request_id, [StreamChunk(0, "!", [0], "stop")], output)], STATS, 0.001, 1)
        self.link.engine.receive(news)


@contextlib.asynccontextmanager
async def served(
    monkeypatch: pytest.MonkeyPatch,
    protocol: type = HttpToolsProtocol,
    template: str = CHATML,
    **options: Any,
) -> AsyncIterator[Served]:
    writes: list[bytes] = []
    write = DirectWriter.write

    def noted(self: DirectWriter, data: bytes) -> bool:
        is_written = write(self, data)
        if is_written:
            writes.append(data)
        return is_written

    monkeypatch.setattr(DirectWriter, "write", noted)
    monkeypatch.setattr(serving, "AutoHTTPProtocol", protocol)
    settings = ServeSettings(port=0, **options)
    metrics = Metrics()
    engine, link = await scripted_engine(
        Answer(gate=asyncio.Event()), settings, listener=metrics, tokenizer=tokenizer_with(default=template),
        card=BIG_CARD,
    )  # fmt: skip
    with listen(settings) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**14)
        http = _Uvicorn(_uvicorn_config(create_app(engine, settings, metrics), settings))
        running = asyncio.create_task(http.serve([listener]))
        server = Served(link, listener.getsockname(), writes)
        try:
            yield server
        finally:
            for writer in server.writers:
                writer.close()
            http.should_exit = True
            await engine.close()
            await running


async def chunk_of(reader: asyncio.StreamReader) -> bytes:
    """The next chunk of a body, as it is on the wire."""
    size = await reader.readuntil(b"\r\n")
    return size + await reader.readexactly(int(size, 16) + 2)


def chunked(events: list[str]) -> bytes:
    """A body in which each of these was sent by itself."""
    return b"".join(b"%x\r\n%b\r\n" % (len(event.encode()), event.encode()) for event in events)


CHAT_HEAD = (
    'data: {"id":"ID","object":"chat.completion.chunk","created":TIME,"model":"scripted",'
    '"choices":[{"index":0,"delta":'
)
CHAT_EVENTS = [
    CHAT_HEAD + '{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"usage":null}\n\n'
    + CHAT_HEAD + '{"content":"Hel"},"logprobs":null,"finish_reason":null}],"usage":null}\n\n',
    *(
        f'{CHAT_HEAD}{{"content":{text}}},"logprobs":null,"finish_reason":null}}],"usage":null}}\n\n'
        for text in ('"lo \\"you\\"\\n"', '"é\\\\🦉"', '"\u2028\x7f"')
    ),
    CHAT_HEAD + '{"content":"!"},"logprobs":null,"finish_reason":null}],"usage":null}\n\n'
    + CHAT_HEAD + '{},"logprobs":null,"finish_reason":"stop"}],"usage":null}\n\n'
    + 'data: {"id":"ID","object":"chat.completion.chunk","created":TIME,"model":"scripted","choices":[],'
    '"usage":{"prompt_tokens":NUM,"completion_tokens":5,"total_tokens":NUM,"prompt_tokens_details":'
    '{"cached_tokens":0}}}\n\ndata: [DONE]\n\n',
]  # fmt: skip
COMPLETION_EVENTS = [
    'data: {"id":"ID","object":"text_completion","created":TIME,"model":"scripted",'
    f'"choices":[{{"index":0,"text":{text},"logprobs":null,"finish_reason":{end}}}]}}\n\n'
    for text, end in (
        ('"Hel"', "null"), ('"lo \\"you\\"\\n"', "null"), ('"é\\\\🦉"', "null"), ('"\u2028\x7f"', "null"),
        ('"!"', '"stop"'),
    )
]  # fmt: skip
COMPLETION_EVENTS[-1] += "data: [DONE]\n\n"
ASKED = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}], "stream_options": {"include_usage": True}},
    COMPLETIONS: {"prompt": "ab"},
}


async def streamed(
    monkeypatch: pytest.MonkeyPatch, path: str, protocol: type = HttpToolsProtocol
) -> tuple[bytes, list[bytes]]:
    """The body of a stream of `TEXTS`, and what of it was written directly."""
    async with served(monkeypatch, protocol) as server:
        reader, _ = await server.ask(path, ASKED[path])
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        assert head.startswith("HTTP/1.1 200 ")
        assert "transfer-encoding: chunked\r\n" in head.lower()
        body = b""
        for text in TEXTS:
            server.token(text)
            body += await chunk_of(reader) if text else b""
        server.end()
        body += await reader.readuntil(b"\r\n0\r\n\r\n")
        return body, list(server.writes)


@pytest.mark.parametrize("protocol", [H11Protocol, HttpToolsProtocol])
@pytest.mark.parametrize(("path", "events"), [(CHAT, CHAT_EVENTS), (COMPLETIONS, COMPLETION_EVENTS)])
def test_the_bytes_of_a_stream(path, events, protocol, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "octavo.serve.requests")

    body, writes = run(streamed(monkeypatch, path, protocol))
    assert _anonymous(body) == _anonymous(chunked(events) + b"0\r\n\r\n")
    # The first and the last go through `send`, all between do not.
    assert [_anonymous(one) for one in writes] == (
        [_anonymous(one.encode()) for one in events[1:-1]] if protocol is HttpToolsProtocol else []
    )
    (told,) = (record.facts for record in caplog.records if getattr(record, "facts", {}).get("status"))
    sizes = [int(size, 16) for size in re.findall(rb"(?:^|\r\n)([0-9a-f]+)\r\n", body)]
    assert told["response_bytes"] == sum(sizes)
    assert told["first_byte_s"] > 0


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("RequestResponseCycle", "flow"),
        ("RequestResponseCycle", "transport"),
        ("RequestResponseCycle", "disconnected"),
        ("RequestResponseCycle", "chunked_encoding"),
        ("FlowControl", "write_paused"),
    ],
)
def test_a_uvicorn_that_names_something_otherwise_streams_the_same_bytes(kind, name, monkeypatch):
    class Renamed(getattr(httptools_impl, kind)):
        def __getattribute__(self, attribute: str) -> Any:
            if attribute == name and sys._getframe(1).f_code.co_filename == direct.__file__:
                raise AttributeError(attribute)
            return super().__getattribute__(attribute)

    monkeypatch.setattr(httptools_impl, kind, Renamed)
    body, writes = run(streamed(monkeypatch, COMPLETIONS))
    assert _anonymous(body) == _anonymous(chunked(COMPLETION_EVENTS) + b"0\r\n\r\n")
    assert writes == []


def test_a_request_that_has_ended_is_left_to_nobody(monkeypatch):
    cycles = []

    class Noted(httptools_impl.RequestResponseCycle):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            cycles.append(weakref.ref(self))

    monkeypatch.setattr(httptools_impl, "RequestResponseCycle", Noted)

    async def test():
        async with served(monkeypatch) as server:
            reader, writer = await begun(server)
            server.token("b")
            await chunk_of(reader)
            server.end()
            await reader.readuntil(b"\r\n0\r\n\r\n")
            assert len(server.writes) == 1
            for _ in range(2):
                writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                await reader.readuntil(b"ready")
            # The connection itself keeps the last one.
            await eventually(lambda: [cycle() is None for cycle in cycles] == [True, True, False])

    gc.disable()
    try:
        run(test())
    finally:
        gc.enable()


def _anonymous(data: bytes) -> bytes:
    """Without what is new each time, and with no sizes, which go by it."""
    data = re.sub(rb'"id":"[\w-]+"', b'"id":"ID"', data)
    data = re.sub(rb'"created":\d+', b'"created":TIME', data)
    data = re.sub(rb'"(prompt|total)_tokens":\d+', rb'"\1_tokens":NUM', data)
    return re.sub(rb"(^|\r\n)[1-9a-f][0-9a-f]*\r\n", rb"\1SIZE\r\n", data)


async def begun(server: Served) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A completion stream whose first piece, ``a``, has come."""
    reader, writer = await server.ask(COMPLETIONS, ASKED[COMPLETIONS], limit=2**12)
    await reader.readuntil(b"\r\n\r\n")
    server.token("a")
    await chunk_of(reader)
    return reader, writer


def text_of(body: bytes) -> str:
    events = re.findall(rb'^data: (\{.*"choices".*)$', body, re.MULTILINE)
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def test_what_comes_while_the_client_takes_nothing_is_joined_and_complete(monkeypatch):
    async def test():
        async with served(monkeypatch) as server:
            reader, _ = await begun(server)
            texts = [chr(ord("a") + i % 26) * 4000 for i in range(1000)]
            for text in texts:
                server.token(text)
                await asyncio.sleep(0)
            num_direct = len(server.writes)
            server.end()
            body = b""
            while not body.endswith(b"\r\n0\r\n\r\n"):
                body += await reader.read(2**20)
            assert text_of(body) == "".join(texts) + "!"
            assert 0 < num_direct < 900
            assert body.count(b"data: {") < 900
            assert not server.link.aborted

    run(test())


def test_a_client_that_leaves_between_direct_pieces_is_aborted(monkeypatch):
    async def test():
        async with served(monkeypatch) as server:
            reader, writer = await begun(server)
            server.token("b")
            assert text_of(await chunk_of(reader)) == "b"
            writer.close()
            await eventually(lambda: server.link.aborted)
            server.token("c")
            assert len(server.writes) == 1

    run(test())


def test_steps_that_came_together_are_one_direct_piece(monkeypatch):
    async def test():
        async with served(monkeypatch) as server:
            reader, _ = await begun(server)
            server.token("b", "c", "d")
            assert text_of(await chunk_of(reader)) == "bcd"
            assert len(server.writes) == 1

    run(test())


def test_text_that_is_not_all_content_goes_directly_too(monkeypatch):
    async def test():
        async with served(monkeypatch, template=QWEN3_STYLE) as server:
            reader, _ = await server.ask(CHAT, {"messages": [{"role": "user", "content": "Hi"}]})
            await reader.readuntil(b"\r\n\r\n")
            deltas = []
            for text in ("<think>", "Hm", "m.", "</think>", "So", " it"):
                server.token(text)
                if "think" not in text:
                    events = re.findall(rb"^data: (.*)$", await chunk_of(reader), re.MULTILINE)
                    deltas += [json.loads(event)["choices"][0]["delta"] for event in events]
            assert deltas[1:] == [
                {"reasoning_content": "Hm"},
                {"reasoning_content": "m."},
                {"content": "So"},
                {"content": " it"},
            ]
            assert len(server.writes) == 3

    run(test())


def test_the_first_text_of_a_choice_comes_with_its_role_when_others_have_begun(monkeypatch):
    async def test():
        async with served(monkeypatch) as server:
            reader, _ = await server.ask(CHAT, {**ASKED[CHAT], "n": 2})
            await reader.readuntil(b"\r\n\r\n")
            server.link.tell(server.link.submitted[0].request_id, [StreamChunk(1, "b", [0])])
            await chunk_of(reader)
            told = []
            for text in "ac":
                server.token(text)
                events = re.findall(rb"^data: (.*)$", await chunk_of(reader), re.MULTILINE)
                told += [json.loads(event)["choices"][0] for event in events]
            assert [(one["index"], one["delta"]) for one in told] == [
                (0, {"role": "assistant", "content": ""}),
                (0, {"content": "a"}),
                (0, {"content": "c"}),
            ]

    run(test())


def connection(written: list[bytes]) -> SimpleNamespace:
    """As much of uvicorn's cycle as is needed."""
    return SimpleNamespace(
        scope={"type": "http", "state": {}},
        flow=SimpleNamespace(write_paused=False),
        transport=SimpleNamespace(write=written.append),
        disconnected=False,
        chunked_encoding=True,
    )


def test_nothing_is_written_where_send_must_decide():
    written: list[bytes] = []
    cycle = connection(written)
    assert DirectWriter.find(cycle.scope) is None
    assert DirectWriter.find({"type": "http"}) is None
    DirectWriter.offer(cycle)
    direct = DirectWriter.find(cycle.scope)
    assert direct.write(b"a" * 300)
    cycle.flow.write_paused = True
    assert not direct.write(b"b")
    cycle.flow.write_paused, cycle.disconnected = False, True
    assert not direct.write(b"b")
    cycle.disconnected, cycle.chunked_encoding = False, False
    assert not direct.write(b"b")
    assert written == [b"12c\r\n" + b"a" * 300 + b"\r\n"]
    assert direct.num_bytes == 300


class Failing:
    """A writer that cannot tell an ``!``."""

    def begin(self) -> bytes:
        return b"<"

    def piece(self, place: int, chunk: StreamChunk) -> bytes:
        return chunk.text.encode()

    def text(self, place: int, text: str) -> bytes | None:
        return b"%d" % (1 // (text != "!"))

    def end(self, outputs: list[RequestOutput]) -> bytes:
        return b">"

    def failed(self, error: Exception) -> bytes:
        return b"failed"


class Played:
    """A stream to a connection that is none, whose first piece, ``0``, has come. `sent` went by `send`, which
    waits while `takes` is not set; `written` did not.
    """

    def __init__(self) -> None:
        self.sent: list[bytes | None] = []
        self.written: list[bytes] = []
        self.cycle = connection(self.written)
        self.takes = asyncio.Event()
        self.takes.set()
        self.generation = Generation("r", None, [1], lambda one: one.fail(EngineError("aborted")))

    async def begin(self, slow_reader_s: float = 60.0) -> asyncio.Task[None]:
        DirectWriter.offer(self.cycle)
        stream = GenerationStream(Failing(), [self.generation], slow_reader_s)
        serving = asyncio.create_task(stream(self.cycle.scope, asyncio.Event().wait, self._send))
        await eventually(lambda: self.sent == [None, b"<"])
        self.generation.put_token("0", 0)
        self.generation.wake()
        return serving

    async def _send(self, message: dict[str, Any]) -> None:
        await self.takes.wait()
        self.sent.append(message.get("body"))


def test_a_text_that_cannot_be_told_ends_its_stream_and_hurts_nobody_else():
    async def test():
        played = Played()
        serving = await played.begin()
        generation = played.generation
        assert generation.on_text("a")
        assert generation.on_text("!")
        assert not generation.on_text("b"), "the stream is ending"
        await serving
        assert played.written == [b"1\r\n1\r\n"]
        assert played.sent == [None, b"<", b"0", b"failed"]
        assert generation.on_text is None
        assert generation.error is not None

    run_timeless(test())


def test_a_client_that_takes_no_direct_pieces_is_given_up(caplog):
    async def test():
        played = Played()
        serving = await played.begin(slow_reader_s=0.1)
        generation = played.generation
        assert generation.on_text("a")
        played.takes.clear()
        played.cycle.flow.write_paused = True
        assert generation.on_text("b"), "it is the send's now, which waits"
        assert not generation.on_text("c"), "the stream's task waits for the client"
        await serving
        assert asyncio.get_running_loop().time() == pytest.approx(0.1, abs=0.05)
        assert (played.sent, played.written) == ([None, b"<", b"0"], [b"1\r\n1\r\n"])
        assert generation.on_text is None
        assert generation.error is not None

    run_timeless(test())
    assert "took nothing for 0.1 s" in caplog.text
