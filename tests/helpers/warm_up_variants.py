"""Which variants of kernels warm-up launches, and which steps need: python warm_up_variants.py ARCH MODEL ...

For a GPU that is not there, and without a compiler: a variant is what Triton would compile apart. Prints
JSON: for each model the variants that warm-up missed, those nothing needs, how many there are, and launches.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from helpers.no_gpu import NoGpu
from triton.runtime.jit import JITFunction

from octavo.engine.graph import bucket_sizes
from octavo.kernels import (
    PackedWeight,
    flash_attn_varlen_func,
    gpu_checks,
    linear,
    linear_onto,
    norm_linear,
    pack_weight,
)
from octavo.kernels import sample as sample_kernel
from octavo.kernels.shared_prefixes import OCTET, attend_shared, find_shared_prefixes
from octavo.kernels.triton import warm_up
from octavo.kernels.triton.warm_up import ModelShape

Variant = tuple[str, str]

_FLOAT8 = torch.float8_e4m3fn
_SERVED = {"max_num_seqs": 300, "max_num_batched_tokens": 2048, "vocab_size": 32000}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "hidden_size": 1024},
    "Qwen3-8B": {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "logits_dtype": torch.bfloat16},
    "SmolLM2": {"num_heads": 9, "num_kv_heads": 3, "hidden_size": 576, "block_size": 64, "qk_norm": False},
    "biased": {"num_heads": 14, "num_kv_heads": 2, "hidden_size": 896, "qkv_bias": True, "qk_norm": False},
    "large": {"num_heads": 16, "num_kv_heads": 8, "hidden_size": 2048, "intermediate_size": 6144},
    "wide": {"num_heads": 72, "num_kv_heads": 8, "head_dim": 128, "hidden_size": 1024},
    "float16": {"dtype": torch.float16, "cache_dtype": torch.float16, "num_heads": 16, "hidden_size": 1024},
    "deep": {"num_heads": 28, "num_kv_heads": 4, "hidden_size": 3584, "intermediate_size": 18944},
    "few sequences": {"max_num_seqs": 3, "hidden_size": 1024},
    "no groups": {"num_heads": 12, "num_kv_heads": 12},
    "windows": {"window_sizes": ((-1, -1), (1023, 0)), "softcap": 30.0, "sinks": True},
    "scales": {"cache_dtype": torch.int8, "scales": "token", "num_heads": 8, "num_kv_heads": 1},
    "bytes": {"cache_dtype": _FLOAT8, "scales": "token", "num_heads": 16, "num_kv_heads": 8, "head_dim": 128},
    "bytes of one scale": {"cache_dtype": _FLOAT8, "scales": "tensor", "num_heads": 16, "num_kv_heads": 8},
    "float32": {"dtype": torch.float32, "cache_dtype": torch.float32},
    "invariant": {"batch_invariant": True},
    "one sequence": {"max_num_seqs": 1, "max_num_batched_tokens": 40, "max_model_len": 64},
    "shared": {"shared_prefixes": True, "num_heads": 16, "num_kv_heads": 8, "head_dim": 128},
    "shared scales": {
        "shared_prefixes": True,
        "cache_dtype": _FLOAT8,
        "scales": "token",
        "num_heads": 9,
        "num_kv_heads": 1,
        "max_num_seqs": 1100,
        "max_num_batched_tokens": 1100,
    },
    "shared bytes": {"shared_prefixes": True, "cache_dtype": _FLOAT8, "scales": "token", "num_heads": 4},
    "shared by few": {"shared_prefixes": True, "max_num_seqs": 13, "max_num_batched_tokens": 40},
    "shared in few tokens": {"shared_prefixes": True, "max_num_batched_tokens": 40},
    "shared by none": {"shared_prefixes": True, "max_num_seqs": 7, "max_num_batched_tokens": 40},
    "few tokens": {"max_num_seqs": 300, "max_num_batched_tokens": 38, "max_model_len": 3000},
}


class Recorder:
    """Stands in for the compiler: notes what it is asked for, and gives something that launches nothing."""

    def __init__(self) -> None:
        self.launches = 0
        self._found: set[Variant] = set()
        self._kernels: set[JITFunction[Any]] = set()

    # A kernel as Triton's `run` uses it.
    function = packed_metadata = None

    def launch_metadata(self, *_: object) -> None:
        return None

    def run(self, *_: object) -> None:
        self.launches += 1

    def compile(self, kernel: JITFunction[Any], key: str, _: object, device: int, *__: object) -> Recorder:
        kernel.device_caches[device][0][key] = self
        self._kernels.add(kernel)
        self._found.add((kernel.fn.__name__, key))
        return self

    def variants(self, launch: Callable[[], object]) -> tuple[set[Variant], int]:
        """What is compiled for it where nothing was compiled before, and the number of launches."""
        for kernel in self._kernels:
            kernel.device_caches.clear()
        self._found, self.launches = set(), 0
        launch()
        return self._found, self.launches


def around_powers(largest: int) -> list[int]:
    """1, both sides of every power of two, and `largest`."""
    powers = [1 << i for i in range(largest.bit_length() + 1)]
    sides = {n for power in powers for n in (power - 1, power, power + 1)}
    return sorted({n for n in sides if 0 < n <= largest} | {largest})


def warmed_up(model: ModelShape) -> None:
    for jobs in warm_up._rounds(model):
        for job in jobs:
            job()


def everything(model: ModelShape) -> None:
    """Steps of all sizes, one by one, and then some at random."""
    for window in model.window_sizes:
        for lens_q, bound_k in _batches(model):
            _attend(model, window, lens_q, bound_k)
    with mock.patch.object(
        ModelShape, "token_counts", lambda model: around_powers(model.max_num_batched_tokens)
    ):
        warm_up._write(model)
        warm_up._small(model)
    if model.shared_prefixes:
        for batch in bucket_sizes(min(model.max_num_seqs, model.max_num_batched_tokens)):
            if batch >= OCTET:
                _attend_shared(model, batch)
    for rows in around_powers(model.max_num_seqs):
        _sample(model, rows)
    if not model.batch_invariant:
        for rows in (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64):
            if rows <= model.max_num_batched_tokens:
                _layer(model, rows)
    if model.max_num_seqs > 257 and model.max_num_batched_tokens >= 2048:
        sweep = gpu_checks.Sweep(model)
        for batch in sweep.batches(60):
            sweep.step(*batch)


def _batches(model: ModelShape) -> Iterator[tuple[list[int], int]]:
    longest = min(model.max_num_batched_tokens, model.max_model_len)
    lengths = [length for length in around_powers(longest) if length > 8]
    short = [length for length in range(1, 9) if length <= longest]
    bounds = around_powers(model.max_model_len)
    calls = itertools.chain(
        itertools.product(around_powers(model.max_num_seqs), short, (*bounds[::7], model.max_model_len)),
        itertools.product((1, 2), short, bounds[::2]),
        itertools.product((1, 2), lengths, (1, model.max_model_len)),
        itertools.product(around_powers(model.max_num_seqs), (9, 100, 1000), (1, model.max_model_len)),
    )
    for batch, length, bound_k in calls:
        fits = batch <= model.max_num_seqs and batch - 1 + length <= model.max_num_batched_tokens
        if fits and length <= longest:
            yield [length, *[1] * (batch - 1)], max(length, bound_k)


def _attend(model: ModelShape, window: tuple[int, int], lens_q: list[int], bound_k: int) -> None:
    q = torch.zeros(sum(lens_q), model.num_heads, model.head_dim, dtype=model.dtype)
    k_cache, v_cache = model.caches()
    sums = torch.tensor([0, *lens_q]).cumsum(0, dtype=torch.int32)
    table = torch.zeros(len(lens_q), -(-bound_k // model.block_size), dtype=torch.int32)
    options = model.attention_options(window)
    flash_attn_varlen_func(
        q, k_cache, v_cache, sums, sums, max(lens_q), bound_k, block_table=table, **options
    )


def _attend_shared(model: ModelShape, batch: int) -> None:
    """A decode step in a bucket of that many rows, whose table is as wide as any."""
    q, _, _ = model.qkv(batch)
    sums = torch.arange(batch + 1, dtype=torch.int32)
    for bound_k in (1, 300, model.max_model_len):
        table = torch.zeros(batch, -(-bound_k // model.block_size), dtype=torch.int32)
        shared = find_shared_prefixes(table, sums, model.block_size)
        scales = model.cache_scales()
        attend_shared(q, *model.caches(), shared, sums, sums, bound_k, block_table=table, **scales)


def _sample(model: ModelShape, rows: int) -> None:
    assert model.vocab_size is not None
    ones, places = torch.ones(rows), torch.zeros(rows, dtype=torch.int64)
    every: dict[str, Any] = {"top_k": places.int() + 5, "top_p": ones, "min_p": ones}
    for dtype, filters in itertools.product((torch.float32, model.logits_dtype), ({}, every)):
        logits = torch.zeros(rows, model.vocab_size, dtype=dtype)
        for return_logprobs in {False, model.logprobs and dtype == model.logits_dtype}:
            sample_kernel(
                logits, temperature=ones, seeds=places, positions=places, return_logprobs=return_logprobs,
                **filters,
            )  # fmt: skip


def _layer(model: ModelShape, rows: int) -> None:
    """The products of a first layer, of another one, and of the head."""
    assert model.hidden_size is not None
    assert model.intermediate_size is not None
    assert model.vocab_size is not None
    hidden, inner = model.hidden_size, model.intermediate_size
    attended = model.num_heads * model.head_dim
    fused = attended + 2 * model.num_kv_heads * model.head_dim
    x, norm = torch.zeros(rows, hidden, dtype=model.dtype), torch.ones(hidden, dtype=model.dtype)

    def weight(width: int, depth: int) -> PackedWeight:
        return replace(pack_weight(torch.zeros(width, depth, dtype=model.dtype), "dense"), at_rest=True)

    attended_rows = torch.zeros(rows, attended, dtype=model.dtype)
    bias = torch.zeros(fused, dtype=model.dtype) if model.qkv_bias else None
    residual: torch.Tensor | None = None
    for _ in range(2):
        _, residual = norm_linear(x, residual, norm, 1e-6, weight(fused, hidden), bias)
        x, residual = linear_onto(attended_rows, residual, weight(hidden, attended))
        y, residual = norm_linear(x, residual, norm, 1e-6, weight(2 * inner, hidden), gated=True)
        x, residual = linear_onto(y, residual, weight(hidden, inner))
    linear(x, weight(model.vocab_size, hidden))  # of as many rows, whatever max_num_seqs: prompt_logprobs


def main(arch: int, names: list[str]) -> dict[str, Any]:
    recorder, found = Recorder(), {}

    def compile(kernel: JITFunction[Any], *arguments: Any) -> Recorder:
        return recorder.compile(kernel, *arguments)

    with NoGpu(arch), mock.patch.object(JITFunction, "_do_compile", compile), torch.inference_mode():
        for name in names:
            model = gpu_checks.model_shape(torch.device("cpu"), **{**_SERVED, **MODELS[name]})
            warm, launches = recorder.variants(partial(warmed_up, model))
            needed, _ = recorder.variants(partial(everything, model))
            found[name] = {
                "missed": sorted(needed - warm),
                "needless": sorted(warm - needed),
                "variants": len(warm),
                "launches": launches,
            }
    return found


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), sys.argv[2:])))
