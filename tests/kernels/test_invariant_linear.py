"""The `invariant` form of a weight: right, and a row has the same bits in any company."""

from __future__ import annotations

import pytest
import torch
from helpers.kernels import assert_within_budget
from torch import Tensor

from octavo.errors import KernelArgumentError
from octavo.kernels import embedding, linear, pack_weight

pytestmark = pytest.mark.rooms("triton", "reference")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (65, 37, 72), (3, 130, 64), (2, 5, 200), (0, 8, 8), (2, 3, 0)], ids=str
)
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
def test_equals_torch(
    implementation: str, dtype: torch.dtype, shape: tuple[int, int, int], with_bias: bool
) -> None:
    rows, width, depth = shape
    x, weight = draw(rows, depth, dtype=dtype), draw(width, depth, seed=1, dtype=dtype)
    bias = draw(width, seed=2, dtype=dtype) if with_bias else None
    found = linear(x, pack_weight(weight, "invariant"), bias)
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert (found.shape, found.dtype) == ((rows, width), dtype)
    assert_within_budget(found, exact, torch.nn.functional.linear(x, weight, bias))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_in_any_company(implementation: str, dtype: torch.dtype) -> None:
    x, weight = draw(70, 200, dtype=dtype), pack_weight(draw(40, 200, seed=1, dtype=dtype), "invariant")
    together = linear(x, weight)
    # At the same places of their tiles: the products of Triton's interpreter are NumPy's, where places count.
    # On a GPU tests/gpu/test_bits.py moves them.
    for rows in (slice(0, 1), slice(0, 63), slice(0, 65), slice(64, 70)):
        assert torch.equal(linear(x[rows], weight), together[rows])


def test_what_stands_beside_the_rows_and_the_weight_is_not_read(implementation: str) -> None:
    memory = torch.full((6, 50), torch.nan)
    memory[2:5, :33] = draw(3, 33)
    x, weight = memory[2:5, :33], pack_weight(draw(9, 33, seed=1), "invariant")
    assert torch.equal(linear(x, weight), linear(x.contiguous(), weight))
    ill = x.clone()
    ill[1] = torch.nan
    assert torch.equal(linear(ill, weight)[[0, 2]], linear(x, weight)[[0, 2]])


def test_the_weight_stays_what_it_is(implementation: str) -> None:
    weight = draw(5, 8)
    packed = pack_weight(weight, "invariant")
    assert packed.data.data_ptr() == weight.data_ptr()
    assert torch.equal(packed.dense(), weight)
    assert torch.equal(embedding(torch.tensor([4, 0]), packed), weight[[4, 0]])
    assert pack_weight(weight.T, "invariant").data.is_contiguous()


@pytest.mark.parametrize(
    ("x", "bias", "message"),
    [
        (torch.zeros(3, 9), None, r"linear: x must be of shape \(3, 8\), got shape \(3, 9\)"),
        (torch.zeros(8), None, r"linear: x must be of shape \(8, 8\), got shape \(8,\)"),
        (torch.zeros(3, 8).half(), None, r"linear: x.dtype must be torch.float32, got torch.float16"),
        (torch.zeros(3, 8), torch.zeros(4), r"linear: bias must be of shape \(5,\), got shape \(4,\)"),
    ],
)
def test_what_does_not_fit_is_named(
    implementation: str, x: Tensor, bias: Tensor | None, message: str
) -> None:
    with pytest.raises(KernelArgumentError, match=message):
        linear(x, pack_weight(torch.zeros(5, 8), "invariant"), bias)
