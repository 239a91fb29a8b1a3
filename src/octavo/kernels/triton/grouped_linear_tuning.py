"""What `octavo bench tune` tries for the products of experts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from octavo.kernels.grouped_linear import PackedExperts
from octavo.kernels.triton import grouped_linear
from octavo.kernels.triton.tuning import Case, Parameters, Tuning

_BF16 = torch.bfloat16
# Experts, columns and depth of both products: Qwen3-30B-A3B, Mixtral-8x7B, Qwen1.5-MoE-A2.7B.
_SHAPES = (
    *((128, 1536, 2048), (128, 2048, 768)),
    *((8, 28672, 4096), (8, 4096, 14336)),
    *((60, 2816, 2048), (60, 2048, 1408)),
)
_ROWS_OF_AN_EXPERT = (0.25, 1, 8, 24, 48, 100, 400)
_COLD = 256 << 20  # bytes of different weights, more than any cache


def _run(case: Case, parameters: Parameters) -> Sequence[Callable[[], object]]:
    num_groups, width, depth = case["shape"]
    num_rows, device = case["rows"], case["device"]
    rng = torch.Generator(device).manual_seed(0)
    group = torch.randint(0, num_groups, (num_rows,), generator=rng, device=device).sort().values
    offsets = torch.searchsorted(group, torch.arange(num_groups + 1, device=device), out_int32=True)
    x = torch.randn(num_rows, depth, generator=rng, dtype=_BF16, device=device)

    def call() -> Callable[[], object]:
        weights = torch.randn(num_groups, width, depth, generator=rng, dtype=_BF16, device=device)
        packed = PackedExperts(case["shape"], "dense", weights)
        return lambda: grouped_linear.grouped_linear(
            x, packed, offsets, None, None, None, parameters=parameters
        )

    return [call() for _ in range(max(1, _COLD // (2 * num_groups * width * depth)))]


def _cases() -> list[Case]:
    cases: list[Case] = []
    for shape, average in itertools.product(_SHAPES, _ROWS_OF_AN_EXPERT):
        num_rows = max(1, int(shape[0] * average))
        key, default = grouped_linear.launch_class(num_rows, shape, _BF16)
        cases.append({"key": key, "default": default, "device": "cuda", "shape": shape, "rows": num_rows})
    return cases


TUNING = Tuning(
    name="grouped_linear",
    space=[
        {
            "BLOCK_M": rows, "BLOCK_N": columns, "BLOCK_K": depth,
            "num_warps": warps, "num_stages": stages, "PDL": 1,
        }
        for rows, columns, depth, warps, stages in (
            *itertools.product((16, 32), (32, 64, 128), (64, 128, 256), (4,), (3, 4, 5)),
            *itertools.product((64,), (64, 128, 256), (64, 128), (4, 8), (3, 4)),
            *itertools.product((128,), (64, 128, 256), (64, 128), (4, 8), (3, 4)),
        )
    ],
    cases=_cases(),
    run=_run,
)  # fmt: skip
