"""Calls whose every tensor lies between holes in the address space; run as a script by test_memory.py.

The first argument, `end` or `start`, says on which side of a tensor its hole begins at once.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.attention_cases import Case, prepare
from helpers.guard_pages import guarded

from octavo.kernels import (
    apply_rotary,
    backend,
    flash_attn_varlen_func,
    rms_norm,
    silu_and_mul,
    write_kv_cache,
)

CASES = [
    Case((1, 1, 0, 8, 1), (1, 16, 3, 300, 1000)),
    Case((9, 20, 130, 64), (9, 300, 130, 64)),
    Case((1, 20, 130, 3), (70, 300, 130, 64), head_dim=128, heads=(8, 2), block_size=64),
    Case((1, 20, 130, 3), (70, 300, 130, 64), head_dim=80, block_size=1, alibi="batch", sinks=True),
    Case((1, 20, 130, 3), (70, 300, 130, 64), block_size=0),
    Case((1, 20, 130, 3), (70, 300, 130, 64), head_dim=128, block_size=0, dtype=torch.float16),
    Case((1, 20, 130, 3), (70, 300, 130, 64), block_size=32, dtype=torch.float32, window=(40, 0)),
    Case((1, 20, 130, 3), (70, 300, 130, 64), cache_dtype=torch.float8_e4m3fn, scales="token"),
    Case((1, 20, 130, 3), (70, 300, 130, 64), cache_dtype=torch.int8, scales="token"),
]  # fmt: skip


def attention(case: Case, at_the_end: bool) -> None:
    inputs = prepare(case, "cuda")
    for name, value in inputs.arguments.items():
        if isinstance(value, Tensor):
            inputs.arguments[name] = guarded(value, at_the_end)
    for batch_invariant in (False, True):
        out = guarded(torch.zeros_like(inputs.arguments["q"]), at_the_end)
        flash_attn_varlen_func(**inputs.arguments, out=out, batch_invariant=batch_invariant)
        torch.cuda.synchronize()


def write(head_dim: int, tokens: int, at_the_end: bool) -> None:
    k, v = (guarded(torch.randn(tokens, 3, head_dim, device="cuda").bfloat16(), at_the_end) for _ in range(2))
    caches = [
        guarded(torch.zeros(20, 16, 3, head_dim, device="cuda").bfloat16(), at_the_end) for _ in range(2)
    ]
    slots = guarded(torch.randperm(320, device="cuda")[:tokens], at_the_end)
    write_kv_cache(k, v, *caches, slots)
    q = guarded(torch.randn(tokens, 5, head_dim, device="cuda").bfloat16(), at_the_end)
    table = guarded(torch.randn(64, head_dim // 2 * 2, device="cuda"), at_the_end)
    apply_rotary(q, k, table, guarded(torch.randint(64, (tokens,), device="cuda"), at_the_end))


def rows(width: int, num_rows: int, at_the_end: bool) -> None:
    x = guarded(torch.randn(num_rows, width, device="cuda").bfloat16(), at_the_end)
    weight = guarded(torch.ones(width, device="cuda").bfloat16(), at_the_end)
    rms_norm(x, weight, 1e-6, residual=x.clone())
    silu_and_mul(x)


def main() -> None:
    at_the_end = sys.argv[1] == "end"
    with backend.use("triton"):
        for case in CASES:
            for packed in (case, replace(case, heads=(case.heads[1] * 3, case.heads[1]))):
                print(packed, flush=True)
                attention(packed, at_the_end)
        for head_dim, tokens in ((64, 1), (64, 301), (80, 7), (128, 33), (100, 8)):
            print("write", head_dim, tokens, flush=True)
            write(head_dim, tokens, at_the_end)
            torch.cuda.synchronize()
        for width, num_rows in ((64, 1), (576, 5), (2048, 300), (6144, 3), (100, 2)):
            print("rows", width, num_rows, flush=True)
            rows(width, num_rows, at_the_end)
            torch.cuda.synchronize()
    print("done", flush=True)


if __name__ == "__main__":
    main()
