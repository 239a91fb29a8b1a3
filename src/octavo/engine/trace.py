"""One JSON line per step: who ran, how much, and what became of the blocks."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from typing import Any, TextIO

from octavo.cache.manager import KVCacheManager
from octavo.engine.schedule import Schedule
from octavo.errors import ConfigError

logger = logging.getLogger("octavo")


class StepTrace:
    """Writes the record of each step to a file; see docs/architecture.md for the fields."""

    def __init__(self, path: str | os.PathLike[str], cache: KVCacheManager) -> None:
        try:
            self._file: TextIO = open(path, "w", encoding="utf-8")  # noqa: SIM115 - closed by close()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"trace: cannot write {os.fspath(path)!r}: {reason}") from error
        self._cache = cache
        self._step = 0
        self._num_evictions = 0
        self._is_full = False

    def begin(self, plan: Schedule) -> dict[str, Any]:
        """What is about to run, for `end`; must come before the scheduler advances."""
        return {
            "num_tokens": plan.num_tokens,
            "num_decode_rows": plan.num_decode_rows,
            "rows": [
                {
                    "request": seq.request.request_id,
                    "index": seq.index,
                    "row": seq.row,
                    "start": seq.num_computed_tokens,
                    "num_tokens": num_new,
                }
                for seq, num_new in zip(plan.sequences, plan.num_new_tokens, strict=True)
            ],
            "num_sampled": len(plan.sampled),
            "admitted": [seq.request.request_id for seq in plan.admitted],
            "preempted": [seq.request.request_id for seq in plan.preempted],
            "num_hit_tokens": plan.num_hit_tokens,
            "num_copied_blocks": len(plan.copies),
        }

    def end(self, begun: dict[str, Any], seconds: float, num_waiting: int, num_running: int) -> None:
        """Write the record that `begin` made of a step, with the state it left behind."""
        if self._is_full:
            return
        evictions = self._cache.num_evictions
        record = {
            "step": self._step,
            **begun,
            "num_waiting": num_waiting,
            "num_running": num_running,
            "num_evictions": evictions - self._num_evictions,
            "blocks": {
                "free": self._cache.num_free,
                "cached": self._cache.num_cached,
                "owned": self._cache.num_owned,
            },
            "step_s": round(seconds, 6),
        }
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        except OSError as error:  # a full disk is no reason to stop answering
            logger.warning("the trace ends here, it cannot be written: %s", error.strerror)
            self._is_full = True
        self._step += 1
        self._num_evictions = evictions

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
