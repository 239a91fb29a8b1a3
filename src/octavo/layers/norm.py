"""Normalisation: RMS, alone or with the residual stream added first, and layer norm."""

from __future__ import annotations

import torch
from torch.nn import functional

from octavo.kernels import rms_norm


class RMSNorm:
    """x / rms(x) * weight over the last dimension, computed in float32; weight (K,) in the dtype of x."""

    __slots__ = ("eps", "weight")

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual); no residual counts as 0."""
        if residual is None:
            return self(x), x
        return rms_norm(x, self.weight, self.eps, residual=residual)


class LayerNorm:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension; weight, bias (K,)."""

    __slots__ = ("bias", "eps", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self.bias = bias
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
