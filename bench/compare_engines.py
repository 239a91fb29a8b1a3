"""Octavo beside other engines on one GPU: random weights of a model's shape, in turn, pass by pass.

    python bench/compare_engines.py MODEL... [--peers vllm,nano_vllm] [--tasks nano,single,...]

Every engine is a process of engine_contestants.py with its share of the GPU's memory; it is started once, and
one at a time works. Each pass has tokens that no pass before it had, the same for all. Rows:

nano/MODEL/bf16                     nano-vllm's workload: output tokens a second
single/MODEL                        one stream, 128 tokens in, 256 out: ms a token after the first
prefill/16x2048/MODEL/e2e           prompts of that number and length, one token each: ms
prefill/1x8192/MODEL/e2e
shared_prefix/64x8192+128/MODEL     64 requests of one prefix and 128 tokens of their own, 128 out: seconds.
                                    `vllm_no_prefix_cache` is vLLM with a cache salt for every request
nano/MODEL/fp8                      Octavo with an fp8 KV cache beside itself without
start/MODEL                         from the start of the process to its first token: seconds; another row
                                    has it without kernels on disk. Each peer has one start, its first

A row's details are all passes (seconds, unless they say) and each engine's spread: (slowest - fastest) /
median. The result file is written after every task; `failed` in it says what went wrong and what was left out
for want of time. With `--append` several commands make one file. What is promised on an H200 stands beside
rows of Octavo as it starts by itself, not of another mode (`--octavo deterministic=true`). `--peers` takes
NAME=FILE, too, a program that is called and answers as engine_contestants.py is and does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_race import ContestantError, Entry, Race, Task, Work
from serve_process import exit_on_sigterm

from octavo.bench.report import (
    ResultFileError,
    Row,
    check_append,
    hardware_slug,
    read_result,
    write_result,
)
from octavo.bench.workloads import WorkloadShape, random_workload
from octavo.models.config import load_config
from octavo.models.shapes import kv_cache_spec
from octavo.models.source import resolve_model

ROOT = Path(__file__).resolve().parent.parent
TASKS = ("nano", "single", "prefill", "shared_prefix", "fp8", "start")
PEERS = ("vllm", "nano_vllm")
COLD = ", no kernels on disk"

# What the project promises on an H200: a number, or the least ratio to each peer.
PROMISES: dict[str, float | dict[str, float]] = {
    "nano/qwen3-0.6b/bf16": {"vllm": 1.5},
    "nano/qwen3-8b/bf16": {"vllm": 1.25},
    "nano/qwen3-0.6b/fp8": {"octavo bf16": 1.2},
    "single/qwen3-0.6b": 0.8,
    "single/qwen3-8b": 4.3,
    "prefill/16x2048/qwen3-0.6b/e2e": 16 * 2048 / 400,  # 400,000 tokens a second
    "prefill/1x8192/qwen3-8b/e2e": 200.0,
    "shared_prefix/64x8192+128/qwen3-0.6b": {"vllm": 1.0, "vllm_no_prefix_cache": 3.0},
    "shared_prefix/64x8192+128/qwen3-8b": {"vllm": 1.0, "vllm_no_prefix_cache": 3.0},
    "start/qwen3-0.6b": 8.0,
    "start/qwen3-0.6b, no kernels on disk": 25.0,
}


def tasks_of(model: str, options: argparse.Namespace) -> Iterator[Task]:
    """Everything but the starts. Octavo alone remains for the last of them."""
    scale, rounds = options.scale, options.rounds

    def scaled(value: int) -> int:
        return max(1, round(value * scale))

    everyone = [Entry("octavo", "octavo"), *(Entry(peer, peer) for peer in options.peers)]
    draw = random_workload(WorkloadShape().scaled(scale))
    nano = Work(list(map(len, draw.prompts)), draw.output_lens)

    def tokens_per_s(seconds: float) -> float:
        return nano.num_output_tokens / seconds

    if "nano" in options.tasks:
        yield Task(f"nano/{model}/bf16", "tok/s", "higher", [(nano, rounds)], everyone, tokens_per_s)
    if "single" in options.tasks:
        num_new = max(2, scaled(256))
        works = [
            (Work([scaled(128)], [num_new], label=f"{num_new} new tokens"), 5),
            (Work([scaled(128)], [1], label="one new token"), 7),
        ]
        yield Task(
            f"single/{model}", "ms/token", "lower", works, everyone,
            lambda long, short: 1e3 * (long - short) / (num_new - 1),
        )  # fmt: skip
    if "prefill" in options.tasks:
        for number, length in ((scaled(16), scaled(2048)), (1, scaled(8192))):
            works = [(Work([length] * number, [1] * number), 7)]
            row = f"prefill/{number}x{length}/{model}/e2e"
            yield Task(row, "ms", "lower", works, everyone, lambda seconds: 1e3 * seconds)
    if "shared_prefix" in options.tasks:
        number, prefix, own = scaled(64), scaled(8192), scaled(128)
        works = [(Work([own] * number, [own] * number, prefix), rounds)]
        entries = [entry for entry in everyone if entry.label != "nano_vllm"]
        if "vllm" in options.peers:
            entries.append(Entry("vllm_no_prefix_cache", "vllm", is_salted=True))
        row = f"shared_prefix/{number}x{prefix}+{own}/{model}"
        yield Task(row, "s", "lower", works, entries, lambda seconds: seconds)
    if "fp8" in options.tasks:
        entries = [Entry("octavo", "octavo_fp8"), Entry("octavo bf16", "octavo")]
        yield Task(f"nano/{model}/fp8", "tok/s", "higher", [(nano, rounds)], entries, tokens_per_s)


def measure(race: Race, task: Task, check: Callable[[Race], None]) -> Row:
    """The row of a task. ContestantError when ours fails; a peer that does is left out, `failed` says why.

    `check` is called when all have started, and may raise.
    """
    entries = list(task.entries)
    seconds: dict[str, list[list[float]]] = {entry.label: [[] for _ in task.works] for entry in entries}

    def each(act: Callable[[Entry], None]) -> None:
        for entry in tuple(entries):
            try:
                act(entry)
            except ContestantError as error:
                if entry is task.entries[0]:
                    raise
                print(f"  {entry.label} failed: {error}", flush=True)
                race.failed[f"{task.row}, {entry.label}"] = str(error)
                entries.remove(entry)

    def in_turn(round_: int) -> None:
        """A pass of each work that has as many rounds; round 0 warms up."""
        drawn = [
            (i, work, work.draw(race.rng, race.num_ids))
            for i, (work, number) in enumerate(task.works)
            if round_ <= number
        ]

        def passes(entry: Entry) -> None:
            for i, work, prompts in drawn:
                taken = race.run(entry, work, prompts, f"{task.row} {round_}")
                what = f"round {round_}" if round_ else "warm-up"
                print(f"  {what}, {entry.label}, {work.label}: {taken:.4g} s", flush=True)
                if round_:
                    seconds[entry.label][i].append(taken)

        each(passes)

    print(task.row, flush=True)
    each(lambda entry: race.enter(entry.contestant))
    check(race)
    for round_ in range(1 + max(number for _, number in task.works)):
        in_turn(round_)

    labels = [entry.label for entry in entries]
    found = {label: task.value(*map(statistics.median, seconds[label])) for label in labels}
    details: dict[str, float | str | Sequence[float]] = {}
    for label, entry in zip(labels, entries, strict=True):
        if "attention" in race.facts[entry.contestant]:
            details[f"{label}, attention"] = race.facts[entry.contestant]["attention"]
        for (work, _), taken in zip(task.works, seconds[label], strict=True):
            details[f"{label}, {work.label}"] = [round(s, 6) for s in taken]
        first = seconds[label][0]
        details[f"{label}, spread"] = round((max(first) - min(first)) / statistics.median(first), 4)
        if task.row.startswith("prefill/"):
            rate = task.works[0][0].num_input_tokens / statistics.median(first)
            details[f"{label}, tok/s in"] = round(rate)
    if task.row.startswith("nano/") and (bound := bytes_bound(race, task)):
        details["bytes allow, tok/s"] = round(bound)
    return row_of(race.options, task.row, task.unit, task.better, found, details)


def row_of(
    options: argparse.Namespace,
    name: str,
    unit: str,
    better: str,
    found: dict[str, float],
    details: dict[str, Any],
) -> Row:
    """`found` has Octavo's own value first. What is promised is promised of Octavo as it starts by itself."""
    (_, ours), *theirs = ((label, round(value, 4)) for label, value in found.items())
    peers = dict(theirs)
    promise = None if options.octavo else PROMISES.get(name)
    if isinstance(promise, dict):
        ratios = {peer: ratio if better == "higher" else 1 / ratio for peer, ratio in promise.items()}
        least = [peers[peer] * ratio for peer, ratio in ratios.items() if peer in peers]
        hardest = max if better == "higher" else min
        promise = round(hardest(least), 4) if least else None
    row = Row(name, ours, unit, better, promise, peers, details)
    print(f"{name}: {ours:.4g} {unit}; {peers}; ratio {row.ratio}", flush=True)
    return row


