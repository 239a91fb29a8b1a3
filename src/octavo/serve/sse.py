"""Answers that are streams of server-sent events.

A client that takes nothing holds up nobody: sending waits for it alone, and gives it up in the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from pydantic_core import to_json
from starlette.responses import Response

from octavo.serve.api_errors import as_api_error
from octavo.serve.begun import Begun
from octavo.serve.connected import ClientGone, Connected
from octavo.serve.direct import DirectWriter

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from octavo.outputs import RequestOutput, StreamChunk
    from octavo.serve.generation import Generation

logger = logging.getLogger("octavo.serve")

DONE: Final = b"data: [DONE]\n\n"
_HEADERS: Final = (
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # or nginx would gather the pieces
    (b"content-type", b"text/event-stream; charset=utf-8"),
)


class Writer(Protocol):
    """Puts the pieces of one answer's generations into words: whole events, as bytes."""

    def begin(self) -> bytes:
        """What is told before the first piece."""

    def piece(self, place: int, chunk: StreamChunk) -> bytes:
        """What a piece of the generation at this place brings. It may raise, which ends the stream."""

    def end(self, outputs: list[RequestOutput]) -> bytes:
        """What is told after the last piece; the generations' outputs in their order."""

    def failed(self, error: Exception) -> bytes:
        """What is told instead of `end`, as headers have gone by then."""


class TextWriter(Writer, Protocol):
    """One that has a shorter way with nearly all that comes."""

    def text(self, place: int, text: str) -> bytes | None:
        """What `piece` gives for one more token of the first continuation that is no more than this text:
        without log probabilities, not the last. None leaves it to `piece`. It may raise: the stream ends.
        """


class _Stream(Response):
    """Sends events until they end or it is cancelled, and aborts `generations` then."""

    media_type = "text/event-stream"

    def __init__(self, generations: Sequence[Generation], slow_reader_s: float, status_code: int) -> None:
        # Nothing of `Response`'s own: it would make the same headers each time.
        self.status_code = status_code
        self.background = None
        self.raw_headers = list(_HEADERS)
        self._generations = generations
        self._slow_reader_s = slow_reader_s
        self._direct: DirectWriter | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        send_piece = scope.get("state", {}).get("send_piece", send)  # see `access_log.RequestLog`
        self._direct = DirectWriter.find(scope)
        head = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        try:
            await self._wait_for(Begun(send(head)))
            await self._write_body(send_piece)
        except TimeoutError:
            logger.warning("a client took nothing for %g s and is given up", self._slow_reader_s)
        finally:
            for generation in self._generations:
                generation.abort()

    async def _write_body(self, send: Send) -> None:
        raise NotImplementedError

    async def _wait_for(self, sending: Begun[None]) -> None:
        """Until the client has taken it; TimeoutError when it takes nothing for too long."""
        if not sending.is_done:
            async with asyncio.timeout(self._slow_reader_s):
                await sending


