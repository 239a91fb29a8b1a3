"""Stop strings in streamed text."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.errors import RequestError


class StopChecker:
    """Decides, piece by piece, how much text may be shown before a stop string is ruled out.

    The match is the first to be *complete* in the text, the longest of those complete at the same character;
    so the result does not depend on how the text was cut into pieces, and generation can end at that very
    token. Text that may still turn out to be the beginning of a stop string is held back. With `include` the
    stop string itself is shown too; nothing after it ever is.

    Raises RequestError for a stop that is not a non-empty string.
    """

    def __init__(self, stops: Iterable[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        for index, stop in enumerate(self._stops):
            if not isinstance(stop, str) or not stop:
                raise RequestError(f"stop[{index}]: expected a non-empty string, got {stop!r}")
        self._include = include
        self._held = ""
        self._matched: str | None = None

    def push(self, piece: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """`(visible text, matched stop or None)`; after a match, always `("", that stop)`.

        Without `may_stop` a stop string that is complete in this piece is let through; one that begins in it
        still counts when a later piece completes it.
        """
        if self._matched is not None:
            return "", self._matched
        if not self._stops:
            return piece, None
        text = self._held + piece
        match = self._find(text) if may_stop else None
        if match is not None:
            start, self._matched = match
            self._held = ""
            return text[: start + len(self._matched) if self._include else start], self._matched
        safe = self._safe_length(text)
        self._held = text[safe:]
        return text[:safe], None

    def finish(self) -> str:
        """The text held back when generation ended without a match."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> tuple[int, str] | None:
        found = [(start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        return min(found, key=lambda match: (match[0] + len(match[1]), match[0]), default=None)

    def _safe_length(self, text: str) -> int:
        """The length of `text` without its longest suffix that begins a stop string."""
        safe = len(text)
        for stop in self._stops:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1), safe)
            while start >= 0:
                if stop.startswith(text[start:]):
                    safe = start
                    break
                start = text.find(stop[0], start + 1, safe)
        return safe
