"""Where the time of a decoding step goes on a GPU, by kernels: a model with random weights, CUDA graphs.

    python bench/step_profile.py MODEL [--rows 1,64,256] [--context 128,800] [--append]

It writes bench/results/<this GPU>/step-profile.json. For each number of rows (requests that decode together)
over each context (tokens before the first step), all in microseconds of a step unless they say:

from start to start     a step's first kernel to the next step's
kernels at work         in which at least one kernel runs; GPU idle is the share of a step in which none does
host work               what the host does for a step besides waiting, without the profiler
decode attention, ...   the kernels of a family, added up. Kernels that start before the one in front ends
                        count the time they wait, so families may add up to more than kernels at work

Steps are those between two beginnings: of N in the profile, N - 1 count. A row's details are its N and, of a
family, its kernels in a step.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import random
import re
import shlex
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from octavo import LLM, SamplingParams
from octavo.bench.report import ResultFileError, Row, check_append, gpu_name, write_result
from octavo.config import DEFAULT_MAX_NUM_BATCHED_TOKENS, DEFAULT_MAX_NUM_BATCHED_TOKENS_ON_GPU
from octavo.engine.core import Engine
from octavo.engine.request import Request
from octavo.engine.schedule import Schedule
from octavo.kernels import triton as triton_room

ROOT = Path(__file__).resolve().parent.parent
LEAD_STEPS = 8  # before anything counts: the runs ahead fill up

# Which family the kernels of a Triton module are of, by how its name begins.
MODULES = {
    "decode_rows": "rest",
    "decode": "decode attention",
    "shared_prefixes": "decode attention",
    "norm": "norms",
    "rotate_and_write": "rotate and write",
    "rotary": "rotate and write",
    "kv_write": "rotate and write",
    "activation": "silu and mul",
    "sampling": "sampling",
    "linear": "products",
    "few_rows_linear": "products",
    "grouped_linear": "products",
    "rows_linear": "products",
}
OTHER_PRODUCTS = re.compile(r"gemm|gemv|nvjet|cutlass|cublas|xmma|split_?k", re.IGNORECASE)
HEAD = "head"
FAMILIES = (
    "decode attention", "products", HEAD, "norms", "rotate and write", "silu and mul", "sampling", "rest",
)  # fmt: skip
BEGIN = "_prepare_decode"  # the first kernel of every step


class Event(NamedTuple):
    """A kernel, copy or fill on the GPU, in microseconds."""

    name: str
    start: float
    end: float


class Profile(NamedTuple):
    """Microseconds of a step, on average, and its kernels by family."""

    num_steps: int
    start_to_start: float
    at_work: float
    families: dict[str, float]
    kernels: dict[str, float]


@functools.cache
def our_kernels() -> dict[str, str]:
    """The family of each kernel in Octavo's room for Triton, by its name."""
    found = {}
    begin = re.compile(r"^@(?:triton|gluon)\.jit.*?^def (\w+)\(", re.MULTILINE | re.DOTALL)
    for path in sorted(Path(triton_room.__file__).parent.glob("*.py")):
        family = next((MODULES[name] for name in MODULES if path.stem.startswith(name)), "rest")
        found |= dict.fromkeys(begin.findall(path.read_text(encoding="utf-8")), family)
    return found


def family_of(name: str) -> str:
    """Products of the layers and of the head are one here."""
    known = our_kernels().get(name)
    if known is None:
        known = "products" if OTHER_PRODUCTS.search(name) else "rest"
    return known


