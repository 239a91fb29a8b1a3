"""Attention of a batch over a cache, after appending to it: FlashAttention's other function.

`octavo.kernels.attention` draws the masks, states the formula, and lists the differences from theirs.
"""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from octavo.kernels import backend, checks
from octavo.kernels.argument_types import names_wrong_types
from octavo.kernels.attention import ScoreOptions, attend
from octavo.kernels.rotary import apply_rotary


@overload
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = ...,
    v: Tensor | None = ...,
    *,
    rotary_cos: Tensor | None = ...,
    rotary_sin: Tensor | None = ...,
    cache_seqlens: Tensor | int | None = ...,
    cache_batch_idx: Tensor | None = ...,
    cache_leftpad: Tensor | None = ...,
    block_table: Tensor | None = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int, int] = ...,
    rotary_interleaved: bool = ...,
    softcap: float = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    return_softmax_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = ...,
    v: Tensor | None = ...,
    *,
    rotary_cos: Tensor | None = ...,
    rotary_sin: Tensor | None = ...,
    cache_seqlens: Tensor | int | None = ...,
    cache_batch_idx: Tensor | None = ...,
    cache_leftpad: Tensor | None = ...,
    block_table: Tensor | None = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int, int] = ...,
    rotary_interleaved: bool = ...,
    softcap: float = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    return_softmax_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@names_wrong_types
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    rotary_interleaved: bool = True,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of a batch of equally long queries over a cache, after appending new keys and values to it.

    `octavo.kernels.attention` draws the masks and states the formula.

    Args:
        q: (B, Sq, H, D) float32, float16, bfloat16 or float64; a contiguous last dimension. Not changed.
        k_cache, v_cache: with `block_table` (num_blocks, block_size, KVH, D), block_size a power of two;
            without it (batch_cache, capacity, KVH, D), batch_cache >= B, any capacity. Any strides with a
            contiguous last dimension. Written in place when k and v are given.
        k, v: (B, Snew, KVH, D) to append at positions cache_seqlens .. cache_seqlens + Snew - 1 before
            attending; any dtype, converted to that of the caches. Both or neither.
        rotary_cos, rotary_sin: (max_position, rotary_dim / 2) float. Copies of q and of the appended k are
            turned first, token i by position cache_seqlens + i (q without causal or window: all by
            cache_seqlens). Only together with k and v.
        cache_seqlens: (B,) int32, or one int for all: the keys already in the cache, which *excludes* k and
            includes left padding. None = the whole capacity; not together with k.
        cache_batch_idx: (B,) int32, the cache row of each sequence (contiguous caches only).
        cache_leftpad: (B,) int32, leading keys of each sequence to ignore. Keys are gathered for it: slow.
        block_table: (B, max_blocks) int32, as in `flash_attn_varlen_func`.
        rotary_interleaved: pairs are neighbours (GPT-J) rather than halves (GPT-NeoX), as in `apply_rotary`.
        alibi_slopes: (H,) or (B, H) float32.      sinks: (H,) float32, float16 or bfloat16.
        return_softmax_lse: return (out, lse), lse (B, H, Sq) float32 (float64 for float64 queries).

    Returns:
        out (B, Sq, H, D), or (out, lse).

    Raises:
        KernelArgumentError: a type, shape, dtype, device or stride is wrong, or arguments contradict each
            other; on the CPU also lengths past the capacity and table entries that name no block. The caches
            are untouched.
        UnsupportedKernelConfig: head_dim over 256, a quantised cache, an input that requires gradients.
    """
    name = "flash_attn_with_kvcache"
    device = q.device
    paged = block_table is not None
    checks.tensor(name, "q", q, "B, Sq, num_heads, head_dim")
    batch, seqlen_q, num_heads, head_dim = q.shape
    checks.caches(name, "k_cache", k_cache, "v_cache", v_cache, device, paged=paged)
    num_blocks, block_size, num_kv_heads, kv_head_dim = k_cache.shape
    checks.heads(name, num_heads, num_kv_heads, head_dim, kv_head_dim)
    window_size = checks.attention_options(
        name, num_heads, batch, device, softmax_scale, causal, window_size, softcap,
        alibi_slopes, sinks, return_softmax_lse,
    )  # fmt: skip
    options = ScoreOptions(softmax_scale, causal, window_size, softcap, alibi_slopes, sinks)
    checks.flag(name, "rotary_interleaved", rotary_interleaved)
    num_new = checks.appended(name, k, v, k_cache, batch, cache_seqlens, rotary_cos, rotary_sin)
    if k is not None:
        checks.two_caches(name, k_cache, v_cache)
    table = _table(name, block_table, cache_batch_idx, num_blocks, batch, device)
    capacity = table.shape[1] * block_size
    if cache_leftpad is not None:
        checks.exactly(name, "cache_leftpad", cache_leftpad, (batch,), device, checks.INT32)
    if isinstance(cache_seqlens, Tensor):
        checks.exactly(name, "cache_seqlens", cache_seqlens, (batch,), device, checks.INT32)
        lens = cache_seqlens
    else:
        known = capacity if cache_seqlens is None else cache_seqlens
        if not 0 <= known <= capacity or not isinstance(known, int):
            raise checks.wrong(name, "cache_seqlens", f"from 0 to the capacity {capacity} as an int", known)
        lens = torch.full((batch,), known, dtype=torch.int32, device=device)
    if q.is_cpu:
        first = cache_leftpad
        if first is None and window_size[0] >= 0:
            first = (lens + (num_new - seqlen_q - window_size[0])).clamp(min=0)
        checks.cache_values(name, lens, num_new, cache_leftpad, first, table, num_blocks, block_size)

    rows = q.flatten(0, 1)
    if k is not None and v is not None:
        new_positions = lens[:, None].long() + torch.arange(num_new, device=device)
        k_rows = k.flatten(0, 1)
        if rotary_cos is not None and rotary_sin is not None:
            follow = causal or window_size[0] >= 0 or window_size[1] >= 0
            q_positions = lens[:, None].long() + torch.arange(seqlen_q, device=device) * follow
            angles = torch.cat([rotary_cos, rotary_sin], dim=-1).float()
            rows, k_rows = rows.clone(), k_rows.clone()
            for turned, positions in ((rows, q_positions), (k_rows, new_positions)):
                no_heads = turned[:, :0]
                apply_rotary(turned, no_heads, angles, positions.flatten(), interleaved=rotary_interleaved)
        blocks = table.long().gather(1, new_positions // block_size)
        slots = (blocks * block_size + new_positions % block_size).flatten()
        write = backend.select("write_kv_cache", device.type, k.dtype, k_cache.dtype)
        write(k_rows, v.flatten(0, 1), k_cache, v_cache, slots)
        lens = lens + num_new
    keys, values = k_cache, v_cache
    keys_table: Tensor | None = table
    if cache_leftpad is not None:
        keys, values = _without_padding(k_cache, v_cache, table, cache_leftpad, lens)
        keys_table, lens = None, lens - cache_leftpad
    cu_seqlens_k = torch.zeros(batch + 1, dtype=torch.int32, device=device)
    torch.cumsum(lens, 0, dtype=torch.int32, out=cu_seqlens_k[1:])
    cu_seqlens_q = torch.arange(batch + 1, dtype=torch.int32, device=device) * seqlen_q
    # On a device, reading the longest length back would make the host wait; the capacity bounds it as well.
    longest = int(lens.max()) if q.is_cpu and batch else capacity
    seqlens = (cu_seqlens_q, cu_seqlens_k, seqlen_q, longest)
    packed, lse = attend(rows, keys, values, *seqlens, options, keys_table, None, return_softmax_lse)
    out = packed.view(batch, seqlen_q, num_heads, head_dim)
    return out if lse is None else (out, lse.view(num_heads, batch, seqlen_q).transpose(0, 1).contiguous())


def _table(
    function: str,
    block_table: Tensor | None,
    cache_batch_idx: Tensor | None,
    num_blocks: int,
    batch: int,
    device: torch.device,
) -> Tensor:
    """The block table; a contiguous cache is a paged one with a single block, its row, per sequence."""
    if block_table is not None:
        if cache_batch_idx is not None:
            raise checks.wrong(
                function, "cache_batch_idx", "None with block_table", "a tensor", "Pass one of them."
            )
        checks.table(function, block_table, batch, device)
        return block_table
    if cache_batch_idx is not None:
        checks.exactly(function, "cache_batch_idx", cache_batch_idx, (batch,), device, checks.INT32)
        if cache_batch_idx.is_cpu:
            checks.cache_rows(function, cache_batch_idx, num_blocks)
        return cache_batch_idx[:, None]
    if num_blocks < batch:
        expected = f"at least {batch} rows, one per sequence"
        raise checks.wrong(function, "k_cache", expected, num_blocks, "Pass cache_batch_idx or block_table.")
    return torch.arange(batch, dtype=torch.int32, device=device)[:, None]


def _without_padding(
    k_cache: Tensor, v_cache: Tensor, table: Tensor, leftpad: Tensor, lens: Tensor
) -> tuple[Tensor, Tensor]:
    """Packed copies of the keys and values from `leftpad` on."""
    block_size = k_cache.shape[1]
    kept = (lens - leftpad).long()
    sequence = torch.repeat_interleave(torch.arange(len(lens), device=lens.device), kept)
    rank = torch.arange(len(sequence), device=lens.device) - (kept.cumsum(0) - kept)[sequence]
    position = rank + leftpad[sequence]
    blocks, offsets = table.long()[sequence, position // block_size], position % block_size
    return k_cache[blocks, offsets], v_cache[blocks, offsets]
