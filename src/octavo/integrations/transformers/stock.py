"""Where Octavo's kernels step aside: Transformers' own attention, with the mask that it needs."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from octavo.errors import UnsupportedKernelConfig
from octavo.integrations.transformers.plan import Plan

Output = tuple[Tensor, Tensor | None]


def needs_gradients(*tensors: Tensor | None) -> bool:
    """Whether autograd wants a graph behind what these are used for; Octavo's kernels leave none."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


class Decode:
    """sdpa of one new token that sees every key: torch's operator, and no more Python than that."""

    def __init__(self, scaling: float | None, *, is_grouped: bool) -> None:
        self._options: dict[str, Any] = {"scale": scaling}
        if is_grouped:
            self._options["enable_gqa"] = True

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, _: None = None) -> Tensor:
        """q (B, H, 1, D) over k and v (B, KVH, T, D); returns (B, 1, H, D)."""
        out = functional.scaled_dot_product_attention(q, k, v, **self._options)
        return out.transpose(1, 2).contiguous()


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Plan | Tensor | None,
    *,
    dropout: float,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    is_causal: bool | None,
    **kwargs: Any,
) -> Output:
    """`sdpa`, or the model's own `eager` where sdpa has no softcap and no sinks. Differentiable.

    Raises:
        UnsupportedKernelConfig: softcap or sinks, and the model's module has no eager attention.
    """
    if softcap is None and sinks is None:
        if isinstance(mask, Plan):
            is_triangle = mask.num_queries in (1, mask.num_slots)
            hides = mask.window is not None and mask.window < mask.num_slots
            is_causal = mask.is_causal
            mask = None if mask.is_full and (is_triangle or not is_causal) and not hides else mask.dense()
        out: Output = sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
        return out
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise UnsupportedKernelConfig(
            f"attn_implementation='octavo': {type(module).__name__} needs softcap or sinks outside of "
            "Octavo's kernels (gradients, dropout, or a dense mask), and its module has no eager attention"
        )
    if isinstance(mask, Plan):
        mask = mask.dense()
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(
            ~mask, torch.finfo(query.dtype).min
        )
    if softcap is not None:
        kwargs["softcap"] = softcap
    found: Output = eager(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)
    return found
