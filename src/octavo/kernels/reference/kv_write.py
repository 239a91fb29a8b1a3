"""Scatter new keys and values into their slots."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.reference import quantization


def write_kv_cache(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
) -> None:
    """Slot s of the caches becomes token t of `k` and `v` where `slot_mapping[t] = s >= 0`."""
    wanted = slot_mapping >= 0
    slots = slot_mapping[wanted]
    block_size = k_cache.shape[1]
    place = slots // block_size, slots % block_size
    for new, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        rows = new[wanted]
        if not quantization.is_quantised(cache.dtype):
            cache[place] = rows.to(cache.dtype)
            continue
        if scale is None:
            scale = 1.0
        elif isinstance(scale, Tensor) and scale.dim() == 3:  # one per token and head, made here
            scale[place] = of_rows = quantization.row_scales(rows, cache.dtype)
            scale = of_rows[..., None]
        stored = quantization.quantise(rows, scale, cache.dtype)
        cache.view(torch.uint8)[place] = stored.view(torch.uint8)  # torch cannot scatter a float8
