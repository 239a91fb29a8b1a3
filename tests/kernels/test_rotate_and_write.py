"""Norm, rotary embedding and cache write in one call: what the three calls make, and nothing else changed."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.errors import KernelArgumentError
from octavo.kernels import apply_rotary, rms_norm, rotate_and_write_kv_cache, write_kv_cache

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SLOTS = [9, -1, 0, 31, 16]


def arguments(
    dtype: torch.dtype = torch.float32, cache_dtype: torch.dtype | None = None, head_dim: int = 24
) -> dict[str, Any]:
    """Slices of one fused qkv, 3 query heads on 1; 2 blocks of 16 slots."""
    rng = torch.Generator().manual_seed(0)
    qkv = torch.randn(5, 5, head_dim, generator=rng).to(dtype)
    angles = torch.rand(8, head_dim // 4, generator=rng) * 6
    caches = [torch.full((2, 16, 1, head_dim), -7.0).to(cache_dtype or dtype) for _ in range(2)]
    return {
        "q": qkv[:, :3],
        "k": qkv[:, 3:4],
        "v": qkv[:, 4:],
        "cos_sin_cache": torch.cat([angles.cos(), angles.sin()], dim=1),
        "positions": torch.tensor([0, 7, 3, 3, 1]),
        "k_cache": caches[0],
        "v_cache": caches[1],
        "slot_mapping": torch.tensor(SLOTS),
    }


def weights(head_dim: int = 24, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(1)
    q_weight, k_weight = torch.randn(2, head_dim, generator=rng).to(dtype)
    return {"q_weight": q_weight, "k_weight": k_weight, "eps": 1e-5}


def three_calls(given: dict[str, Any]) -> Tensor:
    """The queries; the caches of `given` are written."""
    q, k = given["q"].clone(), given["k"].clone()
    if "q_weight" in given:
        q, k = (rms_norm(x, given[f"{n}_weight"], given["eps"]) for n, x in (("q", q), ("k", k)))
    interleaved = given.get("interleaved", False)
    apply_rotary(q, k, given["cos_sin_cache"], given["positions"], interleaved=interleaved)
    places = (given["k_cache"], given["v_cache"], given["slot_mapping"])
    write_kv_cache(k, given["v"], *places, k_scale=given.get("k_scale"), v_scale=given.get("v_scale"))
    return q


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("cache_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.rooms("reference", "cpu")  # Triton's is one launch, and rounds less
def test_is_the_three_calls_to_the_bit(
    implementation: str, dtype: torch.dtype, cache_dtype: torch.dtype, normed: bool, interleaved: bool
) -> None:
    options = {"interleaved": interleaved} | (weights(dtype=dtype) if normed else {})
    expected, given = (arguments(dtype, cache_dtype) | options for _ in range(2))
    turned = rotate_and_write_kv_cache(**given)
    right = three_calls(expected)
    assert torch.equal(turned, right)
    assert turned.is_contiguous()
    for name in ("k_cache", "v_cache"):
        assert torch.equal(given[name], expected[name])
        assert (given[name].flatten(0, 1)[[s for s in range(32) if s not in SLOTS]] == -7.0).all()
    for name in ("q", "k", "v"):
        assert torch.equal(given[name], arguments(dtype)[name])


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_quantised_caches(cache_dtype: torch.dtype, per_token: bool) -> None:
    given, expected = (arguments(cache_dtype=cache_dtype) | weights() for _ in range(2))
    for call in (given, expected):
        scales = torch.zeros(2, 2, 16, 1) if per_token else torch.tensor([0.02, 0.03])
        call |= {"k_scale": scales[0], "v_scale": scales[1]}
    assert torch.equal(rotate_and_write_kv_cache(**given), three_calls(expected))
    for name in ("k_cache", "v_cache"):
        assert torch.equal(given[name].view(torch.uint8), expected[name].view(torch.uint8))
    for name in ("k_scale", "v_scale"):
        assert torch.equal(given[name], expected[name])
        assert not per_token or (given[name] > 0).nonzero()[:, :2].tolist() == [
            [0, 0],
            [0, 9],
            [1, 0],
            [1, 15],
        ]


def test_no_tokens(implementation: str) -> None:
    given = arguments()
    empty = {name: given[name][:0] for name in ("q", "k", "v", "positions", "slot_mapping")}
    assert rotate_and_write_kv_cache(**given | empty).shape == (0, 3, 24)
    assert (given["k_cache"] == -7.0).all()


def test_a_weight_of_another_dtype(implementation: str) -> None:
    """Norms are computed in float32 from weights as they are."""
    given, expected = (arguments() | weights(dtype=torch.float64) for _ in range(2))
    expected |= {n: expected[n].float() for n in ("q_weight", "k_weight")}
    torch.testing.assert_close(rotate_and_write_kv_cache(**given), three_calls(expected))


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"k": torch.ones(5, 1, 16)}, "k must be of shape (5, num_kv_heads, 24) like q"),
    ({"k": torch.ones(5, 2, 24)}, "v must be of the shape of k (5, 2, 24)"),
    ({"v": torch.ones(5, 1, 24).half()}, "v.dtype must be torch.float32 like k"),
    ({"positions": torch.tensor([0, 8, 3, 3, 1])}, "every position must be from 0 to 7"),
    ({"slot_mapping": torch.tensor([0, 1, 2, 3, 32])}, "below num_blocks * block_size = 32"),
    ({"q_weight": None}, "q_weight and k_weight must be both given or both None, got only k_weight"),
    ({"k_weight": torch.ones(23)}, "k_weight must be of shape (24,) like a head of q"),
    ({"k_weight": torch.ones(24).half()}, "k_weight.dtype must be torch.float32 like q_weight"),
    ({"eps": -1.0}, "eps must be 0 or positive, got -1.0"),
    ({"eps": None}, "eps must be a value of type float, got None"),
    ({"interleaved": 1}, "interleaved must be True or False, got 1"),
    ({"k_scale": 1.0}, "k_scale must be None with caches of torch.float32"),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES, ids=["-".join(c) for c, _ in MISTAKES])
def test_a_wrong_call_says_so_and_writes_nothing(changes: dict, message: str) -> None:
    given = arguments() | weights() | changes
    before = {name: given[name].clone() for name in ("k_cache", "v_cache")}
    with pytest.raises(KernelArgumentError, match=re.escape(message)) as caught:
        rotate_and_write_kv_cache(**given)
    assert str(caught.value).startswith("rotate_and_write_kv_cache: ")
    for name, was in before.items():
        assert torch.equal(given[name], was)
