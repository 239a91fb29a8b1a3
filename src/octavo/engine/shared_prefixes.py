"""Which decode steps are worth the form that reads common keys once for eight sequences.

The device finds out itself, in every step, what its sequences have in common
(`octavo.kernels.shared_prefixes`); this decides whether looking pays. Either way the answer is the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from octavo.cache.spec import KVCacheSpec
from octavo.cache.storage import storage_dtype
from octavo.kernels.linear import Form
from octavo.kernels.shared_prefixes import LEAST_TOKENS, OCTET, rows_at_once


@dataclass(frozen=True)
class Sharing:
    """From when on the form pays, for a cache of `bytes_per_token` a layer.

    `least_tokens` are common to an octet; `least_bytes` fewer are read in each layer. What is 64 MiB takes
    an H200 14 us to read: the price of three launches. An octet reads its common keys once for every
    `rows_at_once` of its query rows, of which each entry has `group` for a KV head.
    """

    bytes_per_token: int
    block_size: int
    least_tokens: int = LEAST_TOKENS
    least_bytes: int = 64 * 2**20
    group: int = 1
    rows_at_once: int = 64

    def can_pay(self, num_rows: int, longest: int) -> bool:
        """Whether any step of so many rows, none longer than that, may be worth it."""
        saved = int(self._spared(num_rows).sum()) * longest * self.bytes_per_token
        return longest > self.least_tokens and saved >= self.least_bytes

    def order(
        self, table: npt.NDArray[np.int32], rows: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64] | None:
        """The order in which a step of these rows of the block table shares enough for the form to pay; None
        when it does not pay.

        First whole octets of rows that begin alike, those alike for longest before the others; then rows that
        are like nobody; then what is left of groups, the largest last, for the last octet is seldom whole.

        table: (R, C), -1 = no block. Some microseconds where nothing is shared.
        """
        num_columns = -(-self.least_tokens // self.block_size)
        if len(rows) < 2 or num_columns > table.shape[1]:
            return None
        # Blocks are found by what stands before them, too: sequences that agree on one agree on those before.
        blocks = np.sort(table[rows, num_columns - 1])
        if not _agree(blocks[1:], blocks[:-1]).any():
            return None
        columns = [num_columns - 1]
        while (further := 2 * columns[-1] + 1) < table.shape[1]:
            columns.append(further)
        keys = table[rows[:, None], columns]
        left = np.lexsort(keys.T[::-1])
        keys = keys[left]
        depth = int(np.flatnonzero(_agree(keys[1:], keys[:-1]).any(axis=0))[-1]) + 1
        octets = []
        for level in reversed(range(depth)):  # an octet of what is alike for longer costs the others none
            place, size = _groups(keys[:, level])
            whole = place < size // OCTET * OCTET
            octets.append(left[whole])
            left, keys, size = left[~whole], keys[~whole], size[~whole]
        rest = left[np.argsort(size % OCTET * (size > 1), kind="stable")]
        order: npt.NDArray[np.int64] = np.concatenate([*octets, rest])
        most = columns[depth] if depth < len(columns) else table.shape[1]
        return order if self._pays(table, rows[order], num_columns, most) else None

    def _pays(self, table: npt.NDArray[np.int32], rows: npt.NDArray[np.int64], least: int, most: int) -> bool:
        """Whether octets of these rows, in this order, save enough; none has more than `most` columns in
        common, or is counted with fewer than `least`."""
        spared = self._spared(len(rows))
        # The last row stands for those that the last octet lacks.
        octets = rows[np.minimum(np.arange(len(spared) * OCTET), len(rows) - 1)].reshape(-1, OCTET)
        blocks = table[octets, least - 1]
        alike = _agree(blocks, blocks[:, :1]).all(axis=1) & (spared > 0)
        if not alike.any():
            return False
        octets, spared = octets[alike], spared[alike]
        num_common = np.full(len(octets), least)
        step = 1 << most.bit_length()
        while self._bytes(spared, num_common) < self.least_bytes:
            step >>= 1
            if not step:
                return False
            further = num_common + step
            blocks = table[octets, np.minimum(further, most)[:, None] - 1]
            alike = _agree(blocks, blocks[:, :1]).all(axis=1) & (further <= most)
            num_common[alike] += step
        return True

    def _bytes(self, spared: npt.NDArray[np.int64], num_common: npt.NDArray[np.int64]) -> int:
        return int(spared @ num_common) * self.block_size * self.bytes_per_token

    def _spared(self, num_rows: int) -> npt.NDArray[np.int64]:
        """How many times less each octet of so many rows reads what they have in common."""
        entries = np.minimum(num_rows - np.arange(0, num_rows, OCTET), OCTET)
        spared: npt.NDArray[np.int64] = np.maximum(entries - -(-entries * self.group // self.rows_at_once), 0)
        return spared


def _agree(blocks: npt.NDArray[np.int32], others: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    alike: npt.NDArray[np.bool_] = (blocks == others) & (blocks >= 0)
    return alike


def _groups(blocks: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Of neighbours with the same block: the place of each among them, and how many they are; 0 without."""
    begins = np.flatnonzero(np.concatenate([[True], blocks[1:] != blocks[:-1]])[: len(blocks)])
    sizes = np.diff(begins, append=len(blocks))
    place = np.arange(len(blocks)) - np.repeat(begins, sizes)
    return place, np.where(blocks >= 0, np.repeat(sizes, sizes), 0)


def sharing_for(spec: KVCacheSpec, form: Form, num_heads: int, dtype: torch.dtype) -> Sharing | None:
    """When a model over such a cache, with so many query heads of that dtype and weights in that form, may
    share; None = never.

    Never where a row's bits must not depend on its neighbours, and where every layer has a window.
    """
    if form == "invariant" or (spec.windows is not None and None not in spec.windows):
        return None
    return Sharing(
        spec.bytes_per_token // spec.num_layers,
        spec.block_size,
        group=num_heads // spec.num_kv_heads,
        rows_at_once=rows_at_once(spec.head_dim, dtype, storage_dtype(spec)),
    )


def parts_bytes(num_rows: int, num_heads: int, head_dim: int) -> int:
    """What attention of such a step hands to the launch that joins its parts: for each of so many rows two
    results in float32 and their LSEs.

    Not counted are the pieces of the launch for octets. Their size is the GPU's, whatever the batch: with 264
    programs and heads of 128, of which four share one KV head, 2 * 264 * 32 * 128 numbers, or 8.7 MB.
    """
    return 2 * num_rows * num_heads * (head_dim + 1) * 4
