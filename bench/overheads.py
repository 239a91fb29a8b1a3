"""What Octavo costs beside the model's arithmetic: scheduling, hashing, start-up, memory.

python bench/overheads.py          writes bench/results/<this machine>/overheads.json
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

from octavo.bench.report import Row, hardware_slug, write_result
from octavo.cache.manager import KVCacheManager
from octavo.engine.request import Request
from octavo.engine.scheduler import Scheduler
from octavo.sampling_params import SamplingParams

ROOT = Path(__file__).resolve().parent.parent
MODEL = "smollm2-135m"
MAX_STEP_MS = {256: 1.0, 1024: 4.0}
MAX_HASH_S = 2.0
MAX_HELP_S = 0.3
MAX_FIRST_TOKEN_S = 4.0
MAX_EXTRA_MB = 300


def scheduler_step_ms(num_rows: int, num_steps: int = 200) -> tuple[float, float]:
    """Median and 99th percentile milliseconds of schedule + commit with `num_rows` requests decoding.

    Prefix caching is on; answers are scripted and there is no model. The mean prompt has 64 tokens, in
    different phases, so that each step some of the rows fill a block.
    """
    rng = random.Random(0)
    cache = KVCacheManager(num_rows * 32, 16, model_id="scripted")
    scheduler = Scheduler(cache, max_num_seqs=num_rows, max_num_batched_tokens=8192, max_model_len=4096)
    params = SamplingParams(max_tokens=2 * num_steps, ignore_eos=True)
    for i in range(num_rows):
        prompt = [rng.randrange(10_000) for _ in range(rng.randint(33, 95))]
        scheduler.add(Request(f"r{i}", prompt, params, seeds=[i], first_seq_id=i, arrival=i))
    while scheduler.waiting or len(scheduler.running) < num_rows:
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(plan, [rng.randrange(10_000) for _ in plan.sampled])
    times = []
    for _ in range(num_steps):
        answers = [rng.randrange(10_000) for _ in range(num_rows)]
        started = time.perf_counter()
        plan = scheduler.schedule()
        assert plan is not None
        assert len(plan.sampled) == num_rows
        scheduler.commit(plan, answers)
        times.append(1000 * (time.perf_counter() - started))
    times.sort()
    return statistics.median(times), times[int(0.99 * len(times))]


def hashing_s(num_tokens: int = 1_000_000, prompt_len: int = 1_000) -> float:
    """Seconds to look up and then file `num_tokens` tokens of prompts in the prefix index."""
    rng = random.Random(0)
    prompts = [[rng.randrange(50_000) for _ in range(prompt_len)] for _ in range(num_tokens // prompt_len)]
    cache = KVCacheManager(num_tokens // 16 + len(prompts), 16, model_id="scripted")
    gc.collect()
    started = time.perf_counter()
    for seq_id, prompt in enumerate(prompts):
        cache.open(seq_id, cache.match_prefix(prompt))
        cache.grow(seq_id, len(prompt))
        cache.commit(seq_id, prompt, len(prompt))
    return time.perf_counter() - started


def command_s(*arguments: str, until: str = "end") -> float:
    """Seconds a fresh `octavo` process takes to its end, or to its first output."""
    started = time.perf_counter()
    process = subprocess.Popen((sys.executable, "-m", "octavo", *arguments), stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read(1)
    first = time.perf_counter() - started
    process.stdout.read()
    if process.wait():
        raise SystemExit(f"octavo {shlex.join(arguments)} failed")
    return first if until == "first output" else time.perf_counter() - started


MEMORY_PROBE = """
import json, sys
from octavo import LLM, SamplingParams
from octavo.bench.timing import peak_rss_bytes, private_bytes, rss_bytes
options = json.loads(sys.argv[1])
# 16 requests of 160 tokens fill these blocks, so that all of the cache is resident.
with LLM("smollm2-135m", num_blocks=162, max_model_len=2048, num_threads=2, **options) as llm:
    prompts = [[7 + i] * 100 for i in range(16)]
    llm.generate(prompts, SamplingParams(max_tokens=60, ignore_eos=True), use_tqdm=False)
    cache = llm.engine.runner.kv_cache.nbytes
    print(json.dumps([rss_bytes(), peak_rss_bytes(), private_bytes(), llm.weights_nbytes + cache]))
"""


def extra_memory_mb(**options: object) -> dict[str, float]:
    """MB beyond weights and cache after a batch of 16: resident, at the peak (loading included), and private.

    Private memory leaves out the pages of libraries on disk, which processes share and the system can drop.
    """
    done = subprocess.run(
        (sys.executable, "-c", MEMORY_PROBE, json.dumps(options)), capture_output=True, text=True, check=True
    )
    *measured, ours = json.loads(done.stdout)
    return {
        name: (value - ours) / 1e6
        for name, value in zip(("resident", "peak", "private"), measured, strict=True)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    default = ROOT / "bench" / "results" / hardware_slug() / "overheads.json"
    parser.add_argument("--json", type=Path, default=default, help="result file")
    options = parser.parse_args()

    rows = []

    def add(name: str, value: float, unit: str, floor: float | None) -> None:
        print(f"{name}: {value:.3g} {unit}", flush=True)
        rows.append(Row(name, round(value, 4), unit, better="lower", floor=floor))

    for num_rows, limit in MAX_STEP_MS.items():
        median, tail = scheduler_step_ms(num_rows)
        add(f"scheduler and cache, a step with {num_rows} running requests, median", median, "ms", limit)
        add(f"the same, 99th percentile of 200 steps ({num_rows})", tail, "ms", None)
    add("hashing 1,000,000 prompt tokens", statistics.median(hashing_s() for _ in range(3)), "s", MAX_HASH_S)
    add("`octavo --help`", statistics.median(command_s("--help") for _ in range(9)), "s", MAX_HELP_S)
    generate = ("generate", MODEL, "--max-tokens", "8", "What is the capital of France?")
    command_s(*generate)  # warm disk, compiled kernels in their cache
    first = statistics.median(command_s(*generate, until="first output") for _ in range(5))
    add(f"first token of `octavo generate {MODEL}`, warm disk", first, "s", MAX_FIRST_TOKEN_S)
    forms: dict[str, dict[str, str]] = {
        "float32": {},
        "float16": {"quantization": "float16"},
        "int8": {"quantization": "int8"},
    }
    for name, engine in forms.items():
        extra = extra_memory_mb(**engine)
        add(f"memory beside weights and cache, {name}", extra["resident"], "MB", MAX_EXTRA_MB)
        add(f"the same at the peak, loading included ({name})", extra["peak"], "MB", None)
        add(f"the same without pages of libraries on disk ({name})", extra["private"], "MB", None)
    write_result(options.json, rows, command="python bench/overheads.py")


if __name__ == "__main__":
    main()
