"""Products of one to four rows on the GPU: values beside torch's, in a graph, and in a chain."""

from __future__ import annotations

import pytest
import torch
from helpers.kernels import assert_within_budget
from torch import Tensor
from torch.nn import functional

from octavo.kernels import linear, norm_linear, pack_weight

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Layers of Qwen3-0.6B and 8B, SmolLM2, a head, and sizes that are no multiple of anything.
SHAPES = [(4096, 1024), (1024, 3072), (576, 576), (4096, 12288), (151_936, 1024), (37, 72), (2049, 1000)]


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_equals_torch_in_float64(dtype: torch.dtype, shape: tuple[int, int], rows: int) -> None:
    width, depth = shape
    x, weight = draw(rows, depth, dtype=dtype), draw(width, depth, dtype=dtype, seed=1)
    bias = draw(width, dtype=dtype, seed=2)
    found = linear(x, pack_weight(weight, "dense"), bias)
    exact = functional.linear(x.double(), weight.double(), bias.double())
    assert_within_budget(found, exact, functional.linear(x, weight, bias))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3072, 1024), (12288, 4096), (37, 72)], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_norm_and_gate(dtype: torch.dtype, shape: tuple[int, int], rows: int) -> None:
    inner, depth = shape
    x, residual = draw(rows, depth, dtype=dtype), draw(rows, depth, dtype=dtype, seed=1)
    weight = draw(2 * inner, depth, dtype=dtype, seed=2) / depth**0.5
    norm = 1 + 0.1 * draw(depth, dtype=dtype, seed=3)
    found, summed = norm_linear(x, residual, norm, 1e-6, pack_weight(weight, "dense"), gated=True)
    assert torch.equal(summed, x + residual)

    def formula(wide: torch.dtype) -> Tensor:
        normed = functional.rms_norm((x + residual).to(wide), (depth,), norm.to(wide), 1e-6)
        gate, up = functional.linear(normed, weight.to(wide)).chunk(2, dim=-1)
        return functional.silu(gate) * up

    assert_within_budget(found, formula(torch.float64), formula(dtype))


def test_a_chain_in_a_graph_reads_what_was_written_just_before() -> None:
    """Each product has its weights under way before the one in front ends: only those."""
    hidden, inner, layers = 1024, 3072, 24
    ups = [
        pack_weight(draw(2 * inner, hidden, dtype=torch.bfloat16, seed=i) / 32, "dense")
        for i in range(layers)
    ]
    downs = [
        pack_weight(draw(hidden, inner, dtype=torch.bfloat16, seed=i) / 64, "dense") for i in range(layers)
    ]
    norm = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
    start = draw(1, hidden, dtype=torch.bfloat16)

    def chain() -> Tensor:
        x = residual = start
        for up, down in zip(ups, downs, strict=True):
            y, residual = norm_linear(x, residual, norm, 1e-6, up, gated=True)
            x = linear(y, down)
        return x + residual

    one_by_one = start
    x = residual = start
    for up, down in zip(ups, downs, strict=True):
        y, residual = norm_linear(x, residual, norm, 1e-6, up, gated=True)
        torch.cuda.synchronize()
        x = linear(y, down)
        torch.cuda.synchronize()
    one_by_one = x + residual
    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = chain()
    for i in range(50):
        start.copy_(start)
        result.fill_(i)
        graph.replay()
        assert torch.equal(result, one_by_one)
