"""What the attention kernels are launched with: the facts that a call is compiled for."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton import attention_arguments
from octavo.kernels.triton.attention_arguments import (
    arguments,
    block_size_of,
    invariant_tile,
    with_scales_applied,
)
from octavo.kernels.triton.tiles import INVARIANT_CHUNK, NO_SCALE, ONE_SCALE, TOKEN_SCALES

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FP8, INT8 = torch.float8_e4m3fn, torch.int8


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The facts as on a GPU; the interpreter has bfloat16 computed in float32."""
    monkeypatch.setattr(attention_arguments, "is_interpreted", lambda: False)
    attention_arguments.compute_dtype.cache_clear()
    yield
    attention_arguments.compute_dtype.cache_clear()


def facts(q_dtype: torch.dtype = BF16, cache_dtype: torch.dtype = BF16, **changes: Any) -> dict[str, Any]:
    q = torch.zeros(20, 6, 24, dtype=q_dtype)
    k = torch.zeros(5, 16, 2, 24).to(cache_dtype)
    sums = torch.tensor([0, 5, 20], dtype=torch.int32)
    options = dict.fromkeys(("alibi_slopes", "sinks", "lse", "k_scale", "v_scale", "leftpad"))
    options |= {"softmax_scale": 0.5, "causal": False, "window_size": (-1, -1), "softcap": 0.0}
    table = torch.zeros(2, 9, dtype=torch.int32)[:, :3]
    return arguments(q, k, k.clone(), sums, sums, **{**options, "block_table": table, "out": q, **changes})


@pytest.mark.parametrize(
    ("q_dtype", "cache_dtype", "compute"),
    [
        (BF16, BF16, tl.bfloat16), (FP16, FP16, tl.float16), (FP32, FP32, tl.float32),
        (FP32, BF16, tl.float32), (FP32, FP8, tl.float32), (FP32, INT8, tl.float32),
        (BF16, FP16, tl.float32), (FP16, BF16, tl.float32),  # no 16 bits hold both
        (BF16, FP8, tl.float16), (FP16, INT8, tl.float16),  # which holds both exactly
    ],
    ids=str,
)  # fmt: skip
def test_what_products_are_computed_in(q_dtype: torch.dtype, cache_dtype: torch.dtype, compute: Any) -> None:
    assert facts(q_dtype, cache_dtype)["COMPUTE"] == compute


def test_sizes_and_strides() -> None:
    found = facts()
    expected = {"NUM_KV_HEADS": 2, "GROUP": 3, "HEAD_DIM": 24, "BLOCK_D": 32, "BLOCK_SIZE": 16, "batch": 2}
    expected |= {"q_stride_token": 144, "q_stride_head": 24, "table_stride": 9}
    expected |= {"k_stride_block": 768, "k_stride_slot": 48, "k_stride_head": 24}
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("window", "causal", "bounds"),
    [
        ((-1, -1), False, (None, None)),
        ((-1, -1), True, (None, 0)),
        ((3, 7), False, (3, 7)),
        ((3, 7), True, (3, 0)),
        ((2**31 - 2, 0), False, (2**30, 0)),  # what is added to a position must not overflow
    ],
)
def test_bounds_of_a_window(window: tuple[int, int], causal: bool, bounds: tuple[Any, Any]) -> None:
    found = facts(window_size=window, causal=causal)
    assert (found["left"], found["right"]) == bounds


@pytest.mark.parametrize(
    ("scale", "kind", "folded"),
    [
        (None, NO_SCALE, 1.0),
        (0.25, NO_SCALE, 0.25),
        (torch.tensor(0.25), ONE_SCALE, 1.0),
        (torch.tensor([0.25]), ONE_SCALE, 1.0),
        (torch.ones(5, 16, 2), TOKEN_SCALES, 1.0),
        (torch.ones(1, 1, 1), TOKEN_SCALES, 1.0),  # of a cache with one slot
    ],
    ids=str,
)
def test_scales_of_a_quantised_cache(scale: Tensor | float | None, kind: int, folded: float) -> None:
    found = facts(BF16, INT8, k_scale=scale, v_scale=scale)
    assert (found["K_SCALES"], found["V_SCALES"]) == (kind, kind)
    assert (found["scale"], found["value_scale"]) == (0.5 * folded, folded)
    assert found["PLAIN"] == (kind == NO_SCALE)


def test_scales_that_are_applied_leave_the_querys_dtype_and_plain_scores() -> None:
    token = torch.ones(5, 16, 2)
    for dtype, compute in ((BF16, tl.bfloat16), (FP16, tl.float16), (FP32, tl.float32)):
        applied = with_scales_applied(facts(dtype, FP8, k_scale=token, v_scale=token))
        assert applied["COMPUTE"] == compute
        assert applied["PLAIN"]
    assert not with_scales_applied(facts(BF16, FP8, k_scale=token, v_scale=token, softcap=2.0))["PLAIN"]
    assert not with_scales_applied(facts(BF16, FP8, k_scale=torch.ones(1), v_scale=token))["PLAIN"]
    exact = facts(BF16, FP8, k_scale=0.5, v_scale=0.5)
    assert with_scales_applied(exact) is exact


@pytest.mark.parametrize(
    ("change", "plain"),
    [
        ({}, True),
        ({"softmax_scale": 0.0}, False),
        ({"softmax_scale": -1.0}, False),
        ({"softcap": 1.0}, False),
    ],
)
def test_only_a_positive_scale_is_plain(change: dict[str, float], plain: bool) -> None:
    assert facts(**change)["PLAIN"] == plain


@pytest.mark.parametrize(
    ("blocks", "size", "columns", "expected"),
    [
        (5, 16, 3, 16), (5, 16, 1, 16), (5, 1, 3, 1), (5, 256, 1, 256),
        (5, 24, 1, 0), (5, 512, 1, 0),  # a contiguous cache: one run per sequence
        (5, 512, 2, 512),
    ],
)  # fmt: skip
def test_block_sizes(blocks: int, size: int, columns: int, expected: int) -> None:
    k = torch.zeros(blocks, size, 1, 8)
    assert block_size_of(k, torch.zeros(2, columns, dtype=torch.int32)) == expected
    assert block_size_of(k[0], None) == 0


@pytest.mark.parametrize("head_dim", [1, 64, 128, 192, 256])
@pytest.mark.parametrize("compute", [tl.float32, tl.bfloat16], ids=str)
def test_batch_invariant_tiles_divide_a_chunk(compute: Any, head_dim: int) -> None:
    tile = invariant_tile({"COMPUTE": compute, "HEAD_DIM": head_dim})
    assert INVARIANT_CHUNK % tile["BLOCK_N"] == 0
