"""What stands before and after a decode step, in one launch each.

Before: one program looks at all rows, the others copy tables. After: one program.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.launch import begin, direct, options

_VARYING = ["batch", "num_columns", "block_size"]
_POINTERS = [
    "rows", "positions", "last_token_ids", "block_tables", "input_ids", "slot_mapping", "cu_seqlens_k",
    "block_table",
]  # fmt: skip
_FINISH_POINTERS = ["rows", "slots", "token_ids", "last_token_ids", "positions", "num_drawn"]


@direct
@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_POINTERS)
def _prepare_decode(
    rows, positions, last_token_ids, block_tables, input_ids, slot_mapping, cu_seqlens_k, block_table,
    batch, num_columns, block_size,
    BLOCK_B: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program == 0:
        total = tl.zeros((), tl.int32)
        tl.store(cu_seqlens_k, total)
        for start in range(0, batch, BLOCK_B):
            b = start + tl.arange(0, BLOCK_B)
            live = b < batch
            row = tl.load(rows + b, mask=live, other=0)
            position = tl.load(positions + b, mask=live, other=0)
            block = tl.load(
                block_tables + row * num_columns + position // block_size, mask=live, other=-1
            ).to(tl.int64)
            there = block >= 0
            tl.store(input_ids + b, tl.load(last_token_ids + row, mask=live, other=0), mask=live)
            slot = tl.where(there, block * block_size + position % block_size, -1)
            tl.store(slot_mapping + b, slot, mask=live)
            length = tl.where(there, position + 1, 0).to(tl.int32)
            tl.store(cu_seqlens_k + 1 + b, total + tl.cumsum(length, 0), mask=live)
            total += tl.sum(length, 0)
    else:
        b = (program - 1).to(tl.int64)
        row = tl.load(rows + b)
        for start in range(0, num_columns, BLOCK_C):
            column = start + tl.arange(0, BLOCK_C)
            mask = column < num_columns
            entries = tl.load(block_tables + row * num_columns + column, mask=mask)
            tl.store(block_table + b * num_columns + column, entries, mask=mask)


@direct
@triton.jit(do_not_specialize=["batch"], do_not_specialize_on_alignment=_FINISH_POINTERS)
def _finish_decode(
    rows, slots, token_ids, last_token_ids, positions, num_drawn, batch,
    BLOCK_B: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    for start in range(0, batch, BLOCK_B):
        b = start + tl.arange(0, BLOCK_B)
        live = b < batch
        live &= tl.load(slots + b, mask=live, other=-1) >= 0
        row = tl.load(rows + b, mask=live, other=0)
        token_id = tl.load(token_ids + b, mask=live, other=0)
        tl.store(last_token_ids + row, tl.maximum(token_id, 0), mask=live)
        tl.store(positions + b, tl.load(positions + b, mask=live, other=0) + 1, mask=live)
        tl.store(num_drawn + b, tl.load(num_drawn + b, mask=live, other=0) + 1, mask=live)


def supports() -> str | None:
    """It has nothing to refuse."""
    return None


def prepare_decode(
    rows: Tensor, positions: Tensor, last_token_ids: Tensor, block_tables: Tensor, block_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(input_ids, slot_mapping, cu_seqlens_k, block_table)."""
    batch, num_columns, device = rows.shape[0], block_tables.shape[1], rows.device
    input_ids = torch.empty(batch, dtype=torch.int64, device=device)
    slot_mapping = torch.empty(batch, dtype=torch.int64, device=device)
    cu_seqlens_k = torch.empty(batch + 1, dtype=torch.int32, device=device)
    block_table = torch.empty((batch, num_columns), dtype=torch.int32, device=device)
    _prepare_decode[1 + batch,](
        rows, positions, last_token_ids, block_tables, input_ids, slot_mapping, cu_seqlens_k, block_table,
        batch, num_columns, block_size, BLOCK_B=1024, BLOCK_C=512, num_warps=4,
    )  # fmt: skip
    return input_ids, slot_mapping, cu_seqlens_k, block_table


def finish_decode(
    rows: Tensor,
    slots: Tensor,
    token_ids: Tensor,
    last_token_ids: Tensor,
    positions: Tensor,
    num_drawn: Tensor,
) -> None:
    """In place; see `octavo.kernels.decode_rows`."""
    _finish_decode[1,](
        rows, slots, token_ids, last_token_ids, positions, num_drawn, rows.shape[0],
        BLOCK_B=256, num_warps=4, **options({"PDL": 1}, rows.device),
    )  # fmt: skip
