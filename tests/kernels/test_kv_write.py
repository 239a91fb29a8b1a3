"""Writing into the cache: the addresses, and nothing beside them."""

import math

import pytest
import torch

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
