"""The engines of compare_engines.py: their processes, what a pass asks of them, and what it may take."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.bench.workloads import MAX_TOKEN_ID
from octavo.models.config import ModelConfig

PROGRAM = Path(__file__).with_name("engine_contestants.py")
MAX_MODEL_LEN = 9216  # the longest request is 8192 + 128 + 128
PEER_ENVIRONMENT = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
START_S = {"octavo": 30.0, "vllm": 120.0, "nano_vllm": 60.0}  # to reckon with on an H200; other programs: 5
CLOSE_S = 15.0


class ContestantError(Exception):
    """A contestant gave an error instead of a result, died, or took too long."""


@dataclass(frozen=True)
class Work:
    """What one pass asks for. Every prompt is `prefix_len` tokens, the same for all, and then its own."""

    own_lens: Sequence[int]
    num_new: Sequence[int]
    prefix_len: int = 0
    label: str = "passes"

    @property
    def num_input_tokens(self) -> int:
        return sum(self.own_lens) + len(self.own_lens) * self.prefix_len

    @property
    def num_output_tokens(self) -> int:
        return sum(self.num_new)

    @property
    def num_kv_reads(self) -> int:
        """Cached tokens that decoding reads, over all steps."""
        return sum(
            n * (self.prefix_len + own) + n * (n + 1) // 2
            for own, n in zip(self.own_lens, self.num_new, strict=True)
        )

    def draw(self, rng: random.Random, num_ids: int) -> list[list[int]]:
        def ids(length: int) -> list[int]:
            return [rng.randrange(num_ids) for _ in range(length)]

        prefix = ids(self.prefix_len)
        return [prefix + ids(length) for length in self.own_lens]

    def expected_s(self, num_params: int, *, shares_prefix: bool) -> float:
        """What a pass may take on an H200: a slow host's steps, prompts at 250 TFLOP/s."""
        num_shared = (len(self.own_lens) - 1) * self.prefix_len if shares_prefix else 0
        step_s = 0.006 + 2 * num_params / 2e12
        return max(self.num_new) * step_s + (self.num_input_tokens - num_shared) * 2 * num_params / 250e12


@dataclass(frozen=True)
class Entry:
    """One column of a task: whose it is, and whether each request has a cache salt of its own."""

    label: str
    contestant: str
    is_salted: bool = False


@dataclass(frozen=True)
class Task:
    """A row to measure. `value` makes it of the median seconds of each work; the first entry is ours."""

    row: str
    unit: str
    better: str
    works: Sequence[tuple[Work, int]]
    entries: Sequence[Entry]
    value: Callable[..., float]


