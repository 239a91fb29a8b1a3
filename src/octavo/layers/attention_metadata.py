"""The index tensors of one step, made once and read by every attention layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from octavo.kernels.shared_prefixes import SharedPrefixes


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """A packed batch of B sequences with T new tokens in all, over a paged cache.

    Attributes:
        slot_mapping: (T,) int64, the slot `block_id * block_size + offset` each new token's K/V is written
            to; negative = do not write.
        cu_seqlens_q: (B + 1,) int32, prefix sums of the numbers of new tokens; first 0, last T.
        cu_seqlens_k: (B + 1,) int32, prefix sums of the context lengths, the new tokens included.
        block_table: (B, max_blocks) int32, each sequence's blocks in token order; -1 = not allocated.
        max_seqlen_q: the most new tokens of one sequence.
        max_seqlen_k: the longest context.
        shared: of a decode step, the leading keys that neighbouring sequences have in common, for layers that
            can make use of it; None where nobody looked.

    The tensors belong to whoever built the batch and are only read here.
    """

    slot_mapping: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    block_table: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    shared: SharedPrefixes | None = None
