"""`silu_and_mul` against torch's silu."""

import pytest
import torch
from helpers.kernels import assert_within_budget
from torch.nn import functional

from octavo.kernels import silu_and_mul

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