def analyse(events: Sequence[Event]) -> Profile:
    """What the steps in a profile are made of; ValueError when there are not two of them.

    The head is every product behind the last norm of its step.
    """
    ordered = sorted(events, key=lambda event: event.start)
    begins = [i for i, event in enumerate(ordered) if event.name == BEGIN]
    if len(begins) < 2:
        seen = ", ".join(sorted({event.name for event in ordered})[:20])
        raise ValueError(f"{len(begins)} steps begin in the profile (by {BEGIN!r}), not 2 and more: {seen}")
    num_steps = len(begins) - 1
    families: dict[str, float] = defaultdict(float)
    kernels: Counter[str] = Counter()
    for begin, end in itertools.pairwise(begins):
        step = [(family_of(event.name), event.end - event.start) for event in ordered[begin:end]]
        last_norm = max((i for i, (family, _) in enumerate(step) if family == "norms"), default=len(step))
        for i, (family, duration) in enumerate(step):
            family = HEAD if family == "products" and i > last_norm else family
            families[family] += duration
            kernels[family] += 1
    first, last = ordered[begins[0]].start, ordered[begins[-1]].start
    at_work, until = 0.0, first
    for event in ordered[begins[0] : begins[-1]]:
        at_work += max(0.0, min(event.end, last) - max(event.start, until))
        until = max(until, event.end)
    return Profile(
        num_steps,
        (last - first) / num_steps,
        at_work / num_steps,
        {family: families[family] / num_steps for family in FAMILIES if family in families},
        {family: kernels[family] / num_steps for family in FAMILIES if family in kernels},
    )


def rows_of(name: str, profile: Profile, host_us: float) -> list[Row]:
    """As they stand in a result file; `name` is what they have in common."""

    def row(what: str, value: float, unit: str = "us", **details: float) -> Row:
        return Row(f"{name}, {what}", round(value, 1), unit, "lower", details=details or None)

    return [
        row("from start to start", profile.start_to_start, steps=profile.num_steps),
        row("kernels at work", profile.at_work),
        row("GPU idle", 100 * (1 - profile.at_work / profile.start_to_start), "%"),
        row("host work", host_us),
        *(
            row(family, took, kernels=round(profile.kernels[family], 2))
            for family, took in profile.families.items()
        ),
    ]


class HostWork:
    """Takes the engine's spans: how long it waited for tokens. Use as `span`."""

    def __init__(self) -> None:
        self.waited_s = 0.0

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        if name == "wait for tokens":
            self.waited_s += time.perf_counter() - began


Record = Callable[[Callable[[], object], int], list[Event]]


def recorded(step: Callable[[], object], num_steps: int) -> list[Event]:
    """What the GPU does in so many steps, by torch's profiler."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        torch.cuda.synchronize()
        for _ in range(num_steps):
            step()
        torch.cuda.synchronize()
    return [
        Event(event.name, event.time_range.start, event.time_range.end)
        for event in found.events()
        if event.device_type == DeviceType.CUDA
    ]


def longest_request(rows: int, context: int, num_steps: int, budget: int) -> int:
    """Tokens of prompt and answer that no request ends before, in steps of at most `budget` tokens.

    The first ones make tokens while the last prompts are read, which get half of such a step; twice the steps
    of that is room. What runs ahead has 16.
    """
    num_reading = -(-rows * context // max(1, min(budget // 2, budget - rows)))
    return context + 2 * num_reading + LEAD_STEPS + 2 * num_steps + 16


def measure(llm: LLM, rows: int, context: int, num_steps: int, record: Record) -> tuple[Profile, float]:
    """The profile of decoding steps of so many requests, and the microseconds of the host's work in one.

    RuntimeError when a request ends meanwhile, or a step has other rows than these.
    """
    engine = llm.engine
    rng = random.Random(f"{rows} {context}")
    params = SamplingParams(temperature=0.6, max_tokens=None, ignore_eos=True)  # up to max_model_len
    requests = [
        engine.add_request([rng.randrange(engine.vocab_size) for _ in range(context)], params)
        for _ in range(rows)
    ]
    try:
        _step_until_all_decode(engine.step, requests)
        with _launches(engine) as launches:
            for _ in range(LEAD_STEPS):
                engine.step()
            host_us = 1e6 * _host_s(llm, num_steps)
            events = record(engine.step, num_steps)
        _check_none_ended(requests)
        if set(launches) != {(rows, rows)}:
            told = ", ".join(f"{decoding} of {tokens}" for decoding, tokens in dict.fromkeys(launches))
            raise RuntimeError(f"not every step was {rows} decoding rows and nothing else: {told} tokens")
        return analyse(events), host_us
    finally:
        for request in requests:
            engine.abort(request.request_id)


def _step_until_all_decode(step: Callable[[], object], requests: Sequence[Request]) -> None:
    while any(request.first_token_s is None for request in requests):
        step()
        _check_none_ended(requests)


def _check_none_ended(requests: Sequence[Request]) -> None:
    for request in requests:
        if request.output is not None:
            why = request.output.error or request.output.finish_reason
            raise RuntimeError(f"request {request.request_id} ended before the profile did: {why}")


@contextmanager
def _launches(engine: Engine) -> Iterator[list[tuple[int, int]]]:
    """The decoding rows and the tokens of each step that is launched meanwhile."""
    found: list[tuple[int, int]] = []
    launch = engine.runner.launch

    def seen(plan: Schedule) -> Any:
        found.append((plan.num_decode_rows, plan.num_tokens))
        return launch(plan)

    with mock.patch.object(engine.runner, "launch", seen):
        yield found


def _host_s(llm: LLM, num_steps: int) -> float:
    """Seconds of the host's work in a step."""
    engine, work = llm.engine, HostWork()
    with mock.patch.object(engine, "_span", work.span):
        began = time.perf_counter()
        for _ in range(num_steps):
            engine.step()
        took = time.perf_counter() - began - work.waited_s
    return took / num_steps


