"""From a schedule to the index tensors of a step: which tokens, where they stand, which slots they take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from octavo.engine.schedule import Schedule
from octavo.layers.attention_metadata import AttentionMetadata


@dataclass(frozen=True, slots=True)
class Batch:
    """The packed tokens of a step.

    input_ids, positions: (T,) int64. logits_rows: (S,) int64, the packed position whose logits sample j is
    drawn from.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    metadata: AttentionMetadata
    logits_rows: torch.Tensor


class BatchBuilder:
    """Keeps each row's block table between steps, so that a step only copies the blocks that are new.

    Row r of the table belongs to the running sequence with `row == r`; entries [0, num_synced_blocks) of it
    are up to date, those past its blocks are -1.
    """

    def __init__(
        self,
        block_table: Callable[[int], list[int]],
        *,
        num_rows: int,
        max_blocks_per_row: int,
        block_size: int,
    ) -> None:
        self._block_table_of = block_table
        self._block_size = block_size
        self._table = np.full((num_rows, max_blocks_per_row), -1, dtype=np.int32)

    def build(self, plan: Schedule) -> Batch:
        num_new = np.array(plan.num_new_tokens, dtype=np.int64)
        starts = np.array([seq.num_computed_tokens for seq in plan.sequences], dtype=np.int64)
        rows = self._sync_rows(plan)
        cu_seqlens_q = _prefix_sums(num_new)
        ends = starts + num_new
        # Each token's position: its index in the packed batch, moved by where its row starts.
        positions = np.arange(plan.num_tokens) + np.repeat(starts - cu_seqlens_q[:-1], num_new)
        block_ids = self._table[np.repeat(rows, num_new), positions // self._block_size]
        slots = block_ids.astype(np.int64) * self._block_size + positions % self._block_size
        max_seqlen_k = int(ends.max())
        num_columns = -(-max_seqlen_k // self._block_size)
        metadata = AttentionMetadata(
            slot_mapping=torch.from_numpy(slots),
            cu_seqlens_q=torch.from_numpy(cu_seqlens_q.astype(np.int32)),
            cu_seqlens_k=torch.from_numpy(_prefix_sums(ends).astype(np.int32)),
            block_table=torch.from_numpy(self._table[rows, :num_columns]),
            max_seqlen_q=int(num_new.max()),
            max_seqlen_k=max_seqlen_k,
        )
        last = cu_seqlens_q[1:] - 1
        return Batch(
            input_ids=torch.tensor(_new_token_ids(plan), dtype=torch.int64),
            positions=torch.from_numpy(positions),
            metadata=metadata,
            logits_rows=torch.from_numpy(last[np.array(plan.sampled_rows, dtype=np.int64)]),
        )

    def _sync_rows(self, plan: Schedule) -> npt.NDArray[np.int64]:
        table = self._table
        for seq in plan.sequences:
            blocks = self._block_table_of(seq.seq_id)
            synced = seq.num_synced_blocks
            if synced != len(blocks):
                row = table[seq.row]
                row[synced : len(blocks)] = blocks[synced:]
                if synced == 0:
                    row[len(blocks) :] = -1  # the row's last owner may have had more
                seq.num_synced_blocks = len(blocks)
        return np.array([seq.row for seq in plan.sequences], dtype=np.int64)


def _new_token_ids(plan: Schedule) -> list[int]:
    token_ids: list[int] = []
    for seq, num_new in zip(plan.sequences, plan.num_new_tokens, strict=True):
        start = seq.num_computed_tokens
        token_ids += seq.token_ids[start : start + num_new]
    return token_ids


def _prefix_sums(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    sums = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=sums[1:])
    return sums
