"""Who does what in decode attention: a fixed number of programs divide ragged work among themselves.

The work is counted in *units*: a stretch of UNIT keys, at absolute positions, of one *item* (a sequence, a KV
head and BLOCK_M query rows). Units are laid end to end, and each program takes an equal range of them::

      sequence 0, head 0      head 1                  sequence 1, head 0  head 1
    | . . . . . . . . . . . | . . . . . . . . . . . | . . . . . . . . . | . . . . . . .
    '------ program 0 ------------' '------ program 1 -----------' '--- program 2 ---

so that all are busy equally long whatever the lengths are, and no length is read by the host. A program's
range cuts at most two items, its first and its last; what lies between is its own.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from octavo.kernels.triton import tiles

_SHORT: tl.constexpr = tl.constexpr(tiles.SHORT)


@triton.jit
def work(
    cu_seqlens_q, cu_seqlens_k, leftpad, left, batch, b,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Sequence b, or a vector of them: where it is, the first key it sees, and its units.

    Returns (q_begin, q_len, k_begin, k_len, first, units of an item, row tiles, units). A sequence whose rows
    see no key has one unit per item: somebody has to write its zeros. One that is not decode's has none.
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
    row_tiles = (q_len * GROUP + BLOCK_M - 1) // BLOCK_M
    units = tl.where((q_len > 0) & (q_len <= _SHORT), per_item * row_tiles * NUM_KV_HEADS, 0)
    return q_begin, q_len, k_begin, k_len, first, per_item, row_tiles, units


@triton.jit
def _units(
    cu_seqlens_q, cu_seqlens_k, leftpad, left, batch, b,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    _, _, _, _, _, _, _, units = work(
        cu_seqlens_q, cu_seqlens_k, leftpad, left, batch, b, NUM_KV_HEADS, GROUP, BLOCK_M, UNIT
    )
    return units


@triton.jit
def share(
    cu_seqlens_q, cu_seqlens_k, leftpad, left, batch, least,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_B: tl.constexpr, ONE_BLOCK: tl.constexpr,
):  # fmt: skip
    """This program's units [unit, end), everybody's `per`, and the sequence of `unit` with its first unit.

    `per` is at least `least`: cutting finer costs more in merging than it gains. BLOCK_B sequences are looked
    at in one go; ONE_BLOCK says that these are all.
    """
    b = tl.arange(0, BLOCK_B)
    total = 0
    if ONE_BLOCK:
        units = _units(
            cu_seqlens_q, cu_seqlens_k, leftpad, left, batch, b, NUM_KV_HEADS, GROUP, BLOCK_M, UNIT
        )
        total = tl.sum(units, 0)
    else:
        for start in range(0, batch, BLOCK_B):
            units = _units(
                cu_seqlens_q, cu_seqlens_k, leftpad, left, batch, start + b,
                NUM_KV_HEADS, GROUP, BLOCK_M, UNIT,
            )  # fmt: skip
            total += tl.sum(units, 0)
    programs = tl.num_programs(0)
    per = tl.maximum((total + programs - 1) // programs, least)
    unit = tl.program_id(0) * per
    end = tl.minimum(unit + per, total)
    sequence = 0
    begin = 0
    if ONE_BLOCK:
        before = tl.cumsum(units, 0) <= unit
        sequence = tl.sum(before.to(tl.int32), 0)
        begin = tl.sum(tl.where(before, units, 0), 0)
    else:
        so_far = 0
        for start in range(0, batch, BLOCK_B):
            units = _units(
                cu_seqlens_q, cu_seqlens_k, leftpad, left, batch, start + b,
                NUM_KV_HEADS, GROUP, BLOCK_M, UNIT,
            )  # fmt: skip
            before = (so_far + tl.cumsum(units, 0) <= unit) & (start + b < batch)
            sequence += tl.sum(before.to(tl.int32), 0)
            begin += tl.sum(tl.where(before, units, 0), 0)
            so_far += tl.sum(units, 0)
    return unit, end, per, sequence, begin


def sequences_at_once(batch: int) -> int:
    """BLOCK_B for a batch: few values, for each is compiled."""
    return 16 if batch <= 16 else 256 if batch <= 256 else 1024
