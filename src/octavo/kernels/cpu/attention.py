"""Attention on the CPU: tensors in, addresses down to `attention_kernel.py`."""

from __future__ import annotations

import functools
import struct

import torch
from torch import Tensor

from octavo.kernels.cpu import host, threads
from octavo.kernels.cpu.attention_parameters import Parameters

_PARALLEL_WORK = 8192  # key reads x head_dim below which waking the other threads costs more than it brings


def supports(q_dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int) -> str | None:
    """None when the compiled kernel can do it, else why not."""
    reason = host.unfit_reason()
    if reason is not None:
        return reason
    for dtype in (q_dtype, cache_dtype):
        if dtype not in host.DTYPE_NAMES:
            return f"no compiled kernel for {dtype}"
    return None


def _float_bits(value: float) -> int:
    bits: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return bits


_kept: list[Tensor] = []  # what `_constants` gave addresses of


@functools.cache
def _constants() -> tuple[int, int]:
    """Addresses of a row of zeros as wide as a tile, and of 0, 1, 2, ... as wide as a vector."""
    from octavo.kernels.cpu.attention_kernel import tile_columns

    zeros = torch.zeros(tile_columns(), dtype=torch.float32, device="cpu")
    lane_numbers = torch.arange(host.vector_shape().lanes, dtype=torch.float32, device="cpu")
    _kept.extend((zeros, lane_numbers))
    return zeros.data_ptr(), lane_numbers.data_ptr()


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    block_table: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    leftpad: Tensor | None = None,
    batch_invariant: bool = False,
) -> None:
    """Fill `out` (Tq, H, D) and `lse` (H, Tq); `octavo.kernels.attention` says what they mean.

    A row gets the same bits in every batch, chunk and block layout; `attention_kernel.py` says why. The
    scales are None: quantised caches are not supported. Keys are gathered for `leftpad`: slow.
    """
    from octavo.kernels.cpu import attention_kernel

    num_tokens, num_heads, head_dim = q.shape
    batch = cu_seqlens_q.shape[0] - 1
    if num_tokens == 0 or batch < 1:
        return
    if leftpad is not None and block_table is not None:
        k, v, cu_seqlens_k = _without_padding(k, v, block_table, leftpad, cu_seqlens_k)
        block_table = None
    num_kv_heads = k.shape[-2]
    group = num_heads // num_kv_heads
    left, right = window_size
    if causal:
        right = 0
    if sinks is not None:
        sinks = sinks.to(torch.float32).contiguous()
    slopes, slopes_row = 0, 0
    if alibi_slopes is not None:
        slopes = alibi_slopes.data_ptr()
        slopes_row = alibi_slopes.stride(0) * 4 if alibi_slopes.dim() == 2 else 0
    q_item, kv_item = q.element_size(), k.element_size()
    paged = block_table is not None
    cu_seqlens_q, cu_seqlens_k = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
    zeros, lane_numbers = _constants()
    task = attention_kernel.task_shape(group, head_dim)
    q_strides, k_strides, v_strides, out_strides = q.stride(), k.stride(), v.stride(), out.stride()
    parameters = Parameters(
        batch=batch,
        group=group,
        kv_heads=num_kv_heads,
        dim=head_dim,
        q=q.data_ptr(),
        q_token=q_strides[0] * q_item,
        q_head=q_strides[1] * q_item,
        k=k.data_ptr(),
        k_block=k_strides[0] * kv_item,
        k_slot=k_strides[-3] * kv_item,
        k_head=k_strides[-2] * kv_item,
        v=v.data_ptr(),
        v_block=v_strides[0] * kv_item,
        v_slot=v_strides[-3] * kv_item,
        v_head=v_strides[-2] * kv_item,
        out=out.data_ptr(),
        out_token=out_strides[0] * q_item,
        out_head=out_strides[1] * q_item,
        lse=0 if lse is None else lse.data_ptr(),
        lse_head=0 if lse is None else lse.stride(0) * 4,
        starts_q=cu_seqlens_q.data_ptr(),
        starts_k=cu_seqlens_k.data_ptr(),
        table=block_table.data_ptr() if block_table is not None else 0,
        table_row=block_table.stride(0) * 4 if block_table is not None else 0,
        block_size=k.shape[1] if paged else 1,
        scale=_float_bits(softmax_scale),
        softcap=_float_bits(softcap),
        left=left,
        right=right,
        slopes=slopes,
        slopes_row=slopes_row,
        sinks=0 if sinks is None else sinks.data_ptr(),
        tokens_per_task=task.tokens,
        rows_stride=task.rows,
        zeros=zeros,
        lane_numbers=lane_numbers,
        scratch_size=task.scratch_bytes,
    )
    work = num_tokens * num_heads * max_seqlen_k * head_dim
    kernel = attention_kernel.attention_kernel(host.DTYPE_NAMES[q.dtype], host.DTYPE_NAMES[k.dtype])
    threads.run(kernel, parameters, parallel=work > _PARALLEL_WORK, scratch_bytes=task.scratch_bytes)


def _without_padding(
    k_cache: Tensor, v_cache: Tensor, table: Tensor, leftpad: Tensor, cu_seqlens_k: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Packed copies of the keys and values from `leftpad` on, and the prefix sums of their numbers."""
    block_size = k_cache.shape[1]
    kept = (cu_seqlens_k.diff() - leftpad).long()
    ends = kept.cumsum(0)
    sequence = torch.repeat_interleave(torch.arange(len(kept), device="cpu"), kept)
    position = torch.arange(len(sequence), device="cpu") - (ends - kept)[sequence] + leftpad[sequence]
    blocks, offsets = table.long()[sequence, position // block_size], position % block_size
    cu_seqlens_k = torch.cat([ends.new_zeros(1), ends]).to(torch.int32)
    return k_cache[blocks, offsets], v_cache[blocks, offsets], cu_seqlens_k
