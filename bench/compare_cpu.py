"""Octavo, Transformers and llama.cpp on this CPU: the same weights, 2 threads each, in turn.

    python bench/compare_cpu.py [--llama-python PYTHON] [--rounds 3]

Every engine runs in a process of its own, loaded once; then workload by workload, round by round,
A B C A B C; medians count. PYTHON is an interpreter that has `xllamacpp`; without it
llama.cpp is left out. The result goes to bench/results/<this machine>/compare.json.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.bench.hf_folder import write_hf_folder
from octavo.bench.report import Row, hardware_slug, write_result
from octavo.models.source import resolve_model

ROOT = Path(__file__).resolve().parent.parent
MODEL = "smollm2-135m"
OCTAVO = {
    "float32": {"dtype": "float32"},
    "float16": {"quantization": "float16"},
    "int8": {"quantization": "int8"},
}
MAX_NOISE = 0.15  # cores that other programs may use during a run
TF32, TF16, LLAMA = "Transformers float32", "Transformers bfloat16", "llama.cpp Q4_1"


@dataclass(frozen=True)
class Job:
    """What every engine is asked. `floors` maps an Octavo variant to (peer, least ratio) promises."""

    name: str
    prompts: list[list[int]]
    num_new: list[int]
    floors: dict[str, list[tuple[str, float]]]
    counts_prompt: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.prompts)) if self.counts_prompt else sum(self.num_new)


def jobs(shrink: int = 1) -> list[Job]:
    """The workloads; `shrink` divides every length, for trying the script out."""
    rng = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(20, 10_000) for _ in range(length // shrink)]

    fast = ("float16", "int8")
    mixed = [rng.randint(30, 150) for _ in range(16)]
    return [
        Job(
            "one stream, 40 prompt and 128 new tokens",
            [prompt(40)],
            [128 // shrink],
            {
                "float32": [(TF32, 2.0), ("faster Transformers", 1.2)],
                **{name: [(LLAMA, 0.5)] for name in fast},
            },
        ),
        Job(
            "16 requests of 50 prompt and 128 new tokens",
            [prompt(50) for _ in range(16)],
            [128 // shrink] * 16,
            {"float32": [(TF32, 2.2)], **{name: [(LLAMA, 1.8)] for name in fast}},
        ),
        Job(
            "16 requests of 30 to 150 prompt and 32 to 128 new tokens",
            [prompt(length) for length in mixed],
            [rng.randint(32, 128) // shrink for _ in range(16)],
            {"float32": [(TF32, 2.2)], **{name: [(LLAMA, 1.8)] for name in fast}},
        ),
        Job(
            "prefill of 512 tokens",
            [prompt(512)],
            [1],
            {"float32": [("faster Transformers", 1.0)], **{name: [(LLAMA, 1.8)] for name in fast}},
            counts_prompt=True,
        ),
    ]


@dataclass
class Contestant:
    """A process of contestants.py and what it answered."""

    name: str
    process: subprocess.Popen[str]
    speeds: dict[str, list[float]] = field(default_factory=dict)
    answers: dict[str, Any] = field(default_factory=dict)
    rss: int = 0

    @classmethod
    def start(cls, name: str, python: str, kind: str, options: dict[str, Any]) -> Contestant:
        print(f"loading {name}", flush=True)
        process = subprocess.Popen(
            (python, str(ROOT / "bench" / "contestants.py"), kind, json.dumps(options)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        contestant = cls(name, process)
        contestant._reply()
        return contestant

    def run(self, job: Job) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": job.prompts, "num_new": job.num_new}) + "\n")
        self.process.stdin.flush()
        return self._reply()

    def _reply(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} died")
        reply: dict[str, Any] = json.loads(line)
        self.rss = reply["rss"]
        return reply

    def median(self, job: Job) -> float:
        return statistics.median(self.speeds[job.name])


def busy_s() -> float:
    """Processor seconds that everything on this machine has used since it started."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return (sum(fields[:8]) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def process_s(pid: int) -> float:
    """Processor seconds that one process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_until_quiet(limit_s: float) -> None:
    """Waits while others use the processor, at most `limit_s`."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        before = busy_s()
        time.sleep(0.5)
        if (busy_s() - before) / 0.5 < MAX_NOISE:
            return


def timed(contestant: Contestant, job: Job, quiet_s: float, retries: int) -> tuple[dict[str, Any], float]:
    """One run and the cores others used during it; a disturbed run is repeated, the calmest one counts."""
    best: tuple[dict[str, Any], float] | None = None
    for _ in range(1 + retries):
        wait_until_quiet(quiet_s)
        everyone, mine = busy_s(), process_s(contestant.process.pid)
        reply = contestant.run(job)
        others = busy_s() - everyone - (process_s(contestant.process.pid) - mine)
        noise = max(0.0, others / reply["seconds"])
        if best is None or noise < best[1]:
            best = reply, noise
        if noise < MAX_NOISE:
            break
    assert best is not None
    return best


