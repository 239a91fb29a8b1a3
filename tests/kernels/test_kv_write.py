"""Writing into the cache: the addresses, and nothing beside them."""

import math

import pytest
import torch
from helpers.quantised import LARGEST, nearest
from torch import Tensor

from octavo.kernels import write_kv_cache

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def caches(num_blocks=4, block_size=4, heads=3, head_dim=5, dtype=torch.float32, fill=-7.0):
    return [torch.full((num_blocks, block_size, heads, head_dim), fill, dtype=dtype) for _ in range(2)]


def new(tokens=6, heads=3, head_dim=5, dtype=torch.float32):
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(tokens, heads, head_dim, generator=rng).to(dtype) for _ in range(2)]


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64], ids=str)
def test_a_token_goes_to_its_slot_and_negative_slots_go_nowhere(
    implementation: str, slot_dtype: torch.dtype
) -> None:
    (k, v), (k_cache, v_cache) = new(), caches()
    slots = [15, -1, 0, 6, -5, 9]
    write_kv_cache(k, v, k_cache, v_cache, torch.tensor(slots, dtype=slot_dtype))
    for cache, rows in ((k_cache, k), (v_cache, v)):
        for slot in range(16):
            held = cache[slot // 4, slot % 4]
            if slot in slots:
                assert torch.equal(held, rows[slots.index(slot)])
            else:
                assert (held == -7.0).all()


@pytest.mark.parametrize("block_size", [1, 2, 16, 64])
def test_block_sizes(implementation: str, block_size: int) -> None:
    k, v = new(tokens=40)
    k_cache, v_cache = caches(num_blocks=128 // block_size, block_size=block_size)
    slots = torch.randperm(128, generator=torch.Generator().manual_seed(1))[:40]
    write_kv_cache(k, v, k_cache, v_cache, slots)
    assert torch.equal(k_cache.flatten(0, 1)[slots], k)
    assert torch.equal(v_cache.flatten(0, 1)[slots], v)
    assert (k_cache == -7.0).sum() == (128 - 40) * 15


@pytest.mark.parametrize("cache_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_are_rounded_to_the_dtype_of_the_cache(
    implementation: str, dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    k, v = new(head_dim=80, dtype=dtype)
    k[0, 0, 0], k[1, 0, 0], k[2, 0, 0] = math.inf, math.nan, 65504.0
    k_cache, v_cache = caches(head_dim=80, dtype=cache_dtype)
    write_kv_cache(k, v, k_cache, v_cache, torch.arange(6))
    torch.testing.assert_close(k_cache.flatten(0, 1)[:6], k.to(cache_dtype), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(v_cache.flatten(0, 1)[:6], v.to(cache_dtype), rtol=0, atol=0)


def test_strided_sources_and_interleaved_caches(implementation: str) -> None:
    qkv = torch.randn(6, 5 * 3 * 8, generator=torch.Generator().manual_seed(0))
    k, v = (qkv[:, i * 24 : (i + 1) * 24].view(6, 3, 8) for i in (3, 4))
    both = torch.full((4, 2, 4, 3, 8), -7.0)
    slots = torch.tensor([13, 2, 0, 7, 8, 5])
    write_kv_cache(k, v, both[:, 0], both[:, 1], slots)
    assert torch.equal(both[:, 0].flatten(0, 1)[slots], k)
    assert torch.equal(both[:, 1].flatten(0, 1)[slots], v)
    assert (both == -7.0).sum() == 2 * 10 * 24


def test_heads_first_caches(implementation: str) -> None:
    """Any strides with a contiguous last dimension: a cache stored heads first."""
    k, v = new()
    stored = [torch.full((4, 3, 4, 5), -7.0) for _ in range(2)]
    slots = torch.tensor([13, 2, 0, 7, 8, 5])
    write_kv_cache(k, v, *(cache.transpose(1, 2) for cache in stored), slots)
    assert torch.equal(stored[0].transpose(1, 2).flatten(0, 1)[slots], k)
    assert torch.equal(stored[1].transpose(1, 2).flatten(0, 1)[slots], v)


def test_no_tokens(implementation: str) -> None:
    k_cache, v_cache = caches()
    write_kv_cache(*new(tokens=0), k_cache, v_cache, torch.empty(0, dtype=torch.int64))
    assert (k_cache == -7.0).all()


QUANTISED = [torch.float8_e4m3fn, torch.int8]


def written_quantised(
    k: Tensor, dtype: torch.dtype, scale: Tensor | float | None, slots: list[int]
) -> tuple[Tensor, Tensor]:
    """What the slots hold after a write of k, as float64, and all that K's cache holds, as it is."""
    k_cache, v_cache = caches(block_size=16, heads=k.shape[1], head_dim=k.shape[2], dtype=dtype, fill=7.0)
    v_scale = torch.zeros(4, 16, k.shape[1]) if isinstance(scale, Tensor) and scale.dim() == 3 else scale
    write_kv_cache(k, k.flip(0), k_cache, v_cache, torch.tensor(slots), k_scale=scale, v_scale=v_scale)
    flat = k_cache.flatten(0, 1).double()
    assert torch.equal(flat[slots].flip(0).nan_to_num(), v_cache.flatten(0, 1).double()[slots].nan_to_num())
    return flat[slots], k_cache


@pytest.mark.parametrize("dtype", QUANTISED, ids=str)
@pytest.mark.parametrize("form", ["number", "0-d", "1-d"])
def test_a_known_scale_divides_and_what_is_too_large_becomes_the_largest(
    dtype: torch.dtype, form: str
) -> None:
    scale = 0.25  # a power of two: dividing is exact, ties are ties
    values = torch.cat([torch.arange(-1000, 1000) / 16, torch.tensor([0.0, 1e4, -1e4, math.inf, -math.inf])])
    k = torch.nn.functional.pad(values, (0, 11)).view(-1, 1, 32)
    given = {"number": scale, "0-d": torch.tensor(scale), "1-d": torch.tensor([scale])}[form]
    held, cache = written_quantised(k, dtype, given, list(range(63)))
    assert torch.equal(held, nearest(k / scale, dtype))
    assert held.abs().max() == LARGEST[dtype]
    assert (cache.flatten(0, 1)[63].float() == 7.0).all()  # the one slot that nothing went to


def test_float8_without_a_scale_holds_the_numbers_themselves() -> None:
    k = torch.cat([torch.arange(-512, 512) / 1024, torch.arange(-1024.0, 1024.0)]).view(-1, 1, 64)
    held, _ = written_quantised(k, torch.float8_e4m3fn, None, list(range(48)))
    assert torch.equal(held, nearest(k, torch.float8_e4m3fn))


@pytest.mark.parametrize("dtype", QUANTISED, ids=str)
def test_a_token_and_head_finds_its_own_scale(dtype: torch.dtype) -> None:
    k, _ = new(tokens=40, heads=3, head_dim=80)
    k *= torch.logspace(-30, 30, 120).view(40, 3, 1)
    k[7, 1] = 0.0
    scales = torch.full((3, 4, 16), -5.0).permute(1, 2, 0)  # any strides
    slots = [int(i) for i in torch.randperm(64, generator=torch.Generator().manual_seed(2))[:40]]
    held, _ = written_quantised(k, dtype, scales, slots)
    of_rows = scales.flatten(0, 1)[slots]
    assert (of_rows > 0).all()
    exact = k.double().abs().amax(-1) / LARGEST[dtype]
    present = exact > 0
    torch.testing.assert_close(of_rows[present].double(), exact[present], rtol=2**-22, atol=0)
    assert (held.abs().amax(-1)[present] == LARGEST[dtype]).all()
    # Half a step of the format, relative or absolute, and a rounding or two of float32.
    steps = 2.0**-4 * k.double().abs() if dtype == torch.float8_e4m3fn else exact[..., None] / 2
    floor = exact[..., None] * 2.0**-10  # float8's smallest step is 2^-9
    assert (
        (held * of_rows[..., None] - k.double()).abs() <= torch.maximum(steps, floor) * (1 + 2**-20)
    ).all()
    assert (held[7, 1] == 0).all()
    untouched = [slot for slot in range(64) if slot not in slots]
    assert (scales.flatten(0, 1)[untouched] == -5.0).all()


@pytest.mark.parametrize("dtype", QUANTISED, ids=str)
def test_what_is_not_finite_stays_where_it_is(dtype: torch.dtype) -> None:
    """An infinity becomes the row's largest number; a NaN stays one, or is 0 where the dtype has none."""
    k, _ = new(tokens=3, heads=2, head_dim=16)
    clean = k.clone()
    clean[1, 0, 3:5] = 0.0
    k[1, 0, 3], k[1, 0, 4] = math.nan, -math.inf
    (held, _), (right, _) = (
        written_quantised(x, dtype, torch.zeros(4, 16, 2), [5, 60, 0]) for x in (k, clean)
    )
    right[1, 0, 3] = 0.0 if dtype == torch.int8 else math.nan
    right[1, 0, 4] = -LARGEST[dtype]
    torch.testing.assert_close(held, right, rtol=0, atol=0, equal_nan=True)


def test_padding_writes_no_scale() -> None:
    k, v = new(tokens=2)
    k_cache, v_cache = caches(dtype=torch.int8)
    scales = [torch.full((4, 4, 3), -5.0) for _ in range(2)]
    write_kv_cache(k, v, k_cache, v_cache, torch.tensor([-1, 9]), k_scale=scales[0], v_scale=scales[1])
    for scale, cache in zip(scales, (k_cache, v_cache), strict=True):
        assert ((scale != -5.0).nonzero() == torch.tensor([[2, 1, h] for h in range(3)])).all()
        assert (cache != -7).any(-1).nonzero().tolist() == [[2, 1, h] for h in range(3)]
