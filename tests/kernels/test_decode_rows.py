"""What a decode step needs of its rows, and leaves with them, beside plain Python, in every room."""

from __future__ import annotations

import random

import pytest
import torch

from octavo.kernels.decode_rows import finish_decode, prepare_decode
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


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("batch", [0, 1, 5, 256, 700])
def test_new_tokens_are_kept_and_rows_go_on(batch: int) -> None:
    rng = random.Random(batch)
    rows = rng.sample(range(batch), batch)
    slots = [rng.choice((0, 1, 2**40)) for _ in rows]
    token_ids = [rng.choice((-1, 0, 151_935)) for _ in rows]
    # Entries beyond them, all of one row that takes no part.
    rows, slots, token_ids = [*rows, *[batch] * 3], [*slots, *[-1] * 3], [*token_ids, 8, -1, 9]
    last, positions, num_drawn = ([rng.randrange(2**20) for _ in range(batch + 3)] for _ in range(3))
    changed = [torch.tensor(values) for values in (last, positions, num_drawn)]
    fixed = [torch.tensor(values) for values in (rows, slots, token_ids)]
    finish_decode(*fixed, *changed)
    for row, token_id in list(zip(rows, token_ids, strict=True))[:batch]:
        last[row] = max(token_id, 0)
    ahead = [1] * batch + [0] * 3
    expected = [last, *([a + b for a, b in zip(x, ahead, strict=True)] for x in (positions, num_drawn))]
    assert [x.tolist() for x in changed] == expected
    assert [x.tolist() for x in fixed] == [rows, slots, token_ids]


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("rows", torch.zeros(2, dtype=torch.int32), r"rows\.dtype must be torch\.int64"),
        ("slots", torch.zeros(3, dtype=torch.int64), r"slots must be of shape \(2,\)"),
        ("token_ids", torch.zeros((2, 1), dtype=torch.int64), r"token_ids must be of shape \(2,\)"),
        ("last_token_ids", torch.zeros(4), r"last_token_ids\.dtype must be torch\.int64"),
        ("positions", torch.zeros(1, dtype=torch.int64), r"positions must be of shape \(2,\)"),
        ("num_drawn", torch.zeros(4, dtype=torch.int64)[::2], "last dimension of num_drawn must be"),
    ],
)
def test_wrong_arguments_of_the_end_are_named(name: str, wrong: torch.Tensor, message: str) -> None:
    names = ("rows", "slots", "token_ids", "positions", "num_drawn")
    arguments = {each: torch.zeros(2, dtype=torch.int64) for each in names}
    arguments["last_token_ids"] = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        finish_decode(**(arguments | {name: wrong}))
