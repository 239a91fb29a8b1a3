"""Answers to clients that may leave at any moment: streams of server-sent events, and whole ones.

A client that has gone is noticed at once, whether it is streamed to or not, and what was generated for it is
aborted. A client that takes nothing holds up nobody: sending waits for it alone, and gives it up in the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pydantic_core import to_json
from starlette.responses import Response

from octavo.serve.api_errors import as_api_error

if TYPE_CHECKING:
    from fastapi import Request
    from starlette.types import Receive, Scope, Send

    from octavo.serve.generation import Generation

logger = logging.getLogger("octavo.serve")

T = TypeVar("T")
Event = dict[str, Any] | str | bytes

DONE: Final = "[DONE]"
HEADERS: Final = {
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # or nginx would gather the pieces
}


class ClientGone(Exception):
    """The client closed its connection before its answer was ready."""


def event_stream(
    events: AsyncIterator[Event],
    generations: Iterable[Generation] = (),
    *,
    done: str | None = DONE,
    slow_reader_s: float = 60.0,
) -> EventStream:
    """A response that sends `events`, and then `done` unless that is None.

    events: a dict becomes ``data: {json}``, a str ``data: str``; bytes are sent as they are, for events with
        a name. An exception in it becomes one ``data: {"error": ...}`` event, as headers have gone by then;
        so await `Generation.accepted` before making the response.
    generations: aborted when the stream ends before them, for whatever reason.
    slow_reader_s: a client that takes nothing for so long is given up.
    """
    return EventStream(events, tuple(generations), done, slow_reader_s)


class EventStream(Response):
    """See `event_stream`."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[Event],
        generations: tuple[Generation, ...],
        done: str | None,
        slow_reader_s: float,
        status_code: int = 200,  # FastAPI reads from here what to put into the API's description
    ) -> None:
        super().__init__(status_code=status_code, headers=HEADERS)
        del self.headers["content-length"]
        self._events = events
        self._generations = generations
        self._done = done
        self._slow_reader_s = slow_reader_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.create_task(self._write(send))
        watching = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait((writing, watching), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for generation in self._generations:
                generation.abort()
            for task in (writing, watching):
                if not task.done():
                    task.cancel()
            await asyncio.gather(writing, watching, return_exceptions=True)
        if not writing.cancelled() and (error := writing.exception()) is not None:
            raise error

    async def _write(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as limit:

                async def patiently_send(message: dict[str, Any]) -> None:
                    limit.reschedule(loop.time() + self._slow_reader_s)
                    await send(message)
                    limit.reschedule(None)

                start = {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
                await patiently_send(start)
                async for data in self._encoded():
                    await patiently_send({"type": "http.response.body", "body": data, "more_body": True})
                await patiently_send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            logger.warning("a client took nothing for %g s and is given up", self._slow_reader_s)

    async def _encoded(self) -> AsyncIterator[bytes]:
        try:
            async for event in self._events:
                yield _encode(event)
        except Exception as error:
            yield _encode(as_api_error(error).body())
        finally:
            if (close := getattr(self._events, "aclose", None)) is not None:
                await close()
        if self._done is not None:
            yield _encode(self._done)


def _encode(event: Event) -> bytes:
    if isinstance(event, bytes):
        return event
    data = event.encode() if isinstance(event, str) else to_json(event, inf_nan_mode="null")
    return b"data: " + data + b"\n\n"


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns; it is cancelled when the client goes away, which raises ClientGone.

    The request's body must have been read, as it is wherever FastAPI hands a route its fields. Generations
    that `work` submits must be in an ``async with`` of it, so that they are aborted.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_until_gone(request.receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
    finally:
        watching.cancel()
        if not working.done():
            working.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await working
    if working.cancelled():
        raise ClientGone
    return working.result()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