def floor_of(job: Job, variant: str, peers: dict[str, float]) -> float | None:
    faster = max((speed for name, speed in peers.items() if name in (TF32, TF16)), default=None)
    known = {**peers, **({} if faster is None else {"faster Transformers": faster})}
    floors = [known[peer] * ratio for peer, ratio in job.floors.get(variant, []) if peer in known]
    return round(max(floors), 2) if floors else None


def rows_of(all_jobs: Iterable[Job], ours: dict[str, Contestant], theirs: dict[str, Contestant]) -> list[Row]:
    rows = []
    for job in all_jobs:
        peers = {name: round(contestant.median(job), 2) for name, contestant in theirs.items()}
        for variant, contestant in ours.items():
            value = round(contestant.median(job), 2)
            floor = floor_of(job, variant, peers)
            rows.append(Row(f"{job.name}, {variant}", value, "tokens/s", floor=floor, peers=peers))
    memory = {name: round(contestant.rss / 1e6) for name, contestant in theirs.items()}
    for variant, contestant in ours.items():
        rows.append(
            Row(
                f"memory after all of it, {variant}", round(contestant.rss / 1e6), "MB", "lower", peers=memory
            )
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = ROOT / "bench" / "results" / hardware_slug() / "compare.json"
    parser.add_argument("--json", type=Path, default=default, help="result file")
    parser.add_argument("--llama-python", help="an interpreter that has xllamacpp")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--quiet-s", type=float, default=30, help="longest wait for an idle machine before a run"
    )
    parser.add_argument("--only", default="*", help="pattern of the workloads to run")
    parser.add_argument("--retries", type=int, default=3, help="repeats of a run that others disturbed")
    parser.add_argument(
        "--try-out", action="store_true", help="one round of sixteenth lengths: numbers mean nothing"
    )
    options = parser.parse_args()

    source = resolve_model(MODEL)
    all_jobs = [job for job in jobs(16 if options.try_out else 1) if fnmatch.fnmatch(job.name, options.only)]
    rounds = 1 if options.try_out else options.rounds
    with tempfile.TemporaryDirectory() as folder:
        write_hf_folder(source, Path(folder))
        start = Contestant.start
        ours = {
            variant: start(f"Octavo {variant}", sys.executable, "octavo", {"model": MODEL, **engine})
            for variant, engine in OCTAVO.items()
        }
        theirs = {
            TF32: start(TF32, sys.executable, "transformers", {"folder": folder, "dtype": "float32"}),
            TF16: start(TF16, sys.executable, "transformers", {"folder": folder, "dtype": "bfloat16"}),
        }
        if options.llama_python:
            theirs[LLAMA] = start(LLAMA, options.llama_python, "llama.cpp", {"gguf": str(source.path)})
        everyone = [*ours.values(), *theirs.values()]

        noise = []
        for job in all_jobs:
            short = Job(job.name, [prompt[:16] for prompt in job.prompts], [2] * len(job.prompts), {})
            for contestant in everyone:
                contestant.run(short)
            for _ in range(rounds):
                for contestant in everyone:
                    reply, others = timed(contestant, job, options.quiet_s, options.retries)
                    noise.append(others)
                    speed = job.num_tokens / reply["seconds"]
                    contestant.speeds.setdefault(job.name, []).append(speed)
                    contestant.answers[job.name] = reply["token_ids"]
                    print(
                        f"{job.name}: {contestant.name} {speed:.1f} tokens/s, others {noise[-1]:.2f} cores",
                        flush=True,
                    )
        for contestant in everyone:
            assert contestant.process.stdin is not None
            contestant.process.stdin.close()
            contestant.process.wait()

    rows = rows_of(all_jobs, ours, theirs)
    equal = total = 0
    for job in all_jobs:
        for mine, reference in zip(
            ours["float32"].answers[job.name], theirs[TF32].answers[job.name], strict=True
        ):
            equal += mine == reference
            total += 1
    rows.append(
        Row("answers equal to Transformers float32, token for token", round(100 * equal / total, 1), "%")
    )
    rows.append(
        Row(
            "cores used by other programs during the runs, mean",
            round(statistics.mean(noise), 3),
            "",
            "lower",
        )
    )
    told = ["--rounds", str(rounds)]
    if options.only != "*":
        told += ["--only", options.only]
    if options.try_out:
        told.append("--try-out")
    versions = {}
    if options.llama_python:
        told += ["--llama-python", "PYTHON"]
        command = (options.llama_python, "-c", "import xllamacpp; print(xllamacpp.__version__)")
        versions["xllamacpp"] = subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout.strip()
    write_result(
        options.json,
        rows,
        command=shlex.join(["python", "bench/compare_cpu.py", *told]),
        extra_versions=versions,
    )
    print(f"wrote {options.json}")


if __name__ == "__main__":
    main()
