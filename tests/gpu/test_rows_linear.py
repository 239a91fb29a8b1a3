"""Products of 5 to 32 rows on a Hopper GPU: values beside torch's, repeated, and in a chain in a graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.kernels import assert_within_budget
from torch import Tensor
from torch.nn import functional

from octavo.kernels import PackedWeight, linear, linear_onto, norm_linear, pack_weight
from octavo.kernels.few_rows import most_rows

BF16 = torch.bfloat16
ROWS = [5, 8, 13, 16, 17, 32]
# Layers of Qwen3-0.6B and 8B, SmolLM2, and sizes that are no multiple of anything but 8.
SHAPES = [(4096, 1024), (1024, 3072), (576, 576), (4096, 12288), (37, 72), (2049, 1000)]

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="a kernel for Hopper"
)


def draw(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_equals_torch_in_float64(dtype: torch.dtype, shape: tuple[int, int], rows: int) -> None:
    width, depth = shape
    x, weight = draw(rows, depth, dtype=dtype), draw(width, depth, dtype=dtype, seed=1) / depth**0.5
    bias, residual = draw(width, dtype=dtype, seed=2), draw(rows, width, dtype=dtype, seed=3)
    packed = pack_weight(weight, "dense")
    found = linear(x, packed, bias)
    exact = functional.linear(x.double(), weight.double(), bias.double())
    assert_within_budget(found, exact, functional.linear(x, weight, bias))
    total, rest = linear_onto(x, residual, packed, bias)
    is_ours = rows <= most_rows(width, depth)
    assert is_ours or shape == (4096, 12288)
    assert (rest is None) is is_ours
    assert torch.equal(total, found + residual if is_ours else found)
    alone = torch.full_like(x, torch.nan)
    alone[-1] = x[-1]
    assert torch.equal(linear(alone, packed, bias)[-1], found[-1])


@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", [(3072, 1024), (6144, 4096), (37, 72)], ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_norm_and_gate(rows: int, shape: tuple[int, int], gated: bool, has_residual: bool) -> None:
    inner, depth = shape
    x = draw(rows, depth)
    residual = draw(rows, depth, seed=1) if has_residual else None
    weight = draw(inner * (1 + gated), depth, seed=2) / depth**0.5
    norm = 1 + 0.1 * draw(depth, seed=3)
    found, stream = norm_linear(x, residual, norm, 1e-6, pack_weight(weight, "dense"), gated=gated)
    assert torch.equal(stream, x if residual is None else x + residual)

    def formula(wide: torch.dtype) -> Tensor:
        normed = functional.rms_norm(stream.to(wide), (depth,), norm.to(wide), 1e-6)
        out = functional.linear(normed, weight.to(wide))
        return functional.silu(out.chunk(2, dim=-1)[0]) * out.chunk(2, dim=-1)[1] if gated else out

    assert_within_budget(found, formula(torch.float64), formula(BF16))


@pytest.mark.parametrize("rows", [5, 16, 32])
def test_a_chain_in_a_graph_reads_what_was_written_just_before(rows: int) -> None:
    """Each product has its weights under way before the one in front ends: only those."""
    hidden, inner, layers = 1024, 3072, 24

    def at_rest(*shape: int, seed: int) -> PackedWeight:
        return replace(pack_weight(draw(*shape, seed=seed) / shape[1] ** 0.5, "dense"), at_rest=True)

    ups = [at_rest(2 * inner, hidden, seed=i) for i in range(layers)]
    downs = [at_rest(hidden, inner, seed=i) for i in range(layers)]
    norm = torch.ones(hidden, device="cuda", dtype=BF16)
    start = draw(rows, hidden)

    def chain(*, wait: bool) -> Tensor:
        x, residual = start, None
        for up, down in zip(ups, downs, strict=True):
            y, residual = norm_linear(x, residual, norm, 1e-6, up, gated=True)
            if wait:
                torch.cuda.synchronize()
            x, residual = linear_onto(y, residual, down)
            if wait:
                torch.cuda.synchronize()
        assert residual is None
        return x

    one_by_one = chain(wait=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = chain(wait=False)
    for i in range(50):
        result.fill_(i)
        graph.replay()
        assert torch.equal(result, one_by_one)
