"""Norm of each head, rotary embedding and the write into the cache, in one launch.

Queries, keys and values are read once, and no normalised or turned copy travels through memory. A program
takes some heads of some tokens, either of the queries or of keys and values.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.known_calls import prepared_by
from octavo.kernels.triton import kv_write, launch, quantization, tiles, tuning
from octavo.kernels.triton.kv_write import place_of
from octavo.kernels.triton.quantization import store
from octavo.kernels.triton.rotary import join_pairs, load_angles, load_pairs, load_rest, turn
from octavo.kernels.triton.tuning import Parameters

_TOKEN_SCALES: tl.constexpr = tl.constexpr(tiles.TOKEN_SCALES)

_VARYING = [
    "num_tokens", "num_slots", "block_size", "num_positions", "table_row",
    "q_token", "q_head", "k_token", "k_head", "v_token", "v_head",
    "k_cache_block", "k_cache_slot", "k_cache_head", "v_cache_block", "v_cache_slot", "v_cache_head",
    "k_scale_block", "k_scale_slot", "k_scale_head", "v_scale_block", "v_scale_slot", "v_scale_head",
]  # fmt: skip


@triton.jit
def _turned(
    x, at, mask, token, live, positions, num_positions, table, table_row, weight, eps,
    HALF: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr,
    INTERLEAVED: tl.constexpr, HAS_NORM: tl.constexpr, TABLE_ALIGN: tl.constexpr,
):  # fmt: skip
    """Heads at elements `at`, normalised and turned, cut in three; without a rest that is anything."""
    # All loads first, the one that waits for another's result last.
    position = tl.load(positions + token, mask=live, other=0)
    first, second = load_pairs(x, at, mask, HALF, BLOCK_H, BLOCK_T, BLOCK_R, INTERLEAVED)
    rest = first
    if 2 * HALF < HEAD_DIM:
        rest = load_rest(x, at, mask, HALF, HEAD_DIM, BLOCK_REST)
    w_first, w_second, w_rest = 1.0, 1.0, 1.0
    if HAS_NORM:
        row = tl.zeros((BLOCK_T, BLOCK_H, 1), tl.int32)
        w_first, w_second = load_pairs(weight, row, row == 0, HALF, BLOCK_H, BLOCK_T, BLOCK_R, INTERLEAVED)
        if 2 * HALF < HEAD_DIM:
            w_rest = load_rest(weight, row, row == 0, HALF, HEAD_DIM, BLOCK_REST)
    cos, sin = load_angles(
        table, table_row, num_positions, position, live, HALF, BLOCK_H, BLOCK_R, TABLE_ALIGN
    )
    if HAS_NORM:
        squares = tl.sum(first * first + second * second, 2)
        if 2 * HALF < HEAD_DIM:
            squares += tl.sum(rest * rest, 2)
        scale = tl.rsqrt(squares * (1.0 / HEAD_DIM) + eps)[:, :, None]
        first = first * scale * w_first
        second = second * scale * w_second
        if 2 * HALF < HEAD_DIM:
            rest = rest * scale * w_rest
    first, second = turn(first, second, cos, sin)
    return first, second, rest


@triton.jit
def _store_turned(
    to, first, second, rest, out, mask, factor, HALF: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr,
    INTERLEAVED: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    if INTERLEAVED:
        dims = tl.arange(0, 2 * BLOCK_R)[None, None, :]
        both = join_pairs(first, second, BLOCK_H, BLOCK_T, BLOCK_R)
        store(out, to + dims, both, mask & (dims < 2 * HALF), factor, FORM)
    else:
        dims = tl.arange(0, BLOCK_R)[None, None, :]
        store(out, to + dims, first, mask & (dims < HALF), factor, FORM)
        store(out, to + (HALF + dims), second, mask & (dims < HALF), factor, FORM)
    if 2 * HALF < HEAD_DIM:
        dims = 2 * HALF + tl.arange(0, BLOCK_REST)[None, None, :]
        store(out, to + dims, rest, mask & (dims < HEAD_DIM), factor, FORM)


@triton.jit
def _queries(
    q, q_out, head, token, live, positions, num_positions, table, table_row, q_weight, eps, q_token, q_head,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_REST: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_NORM: tl.constexpr, ALIGN: tl.constexpr,
    TABLE_ALIGN: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    mask = ((head < NUM_HEADS)[None, :] & live[:, None])[:, :, None]
    at = launch.grid(token, q_token, head, q_head, ALIGN)
    first, second, rest = _turned(
        q, at, mask, token, live, positions, num_positions, table, table_row, q_weight, eps,
        HALF, HEAD_DIM, BLOCK_H, BLOCK_T, BLOCK_R, BLOCK_REST, INTERLEAVED, HAS_NORM, TABLE_ALIGN,
    )  # fmt: skip
    to = ((token[:, None] * NUM_HEADS + head[None, :]) * HEAD_DIM)[:, :, None]
    _store_turned(
        to, first, second, rest, q_out, mask, 1.0, HALF, HEAD_DIM, BLOCK_H, BLOCK_T, BLOCK_R, BLOCK_REST,
        INTERLEAVED, 0,
    )  # fmt: skip


@triton.jit
def _keys_and_values(
    k, v, head, token, live, positions, num_positions, table, table_row, k_weight, eps,
    k_token, k_head, v_token, v_head, slot_mapping,
    k_cache, v_cache, k_scale, v_scale, num_slots, block_size,
    k_cache_block, k_cache_slot, k_cache_head, v_cache_block, v_cache_slot, v_cache_head,
    k_scale_block, k_scale_slot, k_scale_head, v_scale_block, v_scale_slot, v_scale_head,
    k_scale_value, v_scale_value,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    HALF: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr, INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ALIGN: tl.constexpr, TABLE_ALIGN: tl.constexpr, CACHE_ALIGN: tl.constexpr,
    FORM: tl.constexpr, K_SCALE: tl.constexpr, V_SCALE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    slots = tl.load(slot_mapping + token, mask=live, other=-1)
    wanted = (head < NUM_KV_HEADS)[None, :] & live[:, None]
    mask = wanted[:, :, None]
    dims = tl.arange(0, BLOCK_D)[None, None, :]
    v_at = launch.grid(token, v_token, head, v_head, ALIGN) + dims
    values = tl.load(v + v_at, mask=mask & (dims < HEAD_DIM), other=0.0)
    k_at = launch.grid(token, k_token, head, k_head, ALIGN)
    first, second, rest = _turned(
        k, k_at, mask, token, live, positions, num_positions, table, table_row, k_weight, eps,
        HALF, HEAD_DIM, BLOCK_H, BLOCK_T, BLOCK_R, BLOCK_REST, INTERLEAVED, HAS_NORM, TABLE_ALIGN,
    )  # fmt: skip

    block, offset, inside = place_of(slots, num_slots, block_size, BLOCK_SIZE)
    wanted = wanted & inside[:, None]
    mask = wanted[:, :, None]
    k_to = launch.part(block, k_cache_block, CACHE_ALIGN) + launch.part(offset, k_cache_slot, CACHE_ALIGN)
    v_to = launch.part(block, v_cache_block, CACHE_ALIGN) + launch.part(offset, v_cache_slot, CACHE_ALIGN)
    k_to = k_to[:, None, None] + launch.part(head, k_cache_head, CACHE_ALIGN)[None, :, None]
    v_to = v_to[:, None, None] + launch.part(head, v_cache_head, CACHE_ALIGN)[None, :, None] + dims
    k_highest, v_highest = 0.0, 0.0
    if K_SCALE == _TOKEN_SCALES:
        highest = tl.maximum(quantization.magnitude(first), quantization.magnitude(second))
        k_highest = tl.max(highest, 2)
        if 2 * HALF < HEAD_DIM:
            k_highest = tl.maximum(k_highest, tl.max(quantization.magnitude(rest), 2))
    if V_SCALE == _TOKEN_SCALES:
        v_highest = tl.max(quantization.magnitude(values.to(tl.float32)), 2)
    at = (block * k_scale_block + offset * k_scale_slot)[:, None] + head[None, :] * k_scale_head
    k_factor = quantization.factor(k_highest, k_scale, at, wanted, k_scale_value, FORM, K_SCALE, 2)
    at = (block * v_scale_block + offset * v_scale_slot)[:, None] + head[None, :] * v_scale_head
    v_factor = quantization.factor(v_highest, v_scale, at, wanted, v_scale_value, FORM, V_SCALE, 2)
    _store_turned(
        k_to, first, second, rest, k_cache, mask, k_factor, HALF, HEAD_DIM, BLOCK_H, BLOCK_T, BLOCK_R,
        BLOCK_REST, INTERLEAVED, FORM,
    )  # fmt: skip
    store(v_cache, v_to, values, mask & (dims < HEAD_DIM), v_factor, FORM)


@launch.direct
@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=["positions", "slot_mapping"])
def _rotate_and_write(
    q, k, v, q_out, table, positions, q_weight, k_weight, eps,
    num_tokens, num_positions, table_row, q_token, q_head, k_token, k_head, v_token, v_head, slot_mapping,
    k_cache, v_cache, k_scale, v_scale, num_slots, block_size,
    k_cache_block, k_cache_slot, k_cache_head, v_cache_block, v_cache_slot, v_cache_head,
    k_scale_block, k_scale_slot, k_scale_head, v_scale_block, v_scale_slot, v_scale_head,
    k_scale_value, v_scale_value,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    HALF: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr, INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ALIGN: tl.constexpr, TABLE_ALIGN: tl.constexpr, CACHE_ALIGN: tl.constexpr,
    FORM: tl.constexpr, K_SCALE: tl.constexpr, V_SCALE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_KVH: tl.constexpr, BLOCK_T: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch.begin(PDL)
    Q_GROUPS: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    GROUPS: tl.constexpr = Q_GROUPS + (NUM_KV_HEADS + BLOCK_KVH - 1) // BLOCK_KVH
    group = tl.program_id(0) % GROUPS
    token = (tl.program_id(0) // GROUPS).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    live = token < num_tokens
    if group < Q_GROUPS:
        head = (group * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
        _queries(
            q, q_out, head, token, live, positions, num_positions, table, table_row, q_weight, eps,
            q_token, q_head, NUM_HEADS, HEAD_DIM, HALF, BLOCK_R, BLOCK_REST, INTERLEAVED, HAS_NORM,
            ALIGN, TABLE_ALIGN, BLOCK_H, BLOCK_T,
        )  # fmt: skip
    else:
        kv_head = ((group - Q_GROUPS) * BLOCK_KVH + tl.arange(0, BLOCK_KVH)).to(tl.int64)
        _keys_and_values(
            k, v, kv_head, token, live, positions, num_positions, table, table_row, k_weight, eps,
            k_token, k_head, v_token, v_head, slot_mapping,
            k_cache, v_cache, k_scale, v_scale, num_slots, block_size,
            k_cache_block, k_cache_slot, k_cache_head, v_cache_block, v_cache_slot, v_cache_head,
            k_scale_block, k_scale_slot, k_scale_head, v_scale_block, v_scale_slot, v_scale_head,
            k_scale_value, v_scale_value,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_D, HALF, BLOCK_R, BLOCK_REST, INTERLEAVED, HAS_NORM, BLOCK_SIZE,
            ALIGN, TABLE_ALIGN, CACHE_ALIGN, FORM, K_SCALE, V_SCALE, BLOCK_KVH, BLOCK_T,

        )  # fmt: skip


def supports(q_dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int) -> str | None:
    """None when the kernel can do it, else why not."""
    return kv_write.supports(q_dtype, cache_dtype)


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
    interleaved: bool = False,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    parameters: Parameters | None = None,
) -> Callable[..., Tensor]:
    """`rotate_and_write_kv_cache` for calls of this signature."""
    (num_tokens, num_heads, head_dim), dtype, device = q.shape, q.dtype, q.device
    num_kv_heads = k.shape[1]
    half = cos_sin_cache.shape[1] // 2
    parameters = parameters or tuning.parameters(
        "rotate_and_write_kv_cache", device, *launch_class(q, k, k_cache)
    )
    groups = -(-num_heads // parameters["BLOCK_H"]) + -(-num_kv_heads // parameters["BLOCK_KVH"])
    programs = -(-num_tokens // parameters["BLOCK_T"]) * groups
    shape = (num_tokens, num_heads, head_dim)
    if programs == 0:
        return lambda *_, **__: torch.empty(shape, dtype=dtype, device=device)
    launched = launch.Prepared(
        _rotate_and_write, (programs,),
        {
            "q": q, "k": k, "v": v, "q_out": torch.empty(shape, dtype=dtype, device=device),
            "table": cos_sin_cache, "positions": positions, "slot_mapping": slot_mapping,
            **kv_write.cache_arguments(k_cache, v_cache, k_scale, v_scale),
            "q_weight": q_weight, "k_weight": k_weight, "eps": float(eps), "num_tokens": num_tokens,
            "num_positions": cos_sin_cache.shape[0], "table_row": cos_sin_cache.stride(0),
            "q_token": q.stride(0), "q_head": q.stride(1), "k_token": k.stride(0), "k_head": k.stride(1),
            "v_token": v.stride(0), "v_head": v.stride(1),
            "NUM_HEADS": num_heads, "NUM_KV_HEADS": num_kv_heads, "HEAD_DIM": head_dim,
            "BLOCK_D": launch.block_for(head_dim), "HALF": half, "BLOCK_R": launch.block_for(half),
            "BLOCK_REST": launch.block_for(head_dim - 2 * half), "INTERLEAVED": interleaved,
            "HAS_NORM": q_weight is not None, "ALIGN": launch.alignment(q, k, v),
            "TABLE_ALIGN": launch.alignment(cos_sin_cache), **launch.options(parameters, device),
        },
    )  # fmt: skip

    def call(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos_sin_cache: Tensor,
        positions: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        *,
        q_weight: Tensor | None = None,
        k_weight: Tensor | None = None,
        eps: float = 0.0,
        interleaved: bool = False,
        k_scale: Tensor | float | None = None,
        v_scale: Tensor | float | None = None,
    ) -> Tensor:
        q_out = torch.empty(shape, dtype=dtype, device=device)
        caches = kv_write.cache_tensors(k_cache, v_cache, k_scale, v_scale)
        weights = () if q_weight is None else (q_weight, k_weight)
        launched(q, k, v, q_out, cos_sin_cache, positions, slot_mapping, *caches, *weights)
        return q_out

    return call


@prepared_by(prepare)
def rotate_and_write_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
    interleaved: bool = False,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    parameters: Parameters | None = None,
) -> Tensor:
    """The turned `q`, a new contiguous tensor; the turned `k`, and `v`, are in their slots of the caches.

    `parameters` take the place of those of this GPU's table.
    """
    tensors = (q, k, v, cos_sin_cache, positions, k_cache, v_cache, slot_mapping)
    options: dict[str, Any] = {
        "q_weight": q_weight, "k_weight": k_weight, "eps": eps, "interleaved": interleaved,
        "k_scale": k_scale, "v_scale": v_scale,
    }  # fmt: skip
    return prepare(*tensors, **options, parameters=parameters)(*tensors, **options)


def launch_class(q: Tensor, k: Tensor, k_cache: Tensor) -> tuple[str, Parameters]:
    """The class of a call in the table of tuned launch parameters, and those that are right on any GPU."""
    (_, num_heads, head_dim), num_kv_heads = q.shape, k.shape[1]
    key = f"H{num_heads}/{num_kv_heads} D{head_dim} {q.element_size()} to {k_cache.element_size()} bytes"
    # Few programs, as each takes its time to start: wide heads fill one, of narrow ones several tokens do.
    heads, kv_heads, tokens, warps = (4, 2, 8, 2) if head_dim <= 64 else (16, 8, 1, 4)
    heads = min(heads, launch.block_for(num_heads))
    kv_heads = min(kv_heads, launch.block_for(num_kv_heads))
    return key, {"BLOCK_H": heads, "BLOCK_KVH": kv_heads, "BLOCK_T": tokens, "num_warps": warps, "PDL": 1}
