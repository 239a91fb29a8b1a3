"""Decode steps whose sequences begin alike: what they have in common, and whether attention agrees."""

from __future__ import annotations

from typing import Any

import torch
from helpers.attention_cases import Case, Inputs, assert_within_ratio, attention
from torch import Tensor

from octavo.kernels.shared_prefixes import attend_shared, find_shared_prefixes

FP8, INT8 = torch.float8_e4m3fn, torch.int8


def in_plain_python(
    tables: list[list[int]], lens_k: list[int], block_size: int, least: int
) -> tuple[list[int], list[int], list[int]]:
    """(lens, cu_seqlens_q, cu_seqlens_k), from what `find_shared_prefixes` promises."""
    lens, sums_q, sums_k = [0] * len(lens_k), [0], [0]
    for first in range(0, len(lens_k), 8):
        octet = range(first, min(first + 8, len(lens_k)))
        real = [b for b in octet if lens_k[b] > 0]
        num = 0
        if len(real) > 1:
            while all((num + 1) * block_size < lens_k[b] for b in real):
                if len({tables[b][num] for b in (first, *real)}) > 1:
                    break
                num += 1
        tokens = num * block_size if num * block_size >= least else 0
        for b in real:
            lens[b] = tokens
        sums_q.append(octet.stop)
        sums_k.append(sums_k[-1] + tokens)
    return lens, sums_q, sums_k


def unshare(inputs: Inputs, b: int, column: int) -> None:
    """Give sequence b a block of its own there, with the same keys in it."""
    arguments = inputs.arguments
    table = arguments["block_table"]
    spare = (set(range(len(arguments["k"]))) - set(table.flatten().tolist())).pop()
    for name in ("k", "v", "k_scale", "v_scale"):
        cache = arguments.get(name)
        if isinstance(cache, Tensor) and cache.dim() > 1:
            cache[spare] = cache[int(table[b, column])].clone()
    table[b, column] = spare


def attended(inputs: Inputs, least: int) -> tuple[Tensor, list[int]]:
    """Attention that shares, and the keys that each entry leaves to its octet."""
    case, arguments = inputs.case, inputs.arguments
    shared = find_shared_prefixes(arguments["block_table"], arguments["cu_seqlens_k"], case.block_size, least)
    out = attend_shared(
        arguments["q"], arguments["k"], arguments["v"], shared,
        arguments["cu_seqlens_q"], arguments["cu_seqlens_k"], arguments["max_seqlen_k"],
        block_table=arguments["block_table"], softmax_scale=case.softmax_scale,
        k_scale=arguments.get("k_scale"), v_scale=arguments.get("v_scale"),
    )  # fmt: skip
    return out, shared.lens.tolist()


def check(inputs: Inputs, least: int = 16) -> list[int]:
    """Hold it to the rule of attention's own tests; returns the shared lengths."""
    out, lens = attended(inputs, least)
    exact, _ = attention(inputs, torch.float64)
    plain, _ = attention(inputs, inputs.case.dtype)
    assert out.dtype == inputs.case.dtype
    assert_within_ratio(out, exact, plain, strict=inputs.case.cache_dtype not in (FP8, INT8))
    return lens


def decode(*lens_k: int, **options: Any) -> Case:
    return Case((1,) * len(lens_k), lens_k, **options)


CASES = [
    *((decode(*(70 + 5 * b for b in range(real)), *[0] * (8 - real)), 64) for real in (2, 3, 7, 8)),
    (decode(*(90 - b for b in range(11))), 64),
    (decode(*(90, 66, 65, 64)), 48),  # the last one's own key is in the fourth block
    (decode(*(70, 80), heads=(8, 1)), 64),
    (decode(*(70, 80), heads=(7, 7)), 64),
    (decode(*(70, 80, 66), heads=(16, 1)), 64),  # two tiles of rows
    (decode(*(70, 80), head_dim=128), 64),
    (decode(*(70, 80), head_dim=80, heads=(9, 3)), 64),
    (decode(*(40, 50, 33), block_size=1), 32),
    (decode(*(140, 150), block_size=64), 128),
    (decode(*(70, 80), dtype=torch.float16), 64),
    (decode(*(70, 80), dtype=torch.float32), 64),
    (decode(*(70, 80), interleaved=True), 64),
    (decode(*(70, 80), cache_dtype=FP8), 64),
    (decode(*(70, 80), cache_dtype=FP8, scales="tensor"), 64),
    (decode(*(70, 80), cache_dtype=FP8, scales="token", heads=(8, 2)), 64),
    (decode(*(70, 80, 66), cache_dtype=FP8, scales="token", heads=(4, 4)), 64),  # eight rows of an octet
    (decode(*(70, 80), cache_dtype=FP8, scales="token", heads=(9, 1)), 64),
    (decode(*(90, 66, 65, 64), cache_dtype=INT8, scales="tensor"), 48),
    (decode(*(140, 150), cache_dtype=INT8, scales="token", block_size=64, head_dim=128), 128),
]
