"""Feed-forward layers: the gated one of Llama-like models, the plain one of GPT-2."""

from __future__ import annotations

import torch

from octavo.kernels import gelu_tanh, silu_and_mul
from octavo.layers.linear import Linear
from octavo.layers.norm import RMSNorm


class GatedMLP:
    """down(silu(gate(x)) * up(x)), with gate and up fused in one weight: gate's rows first."""

    __slots__ = ("down", "gate_up")

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self.gate_up = gate_up
        self.down = down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x (T, hidden) -> (T, hidden)."""
        return self.down(silu_and_mul(self.gate_up(x)))

    def after_norm(
        self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The stream x + residual with this layer of its norm, as two that may be left to be added."""
        inner, residual = self.gate_up.after_norm(norm, x, residual, gated=True)
        return self.down.onto(inner, residual)


class GeluMLP:
    """down(gelu(up(x))), the GELU in its tanh form."""

    __slots__ = ("down", "up")

    def __init__(self, up: Linear, down: Linear) -> None:
        self.up = up
        self.down = down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x (T, hidden) -> (T, hidden)."""
        return self.down(gelu_tanh(self.up(x)))
