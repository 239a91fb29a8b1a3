"""Attention of a batch over a cache, after appending to it: FlashAttention's other function.

`octavo.kernels.attention` draws the masks, states the formula, and lists the differences from theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch import Tensor

from octavo.kernels import backend, checks
from octavo.kernels.argument_types import names_wrong_types
from octavo.kernels.attention import Options, attend, check_invariant
from octavo.kernels.reference.kvcache import Plan, plan_kvcache
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
    k_scale: Tensor | float | None = ...,
    v_scale: Tensor | float | None = ...,
    batch_invariant: bool = ...,
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
    k_scale: Tensor | float | None = ...,
    v_scale: Tensor | float | None = ...,
    batch_invariant: bool = ...,
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
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    batch_invariant: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of a batch of equally long queries over a cache, after appending new keys and values to it.

    `octavo.kernels.attention` draws the masks and states the formula.

    Args:
        q: (B, Sq, H, D) float32, float16, bfloat16 or float64; a contiguous last dimension. Not changed.
        k_cache, v_cache: with `block_table` (num_blocks, block_size, KVH, D), block_size a power of two;
            without it (batch_cache, capacity, KVH, D), batch_cache >= B, any capacity. Any strides with a
            contiguous last dimension. May be quantised: float8_e4m3fn or int8. Written in place when k and v
            are given.
        k, v: (B, Snew, KVH, D) to append at positions cache_seqlens .. cache_seqlens + Snew - 1 before
            attending; any float dtype, converted to that of the caches. Both or neither.
        rotary_cos, rotary_sin: (max_position, rotary_dim / 2) float. Copies of q and of the appended k are
            turned first, token i by position cache_seqlens + i (q without causal or window: all by
            cache_seqlens). Only together with k and v.
        cache_seqlens: (B,) int32, or one int for all: the keys already in the cache, which *excludes* k and
            includes left padding. None = the whole capacity; not together with k.
        cache_batch_idx: (B,) int32, the cache row of each sequence (contiguous caches only).
        cache_leftpad: (B,) int32, leading keys of each sequence to ignore. On the CPU slow.
        block_table: (B, max_blocks) int32, as in `flash_attn_varlen_func`.
        rotary_interleaved: pairs are neighbours (GPT-J) rather than halves (GPT-NeoX), as in `apply_rotary`.
        alibi_slopes: (H,) or (B, H) float32.      sinks: (H,) float32, float16 or bfloat16.
        return_softmax_lse: return (out, lse), lse (B, H, Sq) float32 (float64 for float64 queries).
        k_scale, v_scale, batch_invariant: as in `flash_attn_varlen_func`; scales per token and head have the
            shape of the cache without D, and those of appended tokens are written.

    Returns:
        out (B, Sq, H, D), or (out, lse).

    On a GPU tokens past the capacity are not written, and the length ends at the capacity. Where its Triton
    kernels run, no value is read by the host: the call can be captured into a CUDA graph and replayed after
    lengths, table and contents have changed.

    Raises:
        KernelArgumentError: a type, shape, dtype, device or stride is wrong, or arguments contradict each
            other; on the CPU also lengths past the capacity, and table entries that name no block, which on a
            GPU reach memory that is not theirs. The caches are untouched.
        UnsupportedKernelConfig: head_dim over 256, a cache of another quantised dtype, an input that
            requires gradients, batch_invariant where only the reference can do the rest. The caches are
            untouched.
    """
    name = "flash_attn_with_kvcache"
    device = q.device
    paged = block_table is not None
    checks.tensor(name, "q", q, "B, Sq, num_heads, head_dim")
    batch, seqlen_q, num_heads, head_dim = q.shape
    checks.caches(name, "k_cache", k_cache, "v_cache", v_cache, device, paged=paged)
    num_blocks, block_size, num_kv_heads, kv_head_dim = k_cache.shape
    checks.heads(name, num_heads, num_kv_heads, head_dim, kv_head_dim)
    checks.scales(name, k_scale, v_scale, k_cache)
    check_invariant(name, batch_invariant, q, k_cache)
    window_size = checks.attention_options(
        name, num_heads, batch, device, softmax_scale, causal, window_size, softcap,
        alibi_slopes, sinks, return_softmax_lse,
    )  # fmt: skip
    options = Options(
        softmax_scale, causal, window_size, softcap, alibi_slopes, sinks, k_scale, v_scale, batch_invariant
    )
    checks.flag(name, "rotary_interleaved", rotary_interleaved)
    num_new = checks.appended(name, k, v, k_cache, batch, cache_seqlens, rotary_cos, rotary_sin)
    if k is not None:
        checks.two_caches(name, k_cache, v_cache, k_scale, v_scale)
    table = _table(name, block_table, cache_batch_idx, num_blocks, batch, device)
    capacity = block_size if table is None else table.shape[1] * block_size
    if cache_leftpad is not None:
        checks.exactly(name, "cache_leftpad", cache_leftpad, (batch,), device, checks.INT32)
    lens = _lens(name, cache_seqlens, capacity, batch, device)
    longest = capacity  # reading the longest length from a GPU would make the host wait
    if q.is_cpu:
        known = q.new_full((batch,), lens, dtype=torch.int32) if isinstance(lens, int) else lens
        first = cache_leftpad
        if first is None and window_size[0] >= 0:
            first = (known + (num_new - seqlen_q - window_size[0])).clamp(min=0)
        rows = torch.arange(batch, dtype=torch.int32, device=device)[:, None] if table is None else table
        checks.cache_values(name, known, num_new, cache_leftpad, first, rows, num_blocks, block_size)
        longest = int(known.max()) + num_new if batch else 0

    follow = causal or window_size[0] >= 0 or window_size[1] >= 0
    facts = (device.type, q.dtype, k_cache.dtype, head_dim)
    plan = _planner(*facts)(
        lens, table, batch, seqlen_q, num_new, block_size, device, rotary_cos, rotary_sin, follow
    )
    packed_q = q.flatten(0, 1)
    if k is not None and v is not None:
        packed_q = _append(
            packed_q, k.flatten(0, 1), v.flatten(0, 1), k_cache, v_cache, plan, rotary_interleaved,
            {"k_scale": k_scale, "v_scale": v_scale},
        )  # fmt: skip
    seqlens = (plan.cu_seqlens_q, plan.cu_seqlens_k, seqlen_q, longest)
    packed, lse, _ = attend(
        packed_q, k_cache, v_cache, *seqlens, options, plan.table, None, return_softmax_lse, cache_leftpad
    )
    out = packed.view(batch, seqlen_q, num_heads, head_dim)
    return out if lse is None else (out, lse.view(num_heads, batch, seqlen_q).transpose(0, 1).contiguous())


