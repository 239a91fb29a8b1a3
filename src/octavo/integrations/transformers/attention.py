"""The attention functions that Transformers' models call, one per layer and step: as little as possible."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.errors import UnsupportedKernelConfig
from octavo.integrations.transformers import dense, paged, stock
from octavo.integrations.transformers import plan as plans
from octavo.integrations.transformers.masks import say_once

Output = tuple[Tensor, Tensor | None]


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **kwargs: Any,
) -> Output:
    """`attn_implementation="octavo"`: attention of query (B, H, Q, D) over key and value (B, KVH, T, D).

    In continuous batching B is 1, sequences are laid end to end, and lengths, indices or a block table come
    as keyword arguments: `paged.py`. Otherwise `attention_mask` is what `octavo_mask` made, None, or a dense
    mask of somebody else's. `s_aux` are sinks (H,).

    Returns (output (B, Q, H, D), None). With gradients, with dropout, over a dense mask or a position bias,
    and where no kernel fits, the output is that of `sdpa`, or of the model's own `eager` for softcap and
    sinks; a head dimension without a kernel is logged, once, as a warning.

    Raises:
        UnsupportedKernelConfig: the model changed the mask or the keys on their way here.
    """
    if cu_seq_lens_q is not None and (
        attention_mask is None or plans.is_plan(attention_mask) or "write_index" in kwargs
    ):
        attend = paged.attend_apart if torch.compiler.is_compiling() else paged.attend
        out = attend(
            module, query, key, value, cu_seq_lens_q,
            scaling=scaling, sliding_window=sliding_window, softcap=softcap, sinks=s_aux, is_causal=is_causal,
            **kwargs,
        )  # fmt: skip
        return out, None
    plan = plans.carried_by(attention_mask)
    if plan is None:
        plan = _plan(module, query, key, attention_mask, sliding_window, is_causal)
    if plan is not None:
        if not dropout and position_bias is None and not stock.needs_gradients(query, key, value, s_aux):
            found = dense.attend(module, query, key, value, plan, scaling, softcap, s_aux)
            if found is not None:
                return found, None
        dense.check(module, query, key, plan)
    if kwargs.get("output_attentions"):
        say_once("octavo: attention weights are not returned; attn_implementation='eager' returns them")
    kwargs = {} if position_bias is None else {"position_bias": position_bias}
    return stock.attend(
        module, query, key, value, plans.undeferred(attention_mask) if plan is None else plan,
        dropout=dropout, scaling=scaling, softcap=softcap, sinks=s_aux, is_causal=is_causal, **kwargs,
    )  # fmt: skip


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **kwargs: Any,
) -> Output:
    """`paged|octavo`, under which Transformers 5.17 runs continuous batching.

    Raises:
        UnsupportedKernelConfig: there is no paged cache, as in an ordinary forward.
    """
    if cu_seq_lens_q is None or kwargs.get("cache") is None:
        raise UnsupportedKernelConfig(
            "attn_implementation='paged|octavo' is for continuous batching and was called without its cache. "
            "Use attn_implementation='octavo' for generate and for a plain forward."
        )
    out = paged.attend(
        module, query, key, value, cu_seq_lens_q,
        scaling=scaling, sliding_window=sliding_window, softcap=softcap, sinks=s_aux, **kwargs,
    )  # fmt: skip
    return out, None


def _plan(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    window: int | None,
    is_causal: bool | None,
) -> plans.Plan | None:
    """Which keys the rows see; None where only a dense mask says it, or sdpa's rule for no mask."""
    batch, _, num_queries, _ = query.shape
    num_slots = key.shape[2]
    if mask is None:
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        if num_queries == 1:
            causal, window = False, None
        elif causal and num_queries != num_slots:
            return None  # sdpa aligns this triangle at the top left
        if not causal:
            window = None
        made = plans.unpadded(batch, num_queries, num_slots, num_slots, window, query.device, causal)
        return plans.of_mask(made, num_queries, num_slots, window, causal)
    return plans.of_mask(mask, num_queries, num_slots, window) if plans.is_plan(mask) else None
