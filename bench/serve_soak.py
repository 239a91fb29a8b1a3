"""Streaming clients for minutes, some of them hanging up in mid-answer: nothing is lost, nothing grows.

python bench/serve_soak.py                       starts `octavo serve smollm2-135m`; 64 clients for 5 minutes
python bench/serve_soak.py MODEL --seconds 20    what follows `--` goes to `octavo serve`

Checks: no error but the ones asked for, in answers and in the log; every block free at the end; /health
within 100 ms throughout; memory of both processes flat. Exit status 1 when one does not hold.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import shlex
import statistics
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from serve_process import Server, exit_on_sigterm, rss_mib

from octavo.bench.report import Row, hardware_slug, write_result
from octavo.bench.serve import Load, LoadGenerator, Target, run_load
from octavo.bench.serve_calls import Arrivals, Lengths, Mix
from octavo.bench.serve_http import Endpoint
from octavo.bench.serve_report import as_text, summarise

ROOT = Path(__file__).resolve().parent.parent
MAX_HEALTH_MS = 100.0
MAX_GROWTH_SHARE, MAX_GROWTH_MIB = 0.03, 8.0
PROBE_PERIOD_S = 0.2
IDLE_S = 30.0
FILL_S = 120.0


@dataclass
class Watch(threading.Thread):
    """Asks /health and reads memory until `ended`."""

    server: Server
    health_ms: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    memory_mib: dict[str, list[float]] = field(default_factory=lambda: {"front": [], "engine": []})
    ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        super().__init__(daemon=True)

    def run(self) -> None:
        pids = self.server.pids()
        for turn in itertools.count():
            if self.ended.wait(PROBE_PERIOD_S):
                return
            started = time.perf_counter()
            try:
                with urllib.request.urlopen(self.server.url + "/health", timeout=10) as answer:
                    answer.read()
                self.health_ms.append(1000 * (time.perf_counter() - started))
            except (OSError, urllib.error.URLError) as error:
                self.failures.append(f"{type(error).__name__}: {error}")
            if turn % 5 == 0:
                for name, pid in pids.items():
                    self.memory_mib[name].append(rss_mib(pid))

    __hash__ = threading.Thread.__hash__


def growth_mib(samples: list[float]) -> tuple[float, float]:
    """How much memory grew from the second fifth of the run to the last one, and what that may be at most."""
    fifth = max(1, len(samples) // 5)
    before = statistics.median(samples[fifth : 2 * fifth] or samples)
    after = statistics.median(samples[-fifth:])
    return after - before, max(MAX_GROWTH_MIB, MAX_GROWTH_SHARE * before)


def target_at(server: Server) -> Target:
    models = json.loads(server.get("/v1/models"))
    return Target(Endpoint.parse(server.url), models["data"][0]["id"], timeout_s=300.0)


def fill(server: Server, target: Target, num_words: int) -> None:
    """Use every block of the cache once: the system hands its memory out only then, and that is no leak."""
    deadline = time.monotonic() + FILL_S
    lens = Lengths.parse("--fill-len", str(num_words)), Lengths.parse("--fill-len", "1")
    calls = Mix(*lens, Arrivals()).calls(0)
    while not server.blocks()["evictions"] and time.monotonic() < deadline:
        run_load(target, list(itertools.islice(calls, 8)), concurrency=4)


def load(target: Target, options: argparse.Namespace) -> Load:
    mix = Mix(
        Lengths.parse("--input-len", options.input_len),
        Lengths.parse("--output-len", options.output_len),
        Arrivals(),
        num_prefixes=options.num_prefixes,
        prefix_len=options.prefix_len if options.num_prefixes else 0,
        drop_share=options.drop_share,
    )
    watch = progress if sys.stderr.isatty() else None
    calls = mix.calls(2)
    return run_load(target, calls, concurrency=options.clients, duration_s=options.seconds, watch=watch)


def progress(generator: LoadGenerator) -> None:
    print(
        f"\r{len(generator.answers)} ended, {generator.num_open} open  ", end="", file=sys.stderr, flush=True
    )


def wait_idle(server: Server) -> dict[str, float]:
    deadline = time.monotonic() + IDLE_S
    while True:
        blocks = server.blocks()
        if (blocks["running"] == 0 and blocks["owned"] == 0) or time.monotonic() > deadline:
            return blocks
        time.sleep(0.05)


def main() -> int:
    exit_on_sigterm()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--drop-share", type=float, default=0.2)
    parser.add_argument("--input-len", default="uniform:8:64", help="words; as `octavo bench serve` takes it")
    parser.add_argument("--output-len", default="uniform:8:96")
    parser.add_argument("--num-prefixes", type=int, default=4)
    parser.add_argument("--prefix-len", type=int, default=48)
    parser.add_argument("--fill-len", type=int, default=400, help="words of the prompts that fill the cache")
    parser.add_argument("--json", type=Path, help="default: bench/results/<this machine>/serve-soak.json")
    own, serve_options = sys.argv[1:], []
    if "--" in own:
        own, serve_options = own[: own.index("--")], own[own.index("--") + 1 :]
    else:
        serve_options = ["--num-blocks", "1536", "--max-model-len", "1024"]
    options = parser.parse_args(own)
    server = Server(options.model, serve_options)
    try:
        target = target_at(server)
        fill(server, target, options.fill_len)
        before = server.blocks()
        num_blocks = sum(before[state] for state in ("free", "cached", "owned"))
        watch = Watch(server)
        watch.start()
        try:
            done = load(target, options)
        finally:
            watch.ended.set()
            watch.join()
        blocks = wait_idle(server)
        status = server.stop()
        complaints = [
            line for line in server.log() if re.search(r"\b(error|traceback)\b", line, re.IGNORECASE)
        ]
    finally:
        server.process.kill()
    summary = summarise(done)
    rows = [
        Row("calls", summary.num_calls, "calls"),
        Row("output tokens", round(summary.output_tokens_per_s, 1), "tokens/s"),
        Row("dropped by clients", summary.num_dropped, "calls", better="lower"),
        Row("aborted in the engine", blocks["aborts"] - before["aborts"], "requests", better="lower"),
        Row("failed", summary.num_failed, "calls", better="lower", floor=0),
        Row("errors in the log", len(complaints), "lines", better="lower", floor=0),
        Row(
            "blocks not free at the end", num_blocks - blocks["free"] - blocks["cached"], "blocks", "lower", 0
        ),
        Row("/health, median", round(statistics.median(watch.health_ms), 2), "ms", better="lower"),
        Row("/health, slowest", round(max(watch.health_ms), 2), "ms", better="lower", floor=MAX_HEALTH_MS),
        Row("/health, failed", len(watch.failures), "calls", better="lower", floor=0),
    ]
    for name, samples in watch.memory_mib.items():
        growth, bound = growth_mib(samples)
        rows.append(Row(f"memory of the {name}", round(samples[-1], 1), "MiB", better="lower"))
        rows.append(Row(f"memory of the {name}, growth", round(growth, 1), "MiB", "lower", round(bound, 1)))
    print(as_text(summary))
    print(f"blocks at the end: {blocks}; the server's exit status: {status}")
    print("".join(complaints[:20]), end="")
    failed = status != 0
    for row in rows:
        broken = row.floor is not None and row.value > row.floor
        failed = failed or broken
        print(
            f"{'BROKEN  ' if broken else ''}{row.name}: {row.value:g} {row.unit}"
            + (f" (at most {row.floor:g})" if row.floor is not None else "")
        )
    path = options.json or ROOT / "bench" / "results" / hardware_slug() / "serve-soak.json"
    write_result(path, rows, command=shlex.join(["python", *sys.argv]), gpu=server.gpu)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
