"""Prefill attention in the interpreter: tiny tiles, so that every loop and every edge of it is met."""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from helpers.attention_cases import Case, Inputs, assert_within_ratio, attend_one, attention, prepare
from torch import Tensor

from octavo.kernels.triton import prefill, tiles

SMALL = {"BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 4, "num_stages": 2}
# Past and none, fewer keys than rows, no rows, rows for decode, more than one tile of rows and of keys.
BASE = Case((10, 3, 17, 0, 12), (10, 9, 70, 3, 5), head_dim=16, dtype=torch.float32)
QUANTISED = replace(BASE, cache_dtype=torch.int8, scales="token")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch, triton_room: None) -> None:
    monkeypatch.setattr(prefill, "parameters", lambda *_: SMALL)
    monkeypatch.setattr(prefill, "num_processors", lambda _: 1)


@pytest.fixture
def idle_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """So many multiprocessors that every tile's keys are divided, those of a small window, too; yields into
    how many parts, each time.
    """
    parts: list[int] = []
    splits = prefill._splits
    monkeypatch.setattr(prefill, "num_processors", lambda _: 64)
    monkeypatch.setattr(prefill, "_LEAST_TILES", 1)
    monkeypatch.setattr(prefill, "most_keys", lambda max_seqlen_k, *_: max_seqlen_k)
    monkeypatch.setattr(prefill, "_splits", lambda *a: parts.append(splits(*a)) or parts[-1])
    yield parts
    assert parts
    assert min(parts) > 1


def run(inputs: Inputs, **changes: object) -> tuple[Tensor, Tensor]:
    q = inputs.arguments["q"]
    out, lse = torch.full_like(q, math.nan), torch.full((q.shape[1], q.shape[0]), math.nan)
    absent = dict.fromkeys(("alibi_slopes", "sinks", "block_table"))
    arguments = {**absent, **inputs.arguments, "out": out, "lse": lse, **changes}
    if arguments["softmax_scale"] is None:
        arguments["softmax_scale"] = inputs.case.head_dim**-0.5
    prefill.prefill_attention(**arguments)
    return out, lse


def check(case: Case, **changes: object) -> None:
    inputs = prepare(case, "cpu")
    out, lse = run(inputs, **changes)
    long = torch.cat([torch.full((n,), n > tiles.SHORT) for n in case.lens_q])
    assert out[~long].isnan().all(), "rows of short sequences are not prefill's"
    assert lse[:, ~long].isnan().all()
    exact, exact_lse = attention(inputs, torch.float64)
    plain, _ = attention(inputs, case.dtype)
    assert_within_ratio(out[long], exact[long], plain[long], strict=case.cache_dtype is None)
    torch.testing.assert_close(lse[:, long].double(), exact_lse[:, long], rtol=1e-5, atol=2e-5)


