"""The Triton gated activation in the interpreter, against torch in float64."""

from __future__ import annotations

import pytest
import torch
from helpers.kernels import assert_within_budget
from torch import Tensor
from torch.nn import functional

from octavo.kernels import silu_and_mul

pytestmark = pytest.mark.usefixtures("triton_room")


def plain(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


@pytest.mark.parametrize("width", [1, 37, 64, 1536, 2100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_equals_torch(dtype: torch.dtype, width: int) -> None:
    """Wider than one program takes, no power of two, and rows with a gap behind them."""
    x = torch.randn(5, 2 * width + 6, generator=torch.Generator().manual_seed(0)).to(dtype)[:, : 2 * width]
    out = silu_and_mul(x)
    assert_within_budget(out, plain(x.double()), plain(x))
    assert out.is_contiguous()


def test_far_gates_are_shut_or_open() -> None:
    """exp(-gate) overflows on one side and vanishes on the other; neither may make a NaN."""
    gates = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4]])
    out = silu_and_mul(torch.cat([gates, torch.full((1, 5), 2.0)], dim=1))
    torch.testing.assert_close(out, torch.tensor([[0.0, 0.0, 0.0, 200.0, 2e4]]))


def test_no_rows() -> None:
    assert silu_and_mul(torch.empty(0, 8)).shape == (0, 4)
