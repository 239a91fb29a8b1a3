"""Messages over a socket pair between the front (asyncio, never blocks) and the engine process (one thread).

Each message is eight bytes of length and `messages.encode` of it. The engine's side may block while sending:
the front always reads, so that is how a front that lags slows the engine down instead of filling memory.
"""

from __future__ import annotations

import asyncio
import selectors
import socket
import struct
from collections.abc import Callable
from typing import Any, Final, cast

from octavo.serve.messages import ToEngine, ToFront, decode, encode

_LENGTH: Final = struct.Struct("!Q")
_READ_BYTES: Final = 2**18


class _Frames:
    """Bytes in, whole messages out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        buffer = self._buffer
        buffer += data
        messages = []
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            end = start + _LENGTH.size + length
            if len(buffer) < end:
                break
            messages.append(decode(buffer[start + _LENGTH.size : end]))
            start = end
        del buffer[:start]
        return messages


class FrontGone(EOFError):
    """The front process has gone, and whoever hears it may go, too."""


class EngineChannel:
    """The engine process's end. Both ways raise FrontGone, and no other error of the socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._socket = sock
        self._frames = _Frames()
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)

    def send(self, message: ToFront) -> None:
        """May block; see above."""
        data = encode(message)
        try:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise FrontGone(str(error)) from error

    def receive(self, timeout_s: float | None) -> list[ToEngine]:
        """Everything that has arrived; waits for it up to `timeout_s` (None: for ever, 0: not at all)."""
        messages: list[ToEngine] = []
        while self._selector.select(0 if messages else timeout_s):
            try:
                data = self._socket.recv(_READ_BYTES)
            except OSError as error:
                raise FrontGone(str(error)) from error
            if not data:
                raise FrontGone("its end of the socket is closed")
            messages += self._frames.feed(data)
            if len(data) < _READ_BYTES and messages:
                break
        return messages

    def close(self) -> None:
        self._selector.close()
        self._socket.close()


class FrontChannel(asyncio.Protocol):
    """The front's end: `on_messages` gets all whole messages that have come since it was called last, up to
    what one read holds; `on_lost` is called once when the engine has gone.
    """

    def __init__(
        self, on_messages: Callable[[*tuple[ToFront, ...]], None], on_lost: Callable[[], None]
    ) -> None:
        self._on_messages = on_messages
        self._on_lost = on_lost
        self._frames = _Frames()
        self._transport: asyncio.WriteTransport | None = None

    async def connect(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: self, sock=sock)

    def send(self, message: ToEngine) -> None:
        """Never blocks; what a gone engine was to get is dropped."""
        if self._transport is not None and not self._transport.is_closing():
            data = encode(message)
            self._transport.write(_LENGTH.pack(len(data)) + data)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)  # an event loop may have its own kind

    def data_received(self, data: bytes) -> None:
        if messages := self._frames.feed(data):
            self._on_messages(*messages)

    def connection_lost(self, error: Exception | None) -> None:
        self._on_lost()
