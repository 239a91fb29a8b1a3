"""RMS normalisation, alone or with the residual stream added first."""

from __future__ import annotations

import torch

from octavo.kernels import rms_norm


class RMSNorm:
    """x / rms(x) * weight over the last dimension, computed in float32; weight (K,) in the dtype of x."""

    __slots__ = ("eps", "weight")

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual)."""
        return rms_norm(x, self.weight, self.eps, residual=residual)
