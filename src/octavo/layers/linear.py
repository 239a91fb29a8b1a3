"""A linear layer over a packed weight."""

from __future__ import annotations

import torch

from octavo.kernels.linear import PackedWeight, linear, linear_onto, norm_linear
from octavo.layers.norm import RMSNorm


class Linear:
    """y = x W^T + b. Projections of one input are fused by stacking their rows in one weight (N, K)."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: PackedWeight, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x (T, K) contiguous -> (T, N)."""
        return linear(x, self.weight, self.bias)

    def onto(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The residual stream with this layer of x, as the two that `after_norm` takes and adds."""
        if self.weight.form != "dense":
            return self(x), residual
        return linear_onto(x, residual, self.weight, self.bias)

    def after_norm(
        self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None, *, gated: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(this layer of norm(x + residual), x + residual); no residual counts as 0.

        gated: the rows are gate's and up's, and silu(gate) * up of them comes out.
        """
        return norm_linear(x, residual, norm.weight, norm.eps, self.weight, self.bias, gated=gated)
