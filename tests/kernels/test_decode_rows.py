"""What a decode step needs to know of its rows, spelled out and beside plain Python, in every room."""

from __future__ import annotations

import random

import pytest
import torch

from octavo.kernels.decode_rows import prepare_decode
from octavo.kernels.reference import decode_rows as reference

pytestmark = pytest.mark.rooms("reference", "triton")


@pytest.mark.usefixtures("implementation")
def test_the_example_of_the_docstring() -> None:
    tables = torch.tensor([[7, -1], [4, 5], [9, 3], [-1, -1]], dtype=torch.int32)
    ids, slots, cu_seqlens_k, table = prepare_decode(
        torch.tensor([2, 0, 3]), torch.tensor([5, 1, 0]), torch.tensor([40, 41, 42, 43]), tables, 4
    )
    assert ids.tolist() == [42, 40, 43]
    assert slots.tolist() == [13, 29, -1]
    assert cu_seqlens_k.tolist() == [0, 6, 8, 8]
    assert table.tolist() == [[9, 3], [7, -1], [-1, -1]]
    assert (ids.dtype, slots.dtype) == (torch.int64, torch.int64)
    assert (cu_seqlens_k.dtype, table.dtype) == (torch.int32, torch.int32)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize(
    ("batch", "num_columns", "block_size"), [(0, 3, 4), (1, 1, 1), (5, 600, 16), (1030, 2, 4)]
)
def test_every_row_beside_plain_python(batch: int, num_columns: int, block_size: int) -> None:
    rng = random.Random(batch)
    num_rows = batch + 3
    rows = rng.sample(range(num_rows), batch)
    tables = [[-1] * num_columns for _ in range(num_rows)]
    positions = []
    for row in rows:
        num_blocks = rng.randint(0, num_columns)
        tables[row][:num_blocks] = [rng.randrange(2**31 - 1) for _ in range(num_blocks)]
        positions.append(rng.randrange(num_columns * block_size))
    last = [rng.randrange(10**6) for _ in range(num_rows)]
    arguments = (
        torch.tensor(rows, dtype=torch.int64),
        torch.tensor(positions, dtype=torch.int64),
        torch.tensor(last),
        torch.tensor(tables, dtype=torch.int32),
        block_size,
    )
    ids, slots, cu_seqlens_k, table = prepare_decode(*arguments)
    assert ids.tolist() == [last[row] for row in rows]
    assert table.tolist() == [tables[row] for row in rows]
    total, sums = 0, [0]
    for row, position, slot in zip(rows, positions, slots.tolist(), strict=True):
        block = tables[row][position // block_size]
        assert slot == (block * block_size + position % block_size if block >= 0 else -1)
        total += position + 1 if block >= 0 else 0
        sums.append(total)
    assert cu_seqlens_k.tolist() == sums
    for found, expected in zip(prepare_decode(*arguments), reference.prepare_decode(*arguments), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": torch.zeros(2, dtype=torch.int32)}, r"rows\.dtype must be torch\.int64"),
        ({"positions": torch.zeros(3, dtype=torch.int64)}, r"positions must be of shape \(2,\)"),
        ({"block_tables": torch.zeros((5, 2), dtype=torch.int32)}, "block_tables must be of shape .* R = 4"),
        ({"block_tables": torch.zeros((4, 2))}, r"block_tables\.dtype must be torch\.int32"),
        ({"block_tables": torch.zeros((2, 4), dtype=torch.int32).T}, "block_tables must be contiguous"),
        ({"block_size": 0}, "block_size must be at least 1"),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "rows": torch.zeros(2, dtype=torch.int64),
        "positions": torch.zeros(2, dtype=torch.int64),
        "last_token_ids": torch.zeros(4, dtype=torch.int64),
        "block_tables": torch.zeros((4, 2), dtype=torch.int32),
        "block_size": 4,
    }
    with pytest.raises(ValueError, match=message):
        prepare_decode(**(arguments | changes))  # type: ignore[arg-type]
