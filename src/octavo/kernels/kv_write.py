"""Writing new keys and values into the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels import backend, checks
from octavo.kernels.argument_types import names_wrong_types

_SLOT_DTYPES = (torch.int64, torch.int32)


@names_wrong_types
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
    """Scatter T new keys and values into their slots, in place.

    ``k_cache[s // block_size, s % block_size] = k[t]`` for each token t with ``s = slot_mapping[t] >= 0``,
    likewise V::

        slot_mapping   5  -1   2        block 0: . . k2 .     (block_size 4; token 1 is padding)
        k             k0  k1  k2        block 1: . k0 .  .

    docs/kv_cache_layout.md draws the layout and works through the slots of three requests.

    Args:
        k, v: (T, num_kv_heads, head_dim); float32, float16, bfloat16 or float64; any strides with a
            contiguous last dimension (slices of a fused qkv are fine). Converted to the dtype of the caches.
        k_cache, v_cache: (num_blocks, block_size, num_kv_heads, head_dim), any strides with a contiguous last
            dimension (both may be views of one interleaved tensor); block_size a power of two. Written in
            place.
        slot_mapping: (T,) int64 or int32. Negative = padding, the token is not written. Two tokens must not
            share a slot: which one stays is then undefined.
        k_scale, v_scale: for quantised caches, which this version does not have; anything but None is
            refused.

    Raises:
        KernelArgumentError: a type, shape, dtype, device or stride is wrong, or (on the CPU) a slot lies past
            the cache.
        UnsupportedKernelConfig: a quantised cache or a scale.
        In both cases the caches are untouched.
    """
    name = "write_kv_cache"
    for argument, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            way_out = "Quantised caches are not supported in this version; pass None."
            raise checks.unsupported(name, argument, scale, way_out)
    device = k.device
    checks.tensor(name, "k", k, "T, num_kv_heads, head_dim")
    checks.tensor(name, "v", v, "T, num_kv_heads, head_dim", device)
    checks.caches(name, "k_cache", k_cache, "v_cache", v_cache, device)
    checks.two_caches(name, k_cache, v_cache)
    checks.same(name, "v", v, "k", k)
    shape = k.shape
    num_blocks, block_size, num_kv_heads, head_dim = k_cache.shape
    if shape[1] != num_kv_heads or shape[2] != head_dim:
        expected = f"of shape (T, {num_kv_heads}, {head_dim}) like the cache"
        raise checks.wrong(name, "k", expected, f"shape {tuple(shape)}")
    checks.exactly(name, "slot_mapping", slot_mapping, (shape[0],), device, _SLOT_DTYPES)
    if slot_mapping.dtype != torch.int64:
        slot_mapping = slot_mapping.long()
    on_cpu = k.is_cpu
    if on_cpu:
        checks.slots(name, slot_mapping, num_blocks * block_size)
    kernel = backend.select(name, "cpu" if on_cpu else device.type, k.dtype, k_cache.dtype)
    kernel(k, v, k_cache, v_cache, slot_mapping)
