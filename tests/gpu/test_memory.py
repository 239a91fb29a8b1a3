"""Which memory the kernels read and write: none but their own, wherever it lies."""

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.attention_cases import Case, assert_within_ratio, attend_one, attention, prepare

from octavo.kernels import flash_attn_varlen_func, flash_attn_with_kvcache, write_kv_cache

DECODE = Case((1, 2, 0, 8, 1, 1), (1, 33, 3, 300, 1000, 16))
PREFILL = Case((9, 64, 130, 20), (9, 300, 130, 10))
MIXED = replace(DECODE, lens_q=DECODE.lens_q + PREFILL.lens_q, lens_k=DECODE.lens_k + PREFILL.lens_k)
PATHS = {"decode": DECODE, "prefill": PREFILL, "mixed": MIXED}


@pytest.mark.parametrize("side", ["end", "start"])
def test_nothing_outside_a_tensor_is_touched(side: str) -> None:
    """Every tensor lies between holes in the address space: a step outside is an illegal access."""
    script = Path(__file__).with_name("guarded_calls.py")
    done = subprocess.run((sys.executable, script, side), capture_output=True, text=True)
    reached = done.stdout.splitlines()
    assert done.returncode == 0, f"stopped at {reached[-1:]}: {done.stderr[-1500:]}"
    assert reached[-1] == "done"


@pytest.mark.parametrize("poison", [math.inf, -math.inf, 0.0], ids=str)
@pytest.mark.parametrize("batch_invariant", [False, True], ids=["", "invariant"])
def test_what_unwritten_slots_hold_does_not_matter(path: str, batch_invariant: bool, poison: float) -> None:
    right, right_lse = prepare(PATHS[path], "cuda").run(batch_invariant=batch_invariant)
    assert torch.isfinite(right).all()
    out, lse = prepare(PATHS[path], "cuda", poison).run(batch_invariant=batch_invariant)
    assert torch.equal(out, right)
    assert torch.equal(lse, right_lse)


@pytest.mark.parametrize("nowhere", [-1, 2**31 - 1])
def test_table_entries_that_no_visible_key_needs_are_not_looked_at(path: str, nowhere: int) -> None:
    case = replace(PATHS[path], window=(20, 0))
    inputs = prepare(case, "cuda")
    table = inputs.arguments["block_table"]
    wide = torch.full((table.shape[0] + 2, table.shape[1] + 40), nowhere, dtype=torch.int32, device="cuda")
    for b, (num_rows, num_keys) in enumerate(zip(case.lens_q, case.lens_k, strict=True)):
        first, last = max(0, num_keys - num_rows - 20) // 16, -(-num_keys // 16)
        wide[b + 1, 5 + first : 5 + last] = table[b, first:last]
    wide = wide[1:-1, 5:-1]
    for batch_invariant in (False, True):
        inputs.check(block_table=wide, batch_invariant=batch_invariant)


def test_outputs_are_written_completely_and_nothing_beside_them(path: str) -> None:
    inputs = prepare(PATHS[path], "cuda")
    q = inputs.arguments["q"]
    wide = torch.full((q.shape[0] + 2, q.shape[1] + 2, q.shape[2] + 16), 7.0, device="cuda", dtype=q.dtype)
    out = wide[1:-1, 1:-1, 8:-8]
    inputs.check(out=out)
    assert torch.equal(out, inputs.run()[0])
    wide[1:-1, 1:-1, 8:-8] = 7.0
    assert (wide == 7.0).all()


def test_index_tensors_may_be_slices(path: str) -> None:
    inputs = prepare(replace(PATHS[path], alibi="batch"), "cuda")
    right, _ = inputs.check()
    arguments = inputs.arguments
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        buffer = torch.full((40,), -1, dtype=torch.int32, device="cuda")
        buffer[3 : 3 + len(arguments[name])] = arguments[name]
        arguments[name] = buffer[3 : 3 + len(arguments[name])]
    slopes = arguments["alibi_slopes"]
    arguments["alibi_slopes"] = torch.cat([slopes, slopes], dim=1)[:, : slopes.shape[1]]
    assert torch.equal(inputs.run()[0], right)


def test_a_cache_of_more_than_2_31_elements() -> None:
    """Only the highest blocks are used: a 32-bit address would land in the first ones."""
    head_dim, size = 128, 16
    num_blocks = 2**31 // (size * 8 * head_dim) + 5000
    caches = [
        torch.zeros(num_blocks, size, 8, head_dim, dtype=torch.bfloat16, device="cuda") for _ in range(2)
    ]
    assert caches[0].numel() > 2**31
    rng = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(200, 16, head_dim, generator=rng, device="cuda").bfloat16()
    k, v = (torch.randn(1100, 8, head_dim, generator=rng, device="cuda").bfloat16() for _ in range(2))
    table = num_blocks - 1 - torch.arange(69, dtype=torch.int32, device="cuda")
    order = torch.arange(1100, device="cuda")
    slots = table[order // size].long() * size + order % size
    assert slots.min() * 8 * head_dim > 2**31
    write_kv_cache(k, v, *caches, slots)
    for cache, tokens in zip(caches, (k, v), strict=True):
        assert torch.equal(cache.view(-1, 8, head_dim)[slots], tokens)
        assert not cache[: num_blocks - 69].any()
    for num_rows in (200, 1):
        rows = q[-num_rows:]
        sums = [torch.tensor([0, n], dtype=torch.int32, device="cuda") for n in (num_rows, 1100)]
        for batch_invariant in (False, True):
            out = flash_attn_varlen_func(
                rows, *caches, *sums, num_rows, 1100, causal=True, block_table=table[None],
                batch_invariant=batch_invariant,
            )  # fmt: skip
            exact, plain = (
                attend_one((rows, k, v), dtype, head_dim**-0.5, True, (-1, -1))[0]
                for dtype in (torch.float64, torch.bfloat16)
            )
            assert_within_ratio(out, exact, plain)


def test_a_contiguous_cache_of_more_than_2_31_elements() -> None:
    """One block per sequence; the last sequence lies past element 2^31."""
    caches = [torch.empty(9, 2**18, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    rng = torch.Generator("cuda").manual_seed(0)
    k, v = (torch.randn(500, 8, 128, generator=rng, device="cuda").bfloat16() for _ in range(2))
    caches[0][8, :500], caches[1][8, :500] = k, v
    for num_rows in (1, 60):
        q = torch.randn(1, num_rows, 16, 128, generator=rng, device="cuda").bfloat16()
        row = torch.tensor([8], dtype=torch.int32, device="cuda")
        out = flash_attn_with_kvcache(q, *caches, cache_seqlens=500, cache_batch_idx=row, causal=True)
        exact, plain = (
            attend_one((q[0], k, v), dtype, 128**-0.5, True, (-1, -1))[0]
            for dtype in (torch.float64, torch.bfloat16)
        )
        assert_within_ratio(out[0], exact, plain)


def test_sinks_alone_leave_rows_without_keys_at_zero() -> None:
    for case in (Case((2, 1), (0, 0), sinks=True), Case((40, 20), (0, 12), sinks=True)):
        inputs = prepare(case, "cuda")
        out, lse = inputs.run()
        _, exact_lse = attention(inputs, torch.float64)
        assert torch.equal(lse == -math.inf, exact_lse == -math.inf)
        assert (out[(exact_lse == -math.inf).T] == 0).all()
