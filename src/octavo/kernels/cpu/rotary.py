"""Rotary position embedding on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.cpu import host, threads

_PARALLEL_ITEMS = 1 << 15  # numbers below which waking the other threads costs more than it brings
_TOKENS_PER_TASK = 8


def supports(q_dtype: torch.dtype) -> str | None:
    """None when the compiled kernel can do it, else why not."""
    return host.unfit_reason() if q_dtype in host.DTYPE_NAMES else f"no compiled kernel for {q_dtype}"


def apply_rotary(q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor, interleaved: bool) -> None:
    """Turn the first `rotary_dim` channels of every head of `q` and `k`, in place."""
    from octavo.kernels.cpu import small_kernels

    num_tokens, num_heads, _ = q.shape
    item = q.element_size()
    positions = positions.contiguous()
    parameters = (
        num_tokens,
        cos_sin_cache.shape[1] // 2,
        cos_sin_cache.data_ptr(),
        cos_sin_cache.stride(0) * 4,
        positions.data_ptr(),
        _TOKENS_PER_TASK,
        q.data_ptr(),
        q.stride(0) * item,
        q.stride(1) * item,
        num_heads,
        k.data_ptr(),
        k.stride(0) * item,
        k.stride(1) * item,
        k.shape[1],
    )
    kernel = small_kernels.rotary_kernel(
        host.DTYPE_NAMES[q.dtype], "interleaved" if interleaved else "halves"
    )
    threads.run(kernel, parameters, parallel=q.numel() > _PARALLEL_ITEMS)
