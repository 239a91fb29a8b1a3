"""What the page sees of a running engine: rows, block tables and block states, as changes since last time.

A payload is one JSON object; docs/page.md tells it to readers outside. Lists of numbers are flat, because
there may be thousands of them ten times a second::

    seq        0, 1, 2, ...: a gap means that a payload was lost and the reader must start anew
    time_s     when it was made, on the engine's own clock
    stats      the fields of EngineStats
    full       only when it holds everything (the reader forgets what it knew): num_blocks, block_size, ...
    new        [seq_id, request_id, index, num_prompt_tokens, max_total_tokens] of each new row
    rows       seq_id, num_tokens, num_computed_tokens, num_cached_tokens, is_running (0 or 1) of changed rows
    tables     [seq_id, start, block ids]: the row's block table is now its first `start` entries and these
    gone       seq_ids of rows that ended
    preempted  seq_ids of rows that lost their blocks and wait again
    blocks     block_id, owners: how many rows hold the block now; 0 = free, -1 = cached
    evicted    block_ids whose cached contents were lost
    steps      microseconds, prompt tokens, other tokens of each step
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from octavo.engine.request import Status

if TYPE_CHECKING:
    from octavo.engine.core import Engine, EngineStats

MAX_WAITING_ROWS: Final = 256
"""How many waiting sequences are shown, the next ones first; the rest is only counted."""
MAX_STEPS: Final = 512
"""Most steps one payload tells of; when there were more, the oldest are left out."""

_NUMBERS_PER_STEP: Final = 3


class _Row:
    """What was last told of a sequence."""

    __slots__ = ("block_ids", "facts", "look", "num_preemptions")

    def __init__(self, num_preemptions: int) -> None:
        self.facts: tuple[int, int, int, bool] | None = None
        self.num_preemptions = num_preemptions
        self.block_ids: list[int] = []
        self.look = -1


class Observer:
    """Looks at an engine between its steps and changes nothing in it; lives in the engine's thread.

    Until `start` and after `stop` it costs nothing. `clock` gives seconds.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.perf_counter) -> None:
        self._engine = engine
        self._scheduler = engine.scheduler
        self._cache = engine.scheduler.cache
        self._clock = clock
        self._stats: EngineStats | None = None
        self._steps: list[int] = []
        self._rows: dict[int, _Row] = {}
        self._num_payloads = 0
        self.is_on = False
        self.is_first = True
        """Whether the next payload holds everything, there being none before it."""

    def start(self) -> None:
        """Somebody began to watch; nothing changes for those who do already."""
        self.is_on = True

    def stop(self) -> None:
        """Nobody watches any more."""
        self.is_on, self.is_first = False, True
        self._cache.record_changes(False)
        self._rows.clear()
        self._steps.clear()
        self._stats = None

    def note_step(self, stats: EngineStats, step_s: float, num_tokens: int) -> None:
        """A step of `num_tokens` tokens ended after `step_s` seconds; `stats` are those after it."""
        if not self.is_on:
            return
        before, self._stats = self._stats, stats
        if before is None:
            return
        num_prompt = min(num_tokens, stats.num_prompt_tokens - before.num_prompt_tokens)
        self._steps += (round(step_s * 1e6), num_prompt, num_tokens - num_prompt)
        if len(self._steps) > MAX_STEPS * _NUMBERS_PER_STEP:
            del self._steps[:_NUMBERS_PER_STEP]

    def payload(self) -> bytes:
        """What changed since the last payload, as the JSON object described above, in ASCII."""
        changes = self._cache.take_changes()
        if self.is_first:
            self._cache.record_changes(True)
            message = self._everything(self._rows)
        else:
            touched = sorted(changes.touched)
            owners = self._cache.num_owners_of(touched)
            message = self._message() | {
                "blocks": [n for pair in zip(touched, owners, strict=True) for n in pair],
                "evicted": changes.evicted,
                **self._rows_since(self._rows),
            }
        message["steps"], self._steps = self._steps, []
        self._stats = self._engine.stats()
        self.is_first = False
        self._num_payloads += 1
        return _as_json(message)

    def snapshot(self) -> bytes:
        """Everything that the payloads have told, for a reader to begin with and go on with the next payload.

        Call it right after `payload`, whose `seq` it has.
        """
        assert not self.is_first
        return _as_json(self._everything({}) | {"seq": self._num_payloads - 1, "steps": []})

    def _message(self) -> dict[str, Any]:
        return {
            "seq": self._num_payloads,
            "time_s": round(self._clock(), 4),
            "stats": asdict(self._engine.stats()),
        }

    def _everything(self, rows: dict[int, _Row]) -> dict[str, Any]:
        owners = self._cache.num_owners_of(range(self._cache.num_blocks))
        full = {
            "num_blocks": self._cache.num_blocks,
            "block_size": self._cache.block_size,
            "max_num_rows": self._scheduler.max_num_rows,
            "max_model_len": self._scheduler.max_model_len,
            "max_num_batched_tokens": self._scheduler.max_num_batched_tokens,
        }
        blocks = [n for pair in enumerate(owners) if pair[1] for n in pair]
        return self._message() | {"full": full, "blocks": blocks, **self._rows_since(rows)}

    def _rows_since(self, rows: dict[int, _Row]) -> dict[str, Any]:
        """How the rows differ from `rows`, which is brought up to date."""
        look = self._num_payloads
        new: list[tuple[int, str, int, int, int]] = []
        facts_of_rows: list[int] = []
        tables: list[tuple[int, int, list[int]]] = []
        preempted: list[int] = []
        for seq in (*self._scheduler.running, *self._scheduler.waiting[:MAX_WAITING_ROWS]):
            seq_id, request = seq.seq_id, seq.request
            row = rows.get(seq_id)
            if row is None:
                row = rows[seq_id] = _Row(request.num_preemptions)
                new.append(
                    (seq_id, request.request_id, seq.index, seq.num_prompt_tokens, seq.max_total_tokens)
                )
            row.look = look
            is_running = seq.status is Status.RUNNING
            facts = (len(seq.token_ids), seq.num_computed_tokens, request.num_cached_tokens, is_running)
            was_running = row.facts is not None and row.facts[3]
            if facts != row.facts:
                row.facts = facts
                facts_of_rows += (seq_id, *facts[:3], int(is_running))
            block_ids = self._cache.block_table(seq_id) if is_running else []
            if block_ids != row.block_ids:
                start = _num_equal(row.block_ids, block_ids)
                tables.append((seq_id, start, block_ids[start:]))
                row.block_ids = block_ids.copy()
            if request.num_preemptions > row.num_preemptions:
                row.num_preemptions = request.num_preemptions
                # The count is the request's: of several sequences, those are told that were seen to stop.
                if request.params.n == 1 or (was_running and not is_running):
                    preempted.append(seq_id)
        gone = [seq_id for seq_id, row in rows.items() if row.look != look]
        for seq_id in gone:
            del rows[seq_id]
        return {
            "new": new,
            "rows": facts_of_rows,
            "tables": tables,
            "gone": gone,
            "preempted": preempted,
        }


def _as_json(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode("ascii")


def _num_equal(old: list[int], new: list[int]) -> int:
    """How many leading elements are the same."""
    if new[: len(old)] == old:  # by far the most frequent case: the table grew
        return len(old)
    for i, (a, b) in enumerate(zip(old, new, strict=False)):
        if a != b:
            return i
    return min(len(old), len(new))
