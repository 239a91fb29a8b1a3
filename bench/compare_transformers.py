"""Octavo's kernels inside Transformers, beside Transformers' own attention: one model, one process, in turn.

python bench/compare_transformers.py            writes bench/results/<this machine>/transformers.json

The model has random weights in the shape of Qwen3-0.6B, or of a toy on a CPU (`--model`). Rows:

transformers/continuous/...   output tokens a second of continuous batching, the first --sequences of
                              nano-vllm's workload, and on a GPU the most memory it took. Peer: sdpa_paged.
transformers/generate/...     milliseconds a token of `generate`, after the first one. Peer: sdpa.
transformers/prefill/...      milliseconds of a forward over one prompt. Peer: sdpa.

Before anything is timed, logits of both are compared: a wrong result is not measured.
"""

from __future__ import annotations

import argparse
import gc
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from octavo.bench.report import Row, gpu_name, hardware_slug, write_result
from octavo.bench.workloads import WorkloadShape, random_workload
from octavo.integrations import transformers as integration

ROOT = Path(__file__).resolve().parent.parent
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
    for name in ("sdpa", "octavo"):
        model.set_attn_implementation(name)
        prompts = model(**inputs).logits[real].float()
        greedy = fixed(3, do_sample=False, output_logits=True, return_dict_in_generate=True)
        found[name] = (prompts, model.generate(**inputs, generation_config=greedy).logits[1].float())
    for what, ours, theirs in zip(("prompts", "decoding"), found["octavo"], found["sdpa"], strict=True):
        error = float((ours - theirs).square().mean().sqrt() / theirs.square().mean().sqrt())
        print(f"{what}: logits differ by {error:.1e} (root mean square, relative)", flush=True)
        if not error <= MAX_RELATIVE_ERROR:
            raise SystemExit(f"wrong logits ({what}): nothing is timed")


def fixed(new_tokens: int, **options: Any) -> GenerationConfig:
    """Exactly that many tokens."""
    options = {"do_sample": True, "temperature": 0.6, "top_k": 0} | options
    if not options["do_sample"]:
        del options["temperature"], options["top_k"]
    return GenerationConfig(
        max_new_tokens=new_tokens, min_new_tokens=new_tokens, pad_token_id=0, eos_token_id=None, **options
    )


def in_turn(model: Any, rounds: int, run: Callable[[], float]) -> dict[str, float]:
    """The median of `run()` under each implementation, after one run of each to warm up."""
    found: dict[str, list[float]] = {"octavo": [], "sdpa": []}
    for round_ in range(rounds + 1):
        for name, values in found.items():
            model.set_attn_implementation(name)
            value = run()
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
    model: Any, attention: str, shape: WorkloadShape, sequences: int, passes: int, device: str
) -> tuple[float, float, str]:
    """Output tokens a second of the last pass, most memory in MB, and how it ran."""
    model.set_attn_implementation(attention)
    workload = random_workload(shape)
    prompts, lengths = workload.prompts[:sequences], workload.output_lens[:sequences]
    longest = max(len(p) + n for p, n in zip(prompts, lengths, strict=True))
    pages = sum(-(-(len(p) + n) // 256) for p, n in zip(prompts, lengths, strict=True)) + 8
    config = ContinuousBatchingConfig(
        num_blocks=pages, max_requests_per_batch=sequences,
        max_batch_tokens=8192 if device == "cuda" else 512,
        max_blocks_per_request=(longest // 256 + 2) if attention == "octavo" else None,
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
                result = manager.get_result(timeout=5)
                if result is None and not manager.is_running():
                    raise RuntimeError(f"continuous batching with {attention} stopped")
                if result is not None and result.is_finished():
                    if result.error:
                        raise RuntimeError(f"continuous batching with {attention}: {result.error}")
                    tokens += len(result.generated_tokens)
                    waited.discard(int(result.request_id.split("-")[1]))
            rate = tokens / (time.perf_counter() - began)
            print(f"  {attention}, pass {number + 1} of {passes}: {rate:,.0f} tok/s", flush=True)
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


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--model", choices=CONFIGS, default="qwen3-0.6b" if device == "cuda" else "toy")
    parser.add_argument("--sequences", type=int, default=64, help="of the workload, in continuous batching")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds of generate and prefill")
    parser.add_argument("--peer-passes", type=int, default=1, help="passes of sdpa_paged (0: leave it out)")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    default = ROOT / "bench" / "results" / slug(device) / "transformers.json"
    parser.add_argument("--json", type=Path, default=default, help="result file")
    options = parser.parse_args(argv)

    integration.register()
    name = options.model
    shape, new_tokens, (wide, context), prompt = SIZES[name]
    model = make_model(name, device)
    check(model, device)
    rows: list[Row] = []

    def add(row: str, unit: str, found: dict[str, float], better: str = "lower", **details: str) -> None:
        peers = {peer: round(value, 4) for peer, value in found.items() if peer != "octavo"}
        rows.append(Row(row, round(found["octavo"], 4), unit, better, None, peers, details or None))
        print(f"{row}: {found['octavo']:.4g} {unit}; {peers}", flush=True)
        write_result(
            options.json, rows, command="python bench/compare_transformers.py",
            gpu=gpu_name() if device == "cuda" else "",
        )  # fmt: skip

    vocab_size = model.config.vocab_size
    lone = {"input_ids": torch.randint(1, vocab_size, (1, 128), device=device)}
    lone["attention_mask"] = torch.ones_like(lone["input_ids"])
    batch = padded(wide, context, vocab_size, device)
    ids = torch.randint(1, vocab_size, (1, prompt), device=device)

    @torch.no_grad()
    def prefill() -> float:
        return 1e3 * timed(lambda: model(ids, logits_to_keep=1), device)

    generate = f"transformers/generate/{name} b1 128+{new_tokens}"
    loops: dict[str, Callable[[], float]] = {
        generate: lambda: ms_per_token(model, lone, new_tokens, device),
        f"transformers/generate/{name} b{wide} {context}+32 left-padded": lambda: ms_per_token(
            model, batch, 32, device
        ),
        f"transformers/prefill/{name} 1x{prompt}": prefill,
    }
    for row, run in loops.items():
        if options.only in row:
            add(row, "ms" if "prefill" in row else "ms/token", in_turn(model, options.rounds, run))

    row = f"transformers/continuous/{name} {options.sequences} sequences"
    if options.only in row:
        rate, memory, how = continuous(model, "octavo", shape, options.sequences, 2, device)
        rates, memories, details = {"octavo": rate}, {"octavo": memory}, {"octavo": how}
        if options.peer_passes:
            found = continuous(model, "sdpa", shape, options.sequences, options.peer_passes, device)
            rates["sdpa_paged"], memories["sdpa_paged"], details["sdpa_paged"] = found
        add(row, "tok/s", rates, "higher", **details)
        if device == "cuda":
            add(f"{row}, peak memory", "MB", memories)

    row = f"{generate} static, compiled"  # last, since torch compiles for a minute
    if device == "cuda" and options.only in row:
        static = {"cache_implementation": "static"}
        found = in_turn(
            model, options.rounds, lambda: ms_per_token(model, lone, new_tokens, device, **static)
        )
        add(row, "ms/token", found)


if __name__ == "__main__":
    main()
