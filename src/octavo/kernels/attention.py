"""Attention over packed sequences or a paged cache: the FlashAttention contract.

Which keys a row sees
---------------------
Row i of a sequence with Q query rows and K keys stands on key ``i + K - Q``: the mask is aligned at the
*bottom right*, so that the last row stands on the last key. 1 = sees, 0 = does not::

    causal, Q=2, K=5       causal, Q=5, K=2       window (2, 0), Q=3, K=5      window (1, 1), Q=4, K=4
    (a chunk with past)    (rows without keys)
      1 1 1 1 0              0 0  -> out 0,         1 1 1 0 0                    1 1 0 0
      1 1 1 1 1              0 0     lse -inf       0 1 1 1 0                    1 1 1 0
                             0 0                    0 0 1 1 1                    0 1 1 1
                             1 0                                                 0 0 1 1
                             1 1

``window_size = (left, right)`` counts keys besides the row's own: a row at key p sees p - left .. p + right;
negative = no bound. ``causal=True`` sets right to 0. A model's ``sliding_window`` W that counts the token
itself is (W - 1, 0).

What happens to a score
-----------------------
::

    s = softmax_scale * (q . k)                    softmax_scale: 1 / sqrt(head_dim) when None
    s = softcap * tanh(s / softcap)                where softcap > 0
    s = s - alibi_slope[head] * |i + K - Q - j|    where alibi_slopes are given
    p = exp(s) / (sum over visible j of exp(s) + exp(sink[head]))     the last term only where sinks are given

A sink is a key of score ``sink`` and value 0: with n equal scores of 0 the weights sum to n / (n + e^sink).
``lse`` is the logarithm of that whole denominator, sink included. A row without visible keys is 0 with lse
-inf, sinks or not.

Query heads H must be a multiple of the KV heads: query head h reads KV head ``h // (H / KVH)``.

Where this differs from the FlashAttention package
--------------------------------------------------
=====================  ================================================================================
block size             any power of two (theirs: a multiple of 256)
head_dim               any from 1 to 256; that of V equals that of K
q and cache dtypes     may differ (float32 queries over a float16 cache)
cache dtype            also float8_e4m3fn and int8, with scales
only here              ``sinks``, ``k_scale``, ``v_scale``, ``batch_invariant``; ``out`` (varlen)
only there             ``dropout_p``, ``deterministic``, ``num_splits``, ``return_attn_probs``: naming one
                       is a TypeError. Nothing is dropped out, repeats give the same bits, the work is
                       divided as the GPU needs it; varlen's LSE is asked for by ``return_softmax_lse``
call by position       up to max_seqlen_k, or v; the rest by name
``causal`` with ALiBi  lse counts the bias as written above; theirs drops a constant of the row from it
gradients              none; inputs that require them are refused
=====================  ================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from octavo.kernels import backend, checks
from octavo.kernels.argument_types import names_wrong_types
from octavo.kernels.known_calls import KnownCalls, prepared

_known = KnownCalls()


@overload
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    block_table: Tensor | None = ...,
    return_softmax_lse: Literal[False] = False,
    out: Tensor | None = ...,
    k_scale: Tensor | float | None = ...,
    v_scale: Tensor | float | None = ...,
    batch_invariant: bool = ...,
) -> Tensor: ...
@overload
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    block_table: Tensor | None = ...,
    return_softmax_lse: Literal[True],
    out: Tensor | None = ...,
    k_scale: Tensor | float | None = ...,
    v_scale: Tensor | float | None = ...,
    batch_invariant: bool = ...,
) -> tuple[Tensor, Tensor]: ...
@names_wrong_types
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    block_table: Tensor | None = None,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    batch_invariant: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of B sequences laid end to end, over packed keys or over a paged cache.

    The module docstring draws the masks and states the formula.

    Args:
        q: (Tq, H, D) float32, float16, bfloat16 or float64; any strides with a contiguous last dimension.
        k, v: packed (Tk, KVH, D), or with `block_table` the paged caches (num_blocks, block_size, KVH, D),
            block_size a power of two. Any strides with a contiguous last dimension. Slots past a sequence's
            length may hold anything, NaN included. Caches may be quantised: float8_e4m3fn or int8.
        cu_seqlens_q, cu_seqlens_k: (B + 1,) int32 prefix sums of the query and key lengths, first 0; key
            lengths *include* the tokens being computed. Lengths of 0 are fine; cu_seqlens_q ends at Tq,
            cu_seqlens_k at Tk (with a block table: anywhere).
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths. On a GPU nothing is read from the device,
            so these choose the kernels and how the work is cut; true bounds give true results, however
            loose, and tight ones are faster.
            On a GPU q may be padded while max_seqlen_q is at most 8 and Tq at most B * max_seqlen_q: rows
            past cu_seqlens_q[-1] belong to nobody; `out` and the LSE keep there what was in that memory.
        block_table: (B, max_blocks) int32: key j of sequence b is slot ``j % block_size`` of block
            ``block_table[b, j // block_size]``. Entries no visible key needs may be -1. Blocks may be shared.
        alibi_slopes: (H,) or (B, H) float32.      sinks: (H,) float32, float16 or bfloat16.
        return_softmax_lse: return (out, lse), lse (H, Tq) float32 (float64 for float64 queries).
        out: (Tq, H, D) in the dtype of q, written instead of a new tensor; must not overlap the inputs.
        k_scale, v_scale: for quantised caches, what `write_kv_cache` was given: None (1.0; not for int8), a
            number, a float32 tensor of one element, or float32 (num_blocks, block_size, KVH). On a GPU
            queries of 16 bits and what is read from the cache are multiplied in float16: neither may be
            larger than 65504.
        batch_invariant: the bits of a row depend on its own sequence alone, whatever else is in the batch,
            whichever chunk the row is computed in, and however much of the prefix was there before. Slower
            with the Triton kernels; always so with the compiled ones of the CPU. The reference, which is
            plain torch, cannot promise it and refuses.

    Returns:
        out (Tq, H, D), or (out, lse).

    Raises:
        KernelArgumentError: a type, shape, dtype, device or stride is wrong; on the CPU also wrong prefix
            sums, bounds that do not hold, and table entries that name no block: reading them from a GPU
            would make the host wait, so there such arguments read or write memory that is not theirs.
            `out` is untouched.
        UnsupportedKernelConfig: head_dim over 256, a cache of another quantised dtype, an input that
            requires gradients, batch_invariant where only the reference can do the rest (on the CPU: float64
            and quantised caches). Nothing was launched.
    """
    # A window that is no pair is a TypeError here, which the decorator explains.
    tensors = (
        q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks, block_table, out, k_scale, v_scale
    )  # fmt: skip
    values = (
        max_seqlen_q, max_seqlen_k, softmax_scale, causal, *window_size, softcap, return_softmax_lse,
        batch_invariant,
    )  # fmt: skip
    lens = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    known = _known.get(tensors, *values)
    if known is None:
        window = _check(
            q, k, v, *lens, softmax_scale, causal, window_size, softcap, alibi_slopes, sinks, block_table,
            return_softmax_lse, out, k_scale, v_scale, batch_invariant,
        )  # fmt: skip
        kernel = None
    else:
        kernel, window = known
    options = Options(
        softmax_scale, causal, window, softcap, alibi_slopes, sinks, k_scale, v_scale, batch_invariant
    )
    result, lse, kernel = attend(q, k, v, *lens, options, block_table, out, return_softmax_lse, kernel=kernel)
    if known is None:
        _known.keep((kernel, window), tensors, *values)
    return result if lse is None else (result, lse)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    block_table: Tensor | None,
    return_softmax_lse: bool,
    out: Tensor | None,
    k_scale: Tensor | float | None,
    v_scale: Tensor | float | None,
    batch_invariant: bool,
) -> tuple[int, int]:
    """That these arguments of `flash_attn_varlen_func` are right; returns the window."""
    name = "flash_attn_varlen_func"
    device = q.device
    checks.tensor(name, "q", q, "Tq, num_heads, head_dim")
    num_rows, num_heads, head_dim = q.shape
    batch = cu_seqlens_q.shape[0] - 1 if cu_seqlens_q.dim() == 1 else -1
    if batch < 0:
        raise checks.wrong(name, "cu_seqlens_q", "of shape (B + 1,)", f"shape {tuple(cu_seqlens_q.shape)}")
    checks.exactly(name, "cu_seqlens_q", cu_seqlens_q, (batch + 1,), device, checks.INT32)
    checks.exactly(name, "cu_seqlens_k", cu_seqlens_k, (batch + 1,), device, checks.INT32)
    if block_table is None:
        checks.tensor(name, "k", k, "Tk, num_kv_heads, head_dim", device)
        checks.tensor(name, "v", v, "Tk, num_kv_heads, head_dim", device)
        checks.same(name, "v", v, "k", k)
        num_keys, num_kv_heads, kv_head_dim = k.shape
        num_blocks = block_size = 0
        if k_scale is not None or v_scale is not None:
            argument = "v_scale" if k_scale is None else "k_scale"
            raise checks.wrong(name, argument, "None without a block table", "a scale")
    else:
        checks.caches(name, "k", k, "v", v, device)
        num_blocks, block_size, num_kv_heads, kv_head_dim = k.shape
        num_keys = None
        checks.table(name, block_table, batch, device)
        checks.scales(name, k_scale, v_scale, k)
    checks.heads(name, num_heads, num_kv_heads, head_dim, kv_head_dim)
    check_invariant(name, batch_invariant, q, k)
    window = checks.attention_options(
        name, num_heads, batch, device, softmax_scale, causal, window_size, softcap,
        alibi_slopes, sinks, return_softmax_lse,
    )  # fmt: skip
    if out is not None:
        checks.output(name, out, q)
    if q.is_cpu:
        checks.ragged(
            name,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            num_rows,
            num_keys,
            window[0],
            block_table,
            num_blocks,
            block_size,
        )
    elif num_rows > batch * max_seqlen_q:
        expected = f"at least {-(-num_rows // max(batch, 1))} for {num_rows} rows of q in {batch} sequences"
        way_out = "Pass the number of rows of the longest sequence, or more."
        raise checks.wrong(name, "max_seqlen_q", expected, max_seqlen_q, way_out)
    return window


