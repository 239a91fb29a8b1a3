"""Norm, rotary, activation and cache write: a row's bits do not depend on its company or on the threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from octavo.kernels import apply_rotary, backend, rms_norm, silu_and_mul, write_kv_cache

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


@pytest.mark.parametrize("operation", [norm, activation, rotary])
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
