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


class Speller:
    """Bytes to ids and back, special tokens left out."""

    def __init__(self, tokens: list[bytes], special_token_ids: list[int]) -> None:
        special = set(special_token_ids)
        self._tokens = [b"" if i in special else token for i, token in enumerate(tokens)]
        self._ids = {token: i for i, token in enumerate(self._tokens) if token}
        self._max_bytes = max(map(len, self._ids), default=1)

    def spell(self, data: bytes) -> list[int]:
        """The longest token that fits, again and again; ends early at a byte that no token begins with."""
        token_ids: list[int] = []
        start = 0
        while start < len(data):
            for end in range(min(len(data), start + self._max_bytes), start, -1):
                if (token_id := self._ids.get(data[start:end])) is not None:
                    token_ids.append(token_id)
                    start = end
                    break
            else:
                break
        return token_ids

    def spelled(self, token_ids: list[int]) -> bytes | None:
        """What the ids say together; None when one is outside the vocabulary."""
        try:
            return b"".join([self._tokens[token_id] for token_id in token_ids])
        except IndexError:
            return None


def main(limits: dict[str, Any]) -> None:
    """Answer until stdin ends.

    limits: `matcher` (LLParserLimits by name), `cpu_s`, `memory_bytes`, `stack_bytes`.
    """
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    # Ctrl-C reaches every process of a terminal; when this one ends is the engine's to decide.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(10)
    import llguidance

    hello = read_message(requests)
    if hello is None:
        return
    tokens = [base64.b64decode(token) for token in hello["tokens"]]
    special, eos = hello["special_token_ids"], hello["eos_token_ids"]
    speller = Speller(tokens, special)
    vocabulary: Any = Vocabulary(tokens, special, eos, lambda text: speller.spell(text.encode()))
    tokenizer = llguidance.LLTokenizer(vocabulary, eos_token=eos)
    matcher_limits = llguidance.LLParserLimits(**limits["matcher"])
    found: list[str | None] = [None]

    def try_out(grammar: str) -> None:
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=matcher_limits)
        matcher.compute_bitmask()  # the first look at the tokens finds out more
        found[0] = matcher.get_error() or None

    _limit_memory(limits["memory_bytes"])
    threading.stack_size(limits["stack_bytes"])
    write_message(answers, {"error": None})
    while (message := read_message(requests)) is not None:
        # The signal's own action ends the process, in the middle of native code as well. Counted is the
        # time that the processor works, so a busy machine refuses nothing.
        signal.setitimer(signal.ITIMER_PROF, limits["cpu_s"])
        thread = threading.Thread(target=try_out, args=(message["grammar"],))
        thread.start()
        thread.join()
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_message(answers, {"error": found[0]})


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
