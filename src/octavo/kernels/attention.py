"""Attention over packed sequences or a paged cache: the FlashAttention contract.

Which keys a row sees
---------------------
Row i of a sequence with Q query rows and K keys stands on key ``i + K - Q``: the mask is aligned at the
*bottom right*, so that the last row stands on the last key. 1 = sees, 0 = does not::

    causal, Q=2, K=5       causal, Q=5, K=2       window (2, 0), Q=3, K=5      window (1, 1), Q=4, K=4
    (a chunk with past)    (rows without keys)
      1 1 1 1 0              0 0  -> out 0,         1 1 1 0 0                    1 1 0 0
      1 1 1 1 1              0 0     lse -inf       0 1 1 1 0                    1 1 1 0
                             0 0                    0 0 1 1 1                    0 1 1 1
                             1 0                                                 0 0 1 1
                             1 1

``window_size = (left, right)`` counts keys besides the row's own: a row at key p sees p - left .. p + right;
negative = no bound. ``causal=True`` sets right to 0. A model's ``sliding_window`` W that counts the token
itself is (W - 1, 0).

What happens to a score
-----------------------
::

    s = softmax_scale * (q . k)                    softmax_scale: 1 / sqrt(head_dim) when None
    s = softcap * tanh(s / softcap)                where softcap > 0
    s = s - alibi_slope[head] * |i + K - Q - j|    where alibi_slopes are given
    p = exp(s) / (sum over visible j of exp(s) + exp(sink[head]))     the last term only where sinks are given

A sink is a key of score ``sink`` and value 0: with n equal scores of 0 the weights sum to n / (n + e^sink).
``lse`` is the logarithm of that whole denominator, sink included. A row without visible keys is 0 with lse
-inf, sinks or not.

Query heads H must be a multiple of the KV heads: query head h reads KV head ``h // (H / KVH)``.

Where this differs from the FlashAttention package
--------------------------------------------------
=====================  ================================================================================
block size             any power of two (theirs: a multiple of 256)
head_dim               any from 1 to 256; that of V equals that of K
q and cache dtypes     may differ (float32 queries over a float16 cache)
``sinks``              here an argument of both functions
call by position       up to max_seqlen_k, or v; what we lack (dropout_p, num_splits, ...) is absent
``causal`` with ALiBi  lse counts the bias as written above; theirs drops a constant of the row from it
gradients              none; inputs that require them are refused
=====================  ================================================================================
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from octavo.kernels import backend, checks
from octavo.kernels.rotary import apply_rotary

_INT32 = (torch.int32,)


@overload
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    block_table: Tensor | None = ...,
    return_softmax_lse: Literal[False] = False,
    out: Tensor | None = ...,
) -> Tensor: ...
@overload
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    block_table: Tensor | None = ...,
    return_softmax_lse: Literal[True],
    out: Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    block_table: Tensor | None = None,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of B sequences laid end to end, over packed keys or over a paged cache.

    The module docstring draws the masks and states the formula.

    Args:
        q: (Tq, H, D) float32, float16, bfloat16 or float64; any strides with a contiguous last dimension.
        k, v: packed (Tk, KVH, D), or with `block_table` the paged caches (num_blocks, block_size, KVH, D),
            block_size a power of two. Any strides with a contiguous last dimension. Slots past a sequence's
            length may hold anything, NaN included.
        cu_seqlens_q, cu_seqlens_k: (B + 1,) int32 prefix sums of the query and key lengths, first 0; key
            lengths *include* the tokens being computed. Lengths of 0 are fine; cu_seqlens_q ends at Tq,
            cu_seqlens_k at Tk (with a block table: anywhere).
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths.
        block_table: (B, max_blocks) int32: key j of sequence b is slot ``j % block_size`` of block
            ``block_table[b, j // block_size]``. Entries no visible key needs may be -1. Blocks may be shared.
        alibi_slopes: (H,) or (B, H) float32.      sinks: (H,) float32, float16 or bfloat16.
        return_softmax_lse: return (out, lse), lse (H, Tq) float32 (float64 for float64 queries).
        out: (Tq, H, D) in the dtype of q, written instead of a new tensor; must not overlap the inputs.

    Returns:
        out (Tq, H, D), or (out, lse).

    Raises:
        KernelArgumentError: a shape, dtype, device or stride is wrong; on the CPU also wrong prefix sums,
            bounds that do not hold, and table entries that name no block. `out` is untouched.
        UnsupportedKernelConfig: head_dim over 256, a quantised cache, an input that requires gradients.
    """
    name = "flash_attn_varlen_func"
    device = q.device
    checks.tensor(name, "q", q, "Tq, num_heads, head_dim")
    num_rows, num_heads, head_dim = q.shape
    batch = cu_seqlens_q.shape[0] - 1 if cu_seqlens_q.dim() == 1 else -1
    if batch < 0:
        raise checks.wrong(name, "cu_seqlens_q", "of shape (B + 1,)", f"shape {tuple(cu_seqlens_q.shape)}")
    checks.exactly(name, "cu_seqlens_q", cu_seqlens_q, (batch + 1,), device, _INT32)
    checks.exactly(name, "cu_seqlens_k", cu_seqlens_k, (batch + 1,), device, _INT32)
    if block_table is None:
        checks.tensor(name, "k", k, "Tk, num_kv_heads, head_dim", device)
        checks.tensor(name, "v", v, "Tk, num_kv_heads, head_dim", device)
        checks.same(name, "v", v, "k", k)
        num_keys, num_kv_heads, kv_head_dim = k.shape
        num_blocks = block_size = 0
    else:
        checks.caches(name, "k", k, "v", v, device)
        num_blocks, block_size, num_kv_heads, kv_head_dim = k.shape
        num_keys = None
        checks.table(name, block_table, batch, device)
    checks.heads(name, num_heads, num_kv_heads, head_dim, kv_head_dim)
    checks.attention_options(name, num_heads, batch, device, window_size, softcap, alibi_slopes, sinks)
    if out is not None:
        checks.output(name, out, q)
    if q.is_cpu:
        checks.ragged(
            name,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            num_rows,
            num_keys,
            window_size[0],
            block_table,
            num_blocks,
            block_size,
        )
    options = _Options(softmax_scale, causal, window_size, softcap, alibi_slopes, sinks)
    lens = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    out, lse = _attend(q, k, v, *lens, options, block_table, out, return_softmax_lse)
    return out if lse is None else (out, lse)


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

    The module docstring draws the masks and states the formula.

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
        KernelArgumentError: a shape, dtype, device or stride is wrong, or arguments contradict each other; on
            the CPU also lengths past the capacity and table entries that name no block. The caches are
            untouched.
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
    checks.attention_options(name, num_heads, batch, device, window_size, softcap, alibi_slopes, sinks)
    num_new = checks.appended(name, k, v, k_cache, batch, cache_seqlens, rotary_cos, rotary_sin)
    table = _table(name, block_table, cache_batch_idx, num_blocks, batch, device)
    capacity = table.shape[1] * block_size
    if cache_leftpad is not None:
        checks.exactly(name, "cache_leftpad", cache_leftpad, (batch,), device, _INT32)
    if isinstance(cache_seqlens, Tensor):
        checks.exactly(name, "cache_seqlens", cache_seqlens, (batch,), device, _INT32)
        lens = cache_seqlens
    else:
        known = capacity if cache_seqlens is None else cache_seqlens
        if not 0 <= known <= capacity:
            raise checks.wrong(name, "cache_seqlens", f"from 0 to the capacity {capacity}", known)
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
    options = _Options(softmax_scale, causal, window_size, softcap, alibi_slopes, sinks)
    seqlens = (cu_seqlens_q, cu_seqlens_k, seqlen_q, longest)
    packed, lse = _attend(rows, keys, values, *seqlens, options, keys_table, None, return_softmax_lse)
    out = packed.view(batch, seqlen_q, num_heads, head_dim)
    return out if lse is None else (out, lse.view(num_heads, batch, seqlen_q).transpose(0, 1).contiguous())


class _Options(NamedTuple):
    """What changes the scores."""

    softmax_scale: float | None
    causal: bool
    window_size: tuple[int, int]
    softcap: float
    alibi_slopes: Tensor | None
    sinks: Tensor | None


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    options: _Options,
    block_table: Tensor | None,
    out: Tensor | None,
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Run the selected implementation on checked arguments."""
    num_rows, num_heads, head_dim = q.shape
    device = q.device
    if out is None:
        out = torch.empty((num_rows, num_heads, head_dim), dtype=q.dtype, device=device)
    lse = None
    if with_lse:
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        lse = torch.empty((num_heads, num_rows), dtype=dtype, device=device)
    scale = options.softmax_scale
    backend.select("varlen_attention", "cpu" if q.is_cpu else device.type, q.dtype, k.dtype, head_dim)(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale=1.0 / math.sqrt(head_dim) if scale is None else scale,
        causal=options.causal,
        window_size=options.window_size,
        softcap=options.softcap,
        alibi_slopes=options.alibi_slopes,
        sinks=options.sinks,
        block_table=block_table,
        out=out,
        lse=lse,
    )
    return out, lse


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
        checks.exactly(function, "cache_batch_idx", cache_batch_idx, (batch,), device, _INT32)
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
