"""An event loop in made-up time: where it would wait for a timer, it is that late at once.

However busy the machine is, no timer is late beside another, and none is waited for. For tests whose two
ends are in this loop: what a socket or another process brings would come too late.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
from typing import Any


class _Selector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self._num_threads = threading.active_count()

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        # A thread that was started meanwhile may have something to say; asked first, or it might end between.
        is_alone = threading.active_count() <= self._num_threads
        ready = super().select(0 if is_alone else 0.001)
        if is_alone and not ready:
            self.now_s += timeout
        return ready


class MadeUpTime(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._waiting = _Selector()
        super().__init__(self._waiting)

    def time(self) -> float:
        return self._waiting.now_s
