"""Octavo's kernels inside Transformers, beside Transformers' own attention: one model, one process, in turn.

python bench/compare_transformers.py [--tasks generate,wide,...] [--append]

It writes bench/results/<this machine>/transformers.json, anew after every row; with --append other rows of
the file stay. The model has random weights in the shape of Qwen3-0.6B, or of a toy on a CPU (`--model`).
Tasks:

generate, wide   transformers/generate/...    milliseconds a token of `generate`, after the first one: one
                                              prompt, and a wide batch padded on the left. Peer: sdpa.
prefill          transformers/prefill/...     milliseconds of a forward over one prompt. Peer: sdpa.
static           transformers/generate/... static, compiled    over a static cache; on a GPU alone
continuous       transformers/continuous/...  output tokens a second of continuous batching, the first
                                              --sequences of nano-vllm's workload, and on a GPU the most
                                              memory. Peer: sdpa_paged, which gets --peer-limit seconds.

All but static have a second row, `..., fused`: the model after `fuse(model)`, in turn with the other two.

Before anything is timed, logits of all are compared: a wrong result is not measured. A peer that fails, or
takes too long, leaves Octavo's row without its column, and `failed` says why.
"""

from __future__ import annotations

import argparse
import functools
import gc
import re
import shlex
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from octavo.bench.report import ResultFileError, Row, check_append, gpu_name, hardware_slug, write_result
from octavo.bench.workloads import WorkloadShape, random_workload
from octavo.integrations import transformers as integration

ROOT = Path(__file__).resolve().parent.parent
# Octavo's attention, the same with `fuse`, and Transformers' own attention.
OCTAVO, FUSED, PEER = "octavo", "octavo fused", "sdpa"
TASKS = ("generate", "wide", "prefill", "static", "continuous")
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
        "max_position_embeddings": 40960, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "toy": {
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 12000, "max_position_embeddings": 40960,
    },
}  # fmt: skip
# (workload, new tokens of generate, wide batch and its context, prompt of the prefill)
SIZES = {
    "qwen3-0.6b": (WorkloadShape(), 256, (32, 4096), 8192),
    "toy": (WorkloadShape().scaled(0.1), 32, (4, 512), 1024),
}
MAX_RELATIVE_ERROR = 0.05  # of bfloat16 logits, root mean square


def make_model(name: str, device: str) -> Any:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        return Qwen3ForCausalLM(Qwen3Config(**CONFIGS[name])).to(dtype).eval()


def become(model: Any, contestant: str) -> None:
    """Makes the model compute as that contestant does; SystemExit where `fuse` leaves something alone."""
    model.set_attn_implementation(PEER if contestant == PEER else OCTAVO)
    integration.unfuse(model)
    if contestant == FUSED:
        found = integration.fuse(model)
        if found.left_alone:
            raise SystemExit(f"not the whole model is fused: {found}")


