"""The Triton RMS norm in the interpreter, against torch in float64."""

from __future__ import annotations

import pytest
import torch
from helpers.kernels import assert_within_budget
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from octavo.kernels import rms_norm
from octavo.kernels.triton import tuning

pytestmark = pytest.mark.usefixtures("triton_room")
# The interpreter cuts bfloat16 off instead of rounding to it: tests/gpu has it.
DTYPES = [torch.float32, torch.float16]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_normalised(out: Tensor, x: Tensor, weight: Tensor) -> None:
    depth = x.shape[-1:]
    exact = functional.rms_norm(x.double(), depth, weight.double(), 1e-6)
    assert_within_budget(out, exact, functional.rms_norm(x, depth, weight, 1e-6))
    assert out.is_contiguous()


@pytest.mark.parametrize(
    "shape", [(5, 576), (1, 1), (3, 9, 64), (7, 33), (0, 64), (64,), (2, 3, 2, 16)], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_torch(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = draw(*shape, dtype=dtype), draw(shape[-1], dtype=dtype, seed=1)
    assert_normalised(rms_norm(x, weight, 1e-6), x, weight)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_residual_is_added_first_and_returned(dtype: torch.dtype) -> None:
    x, residual, weight = draw(4, 96, dtype=dtype), draw(4, 96, dtype=dtype, seed=1), draw(96, dtype=dtype)
    kept = x.clone(), residual.clone()
    out, new_residual = rms_norm(x, weight, 1e-6, residual=residual)
    assert torch.equal(new_residual, kept[0] + kept[1])
    assert torch.equal(out, rms_norm(new_residual, weight, 1e-6))
    assert torch.equal(x, kept[0])
    assert torch.equal(residual, kept[1])


def test_strides() -> None:
    """Heads of a fused qkv, rows with gaps, more dimensions than two strides describe; x unlike residual."""
    weight = draw(16)
    heads = draw(5, 9, 16)[:, 2:6]
    gaps = draw(5, 40)[:, :16]
    turned = draw(2, 3, 4, 16).permute(2, 0, 1, 3)
    for x in (heads, gaps, turned, heads.transpose(0, 1)):
        assert_normalised(rms_norm(x, weight, 1e-6), x, weight)
        for residual in (draw(*x.shape, seed=3), draw(*x.shape[:-1], 20, seed=4)[..., :16]):
            out, summed = rms_norm(x, weight, 1e-6, residual=residual)
            assert torch.equal(summed, x + residual)
            assert_normalised(out, summed, weight)


@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    rows=st.integers(1, 9),
    depth=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES),
    block_rows=st.sampled_from([1, 4]),
)
def test_any_shape_and_launch_parameters(rows: int, depth: int, dtype: torch.dtype, block_rows: int) -> None:
    x, weight = draw(rows, depth, dtype=dtype), draw(depth, dtype=dtype, seed=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "parameters", lambda *_: {"BLOCK_ROWS": block_rows, "num_warps": 1, "PDL": 1})
        assert_normalised(rms_norm(x, weight, 1e-6), x, weight)
