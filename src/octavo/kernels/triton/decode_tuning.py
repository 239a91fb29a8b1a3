"""What `octavo bench tune` tries for decode attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from octavo.kernels.triton import decode
from octavo.kernels.triton.attention_arguments import arguments
from octavo.kernels.triton.tuning import Case, Parameters, Tuning

# q heads, kv heads, head_dim, cache dtype, block size
_MODELS = (
    (16, 8, 128, torch.bfloat16, 16),
    (32, 8, 128, torch.bfloat16, 16),
    (16, 8, 128, torch.bfloat16, 64),
    (32, 8, 128, torch.bfloat16, 64),
    (8, 1, 128, torch.bfloat16, 16),
    (9, 3, 64, torch.bfloat16, 16),
    (16, 8, 128, torch.float8_e4m3fn, 16),
    (16, 8, 128, torch.int8, 16),
)
# Sequences, keys of each: little work and much, all of one class of batch, which share what is compiled.
_BATCHES = ((2, 4096), (32, 1024), (32, 8192))
_CACHE_BYTES = 256 << 20  # the inputs of a case together are larger than any GPU's cache
# Keys, warps, stages, programs per multiprocessor, registers (0: as many as the compiler likes): those of
# fifty that were the best at something on an H200.
_LAUNCHES = (
    (64, 4, 3, 2, 0),
    (64, 4, 4, 2, 0),
    (64, 4, 3, 1, 0),
    (64, 4, 3, 3, 168),
    (64, 4, 2, 4, 128),
    (64, 4, 3, 4, 128),
    (32, 4, 4, 3, 168),
    (32, 4, 3, 4, 128),
    (128, 4, 2, 2, 0),
    (128, 4, 3, 2, 0),
)
# The same over caches of one byte, where `decode_by_key` can do it: 16 keys for each warp, or 32.
_BY_KEY = (
    (64, 4, 2, 4, 128),
    (64, 4, 3, 3, 168),
    (64, 4, 4, 3, 168),
    (32, 2, 3, 7, 144),
    (64, 2, 2, 6, 168),
    (64, 2, 3, 5, 168),
    (128, 4, 3, 2, 0),
)


def _space(default: Parameters) -> list[dict[str, int]]:
    launches = [
        {
            **default, "BLOCK_N": keys, "num_warps": warps, "num_stages": stages, "PROGRAMS": programs,
            "maxnreg": registers, "BY_KEY": by_key,
        }
        for by_key, some in ((0, _LAUNCHES), (1, _BY_KEY if default["BY_KEY"] else ()))
        for keys, warps, stages, programs, registers in some
    ]  # fmt: skip
    return [*launches, {**default, "LEAST_KEYS": 128}, {**default, "MERGED": 4096}]


def _case(model: tuple[int, int, int, torch.dtype, int], batch: int, keys: int) -> Case:
    heads, kv_heads, head_dim, cache_dtype, block_size = model
    q = torch.empty(0, heads, head_dim, dtype=torch.bfloat16)
    k = torch.empty(0, block_size, kv_heads, head_dim, dtype=cache_dtype)
    default = decode.default_parameters(q, k, 1)
    return {
        "key": decode.parameters_key(q, k, block_size, 1), "default": default, "space": _space(default),
        "model": model, "batch": batch, "keys": keys,
    }  # fmt: skip


def _run(case: Case, parameters: Parameters) -> Sequence[Callable[[], object]]:
    heads, kv_heads, head_dim, cache_dtype, block_size = case["model"]
    batch, keys = case["batch"], case["keys"]
    sets = max(1, _CACHE_BYTES // (batch * keys * kv_heads * head_dim * 2 * cache_dtype.itemsize))
    shape = (sets * batch * keys // block_size, block_size, kv_heads, head_dim)
    k, v = (
        torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_().to(cache_dtype) for _ in range(2)
    )
    q = torch.randn(batch, heads, head_dim, dtype=torch.bfloat16, device="cuda")
    rows = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    tables = torch.randperm(shape[0], device="cuda", dtype=torch.int32).view(sets, batch, -1)

    def call(table: torch.Tensor) -> Callable[[], object]:
        facts = arguments(
            q, k, v, rows, rows * keys, softmax_scale=head_dim**-0.5, causal=True, window_size=(-1, -1),
            softcap=0.0, alibi_slopes=None, sinks=None, block_table=table, out=torch.empty_like(q), lse=None,
            k_scale=0.05 if cache_dtype == torch.int8 else None,
            v_scale=0.05 if cache_dtype == torch.int8 else None, leftpad=None,
        )  # fmt: skip
        return lambda: decode.launch(facts, 1, 1, keys, parameters)

    return [call(table) for table in tables]


TUNING = Tuning(
    name="decode_attention",
    space=[],
    cases=[_case(model, *batch) for model in _MODELS for batch in _BATCHES],
    run=_run,
)
