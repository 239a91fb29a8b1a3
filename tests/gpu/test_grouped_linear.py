"""`grouped_linear` and `gelu_tanh` on the GPU: values, CUDA graphs, and a whole layer of experts."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from helpers.kernels import assert_within_budget
from helpers.models import PagedDriver, hf_logits, random_ids, saved, tiny_hf_model
from torch import Tensor
from torch.nn import functional

from octavo.kernels import gelu_tanh, grouped_linear, pack_experts
from octavo.kernels.grouped_linear import PackedExperts
from octavo.kernels.triton.monitor import forbid_compiles
from octavo.models.registry import load_model

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# groups, N, K, average rows of a group: every class of tiles, and sizes that are no multiple of one
SHAPES = [
    (128, 1536, 2048, 0.5),
    (128, 2048, 768, 20),
    (8, 2880, 1000, 50),
    (8, 4096, 1024, 300),
    (5, 37, 72, 3),
    (60, 200, 136, 100),
]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def groups_of(num_rows: int, num_groups: int, seed: int) -> tuple[Tensor, Tensor]:
    """A group for each row, in order, a third of the groups without any; and the offsets."""
    rng = torch.Generator("cuda").manual_seed(seed)
    most = max(1, num_groups * 2 // 3)
    group = torch.randint(0, most, (num_rows,), generator=rng, device="cuda").sort().values
    return group, torch.searchsorted(group, torch.arange(num_groups + 1, device="cuda"), out_int32=True)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_torch_in_float64(dtype: torch.dtype, shape: tuple[int, int, int, float]) -> None:
    num_groups, width, depth, average = shape
    num_rows = max(1, int(num_groups * average))
    weights = draw(num_groups, width, depth, dtype=dtype, seed=1) / depth**0.5
    group, offsets = groups_of(num_rows, num_groups, seed=2)
    x = draw(max(1, num_rows // 2), depth, dtype=dtype)
    sources = torch.randint(0, x.shape[0], (num_rows,), device="cuda")
    targets = torch.randperm(num_rows, device="cuda")
    scale = draw(num_rows, seed=3)
    packed = PackedExperts((num_groups, width, depth), "dense", weights)
    out = grouped_linear(x, packed, offsets, sources=sources, targets=targets, scale=scale)

    def plain(wide: torch.dtype) -> Tensor:
        products = torch.zeros((num_rows, width), dtype=wide, device="cuda")
        if wide == torch.float32:
            # Terms added in plain order: cuBLAS adds parts of a row in several places, with a smaller error.
            for k in range(depth):
                products.addcmul_(x[sources, k : k + 1], weights[group, :, k])
        else:
            for one in group.unique().tolist():
                mine = group == one
                products[mine] = x[sources[mine]].to(wide) @ weights[one].to(wide).T
        products = products * scale.to(wide)[:, None]
        return torch.empty_like(products).index_copy_(0, targets, products)

    assert_within_budget(out, plain(torch.float64), plain(dtype))


def test_in_a_cuda_graph_the_offsets_may_change_between_replays() -> None:
    num_groups, num_rows = 16, 96
    packed = pack_experts(draw(num_groups, 256, 128, dtype=torch.bfloat16, seed=1) / 11, num_groups, "dense")
    x = draw(num_rows, 128, dtype=torch.bfloat16)
    offsets = torch.empty(num_groups + 1, dtype=torch.int32, device="cuda")
    offsets.copy_(groups_of(num_rows, num_groups, seed=0)[1])
    grouped_linear(x, packed, offsets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = grouped_linear(x, packed, offsets)
    for seed in range(1, 5):
        group, changed = groups_of(num_rows, num_groups, seed)
        offsets.copy_(changed)
        graph.replay()
        expected = torch.stack([packed.data[g] @ x[i] for i, g in enumerate(group.tolist())])
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


def test_nothing_is_compiled_for_another_number_of_rows_of_the_same_class() -> None:
    packed = pack_experts(draw(8, 256, 128, dtype=torch.bfloat16), 8, "dense")

    def call(num_rows: int) -> torch.Tensor:
        _, offsets = groups_of(num_rows, 8, seed=0)
        return grouped_linear(draw(num_rows, 128, dtype=torch.bfloat16), packed, offsets)

    for average in (1, 32, 64, 128):
        call(8 * average)
    with forbid_compiles():
        for num_rows in (1, 3, 17, 100, 129, 300, 600, 1500, 4000):
            assert call(num_rows).isfinite().all()


@pytest.mark.parametrize("shape", [(1, 3072), (37, 100), (4096, 3072), (0, 8), (3, 1)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gelu(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = 3 * draw(*shape, dtype=dtype)
    wide = x.double()
    exact = wide / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))
    assert_within_budget(gelu_tanh(x), exact, functional.gelu(x, approximate="tanh"))


@pytest.mark.parametrize("model_type", ["gpt2", "qwen3_moe", "qwen2_moe", "mixtral"])
def test_logits_equal_transformers(model_type: str, tmp_path: Path) -> None:
    hf = tiny_hf_model(model_type).to("cuda")
    loaded = load_model(saved(hf, tmp_path), device="cuda", dtype="float32")
    ids = random_ids(29, seed=1)
    driver = PagedDriver(loaded)
    pieces = [driver.step({"a": ids[:20]})["a"], *(driver.step({"a": [i]})["a"] for i in ids[20:])]
    torch.testing.assert_close(torch.cat(pieces), hf_logits(hf, ids), rtol=0, atol=1e-3)
