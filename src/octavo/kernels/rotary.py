"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels import backend, checks
from octavo.kernels.argument_types import names_wrong_types


@names_wrong_types
def apply_rotary(
    q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor, *, interleaved: bool = False
) -> None:
    """Turn the first ``rotary_dim`` channels of every head of q and k by their token's angles, in place.

    Channel pairs (a, b) become (a cos - b sin, b cos + a sin). Which channels make a pair::

        interleaved=False  (GPT-NeoX, Hugging Face Llama)   0 with r/2, 1 with r/2 + 1, ...
        interleaved=True   (GPT-J)                          0 with 1,   2 with 3,       ...

    Args:
        q: (T, num_heads, head_dim), k: (T, num_kv_heads, head_dim), of one dtype; any strides with a
            contiguous last dimension (slices of a fused qkv are fine). Changed in place; channels from
            rotary_dim on are left alone.
        cos_sin_cache: (max_position, rotary_dim) float32; a row is rotary_dim / 2 cosines, then as many
            sines.
        positions: (T,) int64, each from 0 to max_position - 1.

    Raises:
        KernelArgumentError: a shape, dtype, device or stride is wrong, or (on the CPU) a position has no row.
    """
    name = "apply_rotary"
    device = q.device
    check_rotary(name, q, k, cos_sin_cache, positions, interleaved)
    kernel = backend.select(name, "cpu" if q.is_cpu else device.type, q.dtype)
    kernel(q, k, cos_sin_cache, positions, interleaved)


def check_rotary(
    name: str, q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor, interleaved: bool
) -> None:
    """The checks of a call that turns q and k."""
    device = q.device
    checks.tensor(name, "q", q, "T, num_heads, head_dim")
    checks.tensor(name, "k", k, "T, num_kv_heads, head_dim", device)
    num_tokens, _, head_dim = q.shape
    if k.shape[0] != num_tokens or k.shape[2] != head_dim:
        expected = f"of shape ({num_tokens}, num_kv_heads, {head_dim}) like q"
        raise checks.wrong(name, "k", expected, f"shape {tuple(k.shape)}")
    if k.dtype != q.dtype:
        raise checks.wrong(name, "k.dtype", f"{q.dtype} like q", k.dtype)
    checks.tensor(name, "cos_sin_cache", cos_sin_cache, "max_position, rotary_dim", device)
    num_positions, rotary_dim = cos_sin_cache.shape
    if cos_sin_cache.dtype != torch.float32:
        raise checks.wrong(name, "cos_sin_cache.dtype", "torch.float32", cos_sin_cache.dtype)
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise checks.wrong(name, "rotary_dim", f"even and at most head_dim = {head_dim}", rotary_dim)
    checks.flag(name, "interleaved", interleaved)
    checks.exactly(name, "positions", positions, (num_tokens,), device, (torch.int64,))
    if q.is_cpu:
        checks.positions(name, positions, num_positions)