def bytes_bound(race: Race, task: Task) -> float | None:
    """Output tokens a second if nothing took time but to read weights and cached keys and values once for
    every step, at the rate this GPU was measured to read; None where it was not.
    """
    gpu = race.gpu_slug
    path = ROOT / "bench" / "results" / gpu / "kernels.json"
    if not gpu or not path.is_file():
        return None
    rate = 1e12 * float(read_result(path)["ceilings"]["read TB/s"])
    work = task.works[0][0]
    kv_dtype = "float8_e4m3" if task.row.endswith("/fp8") else "bfloat16"
    spec = kv_cache_spec(race.config, dtype=kv_dtype)
    weights = race.facts[task.entries[0].contestant]["weights_nbytes"]
    num_bytes = max(work.num_new) * weights + work.num_kv_reads * spec.bytes_per_token
    return float(work.num_output_tokens * rate / num_bytes)


def measure_starts(race: Race, check: Callable[[Race], None]) -> list[Row]:
    """How long starts take, each alone on the GPU; a peer's is the one it had, whoever was there already.

    `check` is called when Octavo has started, and may raise.
    """
    name = f"start/{race.model}"
    print(name, flush=True)
    race.close(*race.alive)
    if "octavo" not in race.starts:
        race.start("octavo")  # may compile kernels
        race.close("octavo")
    check(race)
    warm = []
    for _ in range(race.options.rounds):
        warm.append(race.start("octavo"))
        race.close("octavo")
    for peer in race.options.peers:
        if peer not in race.starts:
            try:
                race.enter(peer)
                race.close(peer)
            except ContestantError as error:
                race.failed[f"{name}, {peer}"] = str(error)
    peers = {peer: race.starts[peer] for peer in race.options.peers if peer in race.starts}
    details = {
        "octavo, passes": [round(s, 3) for s in warm],
        "octavo, spread": round((max(warm) - min(warm)) / statistics.median(warm), 4),
        "octavo, first start of this run": round(race.starts["octavo"], 3),
    }
    rows = [row_of(race.options, name, "s", "lower", {"octavo": statistics.median(warm), **peers}, details)]
    name += COLD
    try:
        with tempfile.TemporaryDirectory() as empty:
            cold = race.start("octavo", TRITON_CACHE_DIR=empty)
            race.close("octavo")
    except ContestantError as error:
        race.failed[name] = str(error)
    else:
        details = {"octavo, passes": [round(cold, 3)]}
        rows.append(row_of(race.options, name, "s", "lower", {"octavo": cold}, details))
    return rows


