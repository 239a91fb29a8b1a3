"""The engine's side of the process that tries grammars out."""

from __future__ import annotations

import base64
import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence as Seq
from multiprocessing.connection import wait
from typing import Any, Final

from octavo.engine import grammar_check
from octavo.errors import EngineError

CPU_S: Final = 2.0
"""Processor time that a grammar may take to compile and to find its first tokens."""
STEP_S: Final = 0.05
"""Processor time that one of its first tokens may take to choose, each time."""
MEMORY_BYTES: Final = 512 * 2**20
"""How far the process may grow."""
STACK_BYTES: Final = 2 * 2**20
"""Stack there; whoever compiles what passed should have more."""
WALL_S: Final = 30.0
"""How long the process may be silent, starting included."""

LIMITS: Final[dict[str, Any]] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
"""Of llguidance: what compiling may cost, and what a step of one sequence. States take up to 2 kB each."""


class GrammarTrial:
    """Starts the process with the first grammar if not before, and again after one has ended it.

    One caller at a time; `close` may be called from elsewhere, and ends a trial under way.
    """

    def __init__(
        self,
        tokens: Seq[bytes],
        special_token_ids: Seq[int],
        eos_token_ids: Seq[int],
        *,
        cpu_s: float = CPU_S,
    ) -> None:
        self._hello = {
            "tokens": [base64.b64encode(token).decode() for token in tokens],
            "special_token_ids": list(special_token_ids),
            "eos_token_ids": list(eos_token_ids),
        }
        limits = {
            "cpu_s": cpu_s,
            "step_s": STEP_S,
            "memory_bytes": MEMORY_BYTES,
            "stack_bytes": STACK_BYTES,
            "matcher": LIMITS,
        }
        # -P: beside the script lie modules whose names the standard library has, too.
        self._command = [sys.executable, "-P", grammar_check.__file__, json.dumps(limits)]
        self._cpu_s = cpu_s
        self._process: subprocess.Popen[bytes] | None = None
        self._is_fresh = True
        self._lock = threading.Lock()
        self._is_closed = False

    def error_of(self, grammar: str) -> str | None:
        """Why the grammar cannot be used, or None when it can.

        Raises EngineError when that could not be found out, which is no fault of the grammar.
        """
        self.start()
        was_fresh, self._is_fresh = self._is_fresh, False
        answer = self._ask({"grammar": grammar})
        if answer is not None:
            error: str | None = answer["error"]
            return error
        status = self._end()
        if status == -signal.SIGPROF:
            return f"it takes more than {self._cpu_s:g} s to compile; make it simpler"
        if status is None:
            raise EngineError(f"structured_output: compiling took longer than {WALL_S:g} s; try again")
        if not was_fresh:  # what others left behind may have taken the memory
            return self.error_of(grammar)
        return "it is nested too deeply, or takes too much memory; make it simpler"

    def close(self) -> None:
        """End the process. Nothing can be tried afterwards."""
        self._is_closed = True
        self._end()

    def start(self) -> None:
        """Start the process if there is none. Raises EngineError when it does not start."""
        if self._process is not None:
            return
        self._is_fresh = True
        why = ""
        try:
            with self._lock:
                if not self._is_closed:
                    self._process = subprocess.Popen(
                        self._command,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.DEVNULL,
                    )
        except OSError as error:  # no memory, or too many processes or files
            why = f": {error}"
        if self._ask(self._hello) is None:
            self._end()
            raise EngineError(f"structured_output: the process that tries grammars does not start{why}")

    def _ask(self, message: dict[str, Any]) -> dict[str, Any] | None:
        """The answer; None when the process ended or was silent for too long."""
        process = self._process
        if process is None:
            return None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            grammar_check.write_message(process.stdin, message)
            if wait([process.stdout.fileno()], WALL_S):
                return grammar_check.read_message(process.stdout)
        except (BrokenPipeError, ValueError):  # it ended, or was closed, in the middle
            pass
        return None

    def _end(self) -> int | None:
        """End the process; its exit status if it ended by itself."""
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return None
        status: int | None = None
        try:
            # A process whose pipe has closed is about to have a status of its own.
            status = process.wait(0 if self._is_closed else 0.5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        return status
