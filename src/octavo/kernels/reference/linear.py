"""A matrix product whose rows have the same bits in every batch."""

from __future__ import annotations

import torch
from torch import Tensor


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias`, row by row: summed in float32 (float64 for float64), rounded once."""
    wide = torch.promote_types(x.dtype, torch.float32)
    wide_weight = weight.to(wide)
    rows = [wide_weight @ row for row in x.to(wide)]
    out = torch.stack(rows) if rows else x.new_empty((0, weight.shape[0]), dtype=wide)
    return (out if bias is None else out + bias.to(wide)).to(x.dtype)
