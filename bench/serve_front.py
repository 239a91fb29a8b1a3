"""What the front adds to a token, from the engine process to the client: with an engine that costs nothing.

python bench/serve_front.py                  256 streams, a token each every 100 ms

Each token's text is the time at which the scripted engine made it; all tokens of an event that holds several
are counted, each from its own time. The load generator's own share is measured in turn, against a server that
writes such pieces itself and does nothing else; what the front adds is the rest. `together`: all streams get
their token at one moment, as an engine's step gives them; the last of them waits for all the others to be
written. `apart`: their moments are spread over the interval.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import shlex
import statistics
import sys
from pathlib import Path

import serve_scripted
from serve_process import exit_on_sigterm

from octavo.bench import serve_null
from octavo.bench.report import Row, hardware_slug, write_result
from octavo.bench.serve import Target, run_load
from octavo.bench.serve_calls import Arrivals, Lengths, Mix
from octavo.bench.serve_http import Endpoint
from octavo.bench.serve_report import Spread

ROOT = Path(__file__).resolve().parent.parent
MAX_ADDED_MS = 5.0


def delays(url: str, options: argparse.Namespace) -> Spread:
    """How long tokens were on their way, while all streams ran and had settled."""
    is_chat = options.api == "chat"
    mix = Mix(
        Lengths.parse("--input-len", "32"),
        Lengths.parse("output", str(options.num_tokens)),
        Arrivals(),
        as_text=is_chat,
    )
    limit_s = 60 + 3 * options.num_tokens * options.interval
    target = Target(Endpoint.parse(url), options.model, is_chat=is_chat, timeout_s=limit_s, reads_stamps=True)
    warm_up = [dataclasses.replace(call, output_len=4) for call in itertools.islice(mix.calls(1), 8)]
    run_load(target, warm_up, concurrency=8)
    calls = list(itertools.islice(mix.calls(0), options.streams))
    load = run_load(target, calls, concurrency=options.streams)
    failed = [answer for answer in load.answers if answer.error]
    if failed:
        raise SystemExit(f"{len(failed)} calls failed, such as {failed[0].error}: {failed[0].detail}")
    if any(len(answer.stamps_s) != options.num_tokens for answer in load.answers):
        raise SystemExit("not every token came with its time")
    begun_s = max(answer.text_s[0] for answer in load.answers) + options.settle
    ended_s = min(answer.text_s[-1] for answer in load.answers)
    spread = Spread.of(
        delay
        for answer in load.answers
        for at_s, delay in zip(answer.stamped_s, answer.stamps_s, strict=True)
        if begun_s < at_s < ended_s
    )
    assert spread is not None, "the streams never all ran at once; raise --num-tokens"
    return spread


def main() -> int:
    exit_on_sigterm()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", help="its tokenizer and chat template are used")
    parser.add_argument("--api", choices=("chat", "completions"), default="chat")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--interval", type=float, default=0.1, help="seconds between a stream's tokens")
    parser.add_argument("--num-tokens", type=int, default=100)
    parser.add_argument("--settle", type=float, default=1.0, help="seconds left out after the last one began")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="default: bench/results/<this machine>/serve-front.json")
    options = parser.parse_args()
    rows = []
    is_slow = False
    for name, num_groups in (("together", 1), ("apart", 16)):
        bare, front = [], []
        for turn in range(options.rounds):
            with serve_null.running(options.interval, num_groups) as url:
                bare.append(delays(url, options))
            with serve_scripted.running(options.interval, num_groups, options.model) as server:
                front.append(delays(server.url, options))
            through, without = (
                f"{1000 * s[-1].p50:.2f} and {1000 * s[-1].p99:.2f} ms" for s in (front, bare)
            )
            print(f"{name}, round {turn + 1}: p50 and p99 {through}; without the front {without}")
        for percentile in ("p50", "p99"):
            added = [
                1000 * (getattr(one, percentile) - getattr(other, percentile))
                for one, other in zip(front, bare, strict=True)
            ]
            value = round(statistics.median(added), 3)
            floor = MAX_ADDED_MS if percentile == "p99" else None
            is_slow = is_slow or (floor is not None and value > floor)
            details = {
                "through the front, ms": round(
                    1000 * statistics.median(getattr(s, percentile) for s in front), 3
                ),
                "without, ms": round(1000 * statistics.median(getattr(s, percentile) for s in bare), 3),
            }
            rows.append(Row(f"added by the front, tokens {name}, {percentile}", value, "ms", "lower", floor,
                            details=details))  # fmt: skip
    for row in rows:
        print(
            f"{row.name}: {row.value:g} ms" + (f" (at most {row.floor:g})" if row.floor is not None else "")
        )
    path = options.json or ROOT / "bench" / "results" / hardware_slug() / "serve-front.json"
    write_result(path, rows, command=shlex.join(["python", *sys.argv]))
    return 1 if is_slow else 0


if __name__ == "__main__":
    sys.exit(main())
