"""One reader of the observer's payloads."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from octavo.serve.messages import Observed

_MAX_UNREAD_PAYLOADS: Final = 32


class Watcher:
    """An iterator of payloads that begins with a full one.

    Its queue is bounded: when its reader lags, what waits is dropped and a full payload asked for.
    """

    def __init__(self, ask_again: Callable[[], None]) -> None:
        self._ask_again = ask_again
        self._payloads: deque[bytes] = deque()
        self._news = asyncio.Event()
        self._needs_full = True
        self._is_over = False

    def put(self, observed: Observed) -> None:
        # A full one is made for who begins or lags; for all others the changes go on.
        if observed.is_full != self._needs_full:
            return
        self._needs_full = False
        if len(self._payloads) == _MAX_UNREAD_PAYLOADS:
            self._payloads.clear()
            self._needs_full = True
            self._ask_again()
            return
        self._payloads.append(observed.payload)
        self._news.set()

    def end(self) -> None:
        self._is_over = True
        self._news.set()

    def __aiter__(self) -> Watcher:
        return self

    async def __anext__(self) -> bytes:
        while not self._payloads:
            if self._is_over:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._payloads.popleft()
