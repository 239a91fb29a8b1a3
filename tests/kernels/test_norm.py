"""`rms_norm` against torch's own, and the residual sum."""

import pytest
import torch
from helpers.kernels import assert_within_budget
from torch import Tensor
from torch.nn import functional

from octavo.kernels import rms_norm

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("shape", [(5, 576), (1, 1), (3, 9, 64), (7, 33), (0, 64), (130, 2048)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_torch(implementation: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = random(*shape, dtype=dtype), random(shape[-1], dtype=dtype, seed=1)
    kept = x.clone()
    out = rms_norm(x, weight, 1e-6)
    exact = functional.rms_norm(x.double(), shape[-1:], weight.double(), 1e-6)
    assert_within_budget(out, exact, functional.rms_norm(x, shape[-1:], weight, 1e-6))
    assert out.is_contiguous()
    assert torch.equal(x, kept)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_residual_is_added_first_and_returned(implementation: str, dtype: torch.dtype) -> None:
    x, residual = (random(4, 96, dtype=dtype, seed=s) for s in (0, 1))
    weight = random(96, dtype=dtype, seed=2)
    kept = x.clone(), residual.clone()
    out, new_residual = rms_norm(x, weight, 1e-5, residual=residual)
    assert torch.equal(new_residual, kept[0] + kept[1])
    assert torch.equal(out, rms_norm(new_residual, weight, 1e-5))
    assert torch.equal(x, kept[0])
    assert torch.equal(residual, kept[1])


def test_eps_keeps_zero_rows_finite(implementation: str) -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6), torch.zeros(2, 8))
    # mean square 3, eps 1: everything is halved
    halved = rms_norm(torch.full((1, 4), 3.0**0.5), torch.full((4,), 2.0), 1.0)
    torch.testing.assert_close(halved, torch.full((1, 4), 3.0**0.5))


def test_heads_of_a_fused_qkv(implementation: str) -> None:
    qkv = random(5, 15 * 16)
    q = qkv[:, : 9 * 16].view(5, 9, 16)
    weight = random(16, seed=1)
    torch.testing.assert_close(
        rms_norm(q, weight, 1e-6), functional.rms_norm(q, (16,), weight, 1e-6), rtol=1e-6, atol=1e-6
    )


def test_a_row_has_the_same_bits_alone_and_in_a_batch(implementation: str) -> None:
    x, weight = random(17, 576), random(576, seed=1)
    together = rms_norm(x, weight, 1e-6)
    alone = torch.cat([rms_norm(row[None], weight, 1e-6) for row in x])
    assert torch.equal(together, alone)


def test_float32_weights_of_a_low_precision_model(implementation: str) -> None:
    x, weight = random(3, 64, dtype=torch.bfloat16), random(64, seed=1)
    out = rms_norm(x, weight, 1e-6)
    exact = functional.rms_norm(x.double(), (64,), weight.double(), 1e-6)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=0)
