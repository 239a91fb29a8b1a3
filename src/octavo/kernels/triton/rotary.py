"""Rotary position embedding, and the pieces that `rotate_and_write` shares.

A tile is (T, H, ...): heads of tokens. A head is cut into *pairs*, whose first and second members are two
tiles (T, H, R), R = rotary_dim / 2 rounded up to a power of two, and the *rest* behind rotary_dim. What all
heads share, angles and weights of norms, is loaded in tiles of that shape, too, by each thread for itself and
out of the cache: as one row it would get a layout of its own, and go through shared memory into the other.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.known_calls import prepared_by
from octavo.kernels.triton import launch, tuning
from octavo.kernels.triton.tuning import Parameters

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@triton.jit
def load_pairs(
    x, at, live, HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """First and second members (T, H, R) float32 of the pairs of the heads that begin at elements `at`."""
    if INTERLEAVED:
        dims = tl.arange(0, 2 * BLOCK_R)[None, None, :]
        mask = live & (dims < 2 * HALF)
        both = tl.load(x + (at + dims), mask=mask, other=0.0)
        first, second = tl.split(tl.reshape(both, (BLOCK_T, BLOCK_H, BLOCK_R, 2)))
    else:
        dims = tl.arange(0, BLOCK_R)[None, None, :]
        mask = live & (dims < HALF)
        first = tl.load(x + (at + dims), mask=mask, other=0.0)
        second = tl.load(x + (at + (HALF + dims)), mask=mask, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def load_rest(
    x, at, live, HALF: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """The channels (T, H, BLOCK_REST) float32 behind the pairs."""
    dims = 2 * HALF + tl.arange(0, BLOCK_REST)[None, None, :]
    rest = tl.load(x + (at + dims), mask=live & (dims < HEAD_DIM), other=0.0)
    return rest.to(tl.float32)


@triton.jit
def load_angles(
    table, table_row, num_positions, position, live,
    HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Cosines and sines (T, H, R) of positions (T,); NaN, and nothing read, for a position without a row."""
    known = (position >= 0) & (position < num_positions) & live
    dims = tl.arange(0, BLOCK_R)[None, None, :]
    row = launch.part(position, table_row, ALIGN)[:, None, None] + tl.zeros((1, BLOCK_H, 1), tl.int64)
    mask = known[:, None, None] & (dims < HALF)
    cos = tl.load(table + (row + dims), mask=mask, other=float("nan"), eviction_policy="evict_last")
    row += HALF
    sin = tl.load(table + (row + dims), mask=mask, other=float("nan"), eviction_policy="evict_last")
    return cos, sin


@triton.jit
def turn(first, second, cos, sin):
    """Pairs turned by their angles."""
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def join_pairs(
    first, second, BLOCK_H: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr
):  # fmt: skip
    """Interleaved pairs as they lie in memory, (T, H, 2 R)."""
    return tl.reshape(tl.join(first, second), (BLOCK_T, BLOCK_H, 2 * BLOCK_R))


