"""What a decode step needs to know of its rows."""

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
