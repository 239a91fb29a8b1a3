"""A linear layer with the norm in front of it and the gate behind."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def few_rows_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    is_gated: bool,
    at_rest: bool,
) -> tuple[Tensor, Tensor | None]:
    """`(out, new_residual)`: the product of `x`, or of the RMS norm of `x + residual` (rounded) where given.

    A residual without a norm is added to the product, once that is rounded; there is no new one then.
    Summed in float32 (float64 for float64) and rounded once. `weight` is (N, K), or [gate; up] where gated.
    `at_rest`: nothing writes it any more.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    new_residual = None if residual is None or norm_weight is None else x + residual
    values = (x if new_residual is None else new_residual).to(wide)
    if norm_weight is not None:
        values = functional.rms_norm(values, values.shape[-1:], norm_weight.to(wide), eps)
    out = functional.linear(values, weight.to(wide), None if bias is None else bias.to(wide))
    if is_gated:
        gate, up = out.chunk(2, dim=-1)
        out = functional.silu(gate) * up
    out = out.to(x.dtype)
    return (out + residual if residual is not None and norm_weight is None else out), new_residual
