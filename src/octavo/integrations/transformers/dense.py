"""Attention over Transformers' ordinary caches, dynamic and static, read where they lie.

Such a cache is (B, KVH, T, D) in any layout whose sequences are a whole number of rows apart. Seen as one
long column of rows, each sequence's keys are a run in it, and left padding only moves the run's beginning:
nothing is copied, and no kernel has to know of padding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from octavo.integrations.transformers import plan as plans
from octavo.integrations.transformers.plan import Plan
from octavo.kernels import backend

# With more rows than that a prompt's kernel runs, which is compiled for the distance between heads.
_SHORT = 8
# On a GPU a run's length comes from the lengths; slots that are no power of two say that it is one.
_RUN = 3


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """q (B, H, Q, D) over k and v (B, KVH, T, D), in the rows and keys of `plan`; returns (B, Q, H, D)."""
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    if torch.compiler.is_compiling():
        window = -1 if plan.window is None else plan.window
        out: Tensor = torch.ops.octavo.dense_attention(
            q, k, v, plan.rows, scale, plan.is_causal, window, softcap or 0.0, sinks
        )
        return out
    return _attend(q, k, v, plan, scale, softcap or 0.0, sinks)


@torch.library.custom_op("octavo::dense_attention", mutates_args=())
def _compiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    scale: float,
    is_causal: bool,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """The same as one operator, which `torch.compile` does not look into."""
    plan = plans.from_rows(rows, q.shape[2], k.shape[2], None if window < 0 else window, is_causal)
    return _attend(q, k, v, plan, scale, softcap, sinks)


@_compiled.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    scale: float,
    is_causal: bool,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    batch, num_heads, num_queries, head_dim = q.shape
    return q.new_empty((batch, num_queries, num_heads, head_dim))


def _attend(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    batch, num_heads, num_queries, head_dim = q.shape
    device_type = q.device.type
    facts = (device_type, q.dtype, k.dtype, head_dim)
    kernel = backend.select("varlen_attention", *facts)
    room = backend.implementation_of("varlen_attention", *facts)
    if num_queries == 1:
        rows = q.squeeze(2)
    elif batch == 1:
        rows = q[0].transpose(0, 1)
    else:
        rows = q.transpose(1, 2).reshape(batch * num_queries, num_heads, head_dim)
    out = torch.empty((batch * num_queries, num_heads, head_dim), dtype=q.dtype, device=q.device)

    leftpad, table, cu_seqlens_k = None, None, plan.cu_seqlens_k
    if room == "reference":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        table = torch.arange(batch, dtype=torch.int32, device=q.device)[:, None]
        leftpad, cu_seqlens_k = plan.leftpad, plan.padded_cu_seqlens_k()
    else:
        if room == "triton" and num_queries > _SHORT:
            rows, k, v = rows.contiguous(), _by_token(k), _by_token(v)
        if batch == 1 and plan.leftpad is None:
            k, v = k[0].transpose(0, 1), v[0].transpose(0, 1)
        else:
            if not _is_column(k, v):
                k, v = k.contiguous(), v.contiguous()
            rows_apart = k.stride(0) // k.stride(2)
            table = plan.first_rows(rows_apart)
            slots = min(_RUN, k.shape[2]) if room == "triton" else k.shape[2]
            k, v = _column(k, rows_apart, slots), _column(v, rows_apart, slots)
    kernel(
        rows, k, v, plan.cu_seqlens_q, cu_seqlens_k, num_queries, plan.max_keys,
        softmax_scale=scale, causal=plan.is_causal,
        window_size=(-1 if plan.window is None else plan.window - 1, -1),
        softcap=softcap, alibi_slopes=None, sinks=None if sinks is None else sinks.detach(),
        block_table=table, out=out, lse=None, leftpad=leftpad,
    )  # fmt: skip
    return out.view(batch, num_queries, num_heads, head_dim)


def _by_token(x: Tensor) -> Tensor:
    """(B, KVH, T, D) with the heads of a token side by side, copied if they are not."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _is_column(k: Tensor, v: Tensor) -> bool:
    batch_apart, _, row, element = k.stride()
    return (
        element == 1 and row > 0 and batch_apart % row == 0 and v.stride(3) == 1
        and v.stride(2) > 0 and v.stride(0) * row == batch_apart * v.stride(2)
    )  # fmt: skip


def _column(x: Tensor, rows_apart: int, slots: int) -> Tensor:
    """All rows of a cache, counted through: (rows - slots + 1, slots, KVH, D), blocks one row apart."""
    batch, num_heads, num_tokens, head_dim = x.shape
    num_rows = (batch - 1) * rows_apart + num_tokens
    _, head, row, _ = x.stride()
    shape = (num_rows - slots + 1, slots, num_heads, head_dim)
    return x.as_strided(shape, (row, row, head, 1))
