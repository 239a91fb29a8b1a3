"""Tries grammars out in a process of its own, where one that never ends or takes all memory harms nobody.

Run as a script, imports nothing of Octavo. Reads messages from stdin: first the vocabulary, then grammars.
Answers each with `{"error": text or null}`. A grammar that breaks a limit ends the process.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import IO, Any


class Vocabulary:
    """What LLTokenizer asks of a tokenizer.

    tokens: the bytes of every id. encode: ids whose bytes are the text, best those the model was taught.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self,
        tokens: list[bytes],
        special_token_ids: list[int],
        eos_token_ids: list[int],
        encode: Callable[[str], list[int]],
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self.eos_token_id = eos_token_ids[0]
        self.encode = encode

    def __call__(self, text: str) -> list[int]:
        return self.encode(text)


def main(limits: dict[str, Any]) -> None:
    """Answer until stdin ends.

    limits: `matcher` (LLParserLimits by name), `cpu_s`, `step_s`, `memory_bytes`, `stack_bytes`.
    """
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    # Ctrl-C reaches every process of a terminal; when this one ends is the engine's to decide.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(5)  # a grammar may wait, the steps of others should not
    import llguidance

    hello = read_message(requests)
    if hello is None:
        return
    tokens = [base64.b64decode(token) for token in hello["tokens"]]
    special, eos = hello["special_token_ids"], hello["eos_token_ids"]
    vocabulary: Any = Vocabulary(tokens, special, eos, lambda text: tokenizer.greedy_tokenize(text[:512]))
    tokenizer = llguidance.LLTokenizer(vocabulary, eos_token=eos)
    matcher_limits = llguidance.LLParserLimits(**limits["matcher"])
    found: list[str | None] = [None]

    def try_out(grammar: str) -> None:
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=matcher_limits)
        slowest_s, error = _first_steps(matcher, eos)
        if error is None and slowest_s > limits["step_s"]:
            error = f"a single token of it takes {slowest_s * 1e3:.0f} ms to choose; make it simpler"
        found[0] = error

    _limit_memory(limits["memory_bytes"])
    threading.stack_size(limits["stack_bytes"])
    write_message(answers, {"error": None})
    while (message := read_message(requests)) is not None:
        # The signal's own action ends the process, in the middle of native code as well. Counted is the
        # time that the processor works, so a busy machine refuses nothing.
        found[0] = "it cannot be tried out"
        signal.setitimer(signal.ITIMER_PROF, limits["cpu_s"])
        thread = threading.Thread(target=try_out, args=(message["grammar"],))
        thread.start()
        thread.join()
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_message(answers, {"error": found[0]})


def _first_steps(matcher: Any, eos_token_ids: list[int]) -> tuple[float, str | None]:
    """Choose a few tokens; returns the processor time of the slowest, and what went wrong.

    The first mask is not counted: that it has once been worked out goes with copies of the matcher.
    """
    slowest = 0.0
    matcher.compute_bitmask()
    matcher = matcher.deep_copy()
    for _ in range(4):
        began = time.thread_time()
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        slowest = max(slowest, time.thread_time() - began)
        for token_id in eos_token_ids:
            mask &= ~(1 << token_id)
        if not mask or matcher.is_error():
            break
        began = time.thread_time()
        matcher.consume_token((mask & -mask).bit_length() - 1)
        slowest = max(slowest, time.thread_time() - began)
    return slowest, matcher.get_error() or None


def _limit_memory(num_bytes: int) -> None:
    """Let the process grow by so much and no more, and leave no core file; where the system can."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with open("/proc/self/statm") as file:
            taken = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + num_bytes, taken + num_bytes))


def write_message(file: IO[bytes], message: dict[str, Any]) -> None:
    """JSON behind its length."""
    data = json.dumps(message).encode()
    file.write(struct.pack(">I", len(data)) + data)
    file.flush()


def read_message(file: IO[bytes]) -> dict[str, Any] | None:
    """None when the file ends first."""
    head = file.read(4)
    data = file.read(struct.unpack(">I", head)[0]) if len(head) == 4 else b""
    message: dict[str, Any] | None = json.loads(data) if data else None
    return message


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
