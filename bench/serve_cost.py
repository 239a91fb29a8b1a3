"""What HTTP costs: tokens a second through `octavo serve`, against the same engine called directly.

python bench/serve_cost.py       smollm2-135m, 64 requests of 64 to 128 tokens, 3 pairs of runs

python bench/serve_cost.py MODEL --num-seqs 256 --engine gpu_memory_utilization=0.4

Both engines are loaded once and stay; runs alternate, each pair with prompts of its own, so that neither
finds the other's in a cache. Through HTTP every request is a stream of its own, and all are sent at once, by
as many client processes as --clients says: what a client takes to read its streams is no cost of the server,
and one process of them reads no faster than the server writes.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from serve_process import START_S, Server, exit_on_sigterm, line_of

from octavo.bench.report import Row, hardware_slug, write_result
from octavo.bench.serve import Load, Target, run_load
from octavo.bench.serve_calls import Arrivals, Call, Lengths, Mix
from octavo.bench.serve_http import Endpoint
from octavo.bench.serve_report import as_text, summarise

ROOT = Path(__file__).resolve().parent.parent
MIN_SHARE = 90.0
RUN_S = 600.0

OFFLINE = """
import json, sys, time
from octavo import LLM, SamplingParams

model, options = json.loads(sys.argv[1])
with LLM(model, **options) as llm:
    print(flush=True)
    for line in sys.stdin:
        prompts, lens = json.loads(line)
        params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lens]
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        elapsed_s = time.perf_counter() - started
        print(json.dumps([sum(len(output.token_ids) for output in outputs), elapsed_s]), flush=True)
"""


class Offline:
    """An `LLM` in a process of its own."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        command = (sys.executable, "-c", OFFLINE, json.dumps([model, options]))
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        line_of(self.process, START_S)

    def run(self, calls: list[Call]) -> float:
        """Output tokens a second."""
        assert self.process.stdin is not None
        work = [[call.prompt for call in calls], [call.output_len for call in calls]]
        print(json.dumps(work), file=self.process.stdin, flush=True)
        num_tokens, elapsed_s = json.loads(line_of(self.process, RUN_S))
        assert num_tokens == sum(call.output_len for call in calls)
        return float(num_tokens / elapsed_s)


def joined(loads: Iterable[Load]) -> Load:
    """One run of what several clients did beside each other, from the first one's start to the last answer.

    Its `cpu_s` is that of the busiest: whether each kept up is what it is asked for. The times of an answer
    stay those after its own client's start.
    """
    loads = list(loads)
    started = min(load.started for load in loads)
    return Load(
        [answer for load in loads for answer in load.answers],
        max(load.started + load.elapsed_s for load in loads) - started,
        max(load.cpu_s for load in loads),
        sum(load.num_connections for load in loads),
        started,
    )


def checked(load: Load, calls: list[Call]) -> Load:
    """A run in which everything was answered in full; what is compared must be the same work."""
    failed = [answer for answer in load.answers if not answer.is_ok]
    if failed:
        raise SystemExit(f"{len(failed)} calls failed, such as {failed[0].error}: {failed[0].detail}")
    num_tokens = sum(answer.num_tokens for answer in load.answers)
    if num_tokens != sum(call.output_len for call in calls):
        raise SystemExit(f"the server made {num_tokens} tokens; other than was asked for")
    return load


def main() -> int:
    exit_on_sigterm()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--num-seqs", type=int, default=64)
    parser.add_argument(
        "--input-len", default="uniform:32:96", help="tokens; as `octavo bench serve` takes it"
    )
    parser.add_argument("--output-len", default="uniform:64:128")
    parser.add_argument("--max-token-id", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--clients", type=int, default=max(1, min(4, (os.cpu_count() or 1) // 4)),
        help="processes that share out the requests; default: one for every 4 processors, at most 4",
    )  # fmt: skip
    parser.add_argument(
        "--engine", action="append", default=[], metavar="NAME=VALUE", help="an engine option; for both"
    )
    parser.add_argument("--json", type=Path, help="default: bench/results/<this machine>/serve-cost.json")
    options = parser.parse_args()
    engine = dict(option.split("=", 1) for option in options.engine)
    flags = [part for name, value in engine.items() for part in (f"--{name.replace('_', '-')}", value)]
    with contextlib.ExitStack() as running:
        server = Server(options.model, flags)
        running.callback(server.process.kill)
        offline = Offline(options.model, {name: _value(value) for name, value in engine.items()})
        running.callback(offline.process.kill)
        name = json.loads(server.get("/v1/models"))["data"][0]["id"]
        target = Target(Endpoint.parse(server.url), name, is_chat=False, timeout_s=RUN_S)
        clients = running.enter_context(
            ProcessPoolExecutor(options.clients, multiprocessing.get_context("spawn"))
        )
        mix = Mix(
            Lengths.parse("--input-len", options.input_len),
            Lengths.parse("--output-len", options.output_len),
            Arrivals(float("inf")),
            as_text=False,
            max_token_id=options.max_token_id,
        )

        def ask(calls: list[Call]) -> Load:
            num = min(options.clients, len(calls))  # none has nothing to send
            shares = [calls[i::num] for i in range(num)]
            return joined(clients.map(functools.partial(run_load, target), shares))

        pairs = []
        for turn in range(options.rounds + 1):
            calls = list(itertools.islice(mix.calls(turn), options.num_seqs))
            sides = {
                "offline": lambda calls=calls: offline.run(calls),
                "http": lambda calls=calls: summarise(checked(ask(calls), calls)),
            }
            order = list(sides) if turn % 2 else list(reversed(sides))
            found = {side: sides[side]() for side in order}
            summary = found["http"]
            print(f"{'warm-up' if not turn else f'pair {turn}'}: offline {found['offline']:.1f} tokens/s, "
                  f"HTTP {summary.output_tokens_per_s:.1f}")  # fmt: skip
            if turn:
                pairs.append((found["offline"], summary.output_tokens_per_s))
        print(as_text(summary))
        status = server.stop()
    shares = [100 * http / direct for direct, http in pairs]
    rows = [
        Row("through HTTP, output", round(statistics.median(http for _, http in pairs), 2), "tokens/s",
            peers={"offline": round(statistics.median(direct for direct, _ in pairs), 2)}),
        Row("through HTTP, of the offline engine", round(statistics.median(shares), 2), "%", floor=MIN_SHARE,
            details={f"pair {i + 1}": round(share, 2) for i, share in enumerate(shares)}),
    ]  # fmt: skip
    if summary.tokens_per_piece is not None:
        rows.append(Row("tokens a piece", round(summary.tokens_per_piece, 3), "tokens", better="lower"))
    path = options.json or ROOT / "bench" / "results" / hardware_slug() / "serve-cost.json"
    write_result(path, rows, command=shlex.join(["python", *sys.argv]), gpu=server.gpu)
    print(f"through HTTP: {statistics.median(shares):.1f} % of the offline engine (at least {MIN_SHARE:g} %)")
    return 1 if status or statistics.median(shares) < MIN_SHARE else 0


def _value(text: str) -> Any:
    """An engine option as Python has it."""
    try:
        return json.loads(text)
    except ValueError:
        return text


if __name__ == "__main__":
    sys.exit(main())
