"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rotary(
    q: Tensor,
    k: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    interleaved: bool,
    out: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Turn the first `rotary_dim` channels of every head of `q` and `k`, in place or into `out`."""
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    cos, sin = cos_sin_cache[positions].to(compute)[:, None, :].chunk(2, dim=-1)  # (T, 1, rotary_dim / 2)
    half = cos.shape[-1]
    if out is not None:
        q, k = out[0].copy_(q), out[1].copy_(k)
    for heads in (q, k):
        if interleaved:
            first, second = heads[..., 0 : 2 * half : 2], heads[..., 1 : 2 * half : 2]
        else:
            first, second = heads[..., :half], heads[..., half : 2 * half]
        a, b = first.to(compute), second.to(compute)
        turned = a * cos - b * sin, b * cos + a * sin
        first.copy_(turned[0])
        second.copy_(turned[1])
