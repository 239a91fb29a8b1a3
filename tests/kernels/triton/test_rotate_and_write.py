"""The fused Triton kernel in the interpreter, against the three reference kernels in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.kernels import backend, rotate_and_write_kv_cache
from octavo.kernels.triton import tuning

pytestmark = pytest.mark.usefixtures("triton_room")
# The interpreter cuts bfloat16 off instead of rounding to it: tests/gpu has it.
DTYPES = [torch.float32, torch.float16]
GUARD = 3


def arguments(
    tokens: int = 5, heads: tuple[int, int] = (5, 2), head_dim: int = 16, rotary_dim: int = 16,
    dtype: torch.dtype = torch.float32, block_size: int = 4, normed: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Slices of a fused qkv, interleaved caches with a guard column, one slot in five skipped."""
    rng = torch.Generator().manual_seed(0)
    qkv = torch.randn(tokens, heads[0] + 2 * heads[1], head_dim, generator=rng).to(dtype)
    q, k, v = qkv.split([*heads, heads[1]], dim=1)
    angles = torch.rand(11, rotary_dim // 2, generator=rng) * 6
    num_blocks = -(-tokens // block_size) + 1
    both = torch.full((num_blocks, 2, block_size, heads[1], head_dim + GUARD), 7.0).to(dtype)
    slots = torch.randperm(num_blocks * block_size, generator=rng)[:tokens]
    slots[2::5] = -1
    return {
        "q": q,
        "k": k,
        "v": v,
        "cos_sin_cache": torch.cat([angles.cos(), angles.sin()], dim=1),
        "positions": torch.randint(0, 11, (tokens,), generator=rng),
        "k_cache": both[:, 0, ..., :head_dim],
        "v_cache": both[:, 1, ..., :head_dim],
        "slot_mapping": slots,
        "q_weight": torch.randn(head_dim, generator=rng).to(dtype) if normed else None,
        "k_weight": torch.randn(head_dim, generator=rng).to(dtype) if normed else None,
        "eps": 1e-5,
    }


def exact(call: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, and what the caches hold, in float64."""
    wide = {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in call.items()}
    wide |= {"cos_sin_cache": call["cos_sin_cache"]}
    with backend.use("reference"):
        return rotate_and_write_kv_cache(**wide), wide["k_cache"], wide["v_cache"]


def assert_right(call: dict[str, Any]) -> None:
    kept = {n: call[n].clone() for n in ("q", "k", "v")}
    right = exact(call)
    turned = rotate_and_write_kv_cache(**call)
    assert turned.is_contiguous()
    eps = torch.finfo(call["q"].dtype).eps
    for ours, expected in zip((turned, call["k_cache"]), right, strict=False):
        torch.testing.assert_close(ours.double(), expected, rtol=2 * eps, atol=4 * eps, equal_nan=True)
    assert torch.equal(call["v_cache"].double(), right[2])
    for name, was in kept.items():
        torch.testing.assert_close(call[name], was, rtol=0, atol=0, equal_nan=True)
    whole = call["k_cache"]._base
    assert whole is None or (whole[..., whole.shape[-1] - GUARD :] == 7.0).all()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"),
    [(16, 16), (16, 8), (16, 0), (24, 20), (80, 80), (96, 24), (120, 120), (33, 2), (2, 2), (192, 64)],
)
def test_head_and_rotary_dims(head_dim: int, rotary_dim: int, normed: bool, interleaved: bool) -> None:
    call = arguments(head_dim=head_dim, rotary_dim=rotary_dim, normed=normed)
    assert_right(call | {"interleaved": interleaved})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(9, 3), (1, 1), (7, 1), (4, 4)], ids=str)
def test_heads_and_dtypes(heads: tuple[int, int], dtype: torch.dtype) -> None:
    """9/3 is SmolLM2: neither number is a power of two."""
    assert_right(arguments(heads=heads, dtype=dtype))


@pytest.mark.parametrize("form", ["number", "token"])
@pytest.mark.parametrize("rotary_dim", [16, 6])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_quantised_caches(cache_dtype: torch.dtype, interleaved: bool, rotary_dim: int, form: str) -> None:
    call = arguments(rotary_dim=rotary_dim) | {"interleaved": interleaved}
    held = []
    for room in ("triton", "reference"):
        caches = {n: torch.full((3, 4, 2, 16), 7.0).to(cache_dtype) for n in ("k_cache", "v_cache")}
        scales: dict[str, Any] = {"k_scale": 0.03, "v_scale": torch.tensor([0.02])}
        if form == "token":
            scales = {name: torch.full((3, 4, 2), -5.0) for name in scales}
        with backend.use(room):
            rotate_and_write_kv_cache(**call | caches | scales)
        held.append((caches, scales))
    (ours, our_scales), (right, right_scales) = held
    assert torch.equal(ours["v_cache"].view(torch.uint8), right["v_cache"].view(torch.uint8))
    # A key that lies on the border of two numbers may fall to either side: its own rounding decides.
    k, expected = ours["k_cache"].float(), right["k_cache"].float()
    assert (k != expected).sum() <= 2
    torch.testing.assert_close(k, expected, rtol=0.126, atol=1.0)
    if form == "token":
        assert torch.equal(our_scales["v_scale"], right_scales["v_scale"])
        torch.testing.assert_close(our_scales["k_scale"], right_scales["k_scale"], rtol=1e-6, atol=0)


def test_a_position_without_a_row_makes_nan_and_reads_nothing() -> None:
    """The CPU's checks would refuse it; on a GPU nobody can look."""
    from octavo.kernels.triton.rotate_and_write import rotate_and_write_kv_cache as kernel

    call = arguments(normed=False)
    poisoned = torch.full((13, 16), float("inf"))
    poisoned[1:12] = call["cos_sin_cache"]
    call |= {"cos_sin_cache": poisoned[1:12], "slot_mapping": torch.tensor([0, 1, 2, 3, 4])}
    call |= {"positions": torch.tensor([3, 11, 0, -1, 10])}
    turned = kernel(**call)
    right, _, _ = exact(call | {"positions": torch.tensor([3, 3, 0, 3, 10])})
    assert turned[[1, 3]].isnan().all()
    torch.testing.assert_close(turned[[0, 2, 4]].double(), right[[0, 2, 4]], rtol=1e-6, atol=1e-6)
    assert call["k_cache"].flatten(0, 1)[[1, 3]].isnan().all()


def test_a_token_that_is_nan_stays_alone() -> None:
    call = arguments(dtype=torch.float32)
    call["k"][1], call["q"][3] = float("nan"), float("inf")
    assert_right(call)


def test_no_tokens() -> None:
    call = arguments()
    empty = {n: call[n][:0] for n in ("q", "k", "v", "positions", "slot_mapping")}
    assert rotate_and_write_kv_cache(**call | empty).shape == (0, 5, 16)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_shape_and_launch_parameters(data: st.DataObject) -> None:
    head_dim = data.draw(st.integers(2, 40))
    call = arguments(
        tokens=data.draw(st.integers(1, 9)),
        heads=(data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))),
        head_dim=head_dim,
        rotary_dim=2 * data.draw(st.integers(0, head_dim // 2)),
        dtype=data.draw(st.sampled_from(DTYPES)),
        block_size=data.draw(st.sampled_from([1, 2, 16])),
        normed=data.draw(st.booleans()),
    )
    launch = {name: data.draw(st.sampled_from([1, 2, 8])) for name in ("BLOCK_H", "BLOCK_KVH", "BLOCK_T")}
    launch |= {"num_warps": 1, "PDL": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "parameters", lambda *_: launch)
        assert_right(call | {"interleaved": data.draw(st.booleans())})
