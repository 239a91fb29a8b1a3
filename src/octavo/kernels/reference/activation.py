"""The activations of the MLP."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def silu_and_mul(x: Tensor, up: Tensor | None = None) -> Tensor:
    """`silu(gate) * up` of `x = [gate | up]`, or of `x` and `up` apart."""
    gate, up = x.chunk(2, dim=-1) if up is None else (x, up)
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    return (functional.silu(gate.to(compute)) * up.to(compute)).to(x.dtype)


def gelu_tanh(x: Tensor) -> Tensor:
    """`x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))`."""
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    return functional.gelu(wide, approximate="tanh").to(x.dtype)
