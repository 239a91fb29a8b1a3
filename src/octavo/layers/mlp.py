"""The gated feed-forward layer of Llama-like models."""

from __future__ import annotations

import torch

from octavo.kernels import silu_and_mul
from octavo.layers.linear import Linear


class GatedMLP:
    """down(silu(gate(x)) * up(x)), with gate and up fused in one weight: gate's rows first."""

    __slots__ = ("down", "gate_up")

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self.gate_up = gate_up
        self.down = down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x (T, hidden) -> (T, hidden)."""
        return self.down(silu_and_mul(self.gate_up(x)))
