"""`flash_attn_with_kvcache`: appending, rotating, indirect and padded caches, against the same by hand."""

import math

import pytest
import torch
from helpers.kernels import Batch, page, sdpa
from torch import Tensor

from octavo.kernels import flash_attn_varlen_func, flash_attn_with_kvcache

LENS = [3, 0, 20]  # keys already there
NEW = 2


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def history(seed: int = 0) -> Batch:
    """Two queries of three sequences over their past and two new keys."""
    return Batch.random([NEW] * 3, [n + NEW for n in LENS], heads=(4, 2), head_dim=16, seed=seed)


def new_of(batch: Batch) -> tuple[Tensor, Tensor]:
    rows = [(k[-NEW:], v[-NEW:]) for _, k, v in batch.sequences()]
    return torch.stack([k for k, _ in rows]), torch.stack([v for _, v in rows])


def contiguous(batch: Batch, capacity: int = 24, with_new: bool = False) -> tuple[Tensor, Tensor]:
    caches = [torch.full((3, capacity, 2, 16), math.nan) for _ in range(2)]
    for b, (_, k, v) in enumerate(batch.sequences()):
        kept = LENS[b] + (NEW if with_new else 0)
        caches[0][b, :kept], caches[1][b, :kept] = k[:kept], v[:kept]
    return caches[0], caches[1]


def forget_new(batch: Batch, cache: Tensor, slots: list[Tensor]) -> None:
    for b in range(3):
        cache.view(-1, 2, 16)[slots[b][LENS[b] :]] = math.nan


def expected(batch: Batch, **options) -> Tensor:
    return sdpa(batch, **options).view(3, NEW, 4, 16).float()


