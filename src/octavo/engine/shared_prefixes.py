"""Which decode steps are worth the form that reads common keys once for eight sequences.

The device finds out itself, in every step, what its sequences have in common
(`octavo.kernels.shared_prefixes`); this decides whether looking pays. Either way the answer is the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.cache.spec import KVCacheSpec
from octavo.kernels.linear import Form
from octavo.kernels.shared_prefixes import LEAST_TOKENS, OCTET


@dataclass(frozen=True)
class Sharing:
    """From when on the form pays, for a cache of `bytes_per_token` a layer.

    `least_tokens` are common to an octet; `least_bytes` fewer are read in each layer. What is 64 MiB takes
    an H200 14 us to read: the price of three launches.
    """

    bytes_per_token: int
    block_size: int
    least_tokens: int = LEAST_TOKENS
    least_bytes: int = 64 * 2**20

    def can_pay(self, num_rows: int, longest: int) -> bool:
        """Whether any step of so many rows, none longer than that, may be worth it."""
        num_spared = num_rows - -(-num_rows // OCTET)
        saved = num_spared * longest * self.bytes_per_token
        return longest > self.least_tokens and saved >= self.least_bytes

    def order(
        self, table: npt.NDArray[np.int32], rows: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64] | None:
        """The order in which a step of these rows of the block table shares enough for the form to pay, those
        that begin alike side by side; None when it does not pay.

        table: (R, C), -1 = no block. Some microseconds where nothing is shared.
        """
        num_columns = -(-self.least_tokens // self.block_size)
        if len(rows) < 2 or num_columns > table.shape[1]:
            return None
        # Blocks are found by what stands before them, too: sequences that agree on one agree on those before.
        blocks = np.sort(table[rows, num_columns - 1])
        if not ((blocks[1:] == blocks[:-1]) & (blocks[1:] >= 0)).any():
            return None
        columns = [num_columns - 1]
        while (further := 2 * columns[-1] + 1) < table.shape[1]:
            columns.append(further)
        order: npt.NDArray[np.int64] = np.lexsort(table[rows[:, None], columns[::-1]].T)
        return order if self._pays(table, rows[order]) else None

    def _pays(self, table: npt.NDArray[np.int32], rows: npt.NDArray[np.int64]) -> bool:
        saved = 0
        for start in range(0, len(rows) - 1, OCTET):
            tables = table[rows[start : start + OCTET]]
            agrees = (tables == tables[0]).all(axis=0) & (tables[0] >= 0)
            num_common = (len(agrees) if agrees.all() else int(agrees.argmin())) * self.block_size
            if num_common >= self.least_tokens:
                saved += (len(tables) - 1) * num_common * self.bytes_per_token
                if saved >= self.least_bytes:
                    return True
        return False


def sharing_for(spec: KVCacheSpec, form: Form) -> Sharing | None:
    """When a model over such a cache, whose weights are in that form, may share; None = never.

    Never where a row's bits must not depend on its neighbours, and where every layer has a window.
    """
    if form == "invariant" or (spec.windows is not None and None not in spec.windows):
        return None
    return Sharing(spec.bytes_per_token // spec.num_layers, spec.block_size)


def shared_bucket_sizes(most: int) -> list[int]:
    """Numbers of rows that such steps are captured for: powers of two from an octet on, and the most."""
    if most < OCTET:
        return []
    return sorted({most, *(1 << i for i in range(OCTET.bit_length() - 1, most.bit_length()))})
