"""Attention over Transformers' ordinary caches, dynamic and static, read where they lie.

Such a cache is (B, KVH, T, D) in any layout whose sequences are a whole number of rows apart. Seen as one
long column of rows, each sequence's keys are a run in it, and left padding only moves the run's beginning:
nothing is copied, and no kernel has to know of padding.

The layers of a forward mostly have tensors of one layout. How these are seen, and the kernel for them, is
worked out in the first such layer and kept with the plan, that is, for one forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octavo.errors import UnsupportedKernelConfig
from octavo.integrations.transformers import stock
from octavo.integrations.transformers.masks import say_once
from octavo.integrations.transformers.plan import Plan, from_rows
from octavo.kernels import backend, known_calls
from octavo.kernels.checks import MAX_HEAD_DIM
from octavo.kernels.known_calls import prepared
from octavo.kernels.triton import SHORT

# On a GPU a run's length comes from the lengths; slots that are no power of two say that it is one.
_RUN = 3
# Keys and values of a layer, below which reading them takes a GPU less time than launching our kernels takes
# Python: at the 4.5 TB/s of an H200, 7 microseconds.
_LAUNCH_BOUND_BYTES = 32 << 20

_Seen = tuple[tuple[int, ...], tuple[int, ...]]


def attend(
    module: torch.nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor | None:
    """q (B, H, Q, D) over k and v (B, KVH, T, D), in the rows and keys of `plan`; returns (B, Q, H, D).

    None when no kernel has these head dimensions, which is logged, once, or keys and values of two dtypes, as
    autocast leaves them: it is sdpa that then casts.

    Raises:
        UnsupportedKernelConfig: the plan is of other sequences or keys.
    """
    if torch.compiler.is_compiling():
        if not _has_kernel(module, q, k, v):
            return None
        check(module, q, k, plan)
        window = -1 if plan.window is None else plan.window
        out: Tensor = torch.ops.octavo.dense_attention(
            q, k, v, plan.rows, _scale(q, scale), plan.is_causal, window, softcap or 0.0, sinks
        )
        return out
    like = (
        q.shape, q.stride(), q.dtype, k.shape, k.stride(), k.dtype, v.shape, v.stride(), v.dtype, scale,
        softcap, sinks if sinks is None else sinks.dtype, known_calls.num_forgotten,
    )  # fmt: skip
    call = plan.calls.get(like)
    if call is None:
        call = plan.calls[like] = _call(module, q, k, v, plan, scale, softcap, sinks)
    return call(q, k, v, sinks)


def check(module: torch.nn.Module, q: Tensor, k: Tensor, plan: Plan) -> None:
    """That the plan is of these sequences and keys; UnsupportedKernelConfig when it is not."""
    if plan.num_slots != k.shape[2] or plan.batch != q.shape[0]:
        raise UnsupportedKernelConfig(
            f"attn_implementation='octavo': {type(module).__name__} attends {q.shape[0]} sequences over "
            f"{k.shape[2]} keys, and its mask is of {plan.batch} sequences over {plan.num_slots}. Use "
            "attn_implementation='sdpa' for this model."
        )


def _call(
    module: torch.nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Callable[..., Tensor | None]:
    """What attends tensors like these in this forward, called with (q, k, v, sinks)."""
    check(module, q, k, plan)
    if q.is_cuda and q.shape[2] == 1 and is_launch_bound(k, plan, softcap, sinks):
        return stock.Decode(scale, is_grouped=q.shape[1] != k.shape[1])
    if not _has_kernel(module, q, k, v):
        return _nothing
    return _Call(q, k, v, plan, _scale(q, scale), softcap or 0.0)


def _nothing(*_: Tensor | None) -> None:
    """Where no kernel fits."""


def _scale(q: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(q.shape[3]) if scale is None else scale


def is_launch_bound(key: Tensor, plan: Plan, softcap: float | None, sinks: Tensor | None) -> bool:
    """Whether a decoding step is left to torch's operator, which C++ launches: few keys, none hidden."""
    return (
        plan.is_full
        and (plan.window is None or plan.window >= plan.num_slots)
        and softcap is None
        and sinks is None
        and 2 * key.nbytes < _LAUNCH_BOUND_BYTES
    )


def _has_kernel(module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor) -> bool:
    if k.dtype != v.dtype:
        return False
    head_dim = q.shape[3]
    if head_dim <= MAX_HEAD_DIM and v.shape[3] == head_dim:
        return True
    say_once(
        f"octavo: {type(module).__name__} runs as sdpa: no kernel for head dimensions of {head_dim} in "
        f"queries and {v.shape[3]} in values (equal, and at most {MAX_HEAD_DIM})"
    )
    return False


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
    plan = from_rows(rows, q.shape[2], k.shape[2], None if window < 0 else window, is_causal)
    return _Call(q, k, v, plan, scale, softcap)(q, k, v, sinks)


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