def assert_close(ours: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(ours, right, rtol=0, atol=2e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_lengths_alone(implementation: str, causal: bool) -> None:
    """Without k, cache_seqlens counts everything that is in the cache."""
    batch = history()
    caches = contiguous(batch, with_new=True)
    lens = int32(*(n + NEW for n in LENS))
    q = batch.q.view(3, NEW, 4, 16)
    assert_close(
        flash_attn_with_kvcache(q, *caches, cache_seqlens=lens, causal=causal), expected(batch, causal=causal)
    )


def test_one_length_for_all_and_the_whole_capacity(implementation: str) -> None:
    batch = Batch.random([1, 1], [6, 6], head_dim=16)
    caches = (batch.k.view(2, 6, 2, 16), batch.v.view(2, 6, 2, 16))
    q = batch.q.view(2, 1, 4, 16)
    right = sdpa(batch).view(2, 1, 4, 16).float()
    assert_close(flash_attn_with_kvcache(q, *caches), right)
    assert_close(flash_attn_with_kvcache(q, *caches, cache_seqlens=6), right)
    first = Batch(
        [1, 1], [4, 4], batch.q, *(x.view(2, 6, 2, 16)[:, :4].flatten(0, 1) for x in (batch.k, batch.v))
    )
    assert_close(flash_attn_with_kvcache(q, *caches, cache_seqlens=4), sdpa(first).view(2, 1, 4, 16).float())


def test_appending_excludes_the_new_keys_and_writes_them_in_place(implementation: str) -> None:
    batch = history()
    k_cache, v_cache = contiguous(batch)
    k, v = new_of(batch)
    q = batch.q.view(3, NEW, 4, 16)
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=int32(*LENS), causal=True, return_softmax_lse=True
    )
    assert_close(out, expected(batch, causal=True))
    for cache, filled in zip((k_cache, v_cache), contiguous(batch, with_new=True), strict=True):
        torch.testing.assert_close(cache, filled, rtol=0, atol=0, equal_nan=True)
    _, packed_lse = flash_attn_varlen_func(
        batch.q, batch.k, batch.v, *batch.lengths, causal=True, return_softmax_lse=True
    )
    assert lse.shape == (3, 4, NEW)
    for b in range(3):
        torch.testing.assert_close(lse[b], packed_lse[:, b * NEW : (b + 1) * NEW], rtol=0, atol=1e-6)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_appending_through_a_block_table(implementation: str, block_size: int) -> None:
    batch = history()
    paged = page(batch, block_size)
    full = paged.k_cache.clone(), paged.v_cache.clone()
    forget_new(batch, paged.k_cache, paged.slots)
    forget_new(batch, paged.v_cache, paged.slots)
    q = batch.q.view(3, NEW, 4, 16)
    out = flash_attn_with_kvcache(
        q,
        paged.k_cache,
        paged.v_cache,
        *new_of(batch),
        cache_seqlens=int32(*LENS),
        causal=True,
        block_table=paged.table,
    )
    assert_close(out, expected(batch, causal=True))
    for cache, filled in zip((paged.k_cache, paged.v_cache), full, strict=True):
        torch.testing.assert_close(cache, filled, rtol=0, atol=0, equal_nan=True)


def test_cache_batch_idx_names_the_row(implementation: str) -> None:
    batch = history()
    rows = [4, 0, 2]
    caches = [torch.full((5, 24, 2, 16), math.nan) for _ in range(2)]
    for cache, source in zip(caches, contiguous(batch), strict=True):
        cache[rows] = source
    out = flash_attn_with_kvcache(
        batch.q.view(3, NEW, 4, 16),
        *caches,
        *new_of(batch),
        cache_seqlens=int32(*LENS),
        cache_batch_idx=int32(*rows),
        causal=True,
    )
    assert_close(out, expected(batch, causal=True))
    assert torch.isnan(caches[0][[1, 3]]).all()


@pytest.mark.parametrize("append", [False, True])
def test_cache_leftpad_hides_the_first_keys(implementation: str, append: bool) -> None:
    batch, padding = history(), [2, 0, 5]
    shorter = [(k[p:], v[p:]) for (_, k, v), p in zip(batch.sequences(), padding, strict=True)]
    visible = Batch(
        [NEW] * 3,
        [n + NEW - p for n, p in zip(LENS, padding, strict=True)],
        batch.q,
        torch.cat([k for k, _ in shorter]),
        torch.cat([v for _, v in shorter]),
    )
    caches = contiguous(batch, with_new=not append)
    for b, p in enumerate(padding):
        caches[0][b, :p], caches[1][b, :p] = math.nan, math.nan
    lens = int32(*(n if append else n + NEW for n in LENS))
    out = flash_attn_with_kvcache(
        batch.q.view(3, NEW, 4, 16),
        *caches,
        *(new_of(batch) if append else ()),
        cache_seqlens=lens,
        cache_leftpad=int32(*padding),
        causal=True,
        window_size=(9, 0),
    )
    assert_close(out, expected(visible, causal=True, window=(9, 0)))


def turn(x: Tensor, positions: list[int], cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotation as a complex product; x (S, heads, D)."""
    half = cos.shape[-1]
    turned = x.clone()
    pairs = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
        if interleaved
        else (slice(0, half), slice(half, 2 * half))
    )
    for i, position in enumerate(positions):
        z = torch.complex(x[i, :, pairs[0]], x[i, :, pairs[1]]) * torch.complex(cos[position], sin[position])
        turned[i, :, pairs[0]], turned[i, :, pairs[1]] = z.real, z.imag
    return turned


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_rotary_turns_the_new_keys_and_a_copy_of_q(
    implementation: str, causal: bool, interleaved: bool
) -> None:
    batch = history()
    angles = torch.rand(32, 6, generator=torch.Generator().manual_seed(2)) * 6  # rotary dimension 12 of 16
    cos, sin = angles.cos(), angles.sin()
    k_cache, v_cache = contiguous(batch)
    k, v = new_of(batch)
    q = batch.q.view(3, NEW, 4, 16)
    kept_q, kept_k = q.clone(), k.clone()
    out = flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        cache_seqlens=int32(*LENS),
        causal=causal,
        rotary_cos=cos,
        rotary_sin=sin,
        rotary_interleaved=interleaved,
    )
    assert torch.equal(q, kept_q)
    assert torch.equal(k, kept_k)
    turned_q, turned_k = [], []
    for b, n in enumerate(LENS):
        own = [n, n + 1] if causal else [n, n]
        turned_q.append(turn(q[b], own, cos, sin, interleaved))
        fresh = turn(k[b], [n, n + 1], cos, sin, interleaved)
        torch.testing.assert_close(k_cache[b, n : n + NEW], fresh, rtol=0, atol=1e-6)
        turned_k.append(torch.cat([batch.k.split(batch.lens_k)[b][:n], fresh]))
    turned = Batch(batch.lens_q, batch.lens_k, torch.cat(turned_q), torch.cat(turned_k), batch.v)
    assert_close(out, expected(turned, causal=causal))


def test_windows_sinks_and_slopes_reach_the_kernel(implementation: str) -> None:
    batch = history()
    caches = contiguous(batch, with_new=True)
    lens = int32(*(n + NEW for n in LENS))
    slopes, sinks = torch.rand(3, 4), torch.tensor([0.0, 1.0, -1.0, 2.0])
    out = flash_attn_with_kvcache(
        batch.q.view(3, NEW, 4, 16),
        *caches,
        cache_seqlens=lens,
        causal=True,
        window_size=(4, 0),
        alibi_slopes=slopes,
        sinks=sinks,
        softmax_scale=0.4,
    )
    right = expected(batch, causal=True, window=(4, 0), slopes=slopes, sinks=sinks, scale=0.4)
    assert_close(out, right)


def test_no_queries_and_no_sequences(implementation: str) -> None:
    caches = [torch.zeros(2, 4, 2, 16) for _ in range(2)]
    assert flash_attn_with_kvcache(torch.zeros(2, 0, 4, 16), *caches, cache_seqlens=3).shape == (2, 0, 4, 16)
    assert flash_attn_with_kvcache(torch.zeros(0, 1, 4, 16), *caches, cache_seqlens=3).shape == (0, 1, 4, 16)


@pytest.mark.parametrize("scales", ["number", "token"])
@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize("paged", [True, False], ids=["paged", "contiguous"])
def test_append_to_a_quantised_cache(paged: bool, cache_dtype: torch.dtype, scales: str) -> None:
    """The new tokens, and their scales, land in their slots, and are then read like the others."""
    batch = history()
    if paged:
        full = page(batch, 4)
        caches, where = [full.k_cache, full.v_cache], {"block_table": full.table}
        slots = full.slots
    else:
        caches, where = list(contiguous(batch, with_new=True)), {}
        slots = [b * 24 + torch.arange(n + NEW) for b, n in enumerate(LENS)]
    stored, kept_scales = [], []
    for cache in caches:
        scale = torch.full(cache.shape[:3], 0.03) if scales == "token" else 0.03
        values = cache.nan_to_num(0.0) / 0.03
        values = values.round() if cache_dtype == torch.int8 else values
        stored.append(values.clamp(-127, 127).to(cache_dtype))
        kept_scales.append(scale)
    for cache, scale in zip(stored, kept_scales, strict=True):
        for b in range(3):
            cache.view(-1, 2, 16)[slots[b][LENS[b] :]] = 0
            if isinstance(scale, Tensor):
                scale.view(-1, 2)[slots[b][LENS[b] :]] = math.nan
    k, v = new_of(batch)
    lens, options = int32(*LENS), {"k_scale": kept_scales[0], "v_scale": kept_scales[1], **where}
    out = flash_attn_with_kvcache(
        batch.q.view(3, NEW, 4, 16), *stored, k, v, cache_seqlens=lens, causal=True, **options
    )
    torch.testing.assert_close(out, expected(batch, causal=True), rtol=0, atol=0.15)
    written = [
        cache.float() * (scale[..., None] if isinstance(scale, Tensor) else scale)
        for cache, scale in zip(stored, kept_scales, strict=True)
    ]
    for cache, new in zip(written, (k, v), strict=True):
        for b in range(3):
            torch.testing.assert_close(
                cache.view(-1, 2, 16)[slots[b][LENS[b] :]], new[b], rtol=0.07, atol=0.02
            )
