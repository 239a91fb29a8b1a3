"""The index tensors of `flash_attn_with_kvcache` in one launch, without the host knowing a length."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.reference.kvcache import Angles, Plan
from octavo.kernels.triton import on_device_of
from octavo.kernels.triton.launch import direct

_BLOCK: tl.constexpr = tl.constexpr(128)
_VARYING = (
    "known_len", "table_stride", "batch", "seqlen_q", "num_new", "block_size", "capacity",
    "max_position", "cos_stride", "sin_stride", "follow",
)  # fmt: skip


@triton.jit
def _gather_angles(
    angles, cos, sin, tokens, num_tokens, positions, max_position, cos_stride, sin_stride,
    HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """Rows `tokens` of `angles`, from rows `positions` of the cosines and sines; NaN where there is none."""
    pairs = tl.arange(0, BLOCK_HALF)
    there = (positions >= 0) & (positions < max_position)
    mask = there[:, None] & (pairs < HALF)[None, :]
    cosines = tl.load(cos + positions[:, None] * cos_stride + pairs[None, :], mask=mask, other=float("nan"))
    sines = tl.load(sin + positions[:, None] * sin_stride + pairs[None, :], mask=mask, other=float("nan"))
    places = tokens.to(tl.int64)[:, None] * (2 * HALF) + pairs[None, :]
    mask = (tokens < num_tokens)[:, None] & (pairs < HALF)[None, :]
    tl.store(angles + places, cosines.to(tl.float32), mask=mask)
    tl.store(angles + places + HALF, sines.to(tl.float32), mask=mask)


@direct
@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=("lens", "table", "cos", "sin"))
def _plan(
    lens, table, cos, sin, cu_seqlens_q, cu_seqlens_k, rows, slots, q_angles, k_angles, order,
    known_len, table_stride, batch, seqlen_q, num_new, block_size, capacity,
    max_position, cos_stride, sin_stride, follow,
    HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    offsets = tl.arange(0, _BLOCK)
    if tl.program_id(0) == 0:
        total = 0
        tl.store(cu_seqlens_q, 0)
        tl.store(cu_seqlens_k, 0)
        for first in range(0, batch, _BLOCK):
            b = first + offsets
            if lens is None:
                length = known_len + tl.zeros([_BLOCK], tl.int32)
            else:
                length = tl.load(lens + b, mask=b < batch, other=0)
            length = tl.where(b < batch, tl.minimum(length + num_new, capacity), 0)
            tl.store(cu_seqlens_k + 1 + b, total + tl.cumsum(length, 0), mask=b < batch)
            tl.store(cu_seqlens_q + 1 + b, (b + 1) * seqlen_q, mask=b < batch)
            if rows is not None:
                tl.store(rows + b, b, mask=b < batch)
            total += tl.sum(length, 0)
    else:
        token = (tl.program_id(0) - 1) * _BLOCK + offsets
        if num_new > 0:
            b = token // num_new
            if lens is None:
                position = known_len + token % num_new
            else:
                position = tl.load(lens + b, mask=b < batch, other=0) + token % num_new
            held = (b < batch) & (position < capacity)
            if table is None:
                block = b.to(tl.int64)
            else:
                entry = table + b.to(tl.int64) * table_stride + position // block_size
                block = tl.load(entry, mask=held, other=0).to(tl.int64)
            slot = tl.where(held, block * block_size + position % block_size, -1)  # -1: not written
            tl.store(slots + token, slot, mask=b < batch)
            if k_angles is not None:
                _gather_angles(
                    k_angles, cos, sin, token, batch * num_new, position.to(tl.int64), max_position,
                    cos_stride, sin_stride, HALF, BLOCK_HALF,
                )  # fmt: skip
        if q_angles is not None:
            b = token // seqlen_q
            if lens is None:
                position = known_len + (token % seqlen_q) * follow
            else:
                position = tl.load(lens + b, mask=b < batch, other=0) + (token % seqlen_q) * follow
            _gather_angles(
                q_angles, cos, sin, token, batch * seqlen_q, position.to(tl.int64), max_position,
                cos_stride, sin_stride, HALF, BLOCK_HALF,
            )  # fmt: skip
        if order is not None:
            tl.store(order + token, token.to(tl.int64), mask=token < batch * tl.maximum(seqlen_q, num_new))


def plan_kvcache(
    lens: Tensor | int,
    table: Tensor | None,
    batch: int,
    seqlen_q: int,
    num_new: int,
    block_size: int,
    device: torch.device,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    follow: bool,
) -> Plan:
    """As the reference's, but the tables of angles hold one row per token, in order.

    Tokens past the capacity have slot -1, and lengths end there.
    """
    num_sums = batch + 1
    indices = torch.empty(2 * num_sums + batch, dtype=torch.int32, device=device)
    cu_seqlens_q, cu_seqlens_k, rows = indices.split([num_sums, num_sums, batch])
    slots = torch.empty(batch * num_new, dtype=torch.int64, device=device)
    num_tokens = batch * num_new
    half = 0
    q_angles = k_angles = None
    order = cos = sin = None
    if rotary_cos is not None and rotary_sin is not None:
        cos, sin, half = rotary_cos, rotary_sin, rotary_cos.shape[1]
        num_tokens = max(num_tokens, batch * seqlen_q)
        order = torch.empty(num_tokens, dtype=torch.int64, device=device)
        k_table = torch.empty(batch * num_new, 2 * half, dtype=torch.float32, device=device)
        k_angles = Angles(k_table, order[: batch * num_new])
        q_angles = k_angles
        if seqlen_q != num_new or not (follow or seqlen_q == 1):
            q_table = torch.empty(batch * seqlen_q, 2 * half, dtype=torch.float32, device=device)
            q_angles = Angles(q_table, order[: batch * seqlen_q])
    with on_device_of(cu_seqlens_q):
        _plan[(1 + triton.cdiv(num_tokens, _BLOCK.value),)](
            lens if isinstance(lens, Tensor) else None,
            table,
            cos,
            sin,
            cu_seqlens_q,
            cu_seqlens_k,
            rows if table is None else None,
            slots,
            None if q_angles is k_angles or q_angles is None else q_angles.table,
            None if k_angles is None else k_angles.table,
            order,
            0 if isinstance(lens, Tensor) else lens,
            0 if table is None else table.stride(0),
            batch,
            seqlen_q,
            num_new,
            block_size,
            block_size if table is None else min(table.shape[1] * block_size, 2**31 - 1),
            0 if cos is None else cos.shape[0],
            0 if cos is None else cos.stride(0),
            0 if sin is None else sin.stride(0),
            int(follow),
            HALF=half,
            BLOCK_HALF=max(1, triton.next_power_of_2(half)),
            num_warps=4,
        )
    return Plan(
        cu_seqlens_q, cu_seqlens_k, rows[:, None] if table is None else table, slots, q_angles, k_angles
    )