@dataclass
class Results:
    """The rows so far and the file they are in, which is written anew after every task."""

    options: argparse.Namespace
    rows: list[Row] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    gpu: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    def write(self, race: Race) -> None:
        path = self._learn(race)
        if not self.rows:
            return  # a result file without a row is none
        write_result(
            path, self.rows, command=command_of(self.options), gpu=self.gpu, failed=self.failed,
            extra_versions=self.versions, append=self.options.append,
        )  # fmt: skip

    def check(self, race: Race) -> None:
        """ResultFileError where what is measured next could not be appended, by what has started so far."""
        path = self._learn(race)
        if self.options.append:
            check_append(path, self.gpu, self.versions)

    def _learn(self, race: Race) -> Path:
        """Take in which GPU and which versions the race knows by now; the result file that is theirs."""
        facts = race.facts
        self.gpu = facts.get("octavo", {}).get("gpu", "") or self.gpu
        self.versions |= {p: facts[p]["version"] for p in race.options.peers if "version" in facts.get(p, {})}
        if self.options.json is not None:
            path: Path = self.options.json
            return path
        return ROOT / "bench" / "results" / (race.gpu_slug or hardware_slug()) / "engines.json"


def command_of(options: argparse.Namespace) -> str:
    """What was asked for, without the paths of this machine."""
    names = [Path(model).name for model in options.models]
    told = [*names, "--peers", ",".join(options.peers) or "none", "--tasks", ",".join(options.tasks)]
    told += ["--rounds", str(options.rounds), "--share", f"{options.share:g}"]
    if options.scale != 1:
        told += ["--scale", f"{options.scale:g}"]
    for key, value in options.octavo.items():
        told += ["--octavo", f"{key}={json.dumps(value)}"]
    return shlex.join(["python", "bench/compare_engines.py", *told])