@launch.direct
@triton.jit(
    do_not_specialize=[
        "num_tokens",
        "num_positions",
        "table_row",
        "q_token",
        "q_head",
        "k_token",
        "k_head",
        "q_out_token",
        "q_out_head",
        "k_out_token",
        "k_out_head",
    ],
    do_not_specialize_on_alignment=["positions"],
)
def _rotate(
    q, k, q_out, k_out, table, positions, num_tokens, num_positions, table_row,
    q_token, q_head, k_token, k_head, q_out_token, q_out_head, k_out_token, k_out_head,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr, IS_APART: tl.constexpr,
    INTERLEAVED: tl.constexpr, ALIGN: tl.constexpr, TABLE_ALIGN: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_T: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch.begin(PDL)
    Q_GROUPS: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    KV_GROUPS: tl.constexpr = (NUM_KV_HEADS + BLOCK_H - 1) // BLOCK_H
    group = tl.program_id(0) % (Q_GROUPS + KV_GROUPS)
    token = (tl.program_id(0) // (Q_GROUPS + KV_GROUPS)).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    live = token < num_tokens
    position = tl.load(positions + token, mask=live, other=0)
    if group < Q_GROUPS:
        x, stride_token, stride_head = q, q_token, q_head
        out, out_token, out_head = q_out, q_out_token, q_out_head
        head = group * BLOCK_H + tl.arange(0, BLOCK_H)
        mask = (head < NUM_HEADS)[None, :] & live[:, None]
    else:
        x, stride_token, stride_head = k, k_token, k_head
        out, out_token, out_head = k_out, k_out_token, k_out_head
        head = (group - Q_GROUPS) * BLOCK_H + tl.arange(0, BLOCK_H)
        mask = (head < NUM_KV_HEADS)[None, :] & live[:, None]
    at = launch.grid(token, stride_token, head, stride_head, ALIGN)
    to = launch.grid(token, out_token, head, out_head, ALIGN)
    mask = mask[:, :, None]
    if IS_APART and 2 * HALF < HEAD_DIM:
        rest = load_rest(x, at, mask, HALF, HEAD_DIM, BLOCK_REST)
        dims = 2 * HALF + tl.arange(0, BLOCK_REST)[None, None, :]
        tl.store(out + (to + dims), rest.to(q.dtype.element_ty), mask=mask & (dims < HEAD_DIM))
    first, second = load_pairs(x, at, mask, HALF, BLOCK_H, BLOCK_T, BLOCK_R, INTERLEAVED)
    cos, sin = load_angles(
        table, table_row, num_positions, position, live, HALF, BLOCK_H, BLOCK_R, TABLE_ALIGN
    )
    first, second = turn(first, second, cos, sin)
    if INTERLEAVED:
        dims = tl.arange(0, 2 * BLOCK_R)[None, None, :]
        both = join_pairs(first, second, BLOCK_H, BLOCK_T, BLOCK_R).to(q.dtype.element_ty)
        tl.store(out + (to + dims), both, mask=mask & (dims < 2 * HALF))
    else:
        dims = tl.arange(0, BLOCK_R)[None, None, :]
        mask = mask & (dims < HALF)
        tl.store(out + (to + dims), first.to(q.dtype.element_ty), mask=mask)
        tl.store(out + (to + (HALF + dims)), second.to(q.dtype.element_ty), mask=mask)


def supports(q_dtype: torch.dtype) -> str | None:
    """None when the kernel can do it, else why not."""
    return None if q_dtype in _DTYPES else f"no Triton kernel for {q_dtype}"


def prepare(
    q: Tensor,
    k: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    interleaved: bool,
    out: tuple[Tensor, Tensor] | None = None,
    *,
    parameters: Parameters | None = None,
) -> Callable[..., None]:
    """`apply_rotary` for calls of this signature."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    num_positions, rotary_dim = cos_sin_cache.shape
    if num_tokens == 0 or num_heads + num_kv_heads == 0 or (rotary_dim == 0 and out is None):
        return lambda *arguments: None
    parameters = parameters or tuning.parameters("apply_rotary", q.device, *launch_class(q, k))
    block_h = parameters["BLOCK_H"]
    groups = -(-num_heads // block_h) + -(-num_kv_heads // block_h)
    q_out, k_out = (q, k) if out is None else out
    launched = launch.Prepared(
        _rotate, (-(-num_tokens // parameters["BLOCK_T"]) * groups,),
        {
            "q": q, "k": k, "q_out": q_out, "k_out": k_out, "table": cos_sin_cache, "positions": positions,
            "num_tokens": num_tokens, "num_positions": num_positions, "table_row": cos_sin_cache.stride(0),
            "q_token": q.stride(0), "q_head": q.stride(1), "k_token": k.stride(0), "k_head": k.stride(1),
            "q_out_token": q_out.stride(0), "q_out_head": q_out.stride(1),
            "k_out_token": k_out.stride(0), "k_out_head": k_out.stride(1),
            "NUM_HEADS": num_heads, "NUM_KV_HEADS": num_kv_heads, "HEAD_DIM": head_dim,
            "HALF": rotary_dim // 2, "BLOCK_R": launch.block_for(rotary_dim // 2),
            "BLOCK_REST": launch.block_for(head_dim - rotary_dim), "IS_APART": out is not None,
            "INTERLEAVED": interleaved, "ALIGN": launch.alignment(q, k, q_out, k_out),
            "TABLE_ALIGN": launch.alignment(cos_sin_cache), **launch.options(parameters, q.device),
        },
    )  # fmt: skip

    def call(
        q: Tensor,
        k: Tensor,
        cos_sin_cache: Tensor,
        positions: Tensor,
        interleaved: bool,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        q_out, k_out = (q, k) if out is None else out
        launched(q, k, q_out, k_out, cos_sin_cache, positions)

    return call


@prepared_by(prepare)
def apply_rotary(
    q: Tensor,
    k: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    interleaved: bool,
    out: tuple[Tensor, Tensor] | None = None,
    *,
    parameters: Parameters | None = None,
) -> None:
    """Turn the first `rotary_dim` channels of every head of `q` and `k`, in place or into `out`.

    `parameters` take the place of those of this GPU's table.
    """
    prepare(q, k, cos_sin_cache, positions, interleaved, out, parameters=parameters)(
        q, k, cos_sin_cache, positions, interleaved, out
    )


def launch_class(q: Tensor, k: Tensor) -> tuple[str, Parameters]:
    """The class of a call in the table of tuned launch parameters, and those that are right on any GPU."""
    key = f"H{q.shape[1]}/{k.shape[1]} D{q.shape[2]} {q.element_size()} bytes"
    return key, {"BLOCK_H": 8, "BLOCK_T": 2, "num_warps": 2, "PDL": 1}
