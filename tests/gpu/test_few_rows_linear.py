"""Products of one to four rows on the GPU: values beside torch's, in a graph, and in a chain."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.kernels import assert_within_budget
from torch import Tensor
from torch.nn import functional

from octavo.kernels import PackedWeight, linear, norm_linear, pack_weight, rms_norm

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

    def at_rest(*shape: int, seed: int) -> PackedWeight:
        weight = draw(*shape, dtype=torch.bfloat16, seed=seed) / shape[1] ** 0.5
        return replace(pack_weight(weight, "dense"), at_rest=True)

    ups = [at_rest(2 * inner, hidden, seed=i) for i in range(layers)]
    downs = [at_rest(hidden, inner, seed=i) for i in range(layers)]
    torch.cuda.synchronize()
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


def test_a_weight_that_was_just_written() -> None:
    """By a kernel that lets the next one start early; only a weight at rest is read ahead of that."""
    source = draw(4096, 1024, dtype=torch.bfloat16)
    norm = torch.ones(1024, device="cuda", dtype=torch.bfloat16)
    x = draw(2, 1024, dtype=torch.bfloat16, seed=1)
    expected = functional.linear(x, rms_norm(source, norm, 1e-6))
    for i in range(100):
        fresh = rms_norm(source * (1 + i % 2), norm, 0.0)
        found = linear(x, pack_weight(fresh, "dense"))
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-1)
        fresh.zero_()
