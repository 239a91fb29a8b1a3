"""One request as the front sees it: its pieces, its output, its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Final, Self

from octavo.errors import EngineError
from octavo.outputs import FinishReason, Logprob, RequestOutput, StreamChunk

_MAX_TEXTS: Final = 64
"""Texts kept apart for a reader that lags; what comes on top is joined to one."""


class Generation:
    """A submitted request: await `accepted()` before answering with a stream; iterate or await `result()`.

    Iterating gives `StreamChunk`s (only when it was submitted with ``stream=True``); pieces that a slow
    reader has not taken are joined, so that what waits for it never exceeds its own answer. The last piece
    carries `output`. Iteration, `accepted` and `result` raise what ended the request:

        RequestError, CapacityError     the engine refused it (never after `accepted()` returned)
        RequestTimeoutError             it took longer than the server allows
        EngineError                     the engine died, got stuck or was shut down, or it was aborted

    Leaving its ``async with`` block before the end aborts it. One reader at a time; event loop only.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: Sequence[int],
        on_abort: Callable[[Generation], None],
        num_rows: int = 1,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.num_rows = num_rows
        """Rows of the engine that it holds while it runs."""
        self.output: RequestOutput | None = None
        self.error: Exception | None = None
        self.is_accepted = False
        self.is_started = False
        """Whether it has left the engine's queue."""
        self.submitted_s = asyncio.get_running_loop().time()
        self.timer: asyncio.TimerHandle | None = None
        self.on_news: Callable[[], None] | None = None
        """Called at once when there is something to `take` or it is over, in place of waking who iterates."""
        self.on_text: Callable[[str], bool] | None = None
        """Offered the text of one more token of the first continuation where nothing else has come; says
        whether it is told. If not, it must be put and waked for."""
        self._on_abort = on_abort
        self._pending: dict[int, _Piece] = {}
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_over(self) -> bool:
        """Whether it has ended; pieces may still be waiting to be read."""
        return self.output is not None or self.error is not None

    async def accepted(self) -> None:
        """Returns when the engine has taken the request; raises when it refused it."""
        while not self.is_accepted and self.output is None:
            self._raise_error()
            await self._news()

    async def result(self) -> RequestOutput:
        """The finished request."""
        while self.output is None:
            self._raise_error()
            await self._news()
        return self.output

    def take(self) -> list[StreamChunk]:
        """What has come and was not read yet: at most one piece of each continuation, without `output`."""
        chunks = [piece.chunk(index) for index, piece in self._pending.items()]
        self._pending.clear()
        return chunks

    def abort(self) -> None:
        """End it now, wherever it stands; after its end this does nothing."""
        if not self.is_over:
            self._on_abort(self)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamChunk:
        while not self._pending:
            self._raise_error()
            if self.output is not None:
                raise StopAsyncIteration
            await self._news()
        index = next(iter(self._pending))
        chunk = self._pending.pop(index).chunk(index)
        if self.output is not None and not self._pending:
            return replace(chunk, output=self.output)
        return chunk

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.abort()

    # For the AsyncEngine alone.

    def put(self, chunks: list[StreamChunk], output: RequestOutput | None) -> None:
        """What a step brought; `wake` tells the reader."""
        for chunk in chunks:
            piece = self._pending.get(chunk.index)
            if piece is None:
                piece = self._pending[chunk.index] = _Piece()
            piece.add(chunk)
        if output is not None:
            self.output = output

    def put_token(self, text: str, token_id: int) -> None:
        """`put` of one more token of the first continuation."""
        piece = self._pending.get(0)
        if piece is None:
            piece = self._pending[0] = _Piece()
        texts = piece.texts
        texts.append(text)
        if len(texts) > _MAX_TEXTS:
            piece.texts = ["".join(texts)]
        piece.token_ids.append(token_id)

    def accept(self) -> None:
        self.is_accepted = True
        self.wake()

    def fail(self, error: Exception) -> None:
        """It ends with `error`; pieces that arrived before can still be read."""
        if not self.is_over:
            self.error = error
            self.wake()

    def wake(self) -> None:
        """The reader is told that there is something, or that it is over."""
        if self.on_news is not None:
            self.on_news()
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _raise_error(self) -> None:
        if self.error is not None:
            # Raised again, by this reader or by others that failed with it, it would grow its traceback.
            raise self.error.with_traceback(None)

    async def _news(self) -> None:
        assert self._waiter is None, "one reader at a time"
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


def aborted(request_id: str) -> EngineError:
    """The error of a request that its owner aborted."""
    return EngineError(f"request {request_id} was aborted")


class _Piece:
    """What has come of one continuation and was not read yet."""

    __slots__ = ("ended", "logprobs", "texts", "token_ids")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, Logprob]] | None = None
        self.ended: tuple[FinishReason | None, str | int | None, str | None] = (None, None, None)

    def add(self, chunk: StreamChunk) -> None:
        self.texts.append(chunk.text)
        if len(self.texts) > _MAX_TEXTS:
            self.texts = ["".join(self.texts)]
        self.token_ids += chunk.token_ids
        if chunk.logprobs:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs += chunk.logprobs
        self.ended = chunk.finish_reason, chunk.stop_reason, chunk.error

    def chunk(self, index: int) -> StreamChunk:
        finish_reason, stop_reason, error = self.ended
        return StreamChunk(
            index,
            "".join(self.texts),
            self.token_ids,
            finish_reason,
            stop_reason,
            self.logprobs,
            error=error,
        )