def _numbers(text: str) -> list[int]:
    found = [int(number) for number in text.split(",")]
    if min(found) < 1:
        raise ValueError
    return found


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="folder with a config.json, or a name")
    parser.add_argument("--rows", type=_numbers, default=[1, 64, 256], metavar="N,N")
    parser.add_argument("--context", type=_numbers, default=[128, 800], metavar="N,N")
    parser.add_argument("--steps", type=int, default=20, help="that the profiler sees")
    parser.add_argument("--kv-cache-memory", default="40GiB")
    result_help = "result file; default bench/results/<this GPU>/step-profile.json"
    parser.add_argument("--json", type=Path, help=result_help)
    append_help = "keep the other rows of the file, which must be of this commit, machine and versions"
    parser.add_argument("--append", action="store_true", help=append_help)
    options = parser.parse_args(argv)
    if options.steps < 2:
        parser.error(f"--steps must be at least 2, got {options.steps}")
    return options


def main(argv: list[str] | None = None, record: Record = recorded) -> int:
    options = parse(argv)
    import torch

    has_gpu = torch.cuda.is_available()
    if not has_gpu and record is recorded:
        print("this is about kernels on a GPU, and there is none", file=sys.stderr)
        return 1
    gpu = gpu_name() if has_gpu else ""
    path = options.json
    if path is None:
        slug = re.sub(r"[^a-z0-9]+", "-", gpu.split(",")[0].lower()).strip("-")
        path = ROOT / "bench" / "results" / slug / "step-profile.json"
    if options.append:
        try:
            check_append(path, gpu)
        except ResultFileError as error:
            print(f"--append: {error}", file=sys.stderr)
            return 1
    name = Path(options.model).name
    told = [
        name,
        "--rows",
        ",".join(map(str, options.rows)),
        "--context",
        ",".join(map(str, options.context)),
    ]
    told += ["--steps", str(options.steps), "--kv-cache-memory", options.kv_cache_memory]
    command = shlex.join(["python", "bench/step_profile.py", *told])
    budget = DEFAULT_MAX_NUM_BATCHED_TOKENS_ON_GPU if has_gpu else DEFAULT_MAX_NUM_BATCHED_TOKENS
    pairs = list(itertools.product(options.rows, options.context))
    longest = max(longest_request(*pair, options.steps, budget) for pair in pairs)
    engine_options: dict[str, Any] = {"max_num_seqs": max(options.rows), "max_model_len": longest}
    engine_options["kv_cache_memory"] = options.kv_cache_memory
    rows: list[Row] = []
    with LLM(options.model, load_format="dummy", enable_prefix_caching=False, **engine_options) as llm:
        for number, context in pairs:
            profile, host_us = measure(llm, number, context, options.steps, record)
            rows += rows_of(f"step/{name.lower()}/{number} rows, context {context}", profile, host_us)
            for row in rows[-len(profile.families) - 4 :]:
                print(f"{row.name}: {row.value:g} {row.unit}", flush=True)
            write_result(path, rows, command=command, gpu=gpu, append=options.append)
    return 0


if __name__ == "__main__":
    sys.exit(main())
