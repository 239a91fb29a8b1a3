"""What a decode step needs to know of its rows, and what it leaves with them."""

from __future__ import annotations

import torch
from torch import Tensor


def prepare_decode(
    rows: Tensor, positions: Tensor, last_token_ids: Tensor, block_tables: Tensor, block_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(input_ids, slot_mapping, cu_seqlens_k, block_table), as `octavo.kernels.decode_rows` explains them."""
    block_table = block_tables.index_select(0, rows)
    block_ids = block_table.gather(1, (positions // block_size)[:, None])[:, 0].long()
    is_there = block_ids >= 0
    slots = torch.where(is_there, block_ids * block_size + positions % block_size, -1)
    cu_seqlens_k = torch.zeros(len(rows) + 1, dtype=torch.int32, device=rows.device)
    cu_seqlens_k[1:] = torch.where(is_there, positions + 1, 0).cumsum(0)
    return last_token_ids.index_select(0, rows), slots, cu_seqlens_k, block_table


def finish_decode(
    rows: Tensor,
    slots: Tensor,
    token_ids: Tensor,
    last_token_ids: Tensor,
    positions: Tensor,
    num_drawn: Tensor,
) -> None:
    """In place; see `octavo.kernels.decode_rows`."""
    took_part = slots >= 0
    kept = last_token_ids.index_select(0, rows)
    last_token_ids.index_copy_(0, rows, torch.where(took_part, token_ids.clamp_min(0), kept))
    positions += took_part
    num_drawn += took_part
