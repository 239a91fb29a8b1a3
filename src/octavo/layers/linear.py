"""A linear layer over a packed weight."""

from __future__ import annotations

import torch

from octavo.kernels.linear import PackedWeight, linear


class Linear:
    """y = x W^T + b. Projections of one input are fused by stacking their rows in one weight (N, K)."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: PackedWeight, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x (T, K) contiguous -> (T, N)."""
        return linear(x, self.weight, self.bias)
