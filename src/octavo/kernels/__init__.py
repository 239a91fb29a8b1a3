"""Tensors in, tensors out: the kernels of the engine, usable without it.

::

    from octavo.kernels import flash_attn_varlen_func, flash_attn_with_kvcache, write_kv_cache

Importing this loads torch and nothing of the engine; Numba is loaded by the first call that needs it.
`octavo.kernels.backend` says which implementation runs and why.
"""

from __future__ import annotations

from octavo.kernels.activation import gelu_tanh, silu_and_mul
from octavo.kernels.attention import flash_attn_varlen_func
from octavo.kernels.grouped_linear import PackedExperts, grouped_linear, pack_experts
from octavo.kernels.kv_write import write_kv_cache
from octavo.kernels.kvcache import flash_attn_with_kvcache
from octavo.kernels.linear import PackedWeight, embedding, linear, linear_onto, norm_linear, pack_weight
from octavo.kernels.norm import rms_norm
from octavo.kernels.rotary import apply_rotary
from octavo.kernels.rotate_and_write import rotate_and_write_kv_cache
from octavo.kernels.sampling import sample
from octavo.kernels.triton.warm_up import warm_up

__all__ = [
    "PackedExperts",
    "PackedWeight",
    "apply_rotary",
    "embedding",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "gelu_tanh",
    "grouped_linear",
    "linear",
    "linear_onto",
    "norm_linear",
    "pack_experts",
    "pack_weight",
    "rms_norm",
    "rotate_and_write_kv_cache",
    "sample",
    "silu_and_mul",
    "warm_up",
    "write_kv_cache",
]