def _planner(device_type: str, *facts: Any) -> Callable[..., Plan]:
    """What makes the index tensors: a kernel where attention has one, plain torch elsewhere."""
    if backend.implementation_of("varlen_attention", device_type, *facts) == "triton":
        from octavo.kernels.triton.kvcache import plan_kvcache as on_the_device

        return on_the_device
    return plan_kvcache


def _append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: Plan,
    interleaved: bool,
    scales: dict[str, Tensor | float | None],
) -> Tensor:
    """Write k and v (B * Snew, KVH, D) into the caches, k turned; returns q, a turned copy if it is to be."""
    device_type = k.device.type
    given = scales if any(scale is not None for scale in scales.values()) else {}
    q_angles, k_angles = plan.q_angles, plan.k_angles
    if q_angles is None or k_angles is None:
        backend.select("write_kv_cache", device_type, k.dtype, k_cache.dtype)(
            k, v, k_cache, v_cache, plan.slots, **given
        )
        return q
    if q_angles is k_angles and q.dtype == k.dtype:
        fused = backend.select("rotate_and_write_kv_cache", device_type, q.dtype, k_cache.dtype, q.shape[2])
        turned: Tensor = fused(
            q, k, v, *k_angles, k_cache, v_cache, plan.slots,
            q_weight=None, k_weight=None, eps=0.0, interleaved=interleaved, **given,
        )  # fmt: skip
        return turned
    q, k = q.clone(), k.clone()
    for turned, angles in ((q, q_angles), (k, k_angles)):
        apply_rotary(turned, turned[:, :0], *angles, interleaved=interleaved)
    backend.select("write_kv_cache", device_type, k.dtype, k_cache.dtype)(
        k, v, k_cache, v_cache, plan.slots, **given
    )
    return q


def _lens(
    function: str, cache_seqlens: Tensor | int | None, capacity: int, batch: int, device: torch.device
) -> Tensor | int:
    """The keys already in the caches, per sequence or one number for all."""
    if isinstance(cache_seqlens, Tensor):
        checks.exactly(function, "cache_seqlens", cache_seqlens, (batch,), device, checks.INT32)
        return cache_seqlens
    known = capacity if cache_seqlens is None else cache_seqlens
    if not 0 <= known <= capacity or not isinstance(known, int):
        raise checks.wrong(function, "cache_seqlens", f"from 0 to the capacity {capacity} as an int", known)
    return known


def _table(
    function: str,
    block_table: Tensor | None,
    cache_batch_idx: Tensor | None,
    num_blocks: int,
    batch: int,
    device: torch.device,
) -> Tensor | None:
    """The block table; a contiguous cache is a paged one with a single block, its row, per sequence.

    None: row b for sequence b.
    """
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
    return None
