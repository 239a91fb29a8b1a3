"""HTTP/1.1 as little as a load generator needs: one request at a time on a connection, pieces with their
times.

Bytes are stamped the moment the event loop hands them over and read afterwards, so that reading the news of
one stream does not make that of its neighbours look late.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from octavo.errors import ConfigError, OctavoError

MAX_HEAD_BYTES = 64 * 1024

SLICE_S = 0.0002
"""How long news may be read before the event loop looks for more of it, and so how late a stamp may be."""


class ServerError(OctavoError):
    """The server to be measured cannot be reached or does not answer as such a server does."""


class ResponseError(Exception):
    """The server's bytes are no HTTP/1.1 response."""


@dataclass(frozen=True)
class Endpoint:
    """Where requests go: ``http://127.0.0.1:8000/v1`` taken apart."""

    host: str
    port: int
    path: str
    is_tls: bool

    @classmethod
    def parse(cls, base_url: str) -> Endpoint:
        """`base_url` as OpenAI's clients take it, with or without ``/v1``; ConfigError when it is none."""
        try:
            parts = urlsplit(base_url if "://" in base_url else f"http://{base_url}")
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"base_url {base_url!r} is no address: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"base_url must look like http://127.0.0.1:8000/v1 or https://host/v1, got {base_url!r}"
            )
        is_tls = parts.scheme == "https"
        path = parts.path.rstrip("/") or "/v1"
        return cls(parts.hostname, port or (443 if is_tls else 80), path, is_tls)

    @property
    def netloc(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.is_tls else 80) else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{'https' if self.is_tls else 'http'}://{self.netloc}{self.path}"

    def head(self, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> bytes:
        """The bytes before the body. `path` is below the endpoint's own, or from the root with ``//``."""
        target = path[1:] if path.startswith("//") else self.path + path
        lines = [
            f"{method} {target} HTTP/1.1",
            f"Host: {self.netloc}",
            "Accept-Encoding: identity",
            "User-Agent: octavo-bench-serve",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        if method == "POST":
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class Receiver(Protocol):
    """Who a response is for. `now` is `time.perf_counter()` at the arrival of the bytes."""

    def head(self, status: int, headers: dict[str, str]) -> None: ...
    def body(self, data: bytes, now: float) -> None: ...
    def end(self, now: float) -> None: ...
    def lost(self, what: str, now: float) -> None: ...


class ResponseReader:
    """Takes one response apart as its bytes come; `is_complete` afterwards, `can_be_reused` says for what."""

    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver
        self.is_complete = False
        self.has_begun = False
        self.can_be_reused = False
        self._buffer = b""
        self._remaining: int | None = None  # bytes of the body, or of this chunk of it
        self._read: Callable[[float], bool] = self._read_head

    def feed(self, data: bytes, now: float) -> None:
        """Raises ResponseError when the bytes make no sense."""
        self.has_begun = True
        self._buffer = self._buffer + data if self._buffer else data
        while not self.is_complete and self._buffer and self._read(now):
            pass
        if self.is_complete and self._buffer:
            raise ResponseError("bytes after the end of the response")

    def feed_eof(self, now: float) -> bool:
        """The connection ended; whether that is where the response ends."""
        if not self.is_complete and self._read == self._read_rest:
            self._finish(now)
        return self.is_complete

    def _read_head(self, now: float) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise ResponseError("the header does not end")
            return False
        first, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
        self._buffer = self._buffer[end + 4 :]
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
            raise ResponseError(f"no status line: {first[:80]!r}")
        status = int(rest[:3])
        if status < 200:  # 100 Continue and the like; the response is still to come
            return True
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        self.can_be_reused = version == "HTTP/1.1" and headers.get("connection", "").lower() != "close"
        self.receiver.head(status, headers)
        if "chunked" in headers.get("transfer-encoding", "").lower():
            self._read = self._read_chunk_size
        elif re.fullmatch("[0-9]{1,18}", headers.get("content-length", "")):
            self._remaining = int(headers["content-length"])
            self._read = self._read_sized
            if not self._remaining:
                self._finish(now)
        else:
            self.can_be_reused = False
            self._read = self._read_rest
        return True

    def _read_rest(self, now: float) -> bool:
        data, self._buffer = self._buffer, b""
        self.receiver.body(data, now)
        return False

    def _read_sized(self, now: float) -> bool:
        assert self._remaining is not None
        data, self._buffer = self._buffer[: self._remaining], self._buffer[self._remaining :]
        self._remaining -= len(data)
        self.receiver.body(data, now)
        if not self._remaining:
            self._finish(now)
        return True

    def _read_chunk_size(self, now: float) -> bool:
        end = self._buffer.find(b"\r\n")
        if end < 0 and len(self._buffer) < MAX_HEAD_BYTES:
            return False
        size = re.match(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;.*)?\r\n", self._buffer)
        if size is None:
            raise ResponseError(f"no chunk size: {self._buffer[:80]!r}")
        self._remaining = int(size[1], 16)
        self._buffer = self._buffer[end + 2 :]
        self._read = self._read_chunk if self._remaining else self._read_trailer
        return True

    def _read_chunk(self, now: float) -> bool:
        assert self._remaining is not None
        if self._remaining:
            data, self._buffer = self._buffer[: self._remaining], self._buffer[self._remaining :]
            self._remaining -= len(data)
            self.receiver.body(data, now)
            return True
        if len(self._buffer) < 2:
            return False
        if self._buffer[:2] != b"\r\n":
            raise ResponseError("a chunk is longer than it said")
        self._buffer = self._buffer[2:]
        self._read = self._read_chunk_size
        return True

    def _read_trailer(self, now: float) -> bool:
        line, found, rest = self._buffer.partition(b"\r\n")
        if not found:
            return False
        self._buffer = rest
        if not line:
            self._finish(now)
        return True

    def _finish(self, now: float) -> None:
        self.is_complete = True
        self.receiver.end(now)


class Connection(asyncio.BufferedProtocol):
    """One connection; belongs to its `Connections`, which it tells when it is free again or gone.

    `was_stale`: it was used before and ended without a byte of the next response; it had been closed idle.
    """

    def __init__(self, owner: Connections) -> None:
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self._reader: ResponseReader | None = None
        self.is_open = False
        self.was_stale = False
        self.num_requests = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.is_open = True

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._owner.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._owner.note(self, bytes(self._owner.buffer[:nbytes]), time.perf_counter())

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._owner.note(self, exc, time.perf_counter())

    def send(self, request: bytes, receiver: Receiver) -> None:
        """Send one request; its response goes to `receiver`."""
        assert self._transport is not None
        self._reader = ResponseReader(receiver)
        self.num_requests += 1
        self._transport.write(request)

    def hang_up(self) -> None:
        """Close now, whatever the server still has to say; the receiver hears no more."""
        self._reader = None
        if self._transport is not None:
            self._transport.abort()

    def read(self, news: bytes | Exception | None, now: float) -> None:
        """Take in what `buffer_updated` (bytes) or `connection_lost` (an error or None) noted."""
        reader = self._reader
        if reader is None:
            return
        if isinstance(news, bytes):
            try:
                reader.feed(news, now)
            except ResponseError as error:
                self.hang_up()
                reader.receiver.lost(f"bad response: {error}", now)
                return
            if reader.is_complete:
                self._reader = None
                if reader.can_be_reused and self.is_open:
                    self._owner.release(self)
                else:
                    self.hang_up()
        elif not reader.feed_eof(now):
            self.was_stale = self.num_requests > 1 and not reader.has_begun
            reader.receiver.lost(type(news).__name__ if news else "closed by the server", now)
            self._reader = None


class Connections:
    """Connections to one endpoint, reused when they are idle."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.num_opened = 0
        self.buffer = memoryview(bytearray(64 * 1024))  # for all: it is emptied before the next one reads
        self._idle: deque[Connection] = deque()
        self._inbox: deque[tuple[Connection, bytes | Exception | None, float]] = deque()
        self._tls = ssl.create_default_context() if endpoint.is_tls else None

    def note(self, connection: Connection, news: bytes | Exception | None, now: float) -> None:
        if not self._inbox:
            asyncio.get_running_loop().call_soon(self._read_news)
        self._inbox.append((connection, news, now))

    def _read_news(self) -> None:
        """Reads for a slice of time; between slices the loop stamps what has arrived."""
        until = time.perf_counter() + SLICE_S
        while self._inbox:
            connection, news, now = self._inbox.popleft()
            connection.read(news, now)
            if time.perf_counter() > until:
                break
        if self._inbox:
            asyncio.get_running_loop().call_soon(self._read_news)

    def idle(self) -> Connection | None:
        """A connection that is open and free, if there is one."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def fresh(self) -> Connection:
        """A new connection. OSError when there is none to be had."""
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: Connection(self), self.endpoint.host, self.endpoint.port, ssl=self._tls
        )
        self.num_opened += 1
        return connection

    def release(self, connection: Connection) -> None:
        self._idle.append(connection)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().hang_up()


class _Body:
    """Collects a whole response."""

    def __init__(self) -> None:
        self.done: asyncio.Future[tuple[int, bytes, float]] = asyncio.get_running_loop().create_future()
        self.status, self.content = 0, b""
        self.headers: dict[str, str] = {}

    def head(self, status: int, headers: dict[str, str]) -> None:
        self.status, self.headers = status, headers

    def body(self, data: bytes, now: float) -> None:
        self.content += data

    def end(self, now: float) -> None:
        if not self.done.done():
            self.done.set_result((self.status, self.content, now))

    def lost(self, what: str, now: float) -> None:
        if not self.done.done():
            self.done.set_exception(ServerError(f"the server ended the connection: {what}"))


async def get(
    endpoint: Endpoint, path: str, headers: dict[str, str], timeout_s: float = 10.0
) -> tuple[int, bytes, float]:
    """Status, body and seconds of one GET on a connection of its own. `path`: see `Endpoint.head`.

    ServerError when there is no answer within `timeout_s`.
    """
    connections = Connections(endpoint)
    started = time.perf_counter()
    connection = None
    try:
        async with asyncio.timeout(timeout_s):
            connection = await connections.fresh()
            receiver = _Body()
            connection.send(endpoint.head("GET", path, headers), receiver)
            status, content, now = await receiver.done
    except (OSError, TimeoutError) as error:
        raise ServerError(
            f"no answer from {endpoint.url}: {type(error).__name__}: {error}; is the server running there?"
        ) from error
    finally:
        if connection is not None:
            connection.hang_up()
    return status, content, now - started
