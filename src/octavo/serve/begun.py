"""A call that is run at once, as far as it gets without waiting."""

from __future__ import annotations

from collections.abc import Awaitable, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Begun(Generic[T]):
    """`call`, begun: nearly all that a server sends and receives need not wait, and then costs no timer.

    `is_done`: it has ended, and `value` is what it returned. Else this is to be awaited, or closed. What the
    call raises comes from whichever ran it, which the making of this object does first. Where who awaits this
    is cancelled while the call waits for the first time, the call is closed: it sees GeneratorExit.
    """

    __slots__ = ("_first", "_steps", "is_done", "value")

    value: T

    def __init__(self, call: Awaitable[T]) -> None:
        self._steps = call.__await__()
        self.is_done = False
        try:
            self._first = next(self._steps)
        except StopIteration as end:
            self.is_done = True
            self.value = end.value

    def __await__(self) -> Generator[Any, Any, T]:
        try:
            yield self._first
            return (yield from self._steps)
        finally:
            self._steps.close()

    def close(self) -> None:
        self._steps.close()
