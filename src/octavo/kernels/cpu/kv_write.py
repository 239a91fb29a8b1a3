"""Writing keys and values into the paged cache on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.cpu import host, threads

_PARALLEL_ITEMS = 1 << 17  # copied numbers below which waking the other threads costs more than it brings
_TOKENS_PER_TASK = 16


def supports(k_dtype: torch.dtype, cache_dtype: torch.dtype) -> str | None:
    """None when the compiled kernel can do it, else why not."""
    for dtype in (k_dtype, cache_dtype):
        if dtype not in host.DTYPE_NAMES:
            return f"no compiled kernel for {dtype}"
    return host.unfit_reason()


def write_kv_cache(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Slot s of the caches becomes token t of `k` and `v` where `slot_mapping[t] = s >= 0`."""
    from octavo.kernels.cpu import small_kernels

    num_tokens, num_heads, head_dim = k.shape
    item, cache_item = k.element_size(), k_cache.element_size()
    slot_mapping = slot_mapping.contiguous()
    cache_strides = [stride * cache_item for cache in (k_cache, v_cache) for stride in cache.stride()[:3]]
    parameters = (
        num_tokens,
        num_heads,
        head_dim,
        slot_mapping.data_ptr(),
        k_cache.shape[1],
        _TOKENS_PER_TASK,
        k.data_ptr(),
        k.stride(0) * item,
        k.stride(1) * item,
        v.data_ptr(),
        v.stride(0) * item,
        v.stride(1) * item,
        k_cache.data_ptr(),
        *cache_strides[:3],
        v_cache.data_ptr(),
        *cache_strides[3:],
    )
    kernel = small_kernels.kv_write_kernel(host.DTYPE_NAMES[k.dtype], host.DTYPE_NAMES[k_cache.dtype])
    threads.run(kernel, parameters, parallel=k.numel() > _PARALLEL_ITEMS)
