"""`grouped_linear` against torch's products in float64, and the bits of a row in any company."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from helpers.kernels import assert_within_budget
from torch import Tensor

from octavo.errors import KernelArgumentError, UnsupportedKernelConfig
from octavo.kernels import grouped_linear, pack_experts, pack_weight
from octavo.kernels.linear import Form

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# groups, N, K, rows of each group
SHAPES = {
    "some-empty": (5, 37, 72, [9, 0, 0, 1, 13]),
    "all-in-the-last": (4, 16, 24, [0, 0, 0, 20]),
    "one-group": (1, 40, 33, [3]),
    "more-groups-than-rows": (70, 20, 16, [*[0] * 30, 1, *[0] * 38, 1]),
    "past-one-tile-each": (3, 130, 300, [33, 17, 50]),
    "no-rows": (3, 8, 8, [0, 0, 0]),
    "one-number": (2, 1, 1, [1, 1]),
}


def prefix(counts: list[int]) -> Tensor:
    return torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("indirect", [False, True], ids=["in-order", "from-and-to-anywhere"])
def test_equals_torch_in_float64(
    implementation: str, dtype: torch.dtype, shape: tuple[int, int, int, list[int]], indirect: bool
) -> None:
    num_groups, width, depth, counts = shape
    num_rows = sum(counts)
    weights = (draw(num_groups, width, depth, seed=1) / depth**0.5).to(dtype)
    num_inputs = max(1, num_rows // 2) if indirect else num_rows
    x = draw(num_inputs, depth).to(dtype)
    kept = x.clone()
    options: dict[str, Tensor] = {}
    if indirect:
        rng = torch.Generator().manual_seed(2)
        options = {
            "sources": torch.randint(0, num_inputs, (num_rows,), generator=rng),
            "targets": torch.randperm(num_rows, generator=rng),
            "scale": draw(num_rows, seed=3),
        }
    form: Form = "float32" if implementation == "cpu" and dtype == torch.float32 else "dense"
    packed = pack_experts(weights, num_groups, form)
    if implementation == "cpu" and dtype != torch.float32:
        with pytest.raises(UnsupportedKernelConfig, match=f"no compiled kernel for {dtype}"):
            grouped_linear(x, packed, prefix(counts), **options)
        return
    out = grouped_linear(x, packed, prefix(counts), **options)

    def plain(wide: torch.dtype) -> Tensor:
        group = torch.repeat_interleave(torch.arange(num_groups), torch.tensor(counts))
        rows = (x[options["sources"]] if indirect else x).to(wide)
        products = torch.einsum("mk,mnk->mn", rows, weights.to(wide)[group])
        if indirect:
            products = products * options["scale"].to(wide)[:, None]
            products = torch.empty_like(products).index_copy_(0, options["targets"], products)
        return products

    assert out.shape == (num_rows, width)
    assert out.dtype == dtype
    assert out.is_contiguous()
    if num_rows:
        assert_within_budget(out, plain(torch.float64), plain(dtype))
    assert torch.equal(x, kept)


def test_rows_that_no_index_names_do_not_reach_a_result(implementation: str) -> None:
    """NaN in the row that dead lanes read, and in the weights of a group without rows."""
    weights = draw(3, 20, 24, seed=1)
    weights[1] = float("nan")
    x = draw(6, 24)
    x[0] = float("nan")
    packed = pack_experts(weights, 3, "float32" if implementation == "cpu" else "dense")
    sources = torch.tensor([1, 2, 3, 4, 5])
    out = grouped_linear(x, packed, prefix([2, 0, 3]), sources=sources)
    group = torch.tensor([0, 0, 2, 2, 2])
    expected = torch.einsum("mk,mnk->mn", x[sources], weights[group])
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["float32", "float16", "int8"])
def test_a_rows_bits_do_not_depend_on_the_other_rows(form: Form) -> None:
    weights = draw(6, 83, 700, seed=1)  # more than one block along K, and a last panel that is not full
    packed = pack_experts(weights, 6, form)
    x = draw(200, 700)
    group = torch.randint(0, 6, (200,), generator=torch.Generator().manual_seed(4)).sort().values
    together = grouped_linear(x, packed, prefix(torch.bincount(group, minlength=6).tolist()))
    for row in (0, 17, 101, 199):
        counts = [int(group[row] == e) for e in range(6)]
        assert torch.equal(grouped_linear(x[row : row + 1], packed, prefix(counts))[0], together[row])
    exact = torch.stack([x[i] @ packed[int(group[i])].dense().T for i in range(200)])
    torch.testing.assert_close(together, exact, rtol=1e-4, atol=1e-3)


@pytest.mark.rooms("triton")
def test_the_invariant_form_has_one_tile_for_any_number_of_rows(implementation: str) -> None:
    packed = pack_experts(draw(3, 40, 72, seed=1), 3, "invariant")
    x = draw(300, 72)
    group = torch.arange(300) // 100
    together = grouped_linear(x, packed, prefix([100, 100, 100]))
    exact = torch.stack([x[i] @ packed[int(group[i])].dense().T for i in range(300)])
    torch.testing.assert_close(together, exact, rtol=1e-4, atol=1e-4)
    for group_id in range(3):  # at the places that they have in their tiles above
        counts = [0, 0, 0]
        counts[group_id] = 5
        first = 100 * group_id
        assert torch.equal(
            grouped_linear(x[first : first + 5], packed, prefix(counts)), together[first : first + 5]
        )


@pytest.mark.rooms("triton")
def test_triton_takes_no_weights_that_were_packed_for_a_cpu(implementation: str) -> None:
    packed = pack_experts([torch.ones(5, 4)], 1, "float32")
    with pytest.raises(UnsupportedKernelConfig, match=r"w.form = 'float32' is not supported"):
        grouped_linear(torch.ones(3, 4), packed, prefix([3]))


def test_a_weight_is_a_view_and_packs_like_one_alone() -> None:
    weights = draw(3, 20, 70)
    packed = pack_experts(weights, 3, "int8")
    assert packed.shape == (3, 20, 70)
    assert packed.nbytes == sum(pack_weight(one, "int8").nbytes for one in weights)
    for one, weight in zip((packed[0], packed[2]), (weights[0], weights[2]), strict=True):
        alone = pack_weight(weight, "int8")
        assert alone.scales is not None
        assert one.scales is not None
        assert torch.equal(one.data, alone.data)
        assert torch.equal(one.scales, alone.scales)
        assert one.data.untyped_storage().data_ptr() == packed.data.untyped_storage().data_ptr()


def test_packing_takes_one_buffer_for_all() -> None:
    buffer = torch.empty(4, 8)
    packed = pack_experts((buffer.fill_(value) for value in (1.0, 2.0, 3.0)), 3, "dense")
    assert packed.data[:, 0, 0].tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("weights", "num", "message"),
    [
        ([], 2, "weights must be 2 matrices, at least one, got 0"),
        ([torch.ones(2, 3)], 2, "weights must be 2 matrices, at least one, got 1"),
        ([torch.ones(2, 3)] * 3, 2, "weights must be 2 matrices, at least one, got 3"),
        ([torch.ones(2, 3), torch.ones(3, 2)], 2, "every weight must be of shape (2, 3), got shape (3, 2)"),
    ],
)
def test_what_cannot_be_packed(weights: list[Tensor], num: int, message: str) -> None:
    with pytest.raises(KernelArgumentError, match=re.escape(f"pack_experts: {message}")):
        pack_experts(weights, num, "dense")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"x": torch.ones(3, 5)}, "x must be contiguous of shape (T, 4) like the weights, got shape (3, 5)"),
    ({"x": torch.ones(4, 3).T}, "the last dimension of x must be contiguous"),
    ({"x": torch.ones(3, 4, dtype=torch.float16)}, "x.dtype must be torch.float32 for weights in form"),
    ({"offsets": torch.tensor([0, 1, 3])}, "offsets.dtype must be torch.int32"),
    ({"offsets": prefix([3])}, "offsets must be of shape (3,)"),
    ({"offsets": prefix([1, 1])}, "offsets must be not decreasing from 0 to the 3 rows, got [0, 1, 2]"),
    ({"offsets": torch.tensor([0, 4, 3], dtype=torch.int32)}, "offsets must be not decreasing from 0"),
    ({"offsets": torch.tensor([1, 2, 3], dtype=torch.int32)}, "offsets must be not decreasing from 0"),
    ({"sources": torch.tensor([0, 1, 3])}, "every index in sources must be from 0 to 2, got 3"),
    ({"sources": torch.tensor([0, -1, 2])}, "every index in sources must be from 0 to 2, got -1"),
    ({"targets": torch.tensor([0, 1, 3])}, "every index in targets must be from 0 to 2, got 3"),
    ({"targets": torch.tensor([0, 1])}, "targets must be of shape (3,)"),
    ({"scale": torch.ones(3, dtype=torch.float64)}, "scale.dtype must be torch.float32"),
    ({"scale": torch.ones(2)}, "scale must be of shape (3,)"),
    ({"w": torch.ones(2, 5, 4)}, "w must be a value of type PackedExperts"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_what_is_wrong_is_named(change: dict[str, Any], message: str) -> None:
    right = {
        "x": torch.ones(3, 4),
        "w": pack_experts([torch.ones(5, 4)] * 2, 2, "float32"),
        "offsets": prefix([1, 2]),
    }
    assert grouped_linear(**right).tolist() == [[4.0] * 5] * 3
    with pytest.raises(KernelArgumentError, match=re.escape(f"grouped_linear: {message}")):
        grouped_linear(**{**right, **change})
