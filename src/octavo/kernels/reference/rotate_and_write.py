"""Norm of each head, rotary embedding and the write into the cache: one kernel after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.reference.kv_write import write_kv_cache
from octavo.kernels.reference.norm import rms_norm
from octavo.kernels.reference.rotary import apply_rotary


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
        q, k = rms_norm(q, q_weight, eps, None)[0], rms_norm(k, k_weight, eps, None)[0]
    else:
        q = q.clone(memory_format=torch.contiguous_format)
        k = k.clone(memory_format=torch.contiguous_format)
    apply_rotary(q, k, cos_sin_cache, positions, interleaved)
    write_kv_cache(k, v, k_cache, v_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale)
    return q
