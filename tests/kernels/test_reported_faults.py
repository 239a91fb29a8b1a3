"""Faults that people met in engines like this one, each with its right value."""

import math
import mmap

import pytest
import torch
from helpers.kernels import Batch, assert_within_budget, page, sdpa

from octavo.errors import KernelArgumentError, UnsupportedKernelConfig
from octavo.kernels import flash_attn_varlen_func, flash_attn_with_kvcache, write_kv_cache


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_k_and_v_may_be_views_of_one_interleaved_cache(implementation: str) -> None:
    """ROCm/aiter#3498: a block stride rebuilt from the shape reads the neighbour's data."""
    torch.manual_seed(0)
    cache = torch.randn(8, 2, 16, 2, 64)
    k_cache, v_cache = cache[:, 0], cache[:, 1]
    assert k_cache.stride(0) == 4096  # not 2048
    q, table = torch.randn(1, 4, 64), int32(5, 0, 7).view(1, 3)
    lengths = (int32(0, 1), int32(0, 37), 1, 37)
    out = flash_attn_varlen_func(q, k_cache, v_cache, *lengths, causal=True, block_table=table)
    copies = (q, k_cache.contiguous(), v_cache.contiguous())
    assert torch.equal(out, flash_attn_varlen_func(*copies, *lengths, causal=True, block_table=table))
    keys, values = (x[[5, 0, 7]].flatten(0, 1)[:37] for x in (k_cache, v_cache))
    batch = Batch([1], [37], q, keys, values)
    assert_within_budget(out, sdpa(batch), sdpa(batch, dtype=torch.float32))


def test_q_may_be_a_slice_of_fused_qkv(implementation: str) -> None:
    """ROCm/aiter#3498, second part: stride(0) of q is 512."""
    torch.manual_seed(0)
    qkv = torch.randn(5, 512)
    q, k, v = (x.view(5, -1, 64) for x in qkv.split([256, 128, 128], dim=1))
    assert q.stride(0) == 512
    lengths = (int32(0, 5), int32(0, 5), 5, 5)
    out = flash_attn_varlen_func(q, k, v, *lengths, causal=True)
    copies = (q.contiguous(), k.contiguous(), v.contiguous())
    assert torch.equal(out, flash_attn_varlen_func(*copies, *lengths, causal=True))
    caches = [torch.full((2, 4, 2, 64), math.nan) for _ in range(2)]
    write_kv_cache(k, v, *caches, torch.arange(5))
    paged = flash_attn_varlen_func(q, *caches, *lengths, causal=True, block_table=int32(0, 1).view(1, 2))
    torch.testing.assert_close(paged, out, rtol=0, atol=1e-6)


def test_max_seqlen_q_of_one_with_an_empty_sequence(implementation: str) -> None:
    """Dao-AILab/flash-attention#1537."""
    batch = Batch.random([1, 0, 1], [3, 0, 5], heads=(9, 3))
    assert batch.cu_q.tolist() == [0, 1, 1, 2]
    assert batch.cu_k.tolist() == [0, 3, 3, 8]
    out = flash_attn_varlen_func(batch.q, batch.k, batch.v, batch.cu_q, batch.cu_k, 1, 5, causal=True)
    assert out.shape == (2, 9, 64)
    assert_within_budget(out, sdpa(batch, causal=True), sdpa(batch, causal=True, dtype=torch.float32))

    one = Batch.random([0, 0, 0, 1], [0, 0, 0, 1], heads=(21, 7), head_dim=120)
    out = flash_attn_varlen_func(one.q, one.k, one.v, one.cu_q, one.cu_k, 1, 1, causal=True)
    assert out.shape == (1, 21, 120)
    # One key has all the weight: p * v / p, where p is 1 but for what a fused multiply-add leaves of the
    # score less its own maximum. Two roundings and one more in the reciprocal, at 2^-24 each.
    torch.testing.assert_close(out, one.v.repeat_interleave(3, dim=1), rtol=3 * 2**-24, atol=0)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_unwritten_slots_of_a_contiguous_cache(implementation: str, poison: float) -> None:
    """Dao-AILab/flash-attention#2374: weight 0 times NaN is NaN."""
    torch.manual_seed(0)
    q, lens = torch.randn(4, 1, 8, 64), int32(32, 64, 96, 48)
    clean = [torch.randn(4, 128, 8, 64) for _ in range(2)]
    for b, length in enumerate(lens.tolist()):
        for cache in clean:
            cache[b, length:] = 0.0
    dirty = [cache.clone() for cache in clean]
    for b, length in enumerate(lens.tolist()):
        for cache in dirty:
            cache[b, length:] = poison
    expected = flash_attn_with_kvcache(q, *clean, cache_seqlens=lens, causal=True)
    out = flash_attn_with_kvcache(q, *dirty, cache_seqlens=lens, causal=True)
    assert torch.isfinite(out).all()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("head_dim", [80, 96, 112, 120, 192, 256, 1, 33])
