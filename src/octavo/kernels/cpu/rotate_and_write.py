"""Norm of each head, rotary embedding and the write into the cache on the CPU: one kernel after the other.

The numbers stay in the processor's caches from one kernel to the next, and starting one costs a microsecond
or two: there is little to win by making them one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.cpu import host, kv_write
from octavo.kernels.cpu.norm import rms_norm
from octavo.kernels.cpu.rotary import apply_rotary
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
    else:
        q = q.clone(memory_format=torch.contiguous_format)
        k = k.clone(memory_format=torch.contiguous_format)
    apply_rotary(q, k, cos_sin_cache, positions, interleaved)
    if k_cache.dtype in host.DTYPE_NAMES:
        kv_write.write_kv_cache(k, v, k_cache, v_cache, slot_mapping)
    else:
        write_quantised(k, v, k_cache, v_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale)
    return q
