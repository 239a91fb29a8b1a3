"""What `warm_up` launches of the products of few rows: those of a decoder's layers, and its head's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from octavo.kernels.linear import PackedWeight
    from octavo.kernels.triton.warm_up import ModelShape


def jobs(model: ModelShape) -> Iterator[Callable[[], object]]:
    """Those that a decoder's layers and head have for few rows, each depth and kind by itself."""
    from octavo.kernels.few_rows import FEW_ROWS
    from octavo.kernels.triton.few_rows_linear import FEW_COLUMNS
    from octavo.kernels.triton.warm_up import powers

    if model.hidden_size is None or model.batch_invariant:
        return
    hidden, attended = model.hidden_size, model.num_heads * model.head_dim
    fused = attended + 2 * model.num_kv_heads * model.head_dim
    found: dict[tuple[int, int, int, bool, bool, bool], None] = {}  # rows, width, depth, norm, gate, bias

    def add(
        rows: int, width: int, depth: int, *, norm: bool = False, gate: bool = False, bias: bool = False
    ) -> None:
        found[rows, min(width, FEW_COLUMNS + 1), depth, norm, gate, bias] = None

    for rows in powers(min(FEW_ROWS, model.max_num_batched_tokens)):
        add(rows, fused, hidden, bias=model.qkv_bias)
        add(rows, fused, hidden, norm=True, bias=model.qkv_bias)
        add(rows, hidden, attended)
        if model.intermediate_size is not None:
            add(rows, model.intermediate_size, hidden, norm=True, gate=True)
            add(rows, hidden, model.intermediate_size)
        if model.vocab_size is not None:
            # More than max_num_seqs, too: prompt_logprobs gives it more than any kernel of ours takes.
            add(rows, model.vocab_size, hidden)
    for rows, width, depth, norm, gate, bias in found:
        yield functools.partial(_product, model, rows, width, depth, norm, gate, bias=bias)
    yield from _products_of_many(model, fused, attended)


def _products_of_many(model: ModelShape, fused: int, attended: int) -> Iterator[Callable[[], object]]:
    """The same for more rows, where a product adds the residual behind it, if it is not left to the norm."""
    from octavo.kernels.few_rows import MANY_ROWS, is_for_many_rows

    assert model.hidden_size is not None
    hidden, inner = model.hidden_size, model.intermediate_size

    def is_ours(rows: int, width: int, depth: int) -> bool:
        # Where the norm is not along (float16), the product behind it is ours by itself.
        return is_for_many_rows(rows, (width, depth), model.device, model.dtype, has_norm=False)

    product, onto = functools.partial(_product, model), functools.partial(_product_onto, model)
    for rows in sorted({min(size, model.max_num_batched_tokens) for size in (8, 16, MANY_ROWS)}):
        attention_adds = is_ours(rows, hidden, attended)
        mlp_adds = inner is not None and is_ours(rows, hidden, inner)
        if is_ours(rows, fused, hidden):
            # The first layer has no residual, others have one where it was left.
            for left in {False, not mlp_adds}:
                qkv = functools.partial(product, rows, fused, hidden, True, False, bias=model.qkv_bias)
                yield functools.partial(qkv, has_residual=left)
        if attention_adds:
            yield functools.partial(onto, rows, hidden, attended)
        if inner is not None and is_ours(rows, 2 * inner, hidden):
            yield functools.partial(product, rows, inner, hidden, True, True, has_residual=not attention_adds)
        if inner is not None and mlp_adds:
            yield functools.partial(onto, rows, hidden, inner)
        if model.vocab_size is not None and is_ours(rows, model.vocab_size, hidden):
            yield functools.partial(product, rows, model.vocab_size, hidden, False, False)


def _product(
    model: ModelShape,
    rows: int,
    width: int,
    depth: int,
    has_norm: bool,
    gated: bool,
    *,
    bias: bool = False,
    has_residual: bool = True,
) -> None:
    from octavo.kernels import linear, norm_linear

    x = torch.zeros((rows, depth), dtype=model.dtype, device=model.device)
    weight = _weight(model, 2 * width if gated else width, depth)
    added = torch.zeros(weight.shape[0], dtype=model.dtype, device=model.device) if bias else None
    if has_norm:
        residual = x if has_residual else None
        norm_linear(x, residual, torch.ones_like(x[0]), 1e-6, weight, added, gated=gated)
    else:
        linear(x, weight, added)


def _product_onto(model: ModelShape, rows: int, width: int, depth: int) -> None:
    from octavo.kernels import linear_onto

    x, residual = (torch.zeros((rows, n), dtype=model.dtype, device=model.device) for n in (depth, width))
    linear_onto(x, residual, _weight(model, width, depth))


def _weight(model: ModelShape, width: int, depth: int) -> PackedWeight:
    from octavo.kernels import pack_weight

    zeros = torch.zeros((width, depth), dtype=model.dtype, device=model.device)
    return replace(pack_weight(zeros, "dense"), at_rest=True)
