"""Matrix products with the weight of each row's group."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.grouped_linear import PackedExperts


def grouped_linear(
    x: Tensor,
    w: PackedExperts,
    offsets: Tensor,
    sources: Tensor | None,
    targets: Tensor | None,
    scale: Tensor | None,
) -> Tensor:
    """`out[targets[i]] = scale[i] * (x[sources[i]] @ w[e].T)`, summed in float32, or float64 for float64."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = (x if sources is None else x[sources]).to(wide)
    out = torch.empty((rows.shape[0], w.shape[1]), dtype=wide, device=x.device)
    bounds = offsets.tolist()
    for expert in range(w.shape[0]):
        mine = slice(bounds[expert], bounds[expert + 1])
        if mine.start < mine.stop:
            out[mine] = rows[mine] @ w[expert].dense().to(wide).T
    if scale is not None:
        out *= scale[:, None]
    if targets is not None:
        out = torch.empty_like(out).index_copy_(0, targets, out)
    return out.to(x.dtype)