class EventStream(_Stream):
    """Sends `events` as they come: bytes that are whole events. An exception in them is told as one.

    slow_reader_s: a client that takes nothing for so long is given up.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        slow_reader_s: float = 60.0,
        status_code: int = 200,  # FastAPI reads from here what to put into the API's description
    ) -> None:
        super().__init__((), slow_reader_s, status_code)
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientGone), Connected(receive):
            await super().__call__(scope, receive, send)

    async def _write_body(self, send: Send) -> None:
        last = b""
        try:
            while True:
                try:
                    event = await anext(self._events)
                except StopAsyncIteration:
                    break
                except Exception as error:
                    last = error_event(error)
                    break
                await self._wait_for(Begun(send(_body(event))))
        finally:
            if (close := getattr(self._events, "aclose", None)) is not None:
                await close()
        await self._wait_for(Begun(send(_body(last, is_last=True))))


class GenerationStream(_Stream):
    """Sends what `writer` makes of each piece of `generations`, at the moment it comes.

    Pieces are written from the call that brings them for as long as the client takes them at once: a task's
    turn for each piece costs more than writing it. Otherwise this stream's task waits for the client, and
    what comes meanwhile is joined by the `Generation`. From the second piece on they go by a `DirectWriter`
    where the server has one.

    slow_reader_s: a client that takes nothing for so long is given up.
    """

    def __init__(
        self, writer: Writer, generations: Sequence[Generation], slow_reader_s: float = 60.0
    ) -> None:
        super().__init__(generations, slow_reader_s, 200)
        self._writer = writer
        self._begin = writer.begin()
        self._open = set(range(len(generations)))
        self._ready = dict.fromkeys(self._open)
        """Places of generations with news, in the order in which they came."""
        self._failure: Exception | None = None
        self._last = b""
        """What the last pieces bring, which goes with the end of the stream."""
        self._sending: Begun[None] | None = None
        """What the client has not taken yet."""
        self._waiter: asyncio.Future[None] | None = None
        self._send: Send  # from the moment that the body begins
        self._write_now: Callable[[bytes], bool] | None = None

    async def _write_body(self, send: Send) -> None:
        self._send = send
        loop = asyncio.get_running_loop()
        try:
            for place, generation in enumerate(self._generations):
                generation.on_news = functools.partial(self._on_news, place)
            if self._begin:
                await self._wait_for(Begun(send(_body(self._begin))))
            while self._sending is not None or (self._failure is None and self._open):
                if self._sending is not None:
                    await self._wait_for(self._sending)
                    self._sending = None
                elif self._ready:
                    self._pump()
                else:
                    self._waiter = loop.create_future()
                    try:
                        await self._waiter
                    finally:
                        self._waiter = None
        finally:
            for generation in self._generations:
                generation.on_news = generation.on_text = None
            if self._sending is not None:
                self._sending.close()
        await self._wait_for(Begun(send(_body(self._last + self._last_words(), is_last=True))))

    def _on_news(self, place: int) -> None:
        self._ready[place] = None
        waiter = self._waiter
        if waiter is None or waiter.done():
            return  # the task is at it
        try:
            self._pump()
        except Exception as error:
            waiter.set_exception(error)
            return
        if self._sending is not None or self._failure is not None or not self._open:
            waiter.set_result(None)

    def _pump(self) -> None:
        """Send what has come, up to the point where the client does not take more."""
        parts = []
        for place in self._ready:
            generation = self._generations[place]
            try:
                for chunk in generation.take():
                    parts.append(self._writer.piece(place, chunk))
                self._failure = generation.error
            except Exception as error:
                self._failure = error
            if self._failure is not None:
                break
            if generation.output is not None:
                self._open.discard(place)
        self._ready.clear()
        data = b"".join(parts)
        if self._failure is not None or not self._open:
            self._last = data
        elif data:
            self._send_on(data)

    def _on_text(self, put_into_words: Callable[[int, str], bytes | None], place: int, text: str) -> bool:
        """`_on_news` and `_pump` for nearly all that comes: one more token, to a client that keeps up."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            return False
        try:
            data = put_into_words(place, text)
        except Exception as error:
            self._failure = error
            waiter.set_result(None)
            return True
        if data is None:
            return False
        if data:
            try:
                self._send_on(data)
            except Exception as error:
                waiter.set_exception(error)
                return True
            if self._sending is not None:
                waiter.set_result(None)
        return True

    def _send_on(self, data: bytes) -> None:
        if self._write_now is None or not self._write_now(data):
            sending = Begun(self._send(_body(data)))
            self._sending = None if sending.is_done else sending
            if self._write_now is None and self._direct is not None:
                self._go_direct(self._direct)

    def _go_direct(self, direct: DirectWriter) -> None:
        self._write_now = direct.write
        if (put_into_words := getattr(self._writer, "text", None)) is not None:  # it is a `TextWriter`
            for place, generation in enumerate(self._generations):
                generation.on_text = functools.partial(self._on_text, put_into_words, place)

    def _last_words(self) -> bytes:
        if self._failure is None:
            try:
                return self._writer.end([one.output for one in self._generations if one.output is not None])
            except Exception as error:
                self._failure = error
        return self._writer.failed(self._failure)


def _body(data: bytes, *, is_last: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": not is_last}


def event(data: object) -> bytes:
    """One event without a name, of what JSON can hold."""
    return b"data: " + to_json(data, inf_nan_mode="null") + b"\n\n"


def error_event(error: Exception) -> bytes:
    """What a stream tells of an error, whatever it is."""
    return event(as_api_error(error).body())
