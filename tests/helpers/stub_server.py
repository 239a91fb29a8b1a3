"""A server whose answer to each request is a script: bytes to send, pauses (seconds, or until a function is
true), and how the connection ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

HANG_UP, RESET, WAIT_FOR_EOF = "hang up", "reset", "wait for eof"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"

Script = list[bytes | float | str | Callable[[], bool]]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(content: dict[str, Any] | str) -> bytes:
    text = content if isinstance(content, str) else json.dumps(content)
    return chunk(f"data: {text}\n\n".encode())


def piece(text: str, reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": reason}]})


def usage(prompt: int, completion: int, cached: int = 0) -> bytes:
    details = {"cached_tokens": cached}
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details}
    return event({"choices": [], "usage": counts})


def whole(status: str, body: bytes, kind: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def answer(*pieces: str) -> Script:
    return [HEAD, *map(piece, pieces), usage(5, len(pieces), 2), event("[DONE]"), END]


@dataclass
class StubServer:
    """What it was asked: `requests` of (path, headers, body), and clients gone early."""

    script: Callable[[str, dict[str, Any]], Script]
    port: int = 0
    requests: list[tuple[str, dict[str, str], dict[str, Any]]] = field(default_factory=list)
    num_connections: int = 0
    num_lost: int = 0
    lost: threading.Event = field(default_factory=threading.Event)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                first, *lines = head.strip().split("\r\n")
                headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                path = first.split(" ")[1]
                content = json.loads(body) if body else {}
                self.requests.append((path, headers, content))
                for action in self.script(path, content):
                    if callable(action):
                        while not action():
                            await asyncio.sleep(0.001)
                    elif isinstance(action, float):
                        await asyncio.sleep(action)
                    elif isinstance(action, bytes):
                        writer.write(action)
                        await writer.drain()
                    elif action == WAIT_FOR_EOF:
                        await reader.read()
                        raise ConnectionResetError
                    else:
                        if action == RESET:
                            writer.transport.abort()
                        return
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError) as error:
            if isinstance(error, ConnectionError):
                self.num_lost += 1
                self.lost.set()
        finally:
            writer.close()


@contextlib.contextmanager
def stub_server(script: Callable[[str, dict[str, Any]], Script]) -> Iterator[StubServer]:
    """Runs in a thread. `script(path, body)` is asked for every request."""
    stub = StubServer(script)
    loop = asyncio.new_event_loop()
    is_up = threading.Event()

    async def run() -> None:
        server = await asyncio.start_server(stub._serve, "127.0.0.1", 0)
        stub.port = server.sockets[0].getsockname()[1]
        is_up.set()
        with contextlib.suppress(asyncio.CancelledError):
            await server.serve_forever()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    task = loop.create_task(run())
    thread = threading.Thread(target=lambda: loop.run_until_complete(task))
    thread.start()
    assert is_up.wait(60)
    try:
        yield stub
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(60)
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
