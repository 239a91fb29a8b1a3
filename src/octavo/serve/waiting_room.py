"""The queue before the engine, as the front counts it: what waits, if more has room, when to ask again.

What waits for a thread that reads its text counts like what waits for the engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from octavo.errors import OverloadedError
from octavo.serve.settings import ServeSettings

_MAX_RETRY_AFTER_S: Final = 60.0


class WaitingRoom:
    """Its limits are the settings' `max_waiting_requests` and `max_waiting_tokens`.

    `last_wait_s`: how long the one that left the engine's queue last had been in it.
    """

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self.last_wait_s = 1.0
        self._rows: dict[str, int] = {}
        self._num_rows = 0
        """Their sum."""
        self._num_tokens = 0
        self._num_texts = 0
        self._num_text_tokens = 0

    @property
    def num_requests(self) -> int:
        """How many have not left the engine's queue yet; texts do not count here."""
        return len(self._rows)

    def check(self, num_requests: int, num_tokens: int, num_free_rows: int = 0, *, num_rows: int = 1) -> None:
        """OverloadedError when so many requests with so many prompt tokens have no room now.

        `num_free_rows`: rows of the engine that nobody holds. Those in the queue that find theirs among them
        can go on at the next step, if there are blocks for them, and do not count. `num_rows`: what each of
        the requests needs. Among no others any number of tokens has room: a text's is only a guess, and must
        not be refused for ever.
        """
        settings = self._settings
        num_waiting = self.num_requests + self._num_texts
        num_waiting_tokens = self._num_tokens + self._num_text_tokens
        num_blocked, num_free_rows = self._blocked(num_free_rows)
        num_running = num_free_rows // num_rows
        if num_blocked + max(0, num_requests - num_running) > settings.max_waiting_requests:
            what = f"{num_blocked} requests are waiting, of at most {settings.max_waiting_requests} "
            what += "(max_waiting_requests)"
            if num_running:
                what += f", and {num_running} more can run now; {num_requests} came at once"
        elif num_waiting and num_waiting_tokens + num_tokens > settings.max_waiting_tokens:
            what = (
                f"{num_waiting_tokens} prompt tokens are waiting and {num_tokens} more came; at most "
                f"{settings.max_waiting_tokens} may wait (max_waiting_tokens)"
            )
        else:
            return
        retry_after_s = min(max(self.last_wait_s, 1.0), _MAX_RETRY_AFTER_S)
        raise OverloadedError(
            f"the server is busy: {what}; try again in {retry_after_s:.0f} s", retry_after_s
        )

    def enter(self, request_id: str, num_tokens: int, num_rows: int = 1) -> None:
        """A request with so many prompt tokens waits for the engine, whether there was room or not."""
        self._rows[request_id] = num_rows
        self._num_rows += num_rows
        self._num_tokens += num_tokens

    def leave(self, request_id: str, num_tokens: int) -> None:
        """It does so no longer."""
        self._num_rows -= self._rows.pop(request_id)
        self._num_tokens -= num_tokens

    def _blocked(self, num_free_rows: int) -> tuple[int, int]:
        """How many in the queue find no rows, and how many rows the others leave. A text takes one."""
        num_blocked = self.num_requests
        # In a burst each that comes asks: only where some want several rows are all gone over.
        if self._num_rows <= num_free_rows:
            num_blocked, num_free_rows = 0, num_free_rows - self._num_rows
        elif self._num_rows == num_blocked:
            num_blocked, num_free_rows = num_blocked - num_free_rows, 0
        else:
            for num_rows in self._rows.values():
                if num_rows <= num_free_rows:
                    num_free_rows -= num_rows
                    num_blocked -= 1
        num_texts = min(self._num_texts, num_free_rows)
        return num_blocked + self._num_texts - num_texts, num_free_rows - num_texts

    @contextlib.contextmanager
    def text(self, num_tokens: int) -> Iterator[None]:
        """A text of about so many tokens is being read, until the block is left."""
        self._num_texts += 1
        self._num_text_tokens += num_tokens
        try:
            yield
        finally:
            self._num_texts -= 1
            self._num_text_tokens -= num_tokens
