"""A server that costs next to nothing: it shows what the load generator itself adds.

It answers completions and chat completions with `max_tokens` pieces, one to every open stream at each tick,
as an engine's step does. Each piece of text is the time at which it was written (`time.perf_counter()`), so
that a client on the same machine can tell how late it heard of it. Run as ``python -m
octavo.bench.serve_null``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator

from octavo.bench.serve import raise_file_limit

_LENGTH = re.compile(rb"content-length:\s*(\d+)", re.IGNORECASE)
_TICK_AHEAD_S = 1e-4


class _Stream:
    """One answer under way on a connection."""

    def __init__(self, protocol: _NullProtocol, body: dict[str, object], is_chat: bool) -> None:
        self.protocol = protocol
        self.num_left = self.num_tokens = int(str(body.get("max_tokens") or 16))
        self.is_stream = bool(body.get("stream"))
        self.is_chat = is_chat
        if self.is_stream:
            protocol.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            )

    def tick(self) -> bool:
        """One more token; whether the answer is complete."""
        self.num_left -= 1
        is_last = self.num_left <= 0
        reason = '"length"' if is_last else "null"
        text = f"{time.perf_counter():.7f} "
        if self.is_stream:
            part = f'"delta": {{"content": "{text}"}}' if self.is_chat else f'"text": "{text}"'
            self._event(f'{{"choices": [{{"index": 0, {part}, "finish_reason": {reason}}}]}}')
            if is_last:
                self._event(f'{{"choices": [], "usage": {self._usage()}}}')
                self._event("[DONE]")
                self.protocol.write(b"0\r\n\r\n")
        elif is_last:
            part = f'"message": {{"content": "{text}"}}' if self.is_chat else f'"text": "{text}"'
            choice = f'{{"index": 0, {part}, "finish_reason": {reason}}}'
            self.protocol.respond("200 OK", f'{{"choices": [{choice}], "usage": {self._usage()}}}')
        return is_last

    def _usage(self) -> str:
        return f'{{"prompt_tokens": 1, "completion_tokens": {self.num_tokens}}}'

    def _event(self, data: str) -> None:
        event = f"data: {data}\n\n".encode()
        self.protocol.write(b"%x\r\n%b\r\n" % (len(event), event))


class _NullProtocol(asyncio.Protocol):
    def __init__(self, server: NullServer) -> None:
        self._server = server
        self._buffer = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def respond(self, status: str, body: str) -> None:
        content = body.encode()
        head = (
            f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        self.write(head.encode() + content)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        length = _LENGTH.search(head)
        size = int(length[1]) if length else 0
        if len(rest) < size:
            return
        self._buffer = rest[size:]
        if head.startswith(b"POST"):
            body = json.loads(rest[:size])
            self._server.streams.append(_Stream(self, body, is_chat=b"/chat/" in head.split(b"\r\n")[0]))
        elif b"/models" in head.split(b"\r\n")[0]:
            self.respond("200 OK", '{"object": "list", "data": [{"id": "null", "object": "model"}]}')
        else:
            self.respond("200 OK", "{}")


class NullServer:
    """Gives every open stream a token each `interval_s`, to one of `num_groups` after the other."""

    def __init__(self, interval_s: float, num_groups: int = 1) -> None:
        self.interval_s = interval_s
        self.num_groups = num_groups
        self.streams: list[_Stream] = []

    async def serve(self, port: int) -> None:
        """Listens on 127.0.0.1 and prints the port; runs until it is cancelled."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _NullProtocol(self), "127.0.0.1", port, backlog=1024)
        print(server.sockets[0].getsockname()[1], flush=True)
        async with server:
            due = loop.time()
            for turn in itertools.cycle(range(self.num_groups)):
                due = max(due + self.interval_s / self.num_groups, loop.time() + _TICK_AHEAD_S)
                await asyncio.sleep(due - loop.time())
                ended = {
                    id(s) for s in self.streams[turn :: self.num_groups] if not s.protocol.is_open or s.tick()
                }
                if ended:
                    self.streams = [s for s in self.streams if id(s) not in ended]


@contextlib.contextmanager
def running(interval_s: float, num_groups: int = 1) -> Iterator[str]:
    """A null server in a process of its own; its base URL."""
    options = ("--interval", str(interval_s), "--groups", str(num_groups))
    command = (sys.executable, "-m", "octavo.bench.serve_null", *options)
    # A session of its own: Ctrl-C is for the load generator, which then ends it.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
        finally:
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m octavo.bench.serve_null", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="0: any that is free; it is printed")
    parser.add_argument("--interval", type=float, default=0.02, help="seconds between tokens")
    parser.add_argument("--groups", type=int, default=1, help="spread the streams' tokens over the interval")
    options = parser.parse_args()
    raise_file_limit()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(NullServer(options.interval, options.groups).serve(options.port))


if __name__ == "__main__":
    main()
