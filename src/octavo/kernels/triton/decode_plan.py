"""Who does what in decode attention: a fixed number of programs divide ragged work among themselves.

Each KV head has the same number of programs, its *ranks*, and the programs of one rank do the same stretch of
keys at the same time, each its head: together they read whole tokens. What a head has to do is counted in
*units*: UNIT keys, at absolute positions, of one *item* (a sequence and BLOCK_M query rows). The units of all
items lie end to end, and each rank takes an equal range of them::

      item 0                    item 1              item 2                      item 3
    | . . . . . . . . . . . . | . . . . . . . . . | . . . . . . . . . . . . . | . . . .
    '----- rank 0 ----''----- rank 1 -----''----- rank 2 -----''----- rank 3 -----' ...

so that all are busy equally long whatever the lengths are, and no length is read by the host. A range cuts at
most two items, its first and its last; what lies between is its own.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from octavo.kernels.triton import tiles

_SHORT: tl.constexpr = tl.constexpr(tiles.SHORT)


@triton.jit
def work(
    cu_seqlens_q, cu_seqlens_k, leftpad, left, batch, b,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Sequence b, or a vector of them: where it is, the first key it sees, and its units.

    Returns (q_begin, q_len, k_begin, k_len, first, units of an item, units). A sequence whose rows see no key
    has one unit per item: somebody has to write its zeros. One that is not decode's has none.
    """
    there = b < batch
    q_begin = tl.load(cu_seqlens_q + b, mask=there, other=0)
    q_len = tl.load(cu_seqlens_q + b + 1, mask=there, other=0) - q_begin
    k_begin = tl.load(cu_seqlens_k + b, mask=there, other=0)
    k_len = tl.load(cu_seqlens_k + b + 1, mask=there, other=0) - k_begin
    first = tl.zeros_like(k_len)
    if left is not None:
        first = tl.maximum(k_len - q_len - left, 0)
    if leftpad is not None:
        first = tl.maximum(first, tl.load(leftpad + b, mask=there, other=0))
    per_item = tl.maximum((k_len + UNIT - 1) // UNIT - first // UNIT, 1)
    items = (q_len * GROUP + BLOCK_M - 1) // BLOCK_M
    units = tl.where((q_len > 0) & (q_len <= _SHORT), per_item * items, 0)
    return q_begin, q_len, k_begin, k_len, first, per_item, units


@triton.jit
def all_units(
    cu_seqlens_q, cu_seqlens_k, leftpad, left, batch, start,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, UNIT: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """The units of the BLOCK_B sequences from `start` on."""
    b = start + tl.arange(0, BLOCK_B)
    _, _, _, _, _, _, units = work(cu_seqlens_q, cu_seqlens_k, leftpad, left, batch, b, GROUP, BLOCK_M, UNIT)
    return units


@triton.jit
def divide(
    cu_seqlens_q, cu_seqlens_k, leftpad, left, batch, ranks, least,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_B: tl.constexpr, ONE_BLOCK: tl.constexpr,
):  # fmt: skip
    """The units of a rank, and of all together.

    No range is under `least` units: cutting finer costs more in merging than it gains. BLOCK_B sequences are
    looked at in one go; ONE_BLOCK says that these are all.
    """
    total = 0
    if ONE_BLOCK:
        total = tl.sum(
            all_units(cu_seqlens_q, cu_seqlens_k, leftpad, left, batch, 0, GROUP, BLOCK_M, UNIT, BLOCK_B), 0
        )
    else:
        for start in range(0, batch, BLOCK_B):
            total += tl.sum(
                all_units(
                    cu_seqlens_q, cu_seqlens_k, leftpad, left, batch, start, GROUP, BLOCK_M, UNIT, BLOCK_B
                ),
                0,
            )
    return tl.maximum((total + ranks - 1) // ranks, least), total


@triton.jit
def sequence_of(
    cu_seqlens_q, cu_seqlens_k, leftpad, left, batch, unit,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_B: tl.constexpr, ONE_BLOCK: tl.constexpr,
):  # fmt: skip
    """The sequence that a unit is of, and the first unit of that sequence."""
    sequence = 0
    begin = 0
    if ONE_BLOCK:
        units = all_units(cu_seqlens_q, cu_seqlens_k, leftpad, left, batch, 0, GROUP, BLOCK_M, UNIT, BLOCK_B)
        before = tl.cumsum(units, 0) <= unit
        sequence = tl.sum(before.to(tl.int32), 0)
        begin = tl.sum(tl.where(before, units, 0), 0)
    else:
        so_far = 0
        for start in range(0, batch, BLOCK_B):
            units = all_units(
                cu_seqlens_q, cu_seqlens_k, leftpad, left, batch, start, GROUP, BLOCK_M, UNIT, BLOCK_B
            )
            before = so_far + tl.cumsum(units, 0) <= unit
            sequence += tl.sum(before.to(tl.int32), 0)
            begin += tl.sum(tl.where(before, units, 0), 0)
            so_far += tl.sum(units, 0)
    return sequence, begin


def sequences_at_once(batch: int) -> int:
    """BLOCK_B for a batch: few values, for each is compiled. One sequence alone has the shortest way.

    Every program of both launches looks at as many sequences; 512 are for 256 and one of padding.
    """
    return next((size for size in (1, 32, 256, 512) if batch <= size), 1024)
