"""Clients may leave at any moment, which is noticed at once, and what was under way for them is given up."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

    from starlette.types import Receive


class ClientGone(Exception):
    """The client closed its connection before it had its answer."""


class Connected:
    """A block for as long as the client is there: when it goes away, the block's task is cancelled in it, and
    leaves it with ClientGone. `receive` must have no more of the request's body to tell.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._is_gone = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._num_cancels = task.cancelling()
        self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._is_gone = True
        self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._watching.cancel()
        del self._watching  # what it ends with holds this object
        if not self._is_gone:
            return
        is_ours = self._task.uncancel() <= self._num_cancels
        if is_ours and kind is asyncio.CancelledError:
            raise ClientGone from error
