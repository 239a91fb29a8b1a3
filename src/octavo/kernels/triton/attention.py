"""Attention on a GPU: which kernels a call needs. A sequence's own number of rows decides, on the device.

Sequences of at most SHORT query rows are `decode.py`'s, the others `prefill.py`'s or, on a Hopper,
`prefill_hopper.py`'s: each kernel skips what is not its own, so a mixed batch is two launches over the same
arguments, and no length is read by the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.known_calls import prepared_by
from octavo.kernels.triton import decode, is_interpreted, on_device_of, on_its_device, prefill
from octavo.kernels.triton.attention_arguments import arguments
from octavo.kernels.triton.tiles import SHORT

_QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_CACHE_DTYPES = (*_QUERY_DTYPES, torch.float8_e4m3fn, torch.int8)
_MAX_HEAD_DIM = 256


def supports(q_dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int) -> str | None:
    """None when these kernels can do it, else why not."""
    if q_dtype not in _QUERY_DTYPES:
        return f"no Triton kernel for {q_dtype}"
    if cache_dtype not in _CACHE_DTYPES:
        return f"no Triton kernel for {cache_dtype}"
    if head_dim > _MAX_HEAD_DIM:
        return f"head_dim is over {_MAX_HEAD_DIM}"
    if cache_dtype == torch.float8_e4m3fn and not _reads_float8():
        return "this GPU has no float8: that takes compute capability 8.9"
    return None


def _reads_float8() -> bool:
    """Whether Triton converts from float8_e4m3fn for the current device."""
    if is_interpreted() or torch.version.hip is not None or not torch.cuda.is_available():
        return True
    return torch.cuda.get_device_capability() >= (8, 9)


def _division(q: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int) -> tuple[bool, int]:
    """Whether the kernel of short sequences is needed; the longest sequence there may be, 0 for nothing."""
    num_rows, batch = q.shape[0], cu_seqlens_q.shape[0] - 1
    if num_rows == 0 or batch < 1:
        return False, 0
    longest = min(max_seqlen_q, num_rows)
    # With more rows than that all sequences are longer, unless q is padded: then one launch does it anyway.
    return longest <= SHORT or num_rows <= (batch - 1) * longest + SHORT, longest


def _attend_long(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    longest: int,
    max_seqlen_k: int,
    **options: Any,
) -> None:
    hopper = _hopper()
    asked = (
        "block_table", "out", "softmax_scale", "alibi_slopes", "sinks", "k_scale", "v_scale", "leftpad",
        "batch_invariant",
    )  # fmt: skip
    fits = (
        not isinstance(hopper, str)
        and hopper.supports_hopper(
            q, k, v, max_seqlen_q=longest, **{name: options[name] for name in asked}
        ) is None
    )  # fmt: skip
    kernel = hopper.prefill_attention if fits else prefill.prefill_attention
    kernel(q, k, v, cu_seqlens_q, cu_seqlens_k, longest, max_seqlen_k, **options)


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    **options: Any,
) -> Callable[..., None]:
    """`varlen_attention` for calls of this signature: the launches for short sequences are ready.

    Those for long ones depend on more than a signature has: whether tensors begin where TMA can read them.
    """
    takes_short, longest = _division(q, cu_seqlens_q, max_seqlen_q)
    if not takes_short or options["batch_invariant"]:
        return on_its_device(varlen_attention)
    told = {name: x for name, x in options.items() if name != "batch_invariant"}
    short = decode.prepare(arguments(q, k, v, cu_seqlens_q, cu_seqlens_k, **told), longest, max_seqlen_k)

    def call(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        **options: Any,
    ) -> None:
        given = (
            q, k, v, options["out"], options["lse"], cu_seqlens_q, cu_seqlens_k, options["block_table"],
            options["leftpad"], options["alibi_slopes"], options["sinks"], options["k_scale"],
            options["v_scale"],
        )  # fmt: skip
        short(*[x for x in given if isinstance(x, Tensor)])
        if longest > SHORT:
            with on_device_of(q):
                _attend_long(q, k, v, cu_seqlens_q, cu_seqlens_k, longest, max_seqlen_k, **options)

    return call


@prepared_by(prepare)
def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    block_table: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    leftpad: Tensor | None = None,
    batch_invariant: bool = False,
) -> None:
    """Fill `out` (Tq, H, D) and `lse` (H, Tq); `octavo.kernels.attention` says what they mean."""
    options: dict[str, Any] = {
        "softmax_scale": softmax_scale, "causal": causal, "window_size": window_size, "softcap": softcap,
        "alibi_slopes": alibi_slopes, "sinks": sinks, "block_table": block_table, "out": out, "lse": lse,
        "k_scale": k_scale, "v_scale": v_scale, "leftpad": leftpad, "batch_invariant": batch_invariant,
    }  # fmt: skip
    takes_short, longest = _division(q, cu_seqlens_q, max_seqlen_q)
    seqlens = cu_seqlens_q, cu_seqlens_k, longest, max_seqlen_k
    if takes_short:
        decode.decode_attention(q, k, v, *seqlens, **options)
    if longest > SHORT:
        _attend_long(q, k, v, *seqlens, **options)


@functools.cache
def _hopper() -> Any:
    """The module of the kernel for Hopper GPUs, or why there is none."""
    try:
        from octavo.kernels.triton import prefill_hopper
    except (ImportError, AttributeError) as error:  # it is written in Gluon, which moves with every release
        return f"prefill_hopper does not import ({error})"
    return prefill_hopper
