"""Norm of each head, rotary embedding and the write into the cache on the CPU.

The norm is a kernel of its own. Where the cache has the dtype of the keys, one kernel turns and writes: keys
go straight to their slots, and nothing is written that is only read again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.cpu import host, kv_write
from octavo.kernels.cpu.norm import rms_norm
from octavo.kernels.cpu.rotary import rotate_into, rotate_into_cache
from octavo.kernels.reference.kv_write import write_kv_cache as write_quantised


def supports(q_dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int) -> str | None:
    """None when the compiled kernels can do it, else why not."""
    if cache_dtype.itemsize == 1:  # quantised: written by the reference
        cache_dtype = q_dtype
    return kv_write.supports(q_dtype, cache_dtype)


def rotate_and_write_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
    interleaved: bool = False,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
) -> Tensor:
    """The turned `q`, a new contiguous tensor; the turned `k`, and `v`, are in their slots of the caches."""
    if q_weight is not None and k_weight is not None:
        if q_weight.dtype not in host.DTYPE_NAMES:
            q_weight, k_weight = q_weight.float(), k_weight.float()
        q, k = rms_norm(q, q_weight, eps, None)[0], rms_norm(k, k_weight, eps, None)[0]
        q_out = q  # the norm's results are ours: in place
    else:
        q_out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if k_cache.dtype == k.dtype:
        caches = (k_cache, v_cache, slot_mapping)
        rotate_into_cache(q_out, q, k, v, *caches, cos_sin_cache, positions, interleaved)
        return q_out
    k_out = torch.empty_like(k, memory_format=torch.contiguous_format)
    rotate_into(q_out, k_out, q, k, cos_sin_cache, positions, interleaved)
    if k_cache.dtype in host.DTYPE_NAMES:
        kv_write.write_kv_cache(k_out, v, k_cache, v_cache, slot_mapping)
    else:
        write_quantised(k_out, v, k_cache, v_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale)
    return q_out
