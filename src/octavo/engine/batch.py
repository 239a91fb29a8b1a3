"""From a schedule to the index tensors of a step: which tokens, where they stand, which slots they take.

All of them are parts of one buffer, so that a step moves to the device in one copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from octavo.engine.request import Sequence
from octavo.engine.schedule import Schedule
from octavo.layers.attention_metadata import AttentionMetadata

# Triton compiles apart for addresses that divide by 16 and for those that do not.
_ALIGNMENT = 16

_NONE = torch.empty(0, dtype=torch.int64, device="cpu")


@dataclass(frozen=True, slots=True)
class Batch:
    """The packed tokens of a step.

    input_ids, positions: (T,) int64. logits_rows: (S,) int64, the packed position whose logits sample j is
    drawn from.
    For steps that are launched before the last one was read, else empty: sampled_rows: (S,) int64, the row of
    the sequence that sample j is drawn for. unknown: (U,) int64, the packed positions whose ids the host does
    not know yet (they hold 0), and unknown_rows: (U,) int64, the rows whose last token they are.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    metadata: AttentionMetadata
    logits_rows: torch.Tensor
    sampled_rows: torch.Tensor
    unknown: torch.Tensor
    unknown_rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class HostBatch:
    """A step of B sequences and T tokens before it goes to a device; what has the name of a tensor of `Batch`
    becomes that one.

    num_new: (B,) new tokens of each sequence. lengths: (B,) context lengths, the new tokens included.
    rows: (B,) rows of the block table. All int64.
    """

    input_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    num_new: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    logits_rows: npt.NDArray[np.int64]
    sampled_rows: npt.NDArray[np.int64]
    unknown: npt.NDArray[np.int64]
    unknown_rows: npt.NDArray[np.int64]


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
        device: torch.device | None = None,
        overlap: bool = False,
    ) -> None:
        self._overlap = overlap
        self._block_table_of = block_table
        self._block_size = block_size
        self._device = device or torch.device("cpu")
        self.num_rows = num_rows
        self._table = np.full((num_rows, max_blocks_per_row), -1, dtype=np.int32)
        # Of each row, the entries [first, last) that a copy of the table elsewhere does not have yet.
        self._changes: dict[int, tuple[int, int]] | None = None

    @property
    def table(self) -> npt.NDArray[np.int32]:
        """(num_rows, max_blocks_per_row) as it was last synchronised; only to be read."""
        return self._table

    def build(self, plan: Schedule) -> Batch:
        """The tensors of one step. On a GPU they are under way when this returns; nothing waits for them."""
        host = self.on_host(plan)
        num_columns = -(-int(host.lengths.max()) // self._block_size)
        overlapped = [host.sampled_rows, host.unknown, host.unknown_rows]
        return pack_batch(
            input_ids=host.input_ids,
            positions=host.positions,
            slots=host.slots,
            num_new=host.num_new,
            lengths=host.lengths,
            block_table=self._table[host.rows, :num_columns],
            logits_rows=host.logits_rows,
            device=self._device,
            overlapped=overlapped if self._overlap else None,
        )

    def on_host(self, plan: Schedule) -> HostBatch:
        """One step, with the rows of its sequences up to date."""
        num_new = np.array(plan.num_new_tokens, dtype=np.int64)
        starts = np.array([seq.num_computed_tokens for seq in plan.sequences], dtype=np.int64)
        self.sync_rows(plan.sequences)
        rows = np.array([seq.row for seq in plan.sequences], dtype=np.int64)
        cu_seqlens_q = prefix_sums(num_new)
        # Each token's position: its index in the packed batch, moved by where its row starts.
        positions = np.arange(plan.num_tokens) + np.repeat(starts - cu_seqlens_q[:-1], num_new)
        block_ids = self._table[np.repeat(rows, num_new), positions // self._block_size]
        token_ids, unknown, unknown_rows = _new_token_ids(plan)
        sampled_rows = [seq.row for seq in plan.sampled] if self._overlap else []
        return HostBatch(
            input_ids=np.array(token_ids, dtype=np.int64),
            positions=positions,
            slots=block_ids.astype(np.int64) * self._block_size + positions % self._block_size,
            num_new=num_new,
            lengths=starts + num_new,
            rows=rows,
            logits_rows=cu_seqlens_q[1:][plan.sampled_rows] - 1,
            sampled_rows=np.array(sampled_rows, dtype=np.int64),
            unknown=np.array(unknown, dtype=np.int64),
            unknown_rows=np.array(unknown_rows, dtype=np.int64),
        )

    def sync_rows(self, sequences: list[Sequence]) -> None:
        """Bring the rows of these sequences up to date with their block tables."""
        table, changes = self._table, self._changes
        block_size = self._block_size
        for seq in sequences:
            synced = seq.num_synced_blocks
            # Blocks are exchanged only with `num_synced_blocks` put back to 0, so that most need no look-up.
            if synced * block_size != seq.num_covered_tokens:
                blocks = self._block_table_of(seq.seq_id)
                num_blocks = len(blocks)
                row = table[seq.row]
                row[synced:num_blocks] = blocks[synced:]
                if synced == 0:
                    row[num_blocks:] = -1  # the row's last owner may have had more
                if changes is not None:
                    first, _ = changes.get(seq.row, (synced, num_blocks))
                    changes[seq.row] = min(first, synced), num_blocks
                seq.num_synced_blocks = num_blocks

    def track_changes(self) -> int:
        """From now on keep what `update` is to copy; returns the entries of a row."""
        self._changes = {}
        return self._table.shape[1]

    def update(self, table: torch.Tensor) -> None:
        """Write what is new since the last call into `table`, a contiguous int32 copy of ours on any device,
        perhaps with more rows. Nothing waits for a GPU to be done with it.

        Entries past a row's blocks are left as they were. A call that raises is made up for by the next one.
        """
        changes = self._changes
        assert changes is not None, "nobody tracks changes"
        if not changes:
            return
        num_columns = self._table.shape[1]
        places = [
            np.arange(row * num_columns + first, row * num_columns + last)
            for row, (first, last) in changes.items()
        ]
        at = np.concatenate(places)
        table.view(-1).index_copy_(0, *upload([at, self._table.reshape(-1)[at]], table.device))
        # Only now: rows of sequences that outlive a step that broke before count on it.
        changes.clear()


def pack_batch(
    *,
    input_ids: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    slots: npt.NDArray[np.int64],
    num_new: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    block_table: npt.NDArray[np.int32],
    logits_rows: npt.NDArray[np.int64],
    device: torch.device,
    overlapped: list[npt.NDArray[np.int64]] | None = None,
) -> Batch:
    """A batch of B sequences on `device`.

    num_new: (B,) new tokens of each. lengths: (B,) context lengths, the new tokens included. overlapped: the
    batch's sampled_rows, unknown and unknown_rows.
    """
    parts = upload(
        [
            input_ids,
            positions,
            slots,
            logits_rows,
            prefix_sums(num_new).astype(np.int32),
            prefix_sums(lengths).astype(np.int32),
            block_table,
            *(overlapped or ()),
        ],
        device,
    )
    sampled_rows, unknown, unknown_rows = parts[7:] if overlapped else [_NONE] * 3
    return Batch(
        input_ids=parts[0],
        positions=parts[1],
        metadata=AttentionMetadata(
            slot_mapping=parts[2],
            cu_seqlens_q=parts[4],
            cu_seqlens_k=parts[5],
            block_table=parts[6],
            max_seqlen_q=int(num_new.max()),
            max_seqlen_k=int(lengths.max()),
        ),
        logits_rows=parts[3],
        sampled_rows=sampled_rows,
        unknown=unknown,
        unknown_rows=unknown_rows,
    )


def upload(
    arrays: list[npt.NDArray[np.int64] | npt.NDArray[np.int32]],
    device: torch.device,
    into: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """The arrays as tensors on `device`, parts of one buffer that is copied there once.

    into: int64, the memory that they are parts of; a new one unless given. Each begins where it did the last
    time if those before it have the sizes that they had.
    """
    starts, size = [], 0  # in bytes
    for array in arrays:
        assert array.flags.c_contiguous
        starts.append(size)
        size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    # New for each step: torch keeps pinned memory until the copy from it is done, then gives it out again.
    buffer = torch.empty(size // 8, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    raw = buffer.numpy().view(np.uint8)
    for array, start in zip(arrays, starts, strict=True):
        raw[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    if into is None:
        wide = buffer.to(device, non_blocking=True)
    else:
        wide = into[: len(buffer)].copy_(buffer, non_blocking=True)
    bases = {8: wide, 4: wide.view(torch.int32)}
    return [
        bases[array.itemsize].as_strided(
            array.shape, [stride // array.itemsize for stride in array.strides], start // array.itemsize
        )
        for array, start in zip(arrays, starts, strict=True)
    ]


def _new_token_ids(plan: Schedule) -> tuple[list[int], list[int], list[int]]:
    """The packed ids; where a step under way is still drawing one, a 0, its place, and its row."""
    token_ids: list[int] = []
    unknown: list[int] = []
    unknown_rows: list[int] = []
    for seq, num_new in zip(plan.sequences, plan.num_new_tokens, strict=True):
        start = seq.num_computed_tokens
        known = seq.token_ids[start : start + num_new]
        if len(known) == num_new:
            token_ids += known
        else:
            assert num_new == 1, f"{seq}: a prompt is computed of tokens that are not known"
            unknown.append(len(token_ids))
            unknown_rows.append(seq.row)
            token_ids.append(0)
    return token_ids, unknown, unknown_rows


def prefix_sums(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    sums = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=sums[1:])
    return sums
