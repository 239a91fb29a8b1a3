"""Where the time of a step goes: spans of host and device, as a Chrome trace (chrome://tracing, Perfetto)."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TextIO

from octavo.errors import ConfigError

logger = logging.getLogger("octavo")

Span = Callable[[str], AbstractContextManager[object]]
"""`with span("schedule"): ...`"""

_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


def no_span(name: str) -> AbstractContextManager[None]:
    """What stands in for `StepProfile.span` where nobody profiles."""
    return _NOTHING


class StepProfile:
    """Writes spans to a file while they end. The file is a list that a viewer reads even if it was cut off.

    Host spans lie on one line; those of the device on another, each as long as its step ran there.
    """

    def __init__(self, path: str | os.PathLike[str], clock: Callable[[], float] = time.perf_counter) -> None:
        try:
            self._file: TextIO = open(path, "w", encoding="utf-8")  # noqa: SIM115 - closed by close()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"profile: cannot write {os.fspath(path)!r}: {reason}") from error
        self._clock = clock
        self._began = clock()
        self._is_full = False
        self._has_events = False
        self._write("[\n")
        for line, name in ((1, "host"), (2, "device")):
            self._event({"name": "thread_name", "ph": "M", "pid": 1, "tid": line, "args": {"name": name}})

    def span(self, name: str, **arguments: Any) -> AbstractContextManager[object]:
        """A span of the host around a `with` block, and what to say of it."""
        return _HostSpan(self, name, arguments)

    def device_span(self, name: str, began: float, ended: float) -> None:
        """A span of the device, by the clock of the host."""
        self._span(name, 2, began, ended, {})

    def now(self) -> float:
        return self._clock()

    def close(self) -> None:
        self._write("\n]\n")
        with contextlib.suppress(OSError):
            self._file.close()

    def _span(self, name: str, line: int, began: float, ended: float, arguments: dict[str, Any]) -> None:
        self._event(
            {
                "name": name,
                "ph": "X",
                "ts": round(1e6 * (began - self._began), 3),
                "dur": round(1e6 * (ended - began), 3),
                "pid": 1,
                "tid": line,
                "args": arguments,
            }
        )

    def _event(self, event: dict[str, Any]) -> None:
        self._write((",\n" if self._has_events else "") + json.dumps(event))
        self._has_events = True

    def _write(self, text: str) -> None:
        if self._is_full:
            return
        try:
            self._file.write(text)
        except OSError as error:  # a full disk is no reason to stop answering
            logger.warning("the profile ends here, it cannot be written: %s", error.strerror)
            self._is_full = True


class _HostSpan:
    __slots__ = ("_arguments", "_began", "_name", "_profile")

    def __init__(self, profile: StepProfile, name: str, arguments: dict[str, Any]) -> None:
        self._profile = profile
        self._name = name
        self._arguments = arguments

    def __enter__(self) -> None:
        self._began = self._profile.now()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        profile = self._profile
        profile._span(self._name, 1, self._began, profile.now(), self._arguments)