class _Call:
    """The kernel, for tensors laid out like these, over the keys of one plan. It keeps none of the three."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, scale: float, softcap: float) -> None:
        batch, num_heads, num_queries, head_dim = q.shape
        num_kv_heads, num_slots = k.shape[1:3]
        facts = (q.device.type, q.dtype, k.dtype, head_dim)
        room = backend.implementation_of("varlen_attention", *facts)
        self._kernel = backend.select("varlen_attention", *facts)
        self._is_known = False
        # One that was prepared for few rows looks at nothing of its tensors but where they begin: once it has
        # seen how they lie, it is given them as they are.
        self._by_address: Callable[..., None] | None = None
        self._shape = batch, num_queries, num_heads, head_dim

        # How the kernel sees what is there, or a copy by token: shapes and strides.
        along, heads, slots, dims = q.stride()
        self._rows: _Seen | None = None
        if num_queries == 1:
            self._rows = (batch, num_heads, head_dim), (along, heads, dims)
        elif batch == 1:
            self._rows = (num_queries, num_heads, head_dim), (slots, heads, dims)
        is_alone = batch == 1 and plan.leftpad is None
        # A prompt's kernel is compiled for the distance between heads, which in a cache has its length in it.
        self._by_token = room == "triton" and num_queries > SHORT
        self._is_packed = self._by_token and is_alone
        self._is_copied = not is_alone and room != "reference" and (self._by_token or not _is_column(k, v))
        copied = num_slots * num_kv_heads * head_dim, head_dim, num_kv_heads * head_dim, 1

        def seen(x: Tensor) -> _Seen:
            along, heads, row, dims = copied if self._is_copied else x.stride()
            if room == "reference":
                return (batch, num_slots, num_kv_heads, head_dim), (along, row, heads, dims)
            if is_alone:
                return (min(plan.max_keys, num_slots), num_kv_heads, head_dim), (row, heads, dims)
            # All rows of the cache, counted through: blocks of `run` slots that begin one row apart.
            run = min(_RUN, num_slots) if room == "triton" else num_slots
            num_rows = (batch - 1) * (along // row) + num_slots
            return (num_rows - run + 1, run, num_kv_heads, head_dim), (row, row, heads, dims)

        self._keys, self._values = seen(k), seen(v)
        leftpad, table, cu_seqlens_k = None, None, plan.cu_seqlens_k
        if room == "reference":
            table = torch.arange(batch, dtype=torch.int32, device=q.device)[:, None]
            leftpad, cu_seqlens_k = plan.leftpad, plan.padded_cu_seqlens_k()
        elif not is_alone:
            along, _, row, _ = copied if self._is_copied else k.stride()
            table = plan.first_rows(along // row)
        self._lens = plan.cu_seqlens_q, cu_seqlens_k, num_queries, plan.max_keys
        self._options: dict[str, Any] = {
            "softmax_scale": scale, "causal": plan.is_causal,
            "window_size": (-1 if plan.window is None else plan.window - 1, -1), "softcap": softcap,
            "alibi_slopes": None, "block_table": table, "lse": None, "k_scale": None, "v_scale": None,
            "leftpad": leftpad, "batch_invariant": False,
        }  # fmt: skip

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        sinks = sinks if sinks is None else sinks.detach()
        if self._by_address is not None:
            out = q.new_empty(self._shape)
            self._by_address(q, k, v, *self._lens, out=out, sinks=sinks, **self._options)
            return out
        if self._is_copied:
            k, v = k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
        rows = q.transpose(1, 2).flatten(0, 1) if self._rows is None else q.as_strided(*self._rows)
        k, v = k.as_strided(*self._keys), v.as_strided(*self._values)
        if self._by_token:
            rows = rows.contiguous()
        if self._is_packed:
            k, v = k.contiguous(), v.contiguous()
        out = q.new_empty(rows.shape)
        given = rows, k, v, *self._lens
        options = {"out": out, "sinks": sinks, **self._options}
        if not (self._is_known or self._by_token):
            kernel, self._is_known = prepared(self._kernel, *given, **options), True
            if kernel is not self._kernel and not self._is_copied and self._rows is not None:
                self._by_address = kernel
            self._kernel = kernel
        self._kernel(*given, **options)
        return out.view(self._shape)


def _is_column(k: Tensor, v: Tensor) -> bool:
    batch_apart, _, row, element = k.stride()
    return (
        element == 1 and row > 0 and batch_apart % row == 0 and v.stride(3) == 1
        and v.stride(2) > 0 and v.stride(0) * row == batch_apart * v.stride(2)
    )  # fmt: skip
