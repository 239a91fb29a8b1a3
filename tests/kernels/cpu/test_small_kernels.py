"""Norm, rotary, activation and cache write: a row's bits do not depend on its company or on the threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from octavo.kernels import (
    apply_rotary,
    backend,
    rms_norm,
    rotate_and_write_kv_cache,
    silu_and_mul,
    write_kv_cache,
)

ROWS = 100


@pytest.fixture(autouse=True)
def compiled() -> Iterator[None]:
    with backend.use("cpu"):
        yield


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def norm(x: Tensor) -> Tensor:
    return torch.cat(rms_norm(x[:, :577], torch.linspace(-1, 2, 577), 1e-5, residual=x[:, 577:1154]))


def activation(x: Tensor) -> Tensor:
    return silu_and_mul(x[:, :1154])


def rotary(x: Tensor) -> Tensor:
    heads = x[:, : 18 * 64].reshape(-1, 18, 64).clone()
    positions = (x[:, 0].abs() * 100).long() % 512
    apply_rotary(heads[:, :15], heads[:, 15:], random(512, 64), positions)
    return heads.flatten(1)


def rotate_and_write(x: Tensor) -> Tensor:
    q, k, v = x[:, : 18 * 64].view(-1, 18, 64).split([12, 3, 3], dim=1)
    positions = (x[:, 0].abs() * 100).long() % 512
    caches = [torch.zeros(8, 16, 3, 64) for _ in range(2)]
    slots = torch.arange(len(x)) + 7
    q = rotate_and_write_kv_cache(q, k, v, random(512, 64), positions, *caches, slots)
    return torch.cat([q, *(cache.flatten(0, 1)[slots] for cache in caches)], dim=1).flatten(1)


@pytest.mark.parametrize("operation", [norm, activation, rotary, rotate_and_write])
def test_a_row_alone_equals_the_row_in_a_batch_on_one_and_two_threads(
    operation: Callable[[Tensor], Tensor], set_threads: Callable[[int], int]
) -> None:
    x = random(ROWS, 1200)
    set_threads(1)
    one = operation(x)
    set_threads(2)
    assert torch.equal(operation(x), one)
    chunks = one.view(-1, ROWS, one.shape[1])  # the norm returns two results, one below the other
    for i in (0, 1, 57, 99):
        alone = operation(x[i : i + 1])
        assert torch.equal(alone, chunks[:, i])


def test_a_large_cache_write_in_parallel_equals_the_reference(set_threads: Callable[[int], int]) -> None:
    set_threads(2)
    k = random(700, 6, 64)
    slots = torch.randperm(1024, generator=torch.Generator().manual_seed(1))[:700]
    slots[::9] = -1
    caches = [torch.zeros(64, 16, 6, 64) for _ in range(4)]
    write_kv_cache(k, -k, caches[0], caches[1], slots)
    with backend.use("reference"):
        write_kv_cache(k, -k, caches[2], caches[3], slots)
    assert torch.equal(caches[0], caches[2])
    assert torch.equal(caches[1], caches[3])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 80), (96, 36), (33, 6), (24, 0)])
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_turned_elsewhere_has_the_bits_of_turned_in_place(
    dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int, rotary_dim: int, interleaved: bool
) -> None:
    """Straight into the cache where it has the dtype of the keys, else by way of memory of its own."""
    fused = random(6, 8, head_dim).to(dtype)
    q, k, v = fused.split([4, 2, 2], dim=1)
    table, positions = random(40, rotary_dim), torch.tensor([3, 0, 39, 3, 11, 8])
    slots = torch.tensor([5, -1, 0, -3, 11, 6])
    in_place = fused.clone()
    apply_rotary(in_place[:, :4], in_place[:, 4:6], table, positions, interleaved=interleaved)
    both = torch.full((3, 2, 4, 2, head_dim), -7.0).to(cache_dtype)  # blocks of K and V in turn
    turned = rotate_and_write_kv_cache(
        q, k, v, table, positions, both[:, 0], both[:, 1], slots, interleaved=interleaved
    )
    assert torch.equal(turned, in_place[:, :4])
    assert torch.equal(fused, random(6, 8, head_dim).to(dtype))
    expected = torch.full((2, 12, 2, head_dim), -7.0).to(cache_dtype)
    written = [0, 2, 4, 5]
    for which, source in enumerate((in_place[:, 4:6], v)):
        expected[which][slots[written]] = source[written].to(cache_dtype)
    for block in range(3):
        assert torch.equal(both[block], expected[:, 4 * block : 4 * block + 4])