OPTIONS = {
    "causal": {},
    "not causal": {"causal": False},
    "left": {"window": (11, -1)},
    "left and right": {"window": (20, 3), "causal": False},
    "right": {"window": (-1, 5), "causal": False},
    "itself": {"window": (0, 0), "causal": False},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi": "head"},
    "alibi of each sequence": {"alibi": "batch", "causal": False},
    "sinks": {"sinks": True},
    "negative scale": {"softmax_scale": -0.3},
    "scale 0": {"softmax_scale": 0.0},
    "all": {"window": (30, 2), "causal": False, "softcap": 2.0, "alibi": "batch", "sinks": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_each_option(options: dict) -> None:
    check(replace(BASE, **options))


@pytest.mark.parametrize("options", [{}, OPTIONS["all"]], ids=["causal", "all"])
@pytest.mark.parametrize("block_size", [0, 1, 4, 64])
def test_keys_anywhere(block_size: int, options: dict) -> None:
    """Packed, in blocks smaller than a tile, in blocks that hold several tiles."""
    check(replace(BASE, block_size=block_size, **options))


@pytest.mark.parametrize("head_dim", [1, 8, 24, 40])
def test_head_dims_that_fill_no_tile(head_dim: int) -> None:
    check(replace(BASE, head_dim=head_dim))


@pytest.mark.parametrize("heads", [(2, 2), (9, 3), (5, 1), (14, 2)], ids=str)
def test_head_ratios(heads: tuple[int, int]) -> None:
    check(replace(BASE, heads=heads))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision(dtype: torch.dtype) -> None:
    check(replace(BASE, dtype=dtype))


@pytest.mark.parametrize("scales", ["tensor", "token"])
@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_quantised_caches(cache_dtype: torch.dtype, scales: str) -> None:
    check(replace(BASE, cache_dtype=cache_dtype, scales=scales))


def test_scales_of_one_element_in_memory() -> None:
    case = replace(BASE, cache_dtype=torch.int8, scales="tensor")
    scales = {f"{name}_scale": torch.tensor(6.0 / 127).float() for name in "kv"}
    check(case, **scales)


def test_all_options_over_a_quantised_cache() -> None:
    check(replace(QUANTISED, **OPTIONS["all"]))


def test_values_of_one_small_scale_keep_their_precision_beside_large_ones() -> None:
    """A weight times the scale of its value must not sink into float16's subnormal numbers."""
    inputs = prepare(replace(QUANTISED, dtype=torch.float16, lens_q=(9,), lens_k=(40,)), "cpu")
    inputs.arguments["v_scale"] *= 1e-4
    inputs.sequences[0].v.mul_(1e-4)
    exact, _ = attention(inputs, torch.float64)
    out, _ = run(inputs)
    assert (out.double() - exact).norm() < 2e-2 * exact.norm()  # the result itself is subnormal
    out, _ = run(inputs, out=(wide := torch.empty(out.shape)))
    assert (wide.double() - exact).norm() < 2e-3 * exact.norm()


@pytest.mark.parametrize(
    ("options", "splits"),
    [
        ({}, 4),
        ({"window": (11, -1), "causal": False}, 4),
        ({"window": (-1, 5), "causal": False}, 4),
        ({"window": (11, -1)}, 1),
        ({"window": (107, 5), "causal": False}, 2),
        ({"window": (106, 5), "causal": False}, 1),
    ],
    ids=str,
)
def test_as_many_parts_as_the_keys_of_a_window_make(
    monkeypatch: pytest.MonkeyPatch, options: dict, splits: int
) -> None:
    parts: list[int] = []
    asked = prefill._splits
    monkeypatch.setattr(prefill, "num_processors", lambda _: 64)
    monkeypatch.setattr(prefill, "_splits", lambda *a: parts.append(asked(*a)) or parts[-1])
    check(replace(BASE, lens_q=(10,), lens_k=(300,), **options))
    assert parts == [splits]


@pytest.mark.parametrize("options", [{}, OPTIONS["all"], OPTIONS["left"]], ids=["causal", "all", "left"])
def test_keys_divided_among_programs(options: dict, idle_gpu: list[int]) -> None:
    check(replace(BASE, **options))


def test_a_quantised_cache_divided_among_programs(idle_gpu: list[int]) -> None:
    scales = {f"{name}_scale": torch.tensor(6.0 / 127).float() for name in "kv"}
    check(replace(BASE, cache_dtype=torch.int8, scales="tensor", sinks=True), **scales)


@pytest.mark.parametrize("options", [{}, OPTIONS["all"]], ids=["causal", "all"])
def test_batch_invariant(options: dict) -> None:
    """Two chunks of keys, and a row that sees none of the first."""
    check(replace(BASE, lens_q=(10, 12), lens_k=(1040, 7), heads=(2, 1), **options), batch_invariant=True)


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["", "invariant"])
@pytest.mark.parametrize("causal", [False, True])
def test_left_padding_is_not_looked_at(causal: bool, batch_invariant: bool) -> None:
    case = Case((10, 20, 9), (40, 33, 30), head_dim=16, dtype=torch.float32, block_size=4, causal=causal)
    inputs = prepare(case, "cpu")
    padding = (17, 32, 0)
    for b, (slots, skipped) in enumerate(zip(inputs.slots, padding, strict=True)):
        for name in ("k", "v"):
            inputs.arguments[name].flatten(0, 1)[slots[:skipped]] = math.nan
        inputs.arguments["block_table"][b, : skipped // 4] = -1
        for tokens in inputs.sequences[b][1:]:
            tokens[:skipped] = 0.0
    leftpad = torch.tensor(padding, dtype=torch.int32)
    out, lse = run(inputs, leftpad=leftpad, batch_invariant=batch_invariant)
    both = [
        attend_one(sequence, torch.float64, 0.25, causal, (-1, -1), first_key=skipped)
        for sequence, skipped in zip(inputs.sequences, padding, strict=True)
    ]
    torch.testing.assert_close(out.double(), torch.cat([out for out, _ in both]), rtol=0, atol=2e-6)
    torch.testing.assert_close(lse.double(), torch.cat([lse for _, lse in both], 1), rtol=0, atol=2e-6)


def test_more_sequences_than_are_looked_through_at_a_time() -> None:
    lens = (9, *[0] * 130, 17, *[1] * 140, 10)
    check(Case(lens, tuple(n + 2 for n in lens), heads=(1, 1), head_dim=8, dtype=torch.float32))


def test_there_are_programs_enough_for_every_tile() -> None:
    rng = torch.Generator().manual_seed(0)
    for _ in range(200):
        lens = torch.randint(0, 40, (int(torch.randint(1, 30, (), generator=rng)),), generator=rng).tolist()
        group, block_m = 3, 16
        tiles_needed = sum(-(-n * group // block_m) for n in lens if n > tiles.SHORT)
        most_long = prefill.most_long(sum(lens), len(lens))
        assert sum(n > tiles.SHORT for n in lens) <= most_long
        assert tiles_needed <= prefill.most_tiles(sum(lens) * group, most_long, block_m)


@pytest.mark.parametrize("num_kv_heads", [1, 3, 8, 12])
def test_sections_divide_the_heads(num_kv_heads: int) -> None:
    for bytes_per_head in (0, 1, 5 << 20, 9 << 20, 1 << 40):
        section = prefill._section(num_kv_heads, bytes_per_head)
        assert num_kv_heads % section == 0
        assert section == 1 or section * bytes_per_head <= prefill._SECTION_BYTES


@triton.jit
def _merged(out, a, b, M: tl.constexpr, D: tl.constexpr):
    """Partials lie as (M, D + 2): acc, high, total."""
    rows, dims = tl.arange(0, M), tl.arange(0, D)
    at = rows[:, None] * (D + 2) + dims[None, :]
    acc, high, total = tiles.merge(
        tl.load(a + at), tl.load(a + rows * (D + 2) + D), tl.load(a + rows * (D + 2) + D + 1),
        tl.load(b + at), tl.load(b + rows * (D + 2) + D), tl.load(b + rows * (D + 2) + D + 1),
    )  # fmt: skip
    tl.store(out + at, acc)
    tl.store(out + rows * (D + 2) + D, high)
    tl.store(out + rows * (D + 2) + D + 1, total)


def test_merging_with_the_partial_of_no_keys_changes_no_bit() -> None:
    some = torch.randn(4, 10, generator=torch.Generator().manual_seed(0))
    none = torch.zeros(4, 10)
    none[:, 8] = -math.inf
    for a, b, right in ((some, none, some), (none, some, some), (none, none, none)):
        out = torch.full_like(some, math.nan)
        _merged[(1,)](out, a, b, M=4, D=8)
        assert torch.equal(out, right)
