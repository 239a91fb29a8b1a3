"""Writing new keys and values into the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels import backend, checks
from octavo.kernels.argument_types import names_wrong_types
from octavo.kernels.known_calls import KnownCalls, prepared

_SLOT_DTYPES = (torch.int64, torch.int32)

_known = KnownCalls()


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
        k_cache, v_cache: (num_blocks, block_size, num_kv_heads, head_dim), of a dtype of k or quantised:
            float8_e4m3fn or int8; any strides with a contiguous last dimension (both may be views of one
            interleaved tensor); block_size a power of two. Written in place.
        slot_mapping: (T,) int64 or int32. Negative = padding, the token is not written. Two tokens must not
            share a slot: which one stays is then undefined.
        k_scale, v_scale: for quantised caches, each in one of three forms. A scale is what a stored number
            is multiplied with when it is read (``value = stored * scale``): attention is given the same ones.

            - None: 1.0. Not for int8.
            - a number, or a float32 tensor of one element: known beforehand, for the whole cache. What does
              not fit becomes the largest number there is, 448 or 127 times the scale.
            - float32 (num_blocks, block_size, num_kv_heads), any strides: one per token and head, found here
              (largest magnitude / 448 or / 127) and written at the token's slot.

    Raises:
        KernelArgumentError: a type, shape, dtype, device, stride or scale is wrong, or (on the CPU) a slot
            lies past the cache; a GPU does not write such a token.
        UnsupportedKernelConfig: a cache of another quantised dtype, an input that requires gradients.
        In both cases the caches are untouched.
    """
    name = "write_kv_cache"
    scales = {} if k_scale is None and v_scale is None else {"k_scale": k_scale, "v_scale": v_scale}
    signature = (k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    call = _known.get(signature)
    if call is None:
        checks.tensor(name, "k", k, "T, num_kv_heads, head_dim")
        check_write(name, k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
        device_type = "cpu" if k.is_cpu else k.device.type
        kernel = backend.select(name, device_type, k.dtype, k_cache.dtype)
        call = prepared(kernel, k, v, k_cache, v_cache, slot_mapping.long(), **scales)
        _known.keep(call, signature)
    else:
        checks.two_caches(name, k_cache, v_cache, k_scale, v_scale)
    call(k, v, k_cache, v_cache, slot_mapping.long(), **scales)


def check_write(
    name: str,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | float | None,
    v_scale: Tensor | float | None,
) -> None:
    """The checks of a call that writes into the caches, but for k alone."""
    device = k.device
    checks.tensor(name, "v", v, "T, num_kv_heads, head_dim", device)
    checks.caches(name, "k_cache", k_cache, "v_cache", v_cache, device)
    checks.scales(name, k_scale, v_scale, k_cache)
    checks.two_caches(name, k_cache, v_cache, k_scale, v_scale)
    checks.same(name, "v", v, "k", k)
    shape = k.shape
    num_blocks, block_size, num_kv_heads, head_dim = k_cache.shape
    if shape[1] != num_kv_heads or shape[2] != head_dim:
        expected = f"of shape (T, {num_kv_heads}, {head_dim}) like the cache"
        raise checks.wrong(name, "k", expected, f"shape {tuple(shape)}")
    checks.exactly(name, "slot_mapping", slot_mapping, (shape[0],), device, _SLOT_DTYPES)
    if k.is_cpu:
        checks.slots(name, slot_mapping, num_blocks * block_size)
