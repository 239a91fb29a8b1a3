"""`linear` and `norm_linear` for one to four rows, where a GPU has a kernel of its own."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers.kernels import assert_within_budget
from torch import Tensor
from torch.nn import functional

from octavo.errors import KernelArgumentError
from octavo.kernels import backend, linear, norm_linear, pack_weight
from octavo.kernels.few_rows import FEW_ROWS, suits_few_rows

pytestmark = pytest.mark.rooms("triton", "reference")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [
    (37, 72),
    (64, 1024),
    (5, 2500),
    (6, 4096),
    (3, 5000),
    (1, 1),
]  # width, depth: whole blocks, and what is left of one


# Every dtype with every shape and every number of rows; the rest in turn, so that each meets each.
GRID = [
    pytest.param(
        dtype, shape, rows, bool((rows + i) % 2), bool((rows // 2 + i + j) % 2), id=f"{dtype}-{shape}-{rows}"
    )
    for j, dtype in enumerate(DTYPES)
    for i, shape in enumerate(SHAPES)
    for rows in range(1, FEW_ROWS + 1)
]


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def wide(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.double()


@pytest.mark.parametrize(("dtype", "shape", "rows", "with_bias", "_"), GRID)
def test_product(
    implementation: str, dtype: torch.dtype, shape: tuple[int, int], rows: int, with_bias: bool, _: bool
) -> None:
    width, depth = shape
    x, weight = draw(rows, depth, dtype=dtype), draw(width, depth, seed=1, dtype=dtype)
    bias = draw(width, seed=2, dtype=dtype) if with_bias else None
    found = linear(x, pack_weight(weight, "dense"), bias)
    assert (found.shape, found.dtype) == ((rows, width), dtype)
    exact = functional.linear(x.double(), weight.double(), wide(bias))
    assert_within_budget(found, exact, functional.linear(x, weight, bias))


@pytest.mark.parametrize(("dtype", "shape", "rows", "gated", "with_bias"), GRID)
def test_norm_before_and_gate_behind(
    implementation: str, dtype: torch.dtype, shape: tuple[int, int], rows: int, gated: bool, with_bias: bool
) -> None:
    width, depth = shape[0] * (1 + gated), shape[1]
    x, residual = draw(rows, depth, dtype=dtype), 3 * draw(rows, depth, seed=1, dtype=dtype)
    weight = (draw(width, depth, seed=2) / depth**0.5).to(dtype)
    norm_weight = (1 + 0.1 * draw(depth, seed=3)).to(dtype)
    bias = draw(width, seed=4, dtype=dtype) if with_bias else None
    packed = pack_weight(weight, "dense")
    found, summed = norm_linear(x, residual, norm_weight, 1e-5, packed, bias, gated=gated)

    def formula(
        x: Tensor, residual: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        total = (x + residual).to(dtype).to(x.dtype)
        out = functional.linear(functional.rms_norm(total, (depth,), norm_weight, 1e-5), weight, bias)
        if not gated:
            return out
        gate, up = out.chunk(2, dim=-1)
        return functional.silu(gate) * up

    exact = formula(x.double(), residual.double(), norm_weight.double(), weight.double(), wide(bias))
    assert (found.shape, found.dtype) == ((rows, shape[0]), dtype)
    assert_within_budget(found, exact, formula(x, residual, norm_weight, weight, bias))
    # The interpreter cuts a bfloat16's last bits off where hardware and torch round.
    torch.testing.assert_close(summed, x + residual, rtol=2**-7 if dtype == torch.bfloat16 else 0, atol=0)


def test_more_rows_are_the_same_functions(implementation: str) -> None:
    x, residual, norm_weight = draw(7, 48), draw(7, 48, seed=1), 1 + 0.1 * draw(48, seed=2)
    weight = pack_weight(draw(20, 48, seed=3), "dense")
    found, summed = norm_linear(x, residual, norm_weight, 1e-5, weight, gated=True)
    assert torch.equal(summed, x + residual)
    for rows in (slice(0, 1), slice(3, 6)):
        few, few_summed = norm_linear(x[rows], residual[rows], norm_weight, 1e-5, weight, gated=True)
        torch.testing.assert_close(few, found[rows], rtol=1e-5, atol=1e-5)
        assert torch.equal(few_summed, summed[rows])


def test_no_rows(implementation: str) -> None:
    weight = pack_weight(draw(20, 48), "dense")
    out, summed = norm_linear(draw(0, 48), draw(0, 48), torch.ones(48), 1e-5, weight, gated=True)
    assert out.shape == (0, 10)
    assert summed.shape == (0, 48)
    assert linear(draw(0, 48), weight).shape == (0, 20)


def test_rows_do_not_meet(implementation: str) -> None:
    x = draw(3, 300)
    weight, norm_weight = pack_weight(draw(9, 300, seed=1), "dense"), torch.ones(300)
    ill = x.clone()
    ill[1] = torch.nan
    assert torch.equal(linear(ill, weight)[[0, 2]], linear(x, weight)[[0, 2]])
    well, _ = norm_linear(x, x, norm_weight, 1e-5, weight)
    sick, _ = norm_linear(ill, x, norm_weight, 1e-5, weight)
    assert torch.equal(sick[[0, 2]], well[[0, 2]])
    assert sick[1].isnan().all()


def test_a_slice_of_something_larger(implementation: str) -> None:
    memory = torch.full((6, 50), torch.nan)
    memory[2:5, :33] = draw(3, 33)
    x, weight = memory[2:5, :33], pack_weight(draw(8, 33, seed=1), "dense")
    ones = torch.ones(33)
    torch.testing.assert_close(linear(x, weight), linear(x.contiguous(), weight))
    one, other = (norm_linear(y, y, ones, 1e-5, weight, gated=True) for y in (x, x.contiguous()))
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("rows", [2, 7])
def test_what_the_kernel_for_few_rows_cannot_do_is_done_all_the_same(implementation: str, rows: int) -> None:
    """What is legal does not depend on the number of rows."""
    x, wide = draw(rows, 48, seed=1), draw(48, 60, seed=2)
    strided = pack_weight(wide.T, "dense")
    torch.testing.assert_close(linear(x, strided), x @ wide)
    half, ones = x.half(), torch.ones(48)
    found, _ = norm_linear(half, half, ones, 1e-5, pack_weight(wide.T.half(), "dense"))
    expected = functional.rms_norm((half + half).float(), (48,), ones, 1e-5) @ wide.half().float()
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)
    learned = x.clone().requires_grad_()
    linear(learned, pack_weight(wide.T.contiguous(), "dense")).sum().backward()
    torch.testing.assert_close(learned.grad, wide.sum(1).expand(rows, 48))


@pytest.mark.parametrize("rows", [2, 7])
@pytest.mark.parametrize("eps", [-1.0, math.nan])
def test_an_epsilon_that_is_none(implementation: str, rows: int, eps: float) -> None:
    x = draw(rows, 48)
    with pytest.raises(KernelArgumentError, match="eps must be 0 or positive"):
        norm_linear(x, x, torch.ones(48), eps, pack_weight(draw(20, 48), "dense"))


@pytest.mark.parametrize(
    ("depth", "most"),
    [(16_384, 4), (16_385, 2), (18_944, 2), (21_845, 2), (32_768, 2), (32_769, 1), (65_537, 0)],
)
def test_a_depth_is_for_all_rows_of_a_class_or_none(depth: int, most: int) -> None:
    """Or what warm-up compiles for the largest of a class would not be what the others need."""
    weight = pack_weight(torch.zeros(1, depth), "dense")
    with backend.use("triton"):
        taken = [rows for rows in range(6) if suits_few_rows(torch.zeros(rows, depth), weight)]
    assert taken == list(range(1, most + 1))


def test_a_weight_at_rest_gives_the_same(implementation: str) -> None:
    x, weight = draw(2, 300), pack_weight(draw(18, 300, seed=1), "dense")
    at_rest = replace(weight, at_rest=True)
    assert not weight.at_rest
    assert torch.equal(linear(x, weight), linear(x, at_rest))
    one, other = (norm_linear(x, x, torch.ones(300), 1e-5, w, gated=True) for w in (weight, at_rest))
    assert torch.equal(one[0], other[0])


def test_wrong_arguments_are_named() -> None:
    x, weight = draw(2, 48), pack_weight(draw(21, 48), "dense")
    with backend.use("triton"):
        for bad, match in (
            ((draw(2, 47), None), r"linear: x must be of shape \(2, 48\)"),
            ((x.half(), None), r"linear: x.dtype must be torch.float32"),
            ((x, draw(20)), r"linear: bias must be of shape \(21,\)"),
        ):
            with pytest.raises(KernelArgumentError, match=match):
                linear(bad[0], weight, bad[1])
        ones = torch.ones(48)
        with pytest.raises(KernelArgumentError, match=r"norm_linear: residual must be of shape \(2, 48\)"):
            norm_linear(x, x[:1], ones, 1e-5, weight)
        with pytest.raises(KernelArgumentError, match=r"norm_linear: norm_weight must be of shape \(48,\)"):
            norm_linear(x, x, ones[:5], 1e-5, weight)
        with pytest.raises(KernelArgumentError, match=r"the rows of w must be an even number where gated"):
            norm_linear(x, x, ones, 1e-5, weight, gated=True)