def check_invariant(name: str, batch_invariant: bool, q: Tensor, k: Tensor) -> None:
    """The flag, and that what will run can keep its promise."""
    checks.flag(name, "batch_invariant", batch_invariant)
    if batch_invariant:
        facts = ("cpu" if q.is_cpu else q.device.type, q.dtype, k.dtype, q.shape[-1])
        if backend.implementation_of("varlen_attention", *facts) == "reference":
            way_out = (
                f"For queries of {q.dtype} over {k.dtype} only the reference runs here, and the order in "
                "which torch adds is its own; octavo.kernels.backend.describe() says why."
            )
            raise checks.unsupported(name, "batch_invariant", True, way_out)


class Options(NamedTuple):
    """What both functions pass on as it is."""

    softmax_scale: float | None
    causal: bool
    window_size: tuple[int, int]
    softcap: float
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    k_scale: Tensor | float | None
    v_scale: Tensor | float | None
    batch_invariant: bool


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    options: Options,
    block_table: Tensor | None,
    out: Tensor | None,
    with_lse: bool,
    leftpad: Tensor | None = None,
    kernel: Callable[..., None] | None = None,
) -> tuple[Tensor, Tensor | None, Callable[..., None]]:
    """Run the selected implementation on checked arguments; the first leftpad[b] keys are not there.

    Returns (out, lse, kernel), and is given that kernel for another call of this signature.
    """
    num_rows, num_heads, head_dim = q.shape
    device = q.device
    if out is None:
        out = torch.empty((num_rows, num_heads, head_dim), dtype=q.dtype, device=device)
    lse = None
    if with_lse:
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        lse = torch.empty((num_heads, num_rows), dtype=dtype, device=device)
    scale = options.softmax_scale
    tensors = (q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    rest = {
        "softmax_scale": 1.0 / math.sqrt(head_dim) if scale is None else scale,
        "causal": options.causal, "window_size": options.window_size, "softcap": options.softcap,
        "alibi_slopes": options.alibi_slopes, "sinks": options.sinks, "block_table": block_table, "out": out,
        "lse": lse, "k_scale": options.k_scale, "v_scale": options.v_scale, "leftpad": leftpad,
        "batch_invariant": options.batch_invariant,
    }  # fmt: skip
    if kernel is None:
        device_type = "cpu" if q.is_cpu else device.type
        selected = backend.select("varlen_attention", device_type, q.dtype, k.dtype, head_dim)
        kernel = prepared(selected, *tensors, **rest)
    kernel(*tensors, **rest)
    return out, lse, kernel
