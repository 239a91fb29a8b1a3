"""What `octavo bench tune` tries for decode attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from octavo.kernels.triton import decode
from octavo.kernels.triton.attention_arguments import arguments
from octavo.kernels.triton.decode_parameters import key_and_defaults
from octavo.kernels.triton.tuning import Case, Parameters, Tuning

# q heads, kv heads, head_dim, cache dtype, block size, whether tokens have scales of their own
_MODELS = (
    (16, 8, 128, torch.bfloat16, 16, False),
    (32, 8, 128, torch.bfloat16, 16, False),
    (16, 8, 128, torch.bfloat16, 64, False),
    (32, 8, 128, torch.bfloat16, 64, False),
    (8, 1, 128, torch.bfloat16, 16, False),
    (9, 3, 64, torch.bfloat16, 16, False),
    (16, 8, 128, torch.float8_e4m3fn, 16, False),
    (16, 8, 128, torch.float8_e4m3fn, 16, True),
    (16, 8, 128, torch.int8, 16, False),
    (16, 8, 128, torch.int8, 16, True),
)
_Model = tuple[int, int, int, torch.dtype, int, bool]
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
# The same for `decode_by_key`: 32 keys for each warp, or 16.
_BY_KEY = (
    (64, 2, 3, 5, 168),
    (64, 2, 3, 4, 200),
    (64, 2, 2, 6, 168),
    (32, 1, 3, 10, 168),
    (32, 1, 2, 12, 160),
    (64, 4, 3, 3, 168),
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


def _case(model: _Model, batch: int, keys: int) -> Case:
    key, default = key_and_defaults(_arguments(model, 1, model[4], 1, torch.device("cpu"))[0], 1)
    return {
        "key": key, "default": default, "space": _space(default),
        "model": model, "batch": batch, "keys": keys,
    }  # fmt: skip


def _run(case: Case, parameters: Parameters) -> Sequence[Callable[[], object]]:
    (_, kv_heads, head_dim, cache_dtype, *_), batch, keys = case["model"], case["batch"], case["keys"]
    sets = max(1, _CACHE_BYTES // (batch * keys * kv_heads * head_dim * 2 * cache_dtype.itemsize))

    def call(facts: dict[str, Any]) -> Callable[[], object]:
        return lambda: decode.launch(facts, 1, 1, keys, parameters)

    return [call(facts) for facts in _arguments(case["model"], batch, keys, sets, torch.device("cuda"))]


def _arguments(model: _Model, batch: int, keys: int, sets: int, device: torch.device) -> list[dict[str, Any]]:
    """A call for each of `sets` batches, over one cache with a place of its own for every key."""
    heads, kv_heads, head_dim, cache_dtype, block_size, has_scales = model
    shape = (sets * batch * keys // block_size, block_size, kv_heads, head_dim)
    k, v = (torch.empty(shape, dtype=torch.bfloat16, device=device).normal_().to(cache_dtype) for _ in "kv")
    k_scale, v_scale = torch.full((2, *shape[:3]), 0.05, device=device) if has_scales else (0.05, 0.05)
    q = torch.randn(batch, heads, head_dim, dtype=torch.bfloat16, device=device)
    rows = torch.arange(batch + 1, dtype=torch.int32, device=device)
    tables = torch.randperm(shape[0], device=device, dtype=torch.int32).view(sets, batch, -1)
    return [
        arguments(
            q, k, v, rows, rows * keys, softmax_scale=head_dim**-0.5, causal=True, window_size=(-1, -1),
            softcap=0.0, alibi_slopes=None, sinks=None, block_table=table, out=torch.empty_like(q), lse=None,
            k_scale=k_scale, v_scale=v_scale, leftpad=None,
        )
        for table in tables
    ]  # fmt: skip


TUNING = Tuning(
    name="decode_attention",
    space=[],
    cases=[_case(model, *batch) for model in _MODELS for batch in _BATCHES],
    run=_run,
)
