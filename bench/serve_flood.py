"""Tokens a second that the front can pass on: 256 streams of an engine that costs nothing and never waits.

python bench/serve_flood.py

The engine process steps as fast as the front takes its news, a token for every stream a step. The client only
counts the bytes, and what was sent by `usage` and by events. Beside the rate there is the processor time of
each side for a token, which says what limits it where there are processors enough, and is steadier.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import shlex
import socket
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import serve_scripted
from serve_process import exit_on_sigterm

from octavo.bench.report import Row, hardware_slug, write_result
from octavo.bench.serve_http import Endpoint

ROOT = Path(__file__).resolve().parent.parent
SILENCE_S = 60.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Flood(NamedTuple):
    """One run: tokens a second, tokens an event, and microseconds of each process for a token."""

    tokens_per_s: float
    tokens_per_event: float
    front_us: float
    engine_us: float


@dataclass
class _Stream:
    """What came of one answer. `tail` is its last bytes, where usage is."""

    num_events: int = 0
    num_bytes: int = 0
    tail: bytes = b""

    def take(self, data: bytes) -> bool:
        """Whether it is complete."""
        self.num_events += data.count(b"data: {")
        self.num_bytes += len(data)
        self.tail = (self.tail + data)[-2048:]
        return self.tail.endswith(b"0\r\n\r\n")

    @property
    def num_tokens(self) -> int:
        """By the server's `usage`. SystemExit when the stream is not a whole one."""
        if self.tail.count(b"data: [DONE]") != 1:
            raise SystemExit(f"a stream without its end: {self.tail[-300:]!r}")
        usage = self.tail[self.tail.rindex(b'"usage":') + 8 :]
        found = json.JSONDecoder().raw_decode(usage.decode())[0]
        return int(found["completion_tokens"])


def flood(url: str, front_pid: int, options: argparse.Namespace) -> Flood:
    """All streams at once, until all have ended."""
    endpoint = Endpoint.parse(url)
    is_chat = options.api == "chat"
    asked = {"messages": [{"role": "user", "content": "Hi"}]} if is_chat else {"prompt": [1, 2, 3]}
    body = json.dumps(
        {**asked, "stream": True, "max_tokens": options.num_tokens, "stream_options": {"include_usage": True}}
    ).encode()
    request = endpoint.head("POST", "/chat/completions" if is_chat else "/completions", {}, body) + body
    selector = selectors.DefaultSelector()
    streams = []
    for _ in range(options.streams):
        connection = socket.create_connection((endpoint.host, endpoint.port), SILENCE_S)
        streams.append(_Stream())
        selector.register(connection, selectors.EVENT_READ, streams[-1])
    (engine_pid,) = _children(front_pid)
    before = _cpu_s(front_pid), _cpu_s(engine_pid)
    began_s = time.perf_counter()
    for key in list(selector.get_map().values()):
        key.fileobj.sendall(request)  # type: ignore[union-attr]
    while selector.get_map():
        if not (ready := selector.select(SILENCE_S)):
            raise SystemExit(
                f"{len(selector.get_map())} streams have not ended, and nothing came for {SILENCE_S:g} s"
            )
        for key, _ in ready:
            connection = key.fileobj  # type: ignore[assignment]
            data = connection.recv(1 << 18)
            if not data:
                raise SystemExit("the server closed a connection in mid-answer")
            if key.data.take(data):
                selector.unregister(connection)
                connection.close()
    elapsed_s = time.perf_counter() - began_s
    front_s, engine_s = (
        after - early for after, early in zip((_cpu_s(front_pid), _cpu_s(engine_pid)), before, strict=True)
    )
    num_tokens = sum(stream.num_tokens for stream in streams)
    if num_tokens != options.streams * options.num_tokens:
        raise SystemExit(f"{num_tokens} tokens by usage; other than was asked for")
    num_events = sum(stream.num_events for stream in streams)
    us = 1e6 / num_tokens
    return Flood(num_tokens / elapsed_s, num_tokens / num_events, front_s * us, engine_s * us)


def _children(pid: int) -> list[int]:
    """Those that run Python code: multiprocessing has a child of its own for its semaphores."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return [one for one in found if b"spawn_main" in Path(f"/proc/{one}/cmdline").read_bytes()]


def _cpu_s(pid: int) -> float:
    """Processor time of a process so far, all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def main() -> int:
    exit_on_sigterm()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", help="its tokenizer and chat template are used")
    parser.add_argument("--api", choices=("chat", "completions"), default="chat")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--num-tokens", type=int, default=1000)
    parser.add_argument("--interval", type=float, default=0.0, help="least seconds of a step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="default: bench/results/<this machine>/serve-flood.json")
    options = parser.parse_args()
    runs = []
    with serve_scripted.running(options.interval, 1, options.model) as server:
        for _ in range(options.rounds):
            one = flood(server.url, server.pid, options)
            runs.append(one)
            print(
                f"{one.tokens_per_s:,.0f} tokens/s in events of {one.tokens_per_event:.2f}; a token costs "
                f"the front {one.front_us:.2f} us and the engine process {one.engine_us:.2f} us"
            )
    best = Flood(*(statistics.median(column) for column in zip(*runs, strict=True)))
    rows = [
        Row("through the front", round(best.tokens_per_s), "tokens/s"),
        Row("tokens an event", round(best.tokens_per_event, 2), "tokens"),
        Row("a token, the front's processor time", round(best.front_us, 2), "us", "lower"),
        Row("a token, the engine process's processor time", round(best.engine_us, 2), "us", "lower"),
    ]
    path = options.json or ROOT / "bench" / "results" / hardware_slug() / "serve-flood.json"
    write_result(path, rows, command=shlex.join(["python", *sys.argv]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
