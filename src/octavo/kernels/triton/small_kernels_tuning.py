"""What `octavo bench tune` tries for the small kernels: cache write, norm, rotary, activation, few rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.few_rows import FEW_ROWS, most_rows
from octavo.kernels.triton import (
    activation,
    few_rows_linear,
    kv_write,
    norm,
    rotary,
    rotate_and_write,
    rows_linear,
)
from octavo.kernels.triton.tuning import Case, Parameters, Tuning

_BF16, _FLOAT8 = torch.bfloat16, torch.float8_e4m3fn
# q heads, kv heads, head_dim, cache dtype
_MODELS = (
    (16, 8, 128, _BF16),
    (32, 8, 128, _BF16),
    (64, 8, 128, _BF16),
    (32, 8, 128, _FLOAT8),
    (9, 3, 64, _BF16),
    (12, 12, 64, _BF16),
    (8, 4, 256, _BF16),
)
_DEPTHS = (576, 1024, 2048, 4096, 8192)
_WIDTHS = (1536, 3072, 9728, 12288, 14336)
_TOKENS = (1, 64, 256, 2048, 8192)
# N (of the result), K, whether it is gated: the products of Qwen3-0.6B and 8B, and their heads
_PRODUCTS = (
    (4096, 1024, False), (1024, 2048, False), (3072, 1024, True), (1024, 3072, False), (151_936, 1024, False),
    (6144, 4096, False), (12288, 4096, True), (4096, 12288, False), (151_936, 4096, False),
)  # fmt: skip
_COLD = 256 << 20  # bytes of different inputs, more than any cache
_BLOCK_SIZE = 16


Call = Callable[[], object]


def _sets(num_bytes: int, build: Callable[[], Call]) -> list[Call]:
    """As many calls, each over inputs of its own, as it takes to find none of them in a cache."""
    return [build() for _ in range(max(2, min(32, math.ceil(_COLD / num_bytes))))]


def _qkv(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    heads, kv_heads, head_dim, _ = case["model"]
    fused = torch.randn(case["tokens"], heads + 2 * kv_heads, head_dim, dtype=_BF16, device=case["device"])
    q, k, v = fused.tensor_split((heads, heads + kv_heads), dim=1)
    return q, k, v


def _places(case: Case) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """Caches with different slots in no order, and the scales of a quantised cache."""
    _, kv_heads, head_dim, dtype = case["model"]
    num_blocks = max(64, math.ceil(2 * case["tokens"] / _BLOCK_SIZE))
    shape = (num_blocks, _BLOCK_SIZE, kv_heads, head_dim)
    k_cache, v_cache = (torch.zeros(shape, device=case["device"]).to(dtype) for _ in range(2))
    slots = torch.randperm(num_blocks * _BLOCK_SIZE, device=case["device"])[: case["tokens"]]
    scales = {}
    if dtype == _FLOAT8:
        scales = {n: torch.zeros(shape[:3], device=case["device"]) for n in ("k_scale", "v_scale")}
    return k_cache, v_cache, slots, scales


def _bytes(case: Case) -> int:
    heads, kv_heads, head_dim, _ = case["model"]
    num_bytes: int = 4 * case["tokens"] * (heads + 2 * kv_heads) * head_dim
    return num_bytes


def _write(case: Case, parameters: Parameters) -> Sequence[Call]:
    def build() -> Call:
        (_, k, v), (k_cache, v_cache, slots, scales) = _qkv(case), _places(case)
        return lambda: kv_write.write_kv_cache(k, v, k_cache, v_cache, slots, **scales, parameters=parameters)

    return _sets(_bytes(case), build)


def _rotate_and_write(case: Case, parameters: Parameters) -> Sequence[Call]:
    head_dim = case["model"][2]
    table = torch.randn(8192, head_dim, device=case["device"])
    weight = torch.ones(head_dim, dtype=_BF16, device=case["device"])
    positions = torch.arange(case["tokens"], device=case["device"])

    def build() -> Call:
        (q, k, v), (k_cache, v_cache, slots, scales) = _qkv(case), _places(case)
        options = {"q_weight": weight, "k_weight": weight, "eps": 1e-6, **scales}
        return lambda: rotate_and_write.rotate_and_write_kv_cache(
            q, k, v, table, positions, k_cache, v_cache, slots, **options, parameters=parameters
        )

    return _sets(_bytes(case), build)


def _rotary(case: Case, parameters: Parameters) -> Sequence[Call]:
    table = torch.randn(8192, case["model"][2], device=case["device"])
    positions = torch.arange(case["tokens"], device=case["device"])

    def build() -> Call:
        q, k, _ = _qkv(case)
        return lambda: rotary.apply_rotary(q, k, table, positions, False, parameters=parameters)

    return _sets(_bytes(case), build)


def _norm(case: Case, parameters: Parameters) -> Sequence[Call]:
    tokens, depth = case["tokens"], case["depth"]
    weight = torch.ones(depth, dtype=_BF16, device=case["device"])

    def build() -> Call:
        x, added = torch.randn(2, tokens, depth, dtype=_BF16, device=case["device"])
        residual = added if case["residual"] else None
        return lambda: norm.rms_norm(x, weight, 1e-6, residual, parameters=parameters)

    return _sets(4 * tokens * depth, build)


def _activation(case: Case, parameters: Parameters) -> Sequence[Call]:
    tokens, width = case["tokens"], case["width"]

    def build() -> Call:
        x = torch.randn(tokens, 2 * width, dtype=_BF16, device=case["device"])
        return lambda: activation.silu_and_mul(x, parameters=parameters)

    return _sets(6 * tokens * width, build)


def _few_rows(case: Case, parameters: Parameters) -> Sequence[Call]:
    """As in a layer; from 5 rows on, a residual is added behind a product instead of in front of a norm."""
    rows, (width, depth, gated), device = case["rows"], case["product"], case["device"]
    x = torch.randn(rows, depth, dtype=_BF16, device=device)
    num_rows = 2 * width if gated else width
    residual = x if gated else None
    if rows > FEW_ROWS:
        residual = None if gated else torch.randn(rows, width, dtype=_BF16, device=device)
    norm_weight = torch.ones(depth, dtype=_BF16, device=device) if gated else None

    def build() -> Call:
        weight = torch.randn(num_rows, depth, dtype=_BF16, device=device)
        return lambda: few_rows_linear.few_rows_linear(
            x, weight, None, residual, norm_weight, 1e-6, gated, True, parameters=parameters
        )

    return _sets(2 * num_rows * depth, build)


def _model_cases(launch_class: Callable[[Tensor, Tensor, Tensor], tuple[str, Parameters]]) -> list[Case]:
    cases: list[Case] = []
    for model, tokens in itertools.product(_MODELS, _TOKENS):
        heads, kv_heads, head_dim, dtype = model
        q = torch.empty(tokens, heads, head_dim, dtype=_BF16, device="meta")
        k = torch.empty(tokens, kv_heads, head_dim, dtype=_BF16, device="meta")
        key, default = launch_class(q, k, torch.empty(0, dtype=dtype, device="meta"))
        cases.append({"key": key, "default": default, "device": "cuda", "model": model, "tokens": tokens})
    return cases


def _norm_cases() -> list[Case]:
    cases: list[Case] = []
    for depth, residual, tokens in itertools.product(_DEPTHS, (False, True), _TOKENS):
        x = torch.empty(tokens, depth, dtype=_BF16, device="meta")
        key, default = norm.launch_class(x, x if residual else None)
        shape = {"depth": depth, "residual": residual, "tokens": tokens}
        cases.append({"key": key, "default": default, "device": "cuda", **shape})
    return cases


def _activation_cases() -> list[Case]:
    cases: list[Case] = []
    for width, tokens in itertools.product(_WIDTHS, _TOKENS):
        x = torch.empty(tokens, 2 * width, dtype=_BF16, device="meta")
        key, default = activation.launch_class(x, width)
        cases.append({"key": key, "default": default, "device": "cuda", "width": width, "tokens": tokens})
    return cases


def _few_rows_cases() -> list[Case]:
    cases: list[Case] = []
    for product, rows in itertools.product(_PRODUCTS, (1, 2, 4)):
        width, depth, gated = product
        x = torch.empty(rows, depth, dtype=_BF16, device="meta")
        key, default = few_rows_linear.launch_class(x, width, gated)
        shape = {"rows": rows, "product": product}
        cases.append({"key": key, "default": default, "device": "cuda", **shape})
    return cases


def _rows_cases() -> list[Case]:
    cases: list[Case] = []
    for product, rows in itertools.product(_PRODUCTS, (8, 16, 32)):
        width, depth, gated = product
        if rows <= most_rows(width * (1 + gated), depth):
            x = torch.empty(rows, depth, dtype=_BF16, device="meta")
            key, default = rows_linear.launch_class(x, width, gated)
            shape = {"rows": rows, "product": product}
            cases.append({"key": key, "default": default, "device": "cuda", **shape})
    return cases


TUNING = (
    Tuning(
        name="rows_linear",
        space=[
            {"BLOCK_N": columns, "BLOCK_K": 32 * warps * atoms, "AHEAD": ahead, "num_warps": warps, "PDL": 1}
            for columns, warps, atoms, ahead in itertools.product((16, 32), (8, 16), (1, 2), (2, 3, 4, 8))
            if columns * atoms * ahead <= 32 * 2 * 3  # more does not fit into the registers
        ],
        cases=_rows_cases(),
        run=_few_rows,
    ),
    Tuning(
        name="few_rows_linear",
        space=[
            {"BLOCK_N": columns, "BLOCK_K": block, "num_warps": warps, "PDL": 1}
            for columns in (1, 2, 4, 8, 16)
            for block, warps in (
                (256, 2),
                (512, 2),
                (512, 4),
                (1024, 4),
                (1024, 8),
                (2048, 4),
                (2048, 8),
                (4096, 4),
                (4096, 8),
            )
        ],
        cases=_few_rows_cases(),
        run=_few_rows,
    ),
    Tuning(
        name="write_kv_cache",
        space=[
            {"BLOCK_ROWS": rows, "num_warps": warps, "PDL": 1}
            for rows in (4, 8, 16, 32)
            for warps in (1, 2, 4, 8)
        ],
        cases=_model_cases(lambda q, k, cache: kv_write.launch_class(k, cache)),
        run=_write,
    ),
    Tuning(
        name="rotate_and_write_kv_cache",
        space=[
            {"BLOCK_H": heads, "BLOCK_KVH": kv_heads, "BLOCK_T": tokens, "num_warps": warps, "PDL": 1}
            for heads, kv_heads in ((4, 2), (8, 4), (16, 8), (32, 8))
            for tokens, warps in ((1, 1), (1, 2), (1, 4), (2, 2), (4, 2), (8, 2))
        ],
        cases=_model_cases(rotate_and_write.launch_class),
        run=_rotate_and_write,
    ),
    Tuning(
        name="apply_rotary",
        space=[
            {"BLOCK_H": heads, "BLOCK_T": tokens, "num_warps": warps, "PDL": 1}
            for heads in (4, 8, 16)
            for tokens, warps in ((1, 1), (1, 2), (1, 4), (2, 2), (8, 2))
        ],
        cases=_model_cases(lambda q, k, cache: rotary.launch_class(q, k)),
        run=_rotary,
    ),
    Tuning(
        name="rms_norm",
        space=[{"BLOCK_ROWS": 1, "num_warps": warps, "PDL": 1} for warps in (1, 2, 4, 8, 16)],
        cases=_norm_cases(),
        run=_norm,
    ),
    Tuning(
        name="silu_and_mul",
        space=[
            {"BLOCK_I": block, "num_warps": warps, "PDL": 1} for block in (1024, 2048) for warps in (4, 8, 16)
        ],
        cases=_activation_cases(),
        run=_activation,
    ),
)
