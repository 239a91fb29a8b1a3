"""The Triton cache write in the interpreter: to the bit what the reference does, and nothing beside it."""

from __future__ import annotations

import pytest
import torch
from helpers.quantised import nearest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.kernels import backend, write_kv_cache
from octavo.kernels.triton import launch, quantization, tuning

pytestmark = pytest.mark.usefixtures("triton_room")
# The interpreter cuts bfloat16 off instead of rounding to it: tests/gpu has those conversions.
DTYPES = [torch.float32, torch.float16]
QUANTISED = [torch.float8_e4m3fn, torch.int8]
GUARD = 3


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def room_for(num_blocks: int, block_size: int, heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """K and V interleaved, with a guard column behind every head."""
    return torch.full((num_blocks, 2, block_size, heads, head_dim + GUARD), 7.0).to(dtype)


def written(
    room: str, k: Tensor, v: Tensor, both: Tensor, slots: Tensor, scales: tuple[object, object] = (None, None)
) -> Tensor:
    both, head_dim = both.clone(), k.shape[-1]
    with backend.use(room):
        write_kv_cache(
            k, v, both[:, 0, ..., :head_dim], both[:, 1, ..., :head_dim], slots,
            k_scale=scales[0], v_scale=scales[1],
        )  # fmt: skip
    return both.view(torch.uint8)


@pytest.mark.parametrize("head_dim", [1, 5, 64, 80, 96, 112, 120, 192, 256])
def test_head_dims_that_are_no_power_of_two(head_dim: int) -> None:
    """ROCm/aiter#3498, sglang#1281: slices of a fused qkv, an interleaved cache, a guard column."""
    qkv = draw(9, 5, head_dim)
    both = room_for(3, 4, 2, head_dim, torch.float32)
    slots = torch.tensor([11, 3, -1, 0, 7, 4, -9, 2, 8])
    held = written("triton", qkv[:, 1:3], qkv[:, 3:], both, slots)
    assert torch.equal(held, written("reference", qkv[:, 1:3], qkv[:, 3:], both, slots))
    assert (held.view(torch.float32)[..., head_dim:] == 7.0).all()


@pytest.mark.parametrize("cache_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16], ids=str)
def test_dtypes(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    k, v = draw(5, 3, 16, dtype=dtype), draw(5, 3, 16, dtype=dtype, seed=1)
    k[0, 0, 0], k[1, 0, 0], v[0, 0, 0] = float("inf"), float("nan"), 65519.0
    both, slots = room_for(2, 8, 3, 16, cache_dtype), torch.tensor([0, 15, 3, 8, 9])
    assert torch.equal(written("triton", k, v, both, slots), written("reference", k, v, both, slots))


def test_bfloat16_as_it_is() -> None:
    k, v = draw(5, 3, 16, dtype=torch.bfloat16), draw(5, 3, 16, dtype=torch.bfloat16, seed=1)
    both, slots = room_for(2, 8, 3, 16, torch.bfloat16), torch.tensor([0, 15, 3, 8, 9])
    assert torch.equal(written("triton", k, v, both, slots), written("reference", k, v, both, slots))


@pytest.mark.parametrize("form", ["number", "one", "token"])
@pytest.mark.parametrize("cache_dtype", QUANTISED, ids=str)
def test_quantised_caches(cache_dtype: torch.dtype, form: str) -> None:
    k, v = draw(9, 3, 40), draw(9, 3, 40, seed=1)
    k *= torch.logspace(-4, 4, 27).view(9, 3, 1)
    v[2, 0], v[3, 1, 7] = 0.0, float("-inf")
    both, slots = room_for(3, 4, 3, 40, cache_dtype), torch.tensor([11, 3, -1, 0, 7, 4, -9, 2, 8])
    scales: dict[str, tuple[object, object]] = {}
    for room in ("triton", "reference"):
        per_token = torch.full((3, 3, 2, 4), -5.0).permute(0, 3, 1, 2)  # heads before slots: any strides
        scales[room] = {
            "number": (0.3, 0.7),
            "one": (torch.tensor(0.3), torch.tensor([0.7])),
            "token": (per_token[..., 0], per_token[..., 1]),
        }[form]
    held = [written(room, k, v, both, slots, scales[room]) for room in ("triton", "reference")]
    assert torch.equal(*held)
    if form == "token":
        for ours, right in zip(scales["triton"], scales["reference"], strict=True):
            assert isinstance(ours, Tensor)
            assert torch.equal(ours, right)
            assert (ours == -5.0).sum() == 5 * 3  # 12 slots, 7 tokens


def test_float8_by_bits_is_the_nearest_number() -> None:
    """All numbers and the points half-way between them, both signs, the tiny ones and those out of range."""
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    points = torch.cat([codes, (codes[1:] + codes[:-1]) / 2])
    points = torch.cat([points, points * (1 + 2**-20), points * (1 - 2**-20), torch.tensor([1e-30, 1e9])])
    points = torch.cat([points, -points])
    k = torch.nn.functional.pad(points, (0, -len(points) % 16)).view(-1, 1, 16)
    both, slots = room_for(len(k), 1, 1, 16, torch.float8_e4m3fn), torch.arange(len(k))
    held = written("triton", k, k, both, slots).view(torch.float8_e4m3fn)[:, 0, ..., :16].double()
    assert torch.equal(held.view(-1, 1, 16), nearest(k, torch.float8_e4m3fn))
    assert quantization.form_of(torch.float8_e4m3fn, k.device) == quantization.E4M3_BITS


def test_a_slot_past_the_cache_is_not_written() -> None:
    """The CPU's checks would refuse it; on a GPU nobody can look, so the kernel must not write there."""
    from octavo.kernels.triton.kv_write import write_kv_cache as kernel

    room = torch.full((6, 4, 2, 8), 7.0)
    k = draw(3, 2, 8)
    kernel(k, k, room[:2], room[3:5], torch.tensor([8, 7, 9]))  # 2 blocks of 4: slots 0 to 7
    assert (room != 7.0).flatten(1).any(1).tolist() == [False, True, False, False, True, False]


@pytest.mark.parametrize("capacity", [1, 6, 7])
def test_one_block_of_any_size_per_sequence(capacity: int) -> None:
    """Contiguous caches, as `flash_attn_with_kvcache` has them, come to the kernel as such blocks."""
    from octavo.kernels.triton.kv_write import write_kv_cache as kernel

    k, slots = draw(4, 2, 8), torch.tensor([0, 3 * capacity - 1, capacity, -1])
    caches = [torch.full((3, capacity, 2, 8), 7.0) for _ in range(2)]
    kernel(k, k * 2, *caches, slots)
    for cache, rows in zip(caches, (k, k * 2), strict=True):
        assert torch.equal(cache.flatten(0, 1)[slots[:3]], rows[:3])
        assert (cache == 7.0).all(-1).sum() == (3 * capacity - 3) * 2


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_shape(data: st.DataObject) -> None:
    """Any shape, strides, dtypes, forms of scales and launch parameters: what the reference does."""
    tokens, heads, head_dim = (data.draw(st.integers(low, high)) for low, high in ((0, 9), (1, 5), (1, 33)))
    block_size = data.draw(st.sampled_from([1, 2, 8]))
    num_blocks = -(-tokens // block_size) + 1
    dtype, cache_dtype = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(DTYPES + QUANTISED))
    fused = draw(tokens, 2 * heads + 1, head_dim, dtype=dtype)
    k, v = fused[:, 1 : heads + 1], fused[:, heads + 1 :]
    slots = data.draw(st.permutations(range(num_blocks * block_size)))[:tokens]
    skipped = data.draw(st.sets(st.sampled_from(range(tokens)))) if tokens else set()
    mapping = torch.tensor([-1 if t in skipped else s for t, s in enumerate(slots)], dtype=torch.int64)
    both = room_for(num_blocks, block_size, heads, head_dim, cache_dtype)
    forms = ["number", "token"] if cache_dtype in QUANTISED else ["none"]
    forms = [data.draw(st.sampled_from(forms)) for _ in range(2)]
    parameters = {"BLOCK_ROWS": data.draw(st.sampled_from([1, 4, 32])), "num_warps": 1, "PDL": 1}

    def scales() -> list[object]:
        made = {"none": None, "number": 0.1, "token": torch.full((num_blocks, block_size, heads), -5.0)}
        return [x.clone() if isinstance(x := made[form], Tensor) else x for form in forms]

    ours, right = scales(), scales()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "parameters", lambda *_: parameters)
        held = written("triton", k, v, both, mapping, tuple(ours))
    assert torch.equal(held, written("reference", k, v, both, mapping, tuple(right)))
    for a, b in zip(ours, right, strict=True):
        assert not isinstance(a, Tensor) or torch.equal(a, b)


def test_blocks_and_alignment() -> None:
    """Powers of two that hold a size; what divides all strides but the last, 16 at most."""
    assert [launch.block_for(size) for size in (0, 1, 2, 3, 64, 65)] == [1, 1, 2, 4, 64, 128]
    qkv = torch.empty(4, 6, 120)
    assert launch.alignment(qkv) == 8
    assert launch.alignment(qkv, torch.empty(4, 7, 33)) == 1
    assert launch.alignment(torch.empty(3, 64), torch.empty(3, 256)) == 16
    assert launch.options({"num_warps": 2, "PDL": 1}, qkv.device) == {"num_warps": 2, "PDL": 0}
