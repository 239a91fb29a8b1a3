"""What public calls would launch on a GPU that is not there: python compiled_calls.py ARCH all|some.

Prints JSON: for each call its kernels, with registers, shared memory and counted instructions; or its error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from helpers.no_gpu import NoGpu
from torch import Tensor

from octavo.kernels import (
    apply_rotary,
    flash_attn_varlen_func,
    gelu_tanh,
    grouped_linear,
    linear,
    linear_onto,
    norm_linear,
    pack_experts,
    pack_weight,
    rms_norm,
    rotate_and_write_kv_cache,
    silu_and_mul,
    write_kv_cache,
)
from octavo.kernels.decode_rows import finish_decode, prepare_decode
from octavo.kernels.sampling import sample
from octavo.kernels.shared_prefixes import attend_shared, find_shared_prefixes

BF16, FP32, FP8, INT8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8
Call = Callable[[], object]


def attend(
    lens_q: list[int],
    lens_k: list[int],
    heads: tuple[int, int] = (16, 8),
    head_dim: int = 128,
    block_size: int = 16,
    dtype: torch.dtype = BF16,
    cache_dtype: torch.dtype | None = None,
    one_scale: bool = False,
    **options: Any,
) -> Call:
    num_heads, kv_heads = heads
    q = torch.zeros(sum(lens_q), num_heads, head_dim, dtype=dtype)
    if block_size:
        blocks = max(-(-n // block_size) for n in lens_k)
        cache = torch.zeros(blocks, block_size, kv_heads, head_dim).to(cache_dtype or dtype)
        table = torch.arange(blocks, dtype=torch.int32).expand(len(lens_k), -1).contiguous()
        options["block_table"] = table
    else:
        cache = torch.zeros(sum(lens_k), kv_heads, head_dim).to(dtype)
    if cache_dtype is not None:
        scales = torch.ones(1 if one_scale else cache.shape[:3])
        options |= {"k_scale": scales, "v_scale": scales}
    sums = [
        torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32) for lens in (lens_q, lens_k)
    ]
    bounds = (max(lens_q), max(lens_k))
    return lambda: flash_attn_varlen_func(q, cache, cache.clone(), *sums, *bounds, causal=True, **options)


def write(kv_heads: int, head_dim: int, cache_dtype: torch.dtype = BF16, tokens: int = 4096) -> Call:
    fused = torch.zeros(tokens, 2, kv_heads, head_dim, dtype=BF16)
    caches = [torch.zeros(tokens // 16, 16, kv_heads, head_dim).to(cache_dtype) for _ in range(2)]
    scales = {}
    if cache_dtype == FP8:
        scales = {name: torch.zeros(tokens // 16, 16, kv_heads) for name in ("k_scale", "v_scale")}
    return lambda: write_kv_cache(fused[:, 0], fused[:, 1], *caches, torch.arange(tokens), **scales)


def rotate_and_write(heads: tuple[int, int], head_dim: int, tokens: int, norm: bool) -> Call:
    q, k = (torch.zeros(tokens, n, head_dim, dtype=BF16) for n in heads)
    caches = [torch.zeros(tokens // 16 + 1, 16, heads[1], head_dim, dtype=BF16) for _ in range(2)]
    weight = torch.ones(head_dim, dtype=BF16)
    options: dict[str, Any] = {"q_weight": weight, "k_weight": weight, "eps": 1e-6} if norm else {}
    table, positions = torch.zeros(64, head_dim), torch.zeros(tokens, dtype=torch.int64)
    return lambda: rotate_and_write_kv_cache(
        q, k, k.clone(), table, positions, *caches, torch.arange(tokens), **options
    )


def norm(width: int, tokens: int) -> Call:
    x, weight = torch.zeros(tokens, width, dtype=BF16), torch.ones(width, dtype=BF16)
    return lambda: rms_norm(x, weight, 1e-6, residual=x.clone())


def rotary(head_dim: int, *, is_apart: bool = False) -> Call:
    q, positions = torch.zeros(256, 8, head_dim, dtype=BF16), torch.zeros(256, dtype=torch.int64)
    out = (torch.zeros_like(q), torch.zeros_like(q)) if is_apart else None
    return lambda: apply_rotary(q, q.clone(), torch.zeros(64, head_dim), positions, out=out)


def product(num_rows: int, width: int, depth: int, dtype: torch.dtype = BF16) -> Call:
    weight = pack_weight(torch.zeros(width, depth, dtype=dtype), "invariant")
    return lambda: linear(torch.zeros(num_rows, depth, dtype=dtype), weight, torch.zeros(width, dtype=dtype))


def few_rows(num_rows: int, width: int, depth: int, *, is_fused: bool = False, is_onto: bool = False) -> Call:
    """A plain product; or norm, [gate; up] and what they make, `width` each; or a product onto a residual."""
    x = torch.zeros(num_rows, depth, dtype=BF16)
    dense = pack_weight(torch.zeros(2 * width if is_fused else width, depth, dtype=BF16), "dense")
    weight = replace(dense, at_rest=True)
    if is_onto:
        return lambda: linear_onto(x, torch.zeros(num_rows, width, dtype=BF16), weight)
    if is_fused:
        return lambda: norm_linear(x, x.clone(), x[0].clone(), 1e-6, weight, gated=True)
    return lambda: linear(x, weight)


def experts(num_rows: int, width: int, depth: int, dtype: torch.dtype = BF16, num: int = 128) -> Call:
    weights = pack_experts([torch.zeros(width, depth, dtype=dtype)] * num, num, "dense")
    x, rows = torch.zeros(num_rows, depth, dtype=dtype), torch.arange(num_rows)
    offsets = torch.full((num + 1,), num_rows, dtype=torch.int32)
    offsets[0] = 0
    return lambda: grouped_linear(x, weights, offsets, sources=rows, targets=rows, scale=torch.ones(num_rows))


def draw(num_rows: int, dtype: torch.dtype = FP32) -> Call:
    def filled(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((num_rows,), value, dtype=dtype)

    logits = torch.zeros(num_rows, 151_936, dtype=dtype)
    return lambda: sample(
        logits,
        temperature=filled(0.8, FP32),
        top_k=filled(40, torch.int32),
        top_p=filled(0.9, FP32),
        min_p=filled(0.0, FP32),
        seeds=filled(0, torch.int64),
        positions=filled(0, torch.int64),
        return_logprobs=True,
    )


def decode_rows(batch: int, num_columns: int) -> Call:
    rows, tables = torch.arange(batch), torch.zeros((batch, num_columns), dtype=torch.int32)
    return lambda: prepare_decode(rows, torch.zeros_like(rows), rows, tables, 16)


def attend_together(
    batch: int, heads: tuple[int, int] = (16, 8), head_dim: int = 128, cache_dtype: torch.dtype = BF16
) -> Call:
    """A layer of a decode step whose sequences begin alike, with what is done once before it."""
    q = torch.zeros(batch, heads[0], head_dim, dtype=BF16)
    caches = [torch.zeros(600, 16, heads[1], head_dim).to(cache_dtype) for _ in range(2)]
    scales = torch.ones(600, 16, heads[1]) if cache_dtype == FP8 else None
    table = torch.arange(600, dtype=torch.int32).repeat(batch, 1)
    sums_q = torch.arange(batch + 1, dtype=torch.int32)
    sums_k = sums_q * 8320

    def call() -> Tensor:
        shared = find_shared_prefixes(table, sums_k, 16)
        return attend_shared(
            q, *caches, shared, sums_q, sums_k, 8320, block_table=table, k_scale=scales, v_scale=scales
        )

    return call


def decode_end(batch: int) -> Call:
    rows = torch.arange(batch)
    return lambda: finish_decode(rows, rows, rows, rows.clone(), rows.clone(), rows.clone())


LONG = ([2048], [2048])
MANY = ([1] * 32, [1024] * 32)

SOME: dict[str, Call] = {
    "decode 16/8/128": attend(*MANY),
    "decode 16/8/128 fp8": attend(*MANY, cache_dtype=FP8),
    "decode 16/8/128 fp8 one scale": attend(*MANY, cache_dtype=FP8, one_scale=True),
    "decode 16/8/128 int8": attend(*MANY, cache_dtype=INT8),
    "decode 16/8/128 int8 one scale": attend(*MANY, cache_dtype=INT8, one_scale=True),
    "prefill 16/8/128": attend(*LONG),
    "prefill 16/8/256": attend(*LONG, head_dim=256),
    "prefill 16/8/128 fp8": attend(*LONG, cache_dtype=FP8),
    "write 8x128": write(8, 128),
    "norm 2048": norm(2048, 4096),
    "experts 128x1536x2048 few": experts(64, 1536, 2048),
    "experts 128x1536x2048 many": experts(128 * 100, 1536, 2048),
    "invariant product 1024x2048": product(256, 1024, 2048),
    "few rows 1 of 1024x2048": few_rows(1, 1024, 2048),
    "sample 64": draw(64),
}
ALL: dict[str, Call] = SOME | {
    "decode 9/3/64": attend(*MANY, heads=(9, 3), head_dim=64),
    "decode 8/1/128 block 64": attend(*MANY, heads=(8, 1), block_size=64),
    "decode 32/8/128 q4": attend([4] * 8, [8192] * 8, heads=(32, 8)),
    "decode 16/2/256": attend(*MANY, heads=(16, 2), head_dim=256),
    "decode 8/1/128 fp8 block 64": attend(*MANY, heads=(8, 1), block_size=64, cache_dtype=FP8),
    "decode 8/1/128 fp8 block 64 one scale": attend(
        *MANY, heads=(8, 1), block_size=64, cache_dtype=FP8, one_scale=True
    ),
    "decode 8/1/128 int8 block 64": attend(*MANY, heads=(8, 1), block_size=64, cache_dtype=INT8),
    "decode 4/2/80 int8 window": attend(
        *MANY, heads=(4, 2), head_dim=80, cache_dtype=INT8, window_size=(100, 0)
    ),
    "decode 4/2/64 fp8 softcap": attend(*MANY, heads=(4, 2), head_dim=64, cache_dtype=FP8, softcap=30.0),
    "decode 32/8/120": attend(*MANY, heads=(32, 8), head_dim=120),
    "decode 32/8/120 fp8": attend(*MANY, heads=(32, 8), head_dim=120, cache_dtype=FP8),
    "decode 16/8/128 fp8 q4": attend([4] * 8, [8192] * 8, cache_dtype=FP8),
    "decode 4/2/80 options": attend(*MANY, heads=(4, 2), head_dim=80, window_size=(100, 0), softcap=30.0),
    "decode 16/8/128 invariant": attend(*MANY, batch_invariant=True),
    "prefill 9/3/64": attend(*LONG, heads=(9, 3), head_dim=64),
    "prefill 32/8/128 block 64": attend(*LONG, heads=(32, 8), block_size=64),
    "prefill 16/8/128 packed": attend(*LONG, block_size=0),
    "prefill 16/8/128 block 1": attend(*LONG, block_size=1),
    "prefill 16/8/128 sinks": attend(*LONG, sinks=torch.zeros(16)),
    "prefill 16/8/128 alibi": attend(*LONG, alibi_slopes=torch.zeros(16)),
    "prefill 8/4/80": attend(*LONG, heads=(8, 4), head_dim=80),
    "prefill 8/4/192": attend(*LONG, heads=(8, 4), head_dim=192),
    "prefill 16/8/128 split": attend([64], [8192]),
    "prefill 16/8/128 behind 8064": attend([128], [8192]),
    "prefill 16/8/128 invariant": attend(*LONG, batch_invariant=True),
    "prefill 4/4/64 fp32": attend(*LONG, heads=(4, 4), head_dim=64, dtype=FP32),
    "write 3x64 few": write(3, 64, tokens=32),
    "write 8x128 fp8": write(8, 128, FP8),
    "rotate and write 16/8/128": rotate_and_write((16, 8), 128, 4096, norm=True),
    "rotate and write 9/3/64 few": rotate_and_write((9, 3), 64, 16, norm=False),
    "norm 1024 few": norm(1024, 8),
    "rotary 128": rotary(128),
    "rotary 128 apart": rotary(128, is_apart=True),
    "gelu 3072": lambda: gelu_tanh(torch.zeros(4096, 3072, dtype=BF16)),
    "silu 3072": lambda: silu_and_mul(torch.zeros(4096, 6144, dtype=BF16)),
    "silu 3072 apart": lambda: silu_and_mul(*torch.zeros(2, 4096, 3072, dtype=BF16)),
    "experts 128x2048x768 some": experts(128 * 32, 2048, 768),
    "experts 128x2048x768 more": experts(128 * 64, 2048, 768),
    "experts 8x2880x4000 many": experts(8 * 128, 2880, 4000, num=8),
    "experts 8x64x128 fp32": experts(8 * 128, 64, 128, FP32, num=8),
    "few rows 4 of 1024x3072": few_rows(4, 1024, 3072),
    "few rows 1 of 151936x1024": few_rows(1, 151_936, 1024),
    "few rows 1 of 3072x1024 fused": few_rows(1, 3072, 1024, is_fused=True),
    "few rows 4 of 12288x4096 fused": few_rows(4, 12288, 4096, is_fused=True),
    "rows 5 of 4096x1024": few_rows(5, 4096, 1024),
    "rows 16 of 3072x1024 fused": few_rows(16, 3072, 1024, is_fused=True),
    "rows 16 of 1024x3072 onto": few_rows(16, 1024, 3072, is_onto=True),
    "rows 32 of 37x576 onto": few_rows(32, 37, 576, is_onto=True),
    "rows 8 of 4096x12288 onto": few_rows(8, 4096, 12288, is_onto=True),
    "rows 8 of 12288x4096 fused": few_rows(8, 12288, 4096, is_fused=True),
    "few rows 1 of 12288x4096 fused": few_rows(1, 12288, 4096, is_fused=True),
    "few rows 1 of 4096x12288": few_rows(1, 4096, 12288),
    "invariant product 151936x1024": product(64, 151_936, 1024),
    "invariant product 576x576 fp32": product(64, 576, 576, FP32),
    "decode rows 256": decode_rows(256, 2560),
    "decode end 256": decode_end(256),
    "shared 64 of 16/8/128": attend_together(64),
    "shared 64 of 32/4/64": attend_together(64, heads=(32, 4), head_dim=64),
    "shared 256 of 16/8/128 fp8": attend_together(256, cache_dtype=FP8),
    "sample 1": draw(1),
    "sample 256": draw(256),
    "sample 256 bf16": draw(256, BF16),
}


def main() -> None:
    arch, which = int(sys.argv[1]), sys.argv[2]
    launched: dict[str, list[str]] = {}
    errors = {}
    with NoGpu(arch) as gpu:
        for name, call in (ALL if which == "all" else SOME).items():
            try:
                call()
            except Exception as error:
                errors[name] = {"error": f"{type(error).__name__}: {error}"[-600:]}
            launched[name] = gpu.launched()
        kernels = gpu.read(hash for hashes in launched.values() for hash in hashes)
    found = {
        name: {"kernels": [vars(kernels[hash]) for hash in hashes], **errors.get(name, {})}
        for name, hashes in launched.items()
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