def compare(model: str, options: argparse.Namespace, logs: Path, deadline: float, results: Results) -> None:
    """Every task of one model that there is time for."""
    source = resolve_model(model, files="config")
    name = Path(model).name.lower()
    race = Race(name, str(source.path), load_config(source), options, logs, deadline, results.failed)

    def attempt(row: str, needed_s: float, act: Callable[[], list[Row]]) -> None:
        if needed_s > race.left_s:
            results.failed[row] = f"left out: {race.left_s:.0f} s left, about {needed_s:.0f} needed"
            print(f"{row}: {results.failed[row]}", flush=True)
        else:
            try:
                results.rows += act()
            except ContestantError as error:
                results.failed[row] = str(error)
                print(f"{row} failed: {error}", flush=True)
        results.write(race)

    tasks = list(tasks_of(name, options))
    try:
        for i, task in enumerate(tasks):
            still = {entry.contestant for later in tasks[i:] for entry in later.entries}
            race.close(*(race.alive.keys() - still))
            attempt(task.row, race.needed_s(task), lambda task=task: [measure(race, task, results.check)])
        if "start" in options.tasks:
            num_starts = options.rounds + 1 + ("octavo" not in race.starts)
            absent = set(options.peers) - race.starts.keys() - race.lost.keys()
            needed_s = num_starts * race.start_s("octavo") + sum(map(race.start_s, absent))
            attempt(f"start/{name}", needed_s, lambda: measure_starts(race, results.check))
        race.close(*race.alive)
    except BaseException:
        race.close(*race.alive, at_once=True)
        raise


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="MODEL", help="folder with a config.json, or a name")
    parser.add_argument("--peers", default="vllm", help=f"of {', '.join(PEERS)}, NAME=FILE, or none")
    path_help = "where peers are found: on the PYTHONPATH of peers only (repeatable)"
    parser.add_argument("--peer-path", action="append", default=[], metavar="DIR", help=path_help)
    parser.add_argument("--tasks", default=",".join(TASKS), help=f"of {', '.join(TASKS)}")
    parser.add_argument("--rounds", type=int, default=2, help="measured passes of the long tasks")
    parser.add_argument("--scale", type=float, default=1.0, help="every size times this, to try it out")
    parser.add_argument("--share", type=float, help="of the GPU's memory for each; default 0.45 or what fits")
    parser.add_argument("--octavo", action="append", default=[], metavar="KEY=VALUE", help="engine option")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="begin nothing that would end later")
    parser.add_argument("--timeout", type=float, default=240.0, help="longest pass or start, in seconds")
    parser.add_argument("--json", type=Path, help="result file; default bench/results/<machine>/engines.json")
    append_help = "keep the other rows of the file, which must be of this commit, machine and versions"
    parser.add_argument("--append", action="store_true", help=append_help)
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep what the engines print")
    options = parser.parse_args(argv)
    peers: dict[str, Path | None] = {}
    for item in options.peers.split(",") if options.peers not in ("", "none") else ():
        name, _, file = item.partition("=")
        if not file and name not in PEERS:
            parser.error(f"--peers: unknown peer {name!r}; known are {', '.join(PEERS)}, or give NAME=FILE")
        peers[name] = Path(file) if file else None
    options.peers = peers
    options.tasks = options.tasks.split(",")
    if unknown := set(options.tasks) - set(TASKS):
        parser.error(f"--tasks: unknown {', '.join(sorted(unknown))}; known are {', '.join(TASKS)}")
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    options.octavo = dict(map(_option, options.octavo))
    if options.append and options.json is not None:
        try:
            check_append(options.json)
        except ResultFileError as error:
            parser.error(f"--append: {error}")
    if options.share is None:
        options.share = min(0.45, round(0.9 / (1 + len(peers)), 2))
    return options


def _option(text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    deadline = time.monotonic() + (options.limit if options.limit is not None else 1e9)
    exit_on_sigterm()
    results = Results(options)
    with contextlib.ExitStack() as stack:
        logs = options.logs or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        logs.mkdir(parents=True, exist_ok=True)
        for model in options.models:
            try:
                compare(model, options, logs, deadline, results)
            except ResultFileError as error:
                print(error, file=sys.stderr)
                return 1
    for what, why in results.failed.items():
        print(f"not measured: {what}: {why}")
    return 0 if results.rows else 1


if __name__ == "__main__":
    sys.exit(main())
