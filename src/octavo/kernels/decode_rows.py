"""What a decode step needs of its rows, and leaves with them: the host says only which rows they are."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels import backend, checks
from octavo.kernels.argument_types import names_wrong_types

_INT64 = (torch.int64,)
_INT32 = (torch.int32,)


@names_wrong_types
def prepare_decode(
    rows: Tensor, positions: Tensor, last_token_ids: Tensor, block_tables: Tensor, block_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What one new token of each of B sequences is computed from.

    A row whose table has no block for its position does not take part: its slot is negative, it sees no key,
    and whatever is computed for it is written nowhere. That is how a batch is padded to a fixed size::

        rows        2  0  3        last_token_ids  40 41 42 43      input_ids     42 40 43
        positions   5  1  0        block_tables    7 -1             slot_mapping  13 29 -1
                                   (block_size 4)  4  5             cu_seqlens_k  0 6 8 8
                                                   9  3             block_table   9 3
                                                  -1 -1                           7 -1
                                                                                 -1 -1

    Args:
        rows: (B,) int64, each from 0 to R - 1; a row that takes part stands there once.
        positions: (B,) int64, where the new token stands in its sequence, from 0 to C * block_size - 1.
        last_token_ids: (R,) int64. block_tables: (R, C) int32 contiguous, -1 = no block.
        block_size: tokens of a block.

    Returns:
        input_ids (B,) int64, slot_mapping (B,) int64, cu_seqlens_k (B + 1,) int32 and block_table (B, C)
        int32, new contiguous tensors, as `octavo.kernels.flash_attn_varlen_func` takes them. On a GPU nothing
        is read by the host, and a CUDA graph can capture the call.

    Raises:
        KernelArgumentError: a type, shape, dtype or device is wrong.
    """
    name = "prepare_decode"
    device = rows.device
    checks.exactly(name, "rows", rows, (rows.numel(),), device, _INT64)
    checks.exactly(name, "positions", positions, (rows.numel(),), device, _INT64)
    checks.exactly(name, "last_token_ids", last_token_ids, (last_token_ids.numel(),), device, _INT64)
    if block_tables.dim() != 2 or block_tables.shape[0] != last_token_ids.shape[0]:
        expected = f"of shape (R, C) with R = {last_token_ids.shape[0]} like last_token_ids"
        raise checks.wrong(name, "block_tables", expected, f"shape {tuple(block_tables.shape)}")
    checks.exactly(name, "block_tables", block_tables, tuple(block_tables.shape), device, _INT32)
    if not block_tables.is_contiguous():
        raise checks.wrong(name, "block_tables", "contiguous", f"strides {block_tables.stride()}")
    if block_size < 1:
        raise checks.wrong(name, "block_size", "at least 1", block_size)
    kernel = backend.select(name, "cpu" if rows.is_cpu else device.type)
    made: tuple[Tensor, Tensor, Tensor, Tensor] = kernel(
        rows, positions, last_token_ids, block_tables, block_size
    )
    return made


@names_wrong_types
def finish_decode(
    rows: Tensor,
    slots: Tensor,
    token_ids: Tensor,
    last_token_ids: Tensor,
    positions: Tensor,
    num_drawn: Tensor,
) -> None:
    """What the next step of the same B rows begins with: their new tokens, each one place further on.

    A row that took no part (a negative slot) is left as it is, and may stand there more than once. A row in
    error has no token, and goes on with 0 until the host knows of it.

    Args:
        rows: (B,) int64, as `prepare_decode` was given them.      slots: (B,) int64, as it made them.
        token_ids: (B,) int64, as `octavo.kernels.sample` chose them: -1 is an error.
        last_token_ids: (R,) int64, changed: those of the rows are set.
        positions, num_drawn: (B,) int64, changed: those of rows that took part are raised by 1.

    Raises:
        KernelArgumentError: a type, shape, dtype or device is wrong.
    """
    name = "finish_decode"
    device = rows.device
    shape = (rows.numel(),)
    checks.exactly(name, "rows", rows, shape, device, _INT64)
    checks.exactly(name, "slots", slots, shape, device, _INT64)
    checks.exactly(name, "token_ids", token_ids, shape, device, _INT64)
    checks.exactly(name, "last_token_ids", last_token_ids, (last_token_ids.numel(),), device, _INT64)
    checks.exactly(name, "positions", positions, shape, device, _INT64)
    checks.exactly(name, "num_drawn", num_drawn, shape, device, _INT64)
    kernel = backend.select(name, "cpu" if rows.is_cpu else device.type)
    kernel(rows, slots, token_ids, last_token_ids, positions, num_drawn)
