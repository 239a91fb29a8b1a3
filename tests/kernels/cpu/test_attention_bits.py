"""Attention: a row has the same bits whatever else is in the call and however its keys are laid out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.kernels import Batch, page
from torch import Tensor

from octavo.kernels import backend, flash_attn_varlen_func

OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"causal": True, "window_size": (75, 0)},
    "softcap": {"causal": True, "softcap": 5.0},
    "alibi and sinks": {
        "causal": True,
        "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.01, 0.3, 0.2]),
        "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, -3.0]),
    },
}


@pytest.fixture(autouse=True)
def compiled() -> Any:
    with backend.use("cpu"):
        yield


def attend(batch: Batch, block_size: int, seed: int = 0, **options: Any) -> tuple[Tensor, Tensor]:
    paged = page(batch, block_size, seed=seed)
    return flash_attn_varlen_func(
        batch.q,
        paged.k_cache,
        paged.v_cache,
        *batch.lengths,
        block_table=paged.table,
        return_softmax_lse=True,
        **options,
    )


def part(whole: Batch, start: int, stop: int) -> Batch:
    """Rows start..stop of a batch of one sequence, with the keys up to there: a chunk of a prompt."""
    return Batch([stop - start], [stop], whole.q[start:stop], whole.k[:stop], whole.v[:stop])


@pytest.mark.parametrize("head_dim", [64, 40])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_whole_prompt_chunks_and_single_tokens_agree(options: dict[str, Any], head_dim: int) -> None:
    length = 201
    whole = Batch.random([length], [length], heads=(6, 2), head_dim=head_dim)
    out, lse = attend(whole, 16, **options)
    for chunk in (1, 7, 64, 100):
        for start in range(0, length, chunk):
            stop = min(start + chunk, length)
            chunk_out, chunk_lse = attend(part(whole, start, stop), 16, seed=start, **options)
            assert torch.equal(chunk_out, out[start:stop])
            assert torch.equal(chunk_lse, lse[:, start:stop])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_block_size_layout_and_packed_keys_agree(dtype: torch.dtype) -> None:
    batch = Batch.random([5, 1, 130], [133, 70, 130], heads=(6, 2), dtype=dtype)
    out, lse = flash_attn_varlen_func(
        batch.q, batch.k, batch.v, *batch.lengths, causal=True, return_softmax_lse=True
    )
    for block_size in (1, 2, 16, 64, 256):
        paged_out, paged_lse = attend(batch, block_size, seed=block_size, causal=True)
        assert torch.equal(paged_out, out)
        assert torch.equal(paged_lse, lse)


def test_alone_and_among_others_agree() -> None:
    batch = Batch.random([1, 40, 0, 1, 3], [77, 200, 12, 1, 64], heads=(6, 2))
    out, _ = attend(batch, 16, causal=True)
    for b, (q, k, v) in enumerate(batch.sequences()):
        alone = Batch([len(q)], [len(k)], q, k, v)
        first = sum(batch.lens_q[:b])
        assert torch.equal(attend(alone, 16, causal=True)[0], out[first : first + len(q)])


def test_thread_counts_agree(set_threads: Callable[[int], int]) -> None:
    batch = Batch.random([1, 100, 1], [300, 150, 20], heads=(6, 2))
    set_threads(1)
    one, _ = attend(batch, 16, causal=True)
    for num_threads in (2, 3):
        set_threads(num_threads)
        assert torch.equal(one, attend(batch, 16, causal=True)[0])


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("window", [(-1, 0), (5, 0), (3, 4)])
def test_a_key_that_a_row_does_not_see_cannot_change_its_bits(poison: float, window: tuple[int, int]) -> None:
    length = 90
    clean = Batch.random([length], [length], heads=(6, 2))
    expected, _ = attend(clean, 16, window_size=window)
    spoilt = Batch([length], [length], clean.q, clean.k.clone(), clean.v.clone())
    spoilt.k[50] = poison
    spoilt.v[50] = poison
    got, _ = attend(spoilt, 16, window_size=window)
    left, right = window
    sees = [(left < 0 or i - left <= 50) and (right < 0 or i + right >= 50) for i in range(length)]
    for i in range(length):
        if sees[i]:
            assert not got[i].isfinite().all()
        else:
            assert torch.equal(got[i], expected[i])