class Contestant:
    """A process that answers passes, from its start to `close`."""

    def __init__(self, command: Sequence[str], log: Path, environment: dict[str, str]) -> None:
        self._log = log
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True,
                env=environment, start_new_session=True,
            )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def ask(self, prompts: Sequence[list[int]], num_new: Sequence[int], salts: list[str] | None) -> None:
        assert self.process.stdin is not None
        asked = {"prompts": prompts, "num_new": list(num_new), "salts": salts}
        if self.is_alive:  # if not, `reply` says why; a child of it may hold the pipe, and never read
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.write(json.dumps(asked) + "\n")
                self.process.stdin.flush()

    def reply(self, timeout_s: float) -> dict[str, Any]:
        """The next line. ContestantError when it is an error, or none comes: the process is then ended."""
        deadline = time.monotonic() + timeout_s
        line = None
        while line is None and time.monotonic() < deadline:
            was_alive = self.is_alive  # its children may hold the pipe open after its death
            with contextlib.suppress(queue.Empty):
                line = self._lines.get(timeout=0.1)
            if line is None and not was_alive:
                line = ""
        if line is None:
            self.close(at_once=True)
            raise ContestantError(f"no answer in {timeout_s:.0f} s")
        if not line:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)  # it may still be about to, and its exit status is worth telling
            self.close(at_once=True)
            told = self._log.read_text(errors="replace").strip().splitlines()
            last = f": {told[-1][:300]}" if told else ""
            raise ContestantError(f"it died (exit status {self.process.returncode}){last}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ContestantError(answer["error"])
        return answer

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def close(self, *, at_once: bool = False) -> None:
        """Ends it and what it started: by the end of its input, by SIGTERM, by SIGKILL."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        if not at_once:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(CLOSE_S)
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
        self._reader.join(5)
        if not self._reader.is_alive():  # else somebody who left the group holds the pipe
            self.process.stdout.close()


@dataclass
class Race:
    """The contestants of one model: which are alive, how long they took to start, what went wrong."""

    model: str
    path: str
    config: ModelConfig
    options: argparse.Namespace
    logs: Path
    deadline: float
    failed: dict[str, str]
    alive: dict[str, Contestant] = field(default_factory=dict)
    starts: dict[str, float] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    spent_s: float = 0.0
    expected_s: float = 0.0

    def __post_init__(self) -> None:
        layer = self.config.hidden_size * self.config.head_dim * 2
        layer *= self.config.num_heads + self.config.num_kv_heads
        layer += 3 * self.config.hidden_size * self.config.intermediate_size
        embedding = self.config.hidden_size * self.config.vocab_size
        self.num_params = self.config.num_layers * layer + embedding  # for estimates: no experts, no biases
        self.num_ids = min(self.config.vocab_size, MAX_TOKEN_ID + 1)
        self.rng = random.Random(self.model)

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    @property
    def gpu_slug(self) -> str:
        """The folder of this GPU's results, such as ``nvidia-h200``; empty without one."""
        gpu = self.facts.get("octavo", {}).get("gpu", "").split(",")[0]
        return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")

    def start(self, name: str, **environment: str) -> float:
        """Seconds from the start of a process to its first token; it is then in `alive`."""
        program = PROGRAM
        kind, engine = name, {}
        if name.startswith("octavo"):
            kind, engine = "octavo", dict(self.options.octavo)
            engine |= {"kv_cache_dtype": "fp8"} if name == "octavo_fp8" else {}
            environment = {**os.environ, **environment}
        else:
            program = self.options.peers[name] or program
            paths = [*self.options.peer_path, os.environ.get("PYTHONPATH", "")]
            environment = {**PEER_ENVIRONMENT, **os.environ}
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        told = {
            "model": self.path,
            "share": self.options.share,
            "max_model_len": min(MAX_MODEL_LEN, self.config.max_position_embeddings),
            "engine": engine,
        }
        log = self.logs / f"{self.model}-{name}.log"
        print(f"starting {name}", flush=True)
        began = time.perf_counter()
        contestant = Contestant((sys.executable, str(program), kind, json.dumps(told)), log, environment)
        self.alive[name] = contestant
        try:
            contestant.ask([[1] * 16], [1], None)
            self.facts[name] = contestant.reply(self._timeout_s())
            contestant.reply(self._timeout_s())
        except ContestantError:
            self.close(name)
            raise
        seconds = time.perf_counter() - began
        print(f"  first token after {seconds:.1f} s", flush=True)
        self.starts.setdefault(name, seconds)
        return seconds

    def enter(self, name: str) -> None:
        """Starts it where it does not run. A peer gets one chance, Octavo another for every task."""
        if name in self.alive:
            if self.alive[name].is_alive:
                return
            self.close(name)
        if name in self.lost:
            raise ContestantError(self.lost[name])
        try:
            self.start(name)
        except ContestantError as error:
            if not name.startswith("octavo"):
                self.lost[name] = f"it did not start: {error}"
            raise

    def run(self, entry: Entry, work: Work, prompts: list[list[int]], salt: str) -> float:
        """Seconds of one pass."""
        if entry.contestant in self.lost:  # since this task began
            raise ContestantError(self.lost[entry.contestant])
        contestant = self.alive[entry.contestant]
        salts = [f"{salt}-{i}" for i in range(len(prompts))] if entry.is_salted else None
        began = time.perf_counter()
        contestant.ask(prompts, work.num_new, salts)
        try:
            seconds = float(contestant.reply(self._timeout_s())["seconds"])
        except ContestantError as error:
            if not contestant.is_alive and not entry.contestant.startswith("octavo"):
                self.lost[entry.contestant] = f"lost before: {error}"
            raise
        self.spent_s += time.perf_counter() - began
        self.expected_s += work.expected_s(self.num_params, shares_prefix=not entry.is_salted)
        return seconds

    def needed_s(self, task: Task) -> float:
        """What a task may take: by the estimates, corrected by how the passes so far compare with them."""
        pace = 1.2 * self.spent_s / self.expected_s if self.expected_s else 1.0
        passes = sum(
            (1 + number) * work.expected_s(self.num_params, shares_prefix=not entry.is_salted)
            for entry in task.entries
            for work, number in task.works
            if entry.contestant not in self.lost
        )
        absent = {entry.contestant for entry in task.entries} - self.alive.keys() - self.lost.keys()
        return passes * pace + sum(map(self.start_s, absent))

    def start_s(self, name: str) -> float:
        """What a start of it may take."""
        kind = "octavo" if name.startswith("octavo") else name
        return 1.2 * self.starts[kind] if kind in self.starts else START_S.get(kind, 5.0)

    def close(self, *names: str, at_once: bool = False) -> None:
        """Ends these; one whose end is interrupted stays in `alive`, to be ended again."""
        for name in names:
            self.alive[name].close(at_once=at_once)
            del self.alive[name]

    def _timeout_s(self) -> float:
        return min(float(self.options.timeout), self.left_s)
