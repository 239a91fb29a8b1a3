"""The reference is tied to `scaled_dot_product_attention`, which we did not write, one sequence at a time."""

import math

import pytest
import torch
from helpers.kernels import Batch, page, sdpa, visible

from octavo.kernels import backend, flash_attn_varlen_func

WINDOWS = [(-1, -1), (2, 0), (0, 0), (3, 1), (-1, 2), (4, -1)]


@pytest.fixture(autouse=True)
def _reference_only():
    with backend.use("reference"):
        yield


def ragged(dtype: torch.dtype = torch.float64, heads: tuple[int, int] = (4, 2)) -> Batch:
    """A prompt, a chunk with a past, a decode, an empty sequence, no keys, more queries than keys."""
    batch = Batch.random(
        [10, 3, 1, 0, 2, 5], [10, 7, 8, 4, 0, 2], heads=heads, head_dim=24, dtype=torch.float64
    )
    return Batch(batch.lens_q, batch.lens_k, *(x.to(dtype) for x in (batch.q, batch.k, batch.v)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_every_mask_is_that_of_sdpa(causal: bool, window: tuple[int, int]) -> None:
    batch = ragged()
    out = flash_attn_varlen_func(batch.q, batch.k, batch.v, *batch.lengths, causal=causal, window_size=window)
    expected = sdpa(batch, causal=causal, window=window)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (5, 1)], ids=["mha", "gqa", "mqa"])
def test_head_ratios_and_a_stated_scale(heads: tuple[int, int]) -> None:
    batch = ragged(heads=heads)
    out = flash_attn_varlen_func(batch.q, batch.k, batch.v, *batch.lengths, causal=True, softmax_scale=0.5)
    torch.testing.assert_close(out, sdpa(batch, causal=True, scale=0.5), rtol=0, atol=1e-14)


@pytest.mark.parametrize("per_sequence", [False, True])
def test_alibi(per_sequence: bool) -> None:
    batch = ragged()
    slopes = torch.rand((6, 4) if per_sequence else (4,), generator=torch.Generator().manual_seed(1))
    for causal in (False, True):
        out = flash_attn_varlen_func(
            batch.q, batch.k, batch.v, *batch.lengths, causal=causal, alibi_slopes=slopes
        )
        torch.testing.assert_close(out, sdpa(batch, causal=causal, slopes=slopes), rtol=0, atol=1e-14)


def test_sinks_are_one_more_key() -> None:
    batch = ragged()
    sinks = torch.tensor([-1.0, 0.0, 1.5, 3.0])
    out = flash_attn_varlen_func(batch.q, batch.k, batch.v, *batch.lengths, causal=True, sinks=sinks)
    torch.testing.assert_close(out, sdpa(batch, causal=True, sinks=sinks), rtol=0, atol=1e-14)


def test_softcap_by_hand() -> None:
    # Scores 0 and 3 under softcap 2: weights 1 and exp(2 tanh 1.5); values 0 and 1.
    q, k = torch.ones(1, 1, 1), torch.tensor([0.0, 3.0]).view(2, 1, 1)
    v = torch.tensor([0.0, 1.0]).view(2, 1, 1)
    batch = Batch([1], [2], q, k, v)
    out, lse = flash_attn_varlen_func(
        q, k, v, *batch.lengths, softmax_scale=1.0, softcap=2.0, return_softmax_lse=True
    )
    capped = 2.0 * math.tanh(1.5)
    assert out.item() == pytest.approx(1 / (1 + math.exp(-capped)), abs=1e-6)
    assert lse.item() == pytest.approx(math.log(1 + math.exp(capped)), abs=1e-6)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_lse_is_the_log_of_the_sum_of_exponentials(window: tuple[int, int]) -> None:
    batch = ragged()
    sinks = torch.tensor([0.5, -2.0, 0.0, 1.0])
    for causal in (False, True):
        for sink in (None, sinks):
            options = {"causal": causal, "window_size": window, "sinks": sink}
            _, lse = flash_attn_varlen_func(
                batch.q, batch.k, batch.v, *batch.lengths, **options, return_softmax_lse=True
            )
            assert lse.shape == (4, 21)
            expected = []
            for q, k, _ in batch.sequences():
                scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, dim=1)) / math.sqrt(24)
                seen = visible(len(q), len(k), causal, window)
                total = scores.masked_fill(~seen, -math.inf).exp().sum(-1)
                if sink is not None:
                    total = (total + sink.double().exp()[:, None]) * seen.any(-1)
                expected.append(total.log())
            torch.testing.assert_close(lse, torch.cat(expected, dim=1), rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_low_precision_is_computed_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    batch = ragged(dtype)
    wide = Batch(batch.lens_q, batch.lens_k, batch.q.float(), batch.k.float(), batch.v.float())
    out = flash_attn_varlen_func(batch.q, batch.k, batch.v, *batch.lengths, causal=True)
    in_float32 = flash_attn_varlen_func(wide.q, wide.k, wide.v, *wide.lengths, causal=True)
    assert out.dtype == dtype
    assert torch.equal(out, in_float32.to(dtype))
    torch.testing.assert_close(in_float32.double(), sdpa(wide, causal=True), rtol=0, atol=1e-6)


@pytest.mark.parametrize("block_size", [1, 2, 16])
def test_paged_equals_packed(block_size: int) -> None:
    batch = ragged()
    paged = page(batch, block_size)
    packed = flash_attn_varlen_func(batch.q, batch.k, batch.v, *batch.lengths, causal=True)
    caches = (batch.q, paged.k_cache, paged.v_cache)
    out = flash_attn_varlen_func(*caches, *batch.lengths, causal=True, block_table=paged.table)
    assert torch.equal(out, packed)
