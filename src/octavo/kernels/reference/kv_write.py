"""Scatter new keys and values into their slots."""

from __future__ import annotations

from torch import Tensor


def write_kv_cache(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Slot s of the caches becomes token t of `k` and `v` where `slot_mapping[t] = s >= 0`."""
    wanted = slot_mapping >= 0
    slots = slot_mapping[wanted]
    block_size = k_cache.shape[1]
    k_cache[slots // block_size, slots % block_size] = k[wanted].to(k_cache.dtype)
    v_cache[slots // block_size, slots % block_size] = v[wanted].to(v_cache.dtype)
