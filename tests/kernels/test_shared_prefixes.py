"""Common keys are found octet by octet, and attention over them and the others is what it was."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.attention_cases import Case, attention, prefix_sums, prepare
from helpers.shared_prefixes import CASES, attended, check, decode, in_plain_python, unshare
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.kernels import backend, flash_attn_varlen_func
from octavo.kernels.shared_prefixes import SharedPrefixes, attend_shared, find_shared_prefixes

# Nothing of this is compiled for the CPU, which does not take such steps.
rooms = pytest.mark.rooms("reference", "triton")


def found(tables: list[list[int]], lens_k: list[int], block_size: int, least: int) -> SharedPrefixes:
    table = torch.tensor(tables, dtype=torch.int32).view(len(lens_k), -1)
    return find_shared_prefixes(table, prefix_sums(lens_k, "cpu"), block_size, least)


@rooms
@pytest.mark.usefixtures("implementation")
def test_the_example_of_the_module() -> None:
    shared = found([[7, 2, 5, -1], [7, 2, 9, 4], [7, 2, 1, -1]], [9, 13, 11], 4, 8)
    assert [x.tolist() for x in shared] == [[8, 8, 8], [0, 3], [0, 8], [[7, 2, 5, -1]]]
    assert all(x.dtype == torch.int32 for x in shared)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[list[int]], list[int], int, int]:
    """Rows that are alike but for a few entries, past whose keys anything stands."""
    block_size = draw(st.sampled_from((1, 2, 4, 16)))
    num_columns = draw(st.integers(1, 6))
    batch = draw(st.integers(1, 20))
    tables = [list(range(num_columns)) for _ in range(batch)]
    places = st.tuples(st.integers(0, batch - 1), st.integers(0, num_columns - 1))
    for row, column in draw(st.lists(places, max_size=4)):
        tables[row][column] = 7
    blocks = st.integers(min(2, num_columns), num_columns)
    ends = st.sampled_from((0, 0, 1, block_size - 1))  # on the edge of a block, or keys before it
    full = st.builds(lambda num, less: num * block_size - less, blocks, ends)
    lens_k = [draw(st.one_of(full, full, st.integers(0, num_columns * block_size))) for _ in range(batch)]
    for b in draw(st.lists(st.integers(0, batch - 1), max_size=3)):
        lens_k[b] = 0
    for row, length in zip(tables, lens_k, strict=True):
        for column in range(-(-length // block_size), num_columns):
            row[column] = draw(st.sampled_from((-1, row[column], 2**31 - 1)))
    return tables, lens_k, block_size, draw(st.integers(1, 2 * block_size))


@rooms
@pytest.mark.usefixtures("implementation")
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps())
def test_what_is_found_beside_plain_python(step: tuple[list[list[int]], list[int], int, int]) -> None:
    tables, lens_k, block_size, least = step
    shared = found(tables, lens_k, block_size, least)
    assert tuple(x.tolist() for x in shared[:3]) == in_plain_python(tables, lens_k, block_size, least)
    assert shared.block_table.tolist() == tables[::8]


@rooms
@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize(("batch", "num_common"), [(1, 3), (8, 511), (9, 512), (24, 513), (1032, 2)])
def test_more_columns_and_octets_than_are_looked_at_in_one_go(batch: int, num_common: int) -> None:
    table = torch.arange(600, dtype=torch.int32).repeat(batch, 1)
    table[1::2, num_common] = 7
    lens_k = [600 * 2 - b % 3 for b in range(batch)]
    # A view, as rows of a wider table are.
    wide = torch.cat([table, table], dim=1)[:, :600]
    shared = find_shared_prefixes(wide, prefix_sums(lens_k, "cpu"), 2, 4)
    expected = in_plain_python(table.tolist(), lens_k, 2, 4)
    assert tuple(x.tolist() for x in shared[:3]) == expected
    assert max(expected[0]) == (2 * num_common if batch > 1 else 0)


@rooms
@pytest.mark.usefixtures("implementation")
def test_no_entries() -> None:
    shared = find_shared_prefixes(torch.zeros((0, 3), dtype=torch.int32), prefix_sums([], "cpu"), 4)
    assert [x.tolist() for x in shared] == [[], [0], [0], []]


@rooms
@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_table": torch.zeros((3, 2), dtype=torch.int32)}, r"block_table must be of shape \(2, 2\)"),
        (
            {"block_table": torch.zeros(4, dtype=torch.int32)},
            r"of shape \(2, max_blocks\), got",
        ),
        ({"cu_seqlens_k": torch.zeros(3, dtype=torch.int64)}, r"cu_seqlens_k\.dtype must be torch\.int32"),
        ({"block_size": 0}, "block_size must be at least 1"),
        ({"least": 0}, "least must be at least 1"),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    arguments = {
        "block_table": torch.zeros((2, 2), dtype=torch.int32),
        "cu_seqlens_k": torch.zeros(3, dtype=torch.int32),
        "block_size": 4,
    }
    with pytest.raises(ValueError, match=message):
        find_shared_prefixes(**(arguments | changes))


# Attention


@rooms
@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize(("case", "expected"), CASES, ids=str)
def test_agrees_with_exact_attention(case: Case, expected: int) -> None:
    inputs = prepare(case, "cpu", share=expected // case.block_size)
    assert check(inputs) == [expected if length else 0 for length in case.lens_k]


@rooms
@pytest.mark.usefixtures("implementation")
def test_octets_that_share_little_or_nothing_beside_one_that_does() -> None:
    inputs = prepare(decode(*(70 + b for b in range(21)), 0, 0, 0), "cpu", share=4)
    unshare(inputs, 9, 2)
    unshare(inputs, 20, 0)
    assert check(inputs, 33) == [64] * 8 + [0] * 16
    assert check(inputs, 32) == [64] * 8 + [32] * 8 + [0] * 8


@rooms
@pytest.mark.usefixtures("implementation")
def test_without_anything_in_common_the_bits_are_those_of_one_attention() -> None:
    inputs = prepare(decode(70, 33, 0, 16, 1), "cpu")
    out, lens = attended(inputs, 16)
    assert lens == [0] * 5
    expected: Tensor = flash_attn_varlen_func(**inputs.arguments)
    assert torch.equal(out, expected)


@rooms
@pytest.mark.usefixtures("implementation")
def test_an_entry_that_takes_no_part_reads_nothing_of_its_octet() -> None:
    inputs = prepare(decode(70, 80, 0, 90), "cpu", share=4)
    inputs.arguments["q"][2] = math.nan
    out, lens = attended(inputs, 16)
    assert lens == [64, 64, 0, 64]
    assert torch.equal(out[2], torch.zeros_like(out[2]))
    assert torch.isfinite(out).all()


@pytest.mark.rooms("reference")
@pytest.mark.usefixtures("implementation")
def test_the_parts_are_joined_before_they_are_rounded() -> None:
    inputs = prepare(decode(70, 80, 66, dtype=torch.float16), "cpu", share=4)
    out, lens = attended(inputs, 16)
    assert lens == [64] * 3
    inputs.arguments["q"] = inputs.arguments["q"].float()
    assert torch.equal(out, attended(inputs, 16)[0].half())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_cpu_with_what_is_compiled_for_it(dtype: torch.dtype) -> None:
    with backend.use("auto"):
        assert check(prepare(decode(70, 80, 0, 90, dtype=dtype), "cpu", share=4)) == [64, 64, 0, 64]


def test_float64_is_joined_in_float64() -> None:
    inputs = prepare(decode(70, 80, dtype=torch.float64), "cpu", share=4)
    out, lens = attended(inputs, 16)
    assert lens == [64, 64]
    torch.testing.assert_close(out, attention(inputs, torch.float64)[0], rtol=0, atol=1e-14)


@rooms
@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("cu_seqlens_q", torch.zeros(4, dtype=torch.int32), r"cu_seqlens_q must be of shape \(3,\)"),
        ("block_table", torch.zeros((3, 2), dtype=torch.int32), r"block_table must be of shape \(2, 2\)"),
        ("v_cache", torch.zeros(3, 4, 2, 9), "v_cache must be of"),
        ("k_scale", 2.0, "k_scale must be None with caches of"),
        ("shared", "lens", r"shared\.lens must be of shape \(2,\)"),
        ("shared", "cu_seqlens_k", r"shared\.cu_seqlens_k must be of shape \(2,\)"),
        ("shared", "block_table", r"shared\.block_table must be of shape \(1, 2\)"),
    ],
)
def test_wrong_arguments_of_attention_are_named(name: str, wrong: Any, message: str) -> None:
    table, sums = torch.zeros((2, 2), dtype=torch.int32), prefix_sums([3, 3], "cpu")
    arguments: dict[str, Any] = {
        "q": torch.zeros(2, 4, 8),
        "k_cache": torch.zeros(3, 4, 2, 8),
        "v_cache": torch.zeros(3, 4, 2, 8),
        "shared": find_shared_prefixes(table, sums, 4),
        "cu_seqlens_q": prefix_sums([1, 1], "cpu"),
        "cu_seqlens_k": sums,
        "max_seqlen_k": 3,
        "block_table": table,
    }
    if isinstance(wrong, str):
        wrong = arguments["shared"]._replace(**{wrong: torch.zeros(5, dtype=torch.int32)})
    with pytest.raises(ValueError, match=message):
        attend_shared(**(arguments | {name: wrong}))