def test_head_dims_that_are_no_powers_of_two(implementation: str, head_dim: int) -> None:
    """sgl-project/sglang#1281: write, prefill and decode; a guard column beside the output stays."""
    batch = Batch.random([33], [33], heads=(4, 2), head_dim=head_dim)
    caches = [torch.full((4, 16, 2, head_dim + 1), math.nan) for _ in range(2)]
    k_cache, v_cache = (cache[..., :head_dim] for cache in caches)
    table = int32(2, 0, 3).view(1, 3)
    slots = torch.tensor([[2, 0, 3][i // 16] * 16 + i % 16 for i in range(33)])
    write_kv_cache(batch.k, batch.v, k_cache, v_cache, slots)
    assert torch.equal(k_cache[[2, 0, 3]].flatten(0, 1)[:33], batch.k)
    assert all(torch.isnan(cache[..., head_dim]).all() for cache in caches)

    exact, plain = sdpa(batch, causal=True), sdpa(batch, causal=True, dtype=torch.float32)
    for rows, cu_q in ((33, int32(0, 33)), (1, int32(0, 1))):
        guarded = torch.full((rows, 4, head_dim + 1), 7.0)
        out = guarded[..., :head_dim]
        q = batch.q[33 - rows :]
        lengths = (cu_q, int32(0, 33), rows, 33)
        options = {"causal": True, "block_table": table, "out": out}
        assert flash_attn_varlen_func(q, k_cache, v_cache, *lengths, **options) is out
        assert_within_budget(out, exact[33 - rows :], plain[33 - rows :])
        assert (guarded[..., head_dim] == 7.0).all()


def test_a_head_dim_no_kernel_does_is_refused_by_name(implementation: str) -> None:
    batch = Batch.random([2], [2], head_dim=257)
    with pytest.raises(UnsupportedKernelConfig, match=r"head_dim = 257 is not supported.*1 to 256"):
        flash_attn_varlen_func(batch.q, batch.k, batch.v, *batch.lengths)


@pytest.mark.rooms("reference", "cpu")  # Triton's interpreter is slow: kernels/triton/ has smaller ones
@pytest.mark.parametrize(
    "heads",
    [(28, 4), (24, 4), (16, 2), (9, 3), (5, 1), (12, 1), (71, 1), (8, 8)],
    ids=lambda h: f"{h[0]}over{h[1]}",
)
def test_any_dividing_head_ratio(implementation: str, heads: tuple[int, int]) -> None:
    """flashinfer-ai/flashinfer#4316: prefill and decode."""
    lens = [1, 16, 17, 300]
    for lens_q in (lens, [1, 1, 1, 1]):
        batch = Batch.random(lens_q, lens, heads=heads)
        paged = page(batch, 16)
        caches = (batch.q, paged.k_cache, paged.v_cache)
        out = flash_attn_varlen_func(*caches, *batch.lengths, causal=True, block_table=paged.table)
        assert_within_budget(out, sdpa(batch, causal=True), sdpa(batch, causal=True, dtype=torch.float32))


@pytest.mark.parametrize("heads", [(33, 2), (3, 2)])
def test_a_head_ratio_that_does_not_divide_is_refused(implementation: str, heads: tuple[int, int]) -> None:
    batch = Batch.random([2], [2], heads=heads)
    with pytest.raises(
        KernelArgumentError, match=rf"query heads must be a multiple of the 2 KV heads, got {heads[0]}"
    ):
        flash_attn_varlen_func(batch.q, batch.k, batch.v, *batch.lengths)


def test_sliding_window_of_a_config_counts_the_token_itself(implementation: str) -> None:
    """huggingface/transformers#39408: sliding_window 3 is window_size (2, 0)."""
    q, k = torch.zeros(6, 1, 8), torch.zeros(6, 1, 8)
    v = torch.arange(6.0).view(6, 1, 1).expand(6, 1, 8).contiguous()
    window = (3 - 1, 0)
    out = flash_attn_varlen_func(q, k, v, int32(0, 6), int32(0, 6), 6, 6, causal=True, window_size=window)
    torch.testing.assert_close(out[:, 0, 0], torch.tensor([0, 0.5, 1, 2, 3, 4]))
    caches = (k.view(1, 6, 1, 8), v.view(1, 6, 1, 8))
    decoded = flash_attn_with_kvcache(
        q[5:].view(1, 1, 1, 8), *caches, cache_seqlens=6, causal=True, window_size=window
    )
    assert decoded.flatten().tolist() == pytest.approx([4.0] * 8)


@pytest.mark.parametrize("num_keys", [1, 6, 600])
def test_sinks_count_once_per_head(implementation: str, num_keys: int) -> None:
    """modular/modular#6591: n / (n + e^s), on prefill and on decode, however the keys are split."""
    if implementation == "triton":
        num_keys = min(num_keys, 70)  # the interpreter is slow
    sinks = torch.tensor([0.0, 0.5, 1.0, 2.0])
    batch = Batch([num_keys], [num_keys], torch.zeros(num_keys, 4, 8), *(torch.ones(num_keys, 2, 8),) * 2)
    paged = page(batch, 16)
    expected = [[n / (n + math.exp(s)) for s in sinks.tolist()] for n in range(1, num_keys + 1)]
    prefill = flash_attn_varlen_func(batch.q, batch.k, batch.v, *batch.lengths, causal=True, sinks=sinks)
    torch.testing.assert_close(prefill[:, :, 3], torch.tensor(expected))
    decode = flash_attn_with_kvcache(
        batch.q[-1].view(1, 1, 4, 8),
        paged.k_cache,
        paged.v_cache,
        cache_seqlens=int32(num_keys),
        block_table=paged.table,
        causal=True,
        sinks=sinks,
    )
    torch.testing.assert_close(decode[0, 0, :, 3], torch.tensor(expected[-1]))
    if num_keys == 6:
        last = [0.857143, 0.784445, 0.688209, 0.448127]
        first = [0.5, 0.377541, 0.268941, 0.119203]
        assert expected[5] == pytest.approx(last, abs=1e-6)
        assert expected[0] == pytest.approx(first, abs=1e-6)


def test_a_slot_past_32_bits_is_refused_and_not_wrapped(implementation: str) -> None:
    k = torch.ones(1, 1, 8)
    caches = [torch.zeros(2, 4, 1, 8) for _ in range(2)]
    with pytest.raises(KernelArgumentError, match="every slot of slot_mapping must be below"):
        write_kv_cache(k, k, *caches, torch.tensor([2**32 + 1]))
    assert all((cache == 0).all() for cache in caches)


def test_addresses_are_64_bit(implementation: str) -> None:
    """The last block starts past element 2^31 of its cache. Only the pages it touches get memory."""
    num_blocks, elements_per_block = 2**20 + 2, 16 * 4 * 32
    size = num_blocks * elements_per_block * 2
    rooms = [mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(2)]
    cache, values = (torch.frombuffer(r, dtype=torch.float16).view(num_blocks, 16, 4, 32) for r in rooms)
    last = num_blocks - 1
    assert last * cache.stride(0) >= 2**31
    batch = Batch.random([1], [16], heads=(4, 4), head_dim=32, dtype=torch.float16)
    write_kv_cache(batch.k, batch.v, cache, values, torch.arange(16) + last * 16)
    wrapped = last * 16 * 4 * 32 % 2**31 // elements_per_block  # where a wrapped write lands
    for written, new in ((cache, batch.k), (values, batch.v)):
        assert torch.equal(written[last], new)
        assert (written[wrapped] == 0).all()
    out = flash_attn_varlen_func(batch.q, cache, values, *batch.lengths, block_table=int32(last).view(1, 1))
    assert_within_budget(out, sdpa(batch), sdpa(batch, dtype=torch.float16))
