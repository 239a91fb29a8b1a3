"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """`(out, new_residual)`; the sum is rounded to the dtype of `x` before it is normalised."""
    new_residual = None if residual is None else x + residual
    summed = x if new_residual is None else new_residual
    wide = summed.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * weight.to(wide.dtype)).to(x.dtype), new_residual
