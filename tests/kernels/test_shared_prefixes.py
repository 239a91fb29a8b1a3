"""Common keys are found octet by octet, and attention over them and the others is what it was."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.attention_cases import Case, Inputs, assert_within_ratio, attention, prefix_sums, prepare
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.kernels import backend, flash_attn_varlen_func
from octavo.kernels.shared_prefixes import SharedPrefixes, attend_shared, find_shared_prefixes

FP8, INT8 = torch.float8_e4m3fn, torch.int8

# Nothing of this is compiled for the CPU, which does not take such steps.
rooms = pytest.mark.rooms("reference", "triton")


def in_plain_python(
    tables: list[list[int]], lens_k: list[int], block_size: int, least: int
) -> tuple[list[int], list[int], list[int]]:
    """(lens, cu_seqlens_q, cu_seqlens_k), from what `find_shared_prefixes` promises."""
    lens, sums_q, sums_k = [0] * len(lens_k), [0], [0]
    for first in range(0, len(lens_k), 8):
        octet = range(first, min(first + 8, len(lens_k)))
        real = [b for b in octet if lens_k[b] > 0]
        num = 0
        if len(real) > 1 and real[0] == first:
            while all((num + 1) * block_size < lens_k[b] for b in real):
                if len({tables[b][num] for b in real}) > 1:
                    break
                num += 1
        tokens = num * block_size if num * block_size >= least else 0
        for b in real:
            lens[b] = tokens
        sums_q.append(octet.stop)
        sums_k.append(sums_k[-1] + tokens)
    return lens, sums_q, sums_k


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
    """Octets that begin alike, more or less, and rows past whose keys anything stands."""
    block_size = draw(st.sampled_from((1, 2, 4, 16)))
    num_columns = draw(st.integers(1, 6))
    batch = draw(st.integers(1, 20))
    system = [draw(st.lists(st.integers(0, 3), min_size=num_columns, max_size=num_columns)) for _ in range(2)]
    tables, lens_k = [], []
    for _ in range(batch):
        row = list(draw(st.sampled_from(system)))
        for column in draw(st.lists(st.integers(0, num_columns - 1), max_size=2)):
            row[column] = draw(st.integers(0, 3))
        length = draw(st.one_of(st.just(0), st.integers(1, num_columns * block_size)))
        for column in range(-(-length // block_size), num_columns):
            row[column] = draw(st.sampled_from((-1, row[column], 2**31 - 1)))
        tables.append(row)
        lens_k.append(length)
    return tables, lens_k, block_size, draw(st.integers(1, 2 * block_size))


@rooms
@pytest.mark.usefixtures("implementation")
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


def unshare(inputs: Inputs, b: int, column: int) -> None:
    """Give sequence b a block of its own there, with the same keys in it."""
    arguments = inputs.arguments
    table = arguments["block_table"]
    spare = (set(range(len(arguments["k"]))) - set(table.flatten().tolist())).pop()
    for name in ("k", "v", "k_scale", "v_scale"):
        cache = arguments.get(name)
        if isinstance(cache, Tensor) and cache.dim() > 1:
            cache[spare] = cache[int(table[b, column])].clone()
    table[b, column] = spare


def attended(inputs: Inputs, least: int) -> tuple[Tensor, list[int]]:
    """Attention that shares, and the keys that each entry leaves to its octet."""
    case, arguments = inputs.case, inputs.arguments
    shared = find_shared_prefixes(arguments["block_table"], arguments["cu_seqlens_k"], case.block_size, least)
    out = attend_shared(
        arguments["q"], arguments["k"], arguments["v"], shared,
        arguments["cu_seqlens_q"], arguments["cu_seqlens_k"], arguments["max_seqlen_k"],
        block_table=arguments["block_table"], softmax_scale=case.softmax_scale,
        k_scale=arguments.get("k_scale"), v_scale=arguments.get("v_scale"),
    )  # fmt: skip
    return out, shared.lens.tolist()


def check(inputs: Inputs, least: int = 16) -> list[int]:
    """Hold it to the rule of attention's own tests; returns the shared lengths."""
    out, lens = attended(inputs, least)
    exact, _ = attention(inputs, torch.float64)
    plain, _ = attention(inputs, inputs.case.dtype)
    assert out.dtype == inputs.case.dtype
    assert_within_ratio(out, exact, plain, strict=inputs.case.cache_dtype not in (FP8, INT8))
    return lens


def decode(*lens_k: int, **options: Any) -> Case:
    return Case((1,) * len(lens_k), lens_k, **options)


CASES = [
    *((decode(*(70 + 5 * b for b in range(real)), *[0] * (8 - real)), 64) for real in (2, 3, 7, 8)),
    (decode(*(90 - b for b in range(11))), 64),
    (decode(*(90, 66, 65, 64)), 48),  # the last one's own key is in the fourth block
    (decode(*(70, 80), heads=(8, 1)), 64),
    (decode(*(70, 80), heads=(7, 7)), 64),
    (decode(*(70, 80, 66), heads=(16, 1)), 64),  # two tiles of rows
    (decode(*(70, 80), head_dim=128), 64),
    (decode(*(70, 80), head_dim=80, heads=(9, 3)), 64),
    (decode(*(40, 50, 33), block_size=1), 32),
    (decode(*(140, 150), block_size=64), 128),
    (decode(*(70, 80), dtype=torch.float16), 64),
    (decode(*(70, 80), dtype=torch.float32), 64),
    (decode(*(70, 80), interleaved=True), 64),
    (decode(*(70, 80), cache_dtype=FP8), 64),
    (decode(*(70, 80), cache_dtype=FP8, scales="tensor"), 64),
    (decode(*(70, 80), cache_dtype=FP8, scales="token", heads=(8, 2)), 64),
    (decode(*(140, 150), cache_dtype=INT8, scales="token", block_size=64, head_dim=128), 128),
]


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
