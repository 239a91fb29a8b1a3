"""Pieces of a streamed body, written straight to the connection of a client that takes them at once."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from starlette.types import Scope

_KEY: Final = "direct_writer"
_used_of = operator.attrgetter(
    "scope", "flow.write_paused", "transport.write", "disconnected", "chunked_encoding"
)


class DirectWriter:
    """Writes a body's pieces as uvicorn's `send` would, which is a coroutine with a message for each: more
    than all else that a piece costs beside the system's own call.

    To be used between the first piece, which goes through `send`, and the last one, which does, too.
    `num_bytes` is what was written so.
    """

    __slots__ = ("_cycle", "_flow", "_transport", "num_bytes")

    def __init__(self, cycle: Any) -> None:
        """`cycle`: uvicorn's `RequestResponseCycle` of the request, with httptools."""
        self._cycle = cycle
        self._flow = cycle.flow
        self._transport = cycle.transport
        self.num_bytes = 0

    def write(self, data: bytes) -> bool:
        """Whether it was written; if not, only `send` can tell what is to be done: wait, most of the time.

        data: not empty.
        """
        cycle = self._cycle
        if self._flow.write_paused or cycle.disconnected or not cycle.chunked_encoding:
            return False
        size = len(data)
        self._transport.write(b"%x\r\n%b\r\n" % (size, data))
        self.num_bytes += size
        return True

    @staticmethod
    def offer(cycle: Any) -> None:
        """Have `find` find one for this request, unless this uvicorn keeps under other names what is used
        here: its `send` then writes all there is.
        """
        try:
            _used_of(cycle)
            state = cycle.scope["state"]
        except (AttributeError, KeyError):
            return
        state[_KEY] = DirectWriter(cycle)

    @staticmethod
    def find(scope: Scope) -> DirectWriter | None:
        """The request's own, where its server offers one."""
        found = scope.get("state", {}).get(_KEY)
        assert found is None or isinstance(found, DirectWriter)
        return found

    @staticmethod
    def withdraw(scope: Scope) -> None:
        """To be called at the request's end: the writer and the scope hold each other."""
        scope.get("state", {}).pop(_KEY, None)
