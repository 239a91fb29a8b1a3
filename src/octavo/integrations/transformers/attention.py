"""The attention functions that Transformers' models call, one per layer and step: as little as possible."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.errors import UnsupportedKernelConfig
from octavo.integrations.transformers import dense, paged, stock
from octavo.integrations.transformers import plan as plans
from octavo.integrations.transformers.masks import say_once
from octavo.kernels.checks import MAX_HEAD_DIM

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
    if query.shape[2] == 1 and query.is_cuda and cu_seq_lens_q is None:
        known = plans.carried_by(attention_mask)
        if (
            known is not None
            and known.num_slots == key.shape[2]
            and known.batch == query.shape[0]
            and _is_launch_bound(key, known, softcap, s_aux)
            and not dropout
            and position_bias is None
        ):
            return stock.decode(query, key, value, scaling), None
    is_packed = attention_mask is None or plans.is_plan(attention_mask) or "write_index" in kwargs
    if cu_seq_lens_q is not None and is_packed:
        attend = paged.attend_apart if torch.compiler.is_compiling() else paged.attend
        out = attend(
            module, query, key, value, cu_seq_lens_q,
            scaling=scaling, sliding_window=sliding_window, softcap=softcap, sinks=s_aux, is_causal=is_causal,
            **kwargs,
        )  # fmt: skip
        return out, None
    plan = _plan(module, query, key, attention_mask, sliding_window, is_causal)
    if (
        plan is not None
        and not (query.shape[2] == 1 and query.is_cuda and _is_launch_bound(key, plan, softcap, s_aux))
        and not dropout
        and position_bias is None
        and not stock.needs_gradients(query, key, value, s_aux)
        and _has_kernel(module, query, value)
    ):
        return dense.attend(query, key, value, plan, scaling, softcap, s_aux), None
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
    if not plans.is_plan(mask):
        return None
    plan = plans.of_mask(mask, num_queries, num_slots, window)
    if plan.num_slots != num_slots or plan.batch != batch:
        raise UnsupportedKernelConfig(
            f"attn_implementation='octavo': {type(module).__name__} attends {batch} sequences over "
            f"{num_slots} keys, and its mask is of {plan.batch} sequences over {plan.num_slots}. Use "
            "attn_implementation='sdpa' for this model."
        )
    return plan


# Keys and values of a layer, below which reading them takes a GPU less time than launching our kernels takes
# Python: at the 4.5 TB/s of an H200, 7 microseconds.
_LAUNCH_BOUND_BYTES = 32 << 20


def _is_launch_bound(key: Tensor, plan: plans.Plan, softcap: float | None, sinks: Tensor | None) -> bool:
    """Whether a decoding step is left to torch's operator, which C++ launches: few keys, none hidden."""
    return (
        plan.is_full
        and (plan.window is None or plan.window >= plan.num_slots)
        and softcap is None
        and sinks is None
        and 2 * key.nbytes < _LAUNCH_BOUND_BYTES
    )


def _has_kernel(module: torch.nn.Module, query: Tensor, value: Tensor) -> bool:
    head_dim = query.shape[3]
    if head_dim <= MAX_HEAD_DIM and value.shape[3] == head_dim:
        return True
    say_once(
        f"octavo: {type(module).__name__} runs as sdpa: no kernel for head dimensions of {head_dim} in "
        f"queries and {value.shape[3]} in values (equal, and at most {MAX_HEAD_DIM})"
    )
    return False
