"""Where new tokens of a batch go in a cache, and the lengths once they are there."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Angles(NamedTuple):
    """What `apply_rotary` turns tokens by: row positions[i] of `table` for token i."""

    table: Tensor  # (rows, rotary_dim) float32, cosines beside sines
    positions: Tensor  # (tokens,) int64


class Plan(NamedTuple):
    """The index tensors of one call of `flash_attn_with_kvcache`."""

    cu_seqlens_q: Tensor  # (B + 1,) int32
    cu_seqlens_k: Tensor  # (B + 1,) int32, the new keys included
    table: Tensor  # (B, max_blocks) int32
    slots: Tensor  # (B * Snew,) int64
    q_angles: Angles | None
    k_angles: Angles | None


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
    """The plan of a batch whose caches hold `lens` keys, (B,) int32 or one number for all.

    `table` (B, max_blocks) int32; None: the cache row of sequence b is b. `follow`: query i is turned by
    position lens + i rather than lens.
    """
    if isinstance(lens, int):
        lens = torch.full((batch,), lens, dtype=torch.int32, device=device)
    if table is None:
        table = torch.arange(batch, dtype=torch.int32, device=device)[:, None]
    cu_seqlens_q = torch.arange(batch + 1, dtype=torch.int32, device=device) * seqlen_q
    cu_seqlens_k = torch.zeros(batch + 1, dtype=torch.int32, device=device)
    torch.cumsum(lens + num_new, 0, dtype=torch.int32, out=cu_seqlens_k[1:])
    positions = lens[:, None].long() + torch.arange(num_new, device=device)
    blocks = table.long().gather(1, positions // block_size)
    slots = (blocks * block_size + positions % block_size).flatten()
    q_angles = k_angles = None
    if rotary_cos is not None and rotary_sin is not None:
        angles = torch.cat([rotary_cos, rotary_sin], dim=-1).float()
        q_positions = lens[:, None].long() + torch.arange(seqlen_q, device=device) * follow
        q_angles, k_angles = Angles(angles, q_positions.flatten()), Angles(angles, positions.flatten())
    return Plan(cu_seqlens_q, cu_seqlens_k, table, slots, q_angles, k_angles)
