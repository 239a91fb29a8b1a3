"""What stands at the two ends of an `AsyncEngine`: who listens to it, and the way to the engine process."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from octavo.outputs import RequestOutput
    from octavo.serve.messages import News, Stage, ToEngine


class EngineListener(Protocol):
    """Told of everything that happens, on the event loop; `octavo.serve.metrics.Metrics` is one."""

    def stage(self, stage: Stage) -> None:
        """A part of loading is done."""

    def state(self, state: str, reason: str | None = None) -> None:
        """The engine's state has changed to this one; `reason` says why it is dead."""

    def submitted(self, request_id: str, num_prompt_tokens: int) -> None:
        """A request was sent to the engine."""

    def told(self, request_ids: Collection[str]) -> None:
        """Each of these streams was given a piece with tokens in it, just now."""

    def step(self, news: News) -> None:
        """A step ended (or there was none, and `news.num_tokens` is 0: an abort, a sign of life)."""

    def finished(self, output: RequestOutput) -> None:
        """A request ended in the engine: stop, length, abort or error. Once for each that was not refused."""

    def refused(self, reason: str, request_id: str | None = None) -> None:
        """A request was not served: ``invalid``, ``capacity``, ``overloaded``, ``timeout``, ``error``
        (it was not the request's fault), or a state.

        `request_id`: it had been submitted, and the engine refused it; it will not be finished.
        """


class Link(Protocol):
    """The way to an engine process; `octavo.serve.process.EngineProcess` is one."""

    def send(self, message: ToEngine) -> None: ...

    async def close(self, *, is_patient: bool) -> None:
        """End the process, which may take its time over it or not, and wait for its end."""
