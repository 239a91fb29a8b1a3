"""`silu_and_mul` against torch's silu, `gelu_tanh` against its formula."""

import math

import pytest
import torch
from helpers.kernels import assert_within_budget
from torch.nn import functional

from octavo.kernels import gelu_tanh, silu_and_mul

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("shape", [(5, 2 * 1536), (1, 2), (3, 2 * 37), (0, 8), (130, 64)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_torch(implementation: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = (torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    kept = x.clone()
    gate, up = x.chunk(2, dim=-1)
    out = silu_and_mul(x)
    exact = functional.silu(gate.double()) * up.double()
    assert_within_budget(out, exact, functional.silu(gate) * up)
    assert out.is_contiguous()
    assert torch.equal(x, kept)


@pytest.mark.parametrize("shape", [(5, 1536), (1, 1), (3, 37), (0, 8), (130, 64)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gate_and_up_apart(implementation: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """With rows of other distances."""
    gate, wide = (
        torch.randn(shape[0], n, generator=torch.Generator().manual_seed(n)) for n in (shape[1], 2000)
    )
    gate, up = gate.to(dtype), wide.to(dtype)[:, 3 : 3 + shape[1]]
    out = silu_and_mul(gate, up)
    assert_within_budget(out, functional.silu(gate.double()) * up.double(), functional.silu(gate) * up)
    assert out.is_contiguous()


def test_far_tails(implementation: str) -> None:
    """silu(-x) is 0 and silu(x) is x where exp overflows; never NaN."""
    gate = torch.tensor([[-1000.0, -100.0, 0.0, 100.0, 1000.0]])
    out = silu_and_mul(torch.cat([gate, torch.ones_like(gate)], dim=-1))
    torch.testing.assert_close(out, torch.tensor([[0.0, 0.0, 0.0, 100.0, 1000.0]]), rtol=0, atol=1e-30)


def test_a_strided_input(implementation: str) -> None:
    wide = torch.randn(4, 100, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        silu_and_mul(wide[:, 10:50]), silu_and_mul(wide[:, 10:50].contiguous()), rtol=0, atol=0
    )


@pytest.mark.parametrize("shape", [(5, 3072), (1, 1), (3, 37), (0, 8), (130, 64)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gelu_equals_its_formula(implementation: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = (torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    kept = x.clone()
    out = gelu_tanh(x)
    wide = x.double()
    exact = wide / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))
    assert_within_budget(out, exact, functional.gelu(x, approximate="tanh"))
    assert out.is_contiguous()
    assert torch.equal(x, kept)


def test_gelu_far_from_zero(implementation: str) -> None:
    x = torch.tensor([[-1e6, -1000.0, -20.0, 0.0, 20.0, 1000.0, 1e6]])
    torch.testing.assert_close(gelu_tanh(x), torch.relu(x), rtol=0, atol=1e-30)


def test_gelu_of_a_strided_input(implementation: str) -> None:
    wide = torch.randn(4, 100, generator=torch.Generator().manual_seed(0))
    strided, whole = gelu_tanh(wide[:, 10:51]), gelu_tanh(wide[:, 10:51].contiguous())
    torch.testing.assert_close(strided, whole, rtol=1e-6, atol=1e-6)
