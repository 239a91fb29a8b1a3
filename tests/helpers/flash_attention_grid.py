"""The cases of FlashAttention's own tests of its two functions, re-expressed, each with the right answer.

After tests/test_flash_attn.py and hopper/test_flash_attn.py of Dao-AILab/flash-attention (BSD-3-Clause):
6 query heads over 6, 2 or 1; lengths, head dims, windows, appends, rotation and padding as they vary them.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, fields
from typing import Any

import torch
from helpers.attention_cases import Case, Sequence, assert_within_ratio, attend_one
from torch import Tensor

from octavo.kernels import flash_attn_with_kvcache

HEADS = {"mha": (6, 6), "mqa": (6, 1), "gqa": (6, 2)}
_AXES: dict[str, tuple[Any, ...]] = {
    "heads": tuple(HEADS.values()),
    "new": ("none", "as many", "fewer"),
    "causal": (False, True),
    "local": (False, True),
    "rotary": (0.0, 0.5, 1.0),
    "interleaved": (False, True),
    "block_size": (0, 1, 4, 16, 256),
    "leftpad": (False, True),
    "batch_idx": (False, True),
    "softcap": (0.0, 0.0, 50.0),
    "alibi": (False, False, True),
    "dtype": (torch.bfloat16, torch.float16),
}


@dataclass(frozen=True)
class KvCase:
    """One call of `flash_attn_with_kvcache`; `block_size` 0 is a contiguous cache, `new` what is appended."""

    len_q: int
    len_k: int
    head_dim: int
    heads: tuple[int, int] = (6, 2)
    new: str = "none"
    causal: bool = False
    local: bool = False
    rotary: float = 0.0
    interleaved: bool = False
    block_size: int = 0
    leftpad: bool = False
    batch_idx: bool = False
    softcap: float = 0.0
    alibi: bool = False
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0

    def __str__(self) -> str:
        changed = [
            f"{one.name}={getattr(self, one.name)}".replace("torch.", "").replace(" ", "")
            for one in fields(self)[3:-1]
            if getattr(self, one.name) != one.default
        ]
        return "-".join([f"{self.len_q}over{self.len_k}d{self.head_dim}", *changed])

    @property
    def is_possible(self) -> bool:
        if self.new == "none":
            return not self.rotary
        return self.len_q <= self.len_k and not (self.block_size and self.batch_idx)


def draw_cases(
    num: int, lens: list[tuple[int, int]], head_dims: list[int], seed: int = 0, **fixed: tuple[Any, ...]
) -> list[KvCase]:
    """`num` combinations drawn from the grid, every pair of lengths in turn."""
    rng, cases = random.Random(seed), []
    axes = _AXES | fixed
    while len(cases) < num:
        len_q, len_k = lens[len(cases) % len(lens)]
        chosen = {name: rng.choice(values) for name, values in axes.items()}
        if chosen["block_size"]:
            chosen["batch_idx"] = False
        if chosen["new"] == "none":
            chosen["rotary"] = 0.0
        case = KvCase(len_q, len_k, rng.choice(head_dims), seed=len(cases), **chosen)
        if case.is_possible:
            cases.append(case)
    return cases


def check(case: KvCase, device: str) -> None:
    """Run the call, hold the result to the ratio rule, and the cache to what it must contain, bit for bit."""
    rng = torch.Generator(device).manual_seed(case.seed)
    plan = random.Random(case.seed)
    (heads, kv_heads), dim, batch = case.heads, case.head_dim, 2

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, device=device).to(case.dtype)

    q = draw(batch, case.len_q, heads, dim)
    num_new = {"none": 0, "as many": case.len_q, "fewer": plan.randint(1, case.len_q)}[case.new]
    before = [plan.randint(0 if num_new else 1, case.len_k - num_new) for _ in range(batch)]
    after = [n + num_new for n in before]
    padding = [plan.randint(0, n) for n in before] if case.leftpad else [0] * batch
    window = (plan.randint(0, case.len_k), plan.randint(0, case.len_k)) if case.local else (-1, -1)
    arguments: dict[str, Any] = {
        "cache_seqlens": int32(before, device),
        "causal": case.causal,
        "window_size": window,
        "softcap": case.softcap,
    }
    if case.leftpad:
        arguments["cache_leftpad"] = int32(padding, device)
    if case.alibi:
        arguments["alibi_slopes"] = torch.rand(batch, heads, generator=rng, device=device) * 0.3

    k_cache, v_cache, slots = _caches(case, draw, plan, arguments, device)
    kept = k_cache.clone(), v_cache.clone()
    new = [draw(batch, num_new, kv_heads, dim) for _ in range(2)] if num_new else []
    rotary_dim = int(case.rotary * dim) // 16 * 16
    cos = sin = None
    if rotary_dim:
        angles = (
            torch.rand(case.len_k + case.len_q, rotary_dim // 2, generator=rng, device=device) * 2 * math.pi
        )
        cos, sin = angles.cos(), angles.sin()
        arguments |= {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": case.interleaved}
    out, lse = flash_attn_with_kvcache(q, k_cache, v_cache, *new, **arguments, return_softmax_lse=True)

    outs: dict[torch.dtype, list[Tensor]] = {torch.float64: [], case.dtype: []}
    lses = []
    for b in range(batch):
        places = slots[b][before[b] : after[b]]
        if num_new:
            own = torch.arange(before[b], after[b], device=device)
            fresh = _turn(new[0][b].double(), cos, sin, own, case.interleaved)
            written = k_cache.flatten(0, 1)[places]
            if rotary_dim:
                torch.testing.assert_close(written.double(), fresh, rtol=2**-7, atol=2**-8)
            else:
                assert torch.equal(written, new[0][b])
            assert torch.equal(v_cache.flatten(0, 1)[places], new[1][b])
            for cache, content in zip((k_cache, v_cache), kept, strict=True):
                content.flatten(0, 1)[places] = cache.flatten(0, 1)[places]
        keys, values = (cache.flatten(0, 1)[slots[b][: after[b]]].double() for cache in (k_cache, v_cache))
        positions = torch.full((case.len_q,), before[b], device=device)
        if case.causal or case.local:
            positions = positions + torch.arange(case.len_q, device=device)
        turned = _turn(q[b].double(), cos, sin, positions, case.interleaved)
        for dtype, found in outs.items():
            exact, exact_lse = attend_one(
                Sequence(turned, keys, values), dtype, dim**-0.5, case.causal, window, case.softcap,
                arguments["alibi_slopes"][b] if case.alibi else None, first_key=padding[b],
            )  # fmt: skip
            found.append(exact)
            if dtype == torch.float64:
                lses.append(exact_lse)
    assert_within_ratio(out, torch.stack(outs[torch.float64]), torch.stack(outs[case.dtype]))
    # Rotated queries are rounded to their dtype before they meet a key.
    atol = {torch.bfloat16: 2e-2, torch.float16: 3e-3}[case.dtype] if rotary_dim else 2e-5
    torch.testing.assert_close(lse.double(), torch.stack(lses), rtol=1e-5, atol=atol)
    for cache, content in zip((k_cache, v_cache), kept, strict=True):
        assert torch.equal(_bits(cache), _bits(content)), "the cache changed outside of what was appended"


def int32(values: list[int], device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def _caches(
    case: KvCase, draw: Any, plan: random.Random, arguments: dict[str, Any], device: str
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The caches, filled to their capacity, and each sequence's slots in token order."""
    kv_heads, dim, batch = case.heads[1], case.head_dim, 2
    order = torch.arange(case.len_k, device=device)
    if case.block_size:
        size = case.block_size
        each = -(-case.len_k // size)
        blocks = plan.sample(range(each * batch + 3), each * batch)
        table = int32(blocks, device).view(batch, each)
        arguments["block_table"] = table
        shape = (each * batch + 3, size, kv_heads, dim)
        slots = [row.long()[order // size] * size + order % size for row in table]
        return draw(*shape), draw(*shape), slots
    rows = [0, 1]
    if case.batch_idx:
        rows = plan.sample(range(4), batch)
        arguments["cache_batch_idx"] = int32(rows, device)
    shape = (4 if case.batch_idx else batch, case.len_k, kv_heads, dim)
    return draw(*shape), draw(*shape), [row * case.len_k + order for row in rows]


def _turn(x: Tensor, cos: Tensor | None, sin: Tensor | None, positions: Tensor, interleaved: bool) -> Tensor:
    """Rotation of channel pairs; x (S, heads, D) float64."""
    if cos is None or sin is None:
        return x
    half = cos.shape[1]
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    c, s = cos[positions].double()[:, None], sin[positions].double()[:, None]
    out = x.clone()
    out[..., first] = x[..., first] * c - x[..., second] * s
    out[..., second] = x[..., second] * c + x[..., first] * s
    return out


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int16)


def varlen_cases(
    num: int, lens: list[tuple[int, int]], head_dims: list[int], batch: int, seed: int = 0
) -> list[Case]:
    """Padded batches, as FlashAttention draws them: each sequence has a random part of the full length."""
    rng, cases = random.Random(seed), []
    for i in range(num):
        len_q, len_k = lens[i % len(lens)]
        low = rng.choice([1, 1, 0])  # now and then an empty sequence
        cases.append(
            Case(
                lens_q=tuple(rng.randint(max(low, len_q - 20), len_q) for _ in range(batch)),
                lens_k=tuple(rng.randint(max(low, len_k - 20), len_k) for _ in range(batch)),
                heads=rng.choice(list(HEADS.values())),
                head_dim=rng.choice(head_dims),
                dtype=rng.choice([torch.bfloat16, torch.float16]),
                block_size=rng.choice([0, 0, 1, 4, 128]),
                causal=rng.choice([False, True]),
                window=rng.choice([(-1, -1), (rng.randint(0, len_k), rng.randint(0, len_k))]),
                softcap=rng.choice([0.0, 0.0, 50.0]),
                alibi=rng.choice(["none", "none", "batch"]),
                seed=i,
            )
        )
    return cases
