"""Calls of the cache and attention kernels that are right, for tests that change one argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octavo.kernels import flash_attn_varlen_func, flash_attn_with_kvcache, write_kv_cache

EMPTY = -7.0


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def write_arguments() -> dict[str, Any]:
    return {
        "k": torch.ones(3, 2, 8),
        "v": torch.ones(3, 2, 8),
        "k_cache": torch.full((4, 4, 2, 8), EMPTY),
        "v_cache": torch.full((4, 4, 2, 8), EMPTY),
        "slot_mapping": torch.tensor([0, 5, 15]),
    }


def packed_arguments() -> dict[str, Any]:
    return {
        "q": torch.ones(3, 4, 8),
        "k": torch.ones(7, 2, 8),
        "v": torch.ones(7, 2, 8),
        "cu_seqlens_q": int32(0, 2, 3),
        "cu_seqlens_k": int32(0, 2, 7),
        "max_seqlen_q": 2,
        "max_seqlen_k": 5,
        "out": torch.full((3, 4, 8), EMPTY),
    }


def paged_arguments() -> dict[str, Any]:
    caches = {"k": torch.ones(4, 4, 2, 8), "v": torch.ones(4, 4, 2, 8)}
    return packed_arguments() | caches | {"block_table": int32(2, -1, 1, 3).view(2, 2)}


def append_arguments() -> dict[str, Any]:
    return {
        "q": torch.ones(2, 1, 4, 8),
        "k_cache": torch.full((4, 4, 2, 8), EMPTY),
        "v_cache": torch.full((4, 4, 2, 8), EMPTY),
        "k": torch.ones(2, 1, 2, 8),
        "v": torch.ones(2, 1, 2, 8),
        "cache_seqlens": int32(2, 5),
        "block_table": int32(2, -1, 1, 3).view(2, 2),
    }


CALLS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    "write": (write_kv_cache, write_arguments),
    "packed": (flash_attn_varlen_func, packed_arguments),
    "paged": (flash_attn_varlen_func, paged_arguments),
    "append": (flash_attn_with_kvcache, append_arguments),
}