def timed(function: Callable[[], Any], device: str) -> float:
    """Seconds to the end of what it started on the device."""
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def padded(batch: int, length: int, vocab_size: int, device: str) -> dict[str, torch.Tensor]:
    """Left-padded prompts, from half that length to all of it."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, vocab_size, (batch, length), generator=generator)
    padding = torch.randint(0, length // 2, (batch, 1), generator=generator)
    padding[0] = 0
    mask = (torch.arange(length) >= padding).long()
    return {"input_ids": (ids * mask).to(device), "attention_mask": mask.to(device)}


@torch.no_grad()
def check(model: Any, device: str) -> None:
    """Raises SystemExit unless both give the same logits, of prompts and of a decoding step."""
    inputs = padded(3, 200, model.config.vocab_size, device)
    real = inputs["attention_mask"].bool()
    found = {}
    for name in (PEER, OCTAVO, FUSED):
        become(model, name)
        prompts = model(**inputs).logits[real].float()
        greedy = fixed(3, do_sample=False, output_logits=True, return_dict_in_generate=True)
        found[name] = (prompts, model.generate(**inputs, generation_config=greedy).logits[1].float())
    for name in (OCTAVO, FUSED):
        for what, ours, theirs in zip(("prompts", "decoding"), found[name], found[PEER], strict=True):
            error = float((ours - theirs).square().mean().sqrt() / theirs.square().mean().sqrt())
            print(f"{name}, {what}: logits differ by {error:.1e} (root mean square, relative)", flush=True)
            if not error <= MAX_RELATIVE_ERROR:
                raise SystemExit(f"wrong logits ({name}, {what}): nothing is timed")


def fixed(new_tokens: int, **options: Any) -> GenerationConfig:
    """Exactly that many tokens."""
    options = {"do_sample": True, "temperature": 0.6, "top_k": 0} | options
    if not options["do_sample"]:
        del options["temperature"], options["top_k"]
    return GenerationConfig(
        max_new_tokens=new_tokens, min_new_tokens=new_tokens, pad_token_id=0, eos_token_id=None, **options
    )


def in_turn(
    model: Any,
    contestants: tuple[str, ...],
    rounds: int,
    run: Callable[[], float],
    failed: Callable[[str, Exception], None],
) -> dict[str, float]:
    """The median of `run()` as each of them, after one run of each to warm up.

    The peer is left out when it fails, and `failed` told of it.
    """
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for round_ in range(rounds + 1):
        for name, values in tuple(found.items()):
            become(model, name)
            try:
                value = run()
            except Exception as error:
                if name != PEER:
                    raise
                failed(name, error)
                del found[name]
                continue
            if round_:
                values.append(value)
    return {name: statistics.median(values) for name, values in found.items()}


def ms_per_token(
    model: Any, inputs: dict[str, torch.Tensor], new_tokens: int, device: str, **options: Any
) -> float:
    """Milliseconds a token of `generate`, the first one left out."""

    def run(n: int) -> float:
        return timed(lambda: model.generate(**inputs, generation_config=fixed(n, **options)), device)

    return 1e3 * (run(new_tokens) - run(1)) / (new_tokens - 1)


def continuous(
    model: Any,
    contestant: str,
    shape: WorkloadShape,
    sequences: int,
    passes: int,
    device: str,
    limit_s: float | None = None,
) -> tuple[float, float, str]:
    """Output tokens a second of the last pass, most memory in MB, and how it ran.

    RuntimeError when it stops, or has not answered everything after `limit_s` seconds.
    """
    deadline = None if limit_s is None else time.perf_counter() + limit_s
    become(model, contestant)
    workload = random_workload(shape)
    prompts, lengths = workload.prompts[:sequences], workload.output_lens[:sequences]
    longest = max(len(p) + n for p, n in zip(prompts, lengths, strict=True))
    pages = sum(-(-(len(p) + n) // 256) for p, n in zip(prompts, lengths, strict=True)) + 8
    config = ContinuousBatchingConfig(
        num_blocks=pages, max_requests_per_batch=sequences,
        max_batch_tokens=8192 if device == "cuda" else 512,
        max_blocks_per_request=(longest // 256 + 2) if contestant != PEER else None,
    )  # fmt: skip
    sampling = GenerationConfig(
        do_sample=True, temperature=0.6, top_k=0, max_new_tokens=max(lengths), eos_token_id=-1, pad_token_id=0
    )
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    rate = 0.0
    with model.continuous_batching_context_manager(
        generation_config=sampling, continuous_batching_config=config, timeout=30
    ) as manager:
        for number in range(passes):
            began = time.perf_counter()
            for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
                # Other tokens in each pass, so that sharing of prefixes cannot help.
                ids = [(token + 3 * number) % 10_001 for token in prompt]
                manager.add_request(ids, request_id=f"{number}-{i}", max_new_tokens=length)
            waited, tokens = set(range(sequences)), 0
            while waited:
                if deadline is not None and time.perf_counter() > deadline:
                    answered = sequences - len(waited)
                    raise RuntimeError(
                        f"{answered} of {sequences} answers, pass {number + 1} of {passes}, in {limit_s:g} s"
                    )
                result = manager.get_result(timeout=5 if deadline is None else 0.2)
                if result is None and not manager.is_running():
                    raise RuntimeError(f"continuous batching with {contestant} stopped")
                if result is not None and result.is_finished():
                    if result.error:
                        raise RuntimeError(f"continuous batching with {contestant}: {result.error}")
                    tokens += len(result.generated_tokens)
                    waited.discard(int(result.request_id.split("-")[1]))
            rate = tokens / (time.perf_counter() - began)
            print(f"  {contestant}, pass {number + 1} of {passes}: {rate:,.0f} tok/s", flush=True)
        resolved = manager.batch_processor.cb_config
        how = (
            f"graphs {resolved.use_cuda_graph}, async {resolved.use_async_batching}, "
            f"block table {resolved.max_blocks_per_request}"
        )
    memory = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    gc.collect()
    return rate, memory / 1e6, how


def slug(device: str) -> str:
    if device != "cuda":
        return hardware_slug()
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")


def parse(argv: list[str] | None, device: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=CONFIGS, default="qwen3-0.6b" if device == "cuda" else "toy")
    parser.add_argument("--tasks", default=",".join(TASKS), help=f"of {', '.join(TASKS)}")
    parser.add_argument("--sequences", type=int, default=64, help="of the workload, in continuous batching")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds of generate and prefill")
    parser.add_argument("--peer-passes", type=int, default=1, help="passes of sdpa_paged (0: leave it out)")
    limit_help = "longest time for sdpa_paged, all its passes together"
    parser.add_argument("--peer-limit", type=float, default=300.0, metavar="SECONDS", help=limit_help)
    default = ROOT / "bench" / "results" / slug(device) / "transformers.json"
    parser.add_argument("--json", type=Path, default=default, help="result file")
    append_help = "keep the other rows of the file, which must be of this commit, machine and versions"
    parser.add_argument("--append", action="store_true", help=append_help)
    options = parser.parse_args(argv)
    options.tasks = options.tasks.split(",")
    if unknown := set(options.tasks) - set(TASKS):
        parser.error(f"--tasks: unknown {', '.join(sorted(unknown))}; known are {', '.join(TASKS)}")
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    if options.append:
        try:
            check_append(options.json, gpu_name() if device == "cuda" else "")
        except ResultFileError as error:
            parser.error(f"--append: {error}")
    told = ["--model", options.model, "--tasks", ",".join(options.tasks), "--rounds", str(options.rounds)]
    if "continuous" in options.tasks:
        told += ["--sequences", str(options.sequences), "--peer-passes", str(options.peer_passes)]
        told += ["--peer-limit", f"{options.peer_limit:g}"]
    options.command = shlex.join(["python", "bench/compare_transformers.py", *told])
    return options


def main(argv: list[str] | None = None) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = parse(argv, device)
    integration.register()
    name = options.model
    shape, new_tokens, (wide, context), prompt = SIZES[name]
    model = make_model(name, device)
    check(model, device)
    rows: dict[str, Row] = {}
    failed: dict[str, str] = {}

    def add(
        row: str,
        unit: str,
        found: dict[str, float],
        better: str = "lower",
        details: dict[str, str] | None = None,
    ) -> None:
        """Adds the rows that there are numbers for to the file; once more, when there are more peers."""
        details = details or {}
        peers = {peer: round(value, 4) for peer, value in found.items() if peer not in (OCTAVO, FUSED)}
        for name in found:
            if name in peers:
                continue
            full = row if name == OCTAVO else f"{row}, fused"
            told = {n: text for n, text in details.items() if n in (name, *peers)}
            rows[full] = Row(full, round(found[name], 4), unit, better, None, peers, told or None)
            print(f"{full}: {found[name]:.4g} {unit}; {peers}", flush=True)
        write_result(
            options.json, list(rows.values()), command=options.command, failed=failed,
            gpu=gpu_name() if device == "cuda" else "", append=options.append,
        )  # fmt: skip

    def without(row: str, peer: str, error: Exception) -> None:
        failed[f"{row}, {peer}"] = f"{type(error).__name__}: {error}".splitlines()[0]
        print(f"not measured: {row}, {peer}: {error}", flush=True)

    vocab_size = model.config.vocab_size
    lone = {"input_ids": torch.randint(1, vocab_size, (1, 128), device=device)}
    lone["attention_mask"] = torch.ones_like(lone["input_ids"])
    batch = padded(wide, context, vocab_size, device)
    ids = torch.randint(1, vocab_size, (1, prompt), device=device)

    @torch.no_grad()
    def prefill() -> float:
        return 1e3 * timed(lambda: model(ids, logits_to_keep=1), device)

    generate = f"transformers/generate/{name} b1 128+{new_tokens}"
    loops: dict[str, tuple[str, Callable[[], float]]] = {
        "generate": (generate, lambda: ms_per_token(model, lone, new_tokens, device)),
        "wide": (
            f"transformers/generate/{name} b{wide} {context}+32 left-padded",
            lambda: ms_per_token(model, batch, 32, device),
        ),
        "prefill": (f"transformers/prefill/{name} 1x{prompt}", prefill),
    }
    if device == "cuda":  # torch compiles for a minute
        static = {"cache_implementation": "static"}
        loops["static"] = (
            f"{generate} static, compiled",
            lambda: ms_per_token(model, lone, new_tokens, device, **static),
        )
    for task, (row, run) in loops.items():
        if task in options.tasks:
            # torch.compile fuses by itself: `fuse` changes nothing there.
            contestants = (OCTAVO, PEER) if task == "static" else (OCTAVO, FUSED, PEER)
            found = in_turn(model, contestants, options.rounds, run, functools.partial(without, row))
            add(row, "ms" if task == "prefill" else "ms/token", found)

    if "continuous" in options.tasks:
        row = f"transformers/continuous/{name} {options.sequences} sequences"
        rates, memories, details = {}, {}, {}

        def measure(label: str, *arguments: Any) -> None:
            found = continuous(model, *arguments)
            rates[label], memories[label], details[label] = found
            add(row, "tok/s", rates, "higher", details)
            if device == "cuda":
                add(f"{row}, peak memory", "MB", memories)

        for name in (OCTAVO, FUSED):
            measure(name, name, shape, options.sequences, 2, device)
        if options.peer_passes:
            peer = PEER, shape, options.sequences, options.peer_passes, device, options.peer_limit
            try:
                measure("sdpa_paged", *peer)
            except Exception as error:
                without(row, "sdpa_paged", error)
                add(row, "tok/s", rates, "higher", details)


if __name__ == "__main__":
    main()
