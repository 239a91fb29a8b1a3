"""Decode attention in the interpreter: every option, work that is cut, and the bits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from helpers.attention_cases import Case, Inputs, assert_within_ratio, attention, prefix_sums, prepare
from torch import Tensor

from octavo.kernels import flash_attn_varlen_func
from octavo.kernels.triton import decode, decode_plan
from octavo.kernels.triton.launch import Prepared

pytestmark = pytest.mark.usefixtures("triton_room")

RAGGED = (40, 0, 1, 15, 16, 17)
ONE_ROW = (1,) * len(RAGGED)
FP8, INT8 = torch.float8_e4m3fn, torch.int8


@pytest.fixture
def finely_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 keys by query, and ranges as short as one, so that a few dozen keys are cut into pieces."""

    def parameters(kernel: str, device: torch.device, key: str, default: dict[str, int]) -> dict[str, int]:
        return {**default, "BY_KEY": 0, "BLOCK_N": 16, "LEAST_KEYS": 16, "PROGRAMS": 4}

    monkeypatch.setattr(decode, "parameters", parameters)


CASES = [
    Case(ONE_ROW, RAGGED),
    Case((1, 2, 8, 0, 5, 3), RAGGED),
    Case((9, 8, 1, 3), (20, 60, 40, 35)),  # drafts beside a prompt
    Case((9, 1, 5, 1), (20, 48, 32, 320), heads=(6, 1)),  # a tile of rows that is cut, and one that is not
    Case((3, 1), (50, 33), causal=False),
    Case((3, 2), (2, 40), causal=True),  # a row before the first key
    Case((1, 2), (40, 33), block_size=0),
    Case((1, 4), (40, 33), window=(20, -1), causal=False),
    Case((8, 3), (40, 33), window=(7, 2), causal=False),
    Case((1, 2), (70, 33), window=(16, -1)),
    Case((1, 4), (40, 33), softcap=2.0),
    Case((1, 4), (40, 33), alibi="head"),
    Case((1, 4), (40, 33), alibi="batch", causal=False),
    Case((1, 4), (40, 33), sinks=True),
    Case((1, 4), (70, 33), window=(30, -1), softcap=2.0, alibi="head", sinks=True),
    Case((1, 3), (20, 9), block_size=1),
    Case((1, 3), (70, 9), block_size=64),
    Case((1, 3), (40, 9), heads=(6, 2)),
    Case((1, 2), (40, 9), heads=(7, 1)),
    Case((1, 1), (40, 9), heads=(71, 1)),
    Case((1, 8), (40, 20), heads=(16, 1)),  # two tiles of rows
    Case((1, 3), (40, 9), head_dim=80),
    Case((1, 3), (40, 9), head_dim=16, dtype=torch.float16),
    Case((1, 3), (40, 9), dtype=torch.float32),
    Case((1, 3), (40, 9), dtype=torch.float32, cache_dtype=torch.float16),
    Case((1, 3), (40, 9), interleaved=True),
    Case((1, 3), (40, 9), cache_dtype=FP8),
    Case((1, 3), (40, 9), cache_dtype=FP8, scales="tensor"),
    Case((1, 3), (40, 9), cache_dtype=FP8, scales="token"),
    Case((1, 3), (70, 9), cache_dtype=INT8, scales="token", block_size=64),
    Case((1, 3), (40, 9), cache_dtype=INT8, scales="tensor", sinks=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_exact_attention(case: Case, finely_cut: None) -> None:
    prepare(case, "cpu").check()


def test_cutting_changes_no_more_than_rounding(finely_cut: None, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = prepare(Case((1, 2, 1), (150, 70, 20), sinks=True), "cpu")
    pieces, _ = inputs.check()
    monkeypatch.undo()
    whole, _ = inputs.check()
    assert_within_ratio(pieces, whole.double(), attention(inputs, torch.bfloat16)[0])


@pytest.mark.parametrize("invariant", [False, True])
def test_sinks_count_once_however_often_the_keys_are_cut(invariant: bool, finely_cut: None) -> None:
    """rocm-libraries#12227: with keys that all score 0, n of them leave n / (n + e^sink) of the value 1."""
    sinks = torch.tensor([0.0, 0.5, 1.0, 2.0])
    out = flash_attn_varlen_func(
        torch.zeros(1, 4, 16), torch.zeros(90, 2, 16), torch.ones(90, 2, 16),
        prefix_sums([1], "cpu"), prefix_sums([90], "cpu"), 1, 90,
        causal=True, sinks=sinks, batch_invariant=invariant,
    )  # fmt: skip
    expected = 90 / (90 + sinks.exp())
    torch.testing.assert_close(out[0], expected[:, None].expand(4, 16), rtol=1e-6, atol=1e-6)


def test_keys_left_of_a_window_are_not_even_read(finely_cut: None) -> None:
    """vllm#641: a weight of 0 times NaN would be NaN. The first blocks of the table are gone, too."""
    inputs = prepare(Case((1, 2), (70, 33), window=(16, -1)), "cpu")
    out, lse = inputs.check()
    for b, first in enumerate((70 - 1 - 16, 33 - 2 - 16)):
        unseen = inputs.slots[b][:first]
        for name in ("k", "v"):
            inputs.arguments[name][unseen // 16, unseen % 16] = math.nan
        inputs.arguments["block_table"][b, : first // 16] = -1
    again, lse_again = inputs.run()
    assert torch.equal(again, out)
    assert torch.equal(lse_again, lse)


def test_long_queries_are_left_to_prefill() -> None:
    inputs = prepare(Case((1, 9, 2), (20, 30, 3)), "cpu")
    out, lse = decode_alone(inputs)
    assert torch.isfinite(out[0]).all()
    assert torch.isfinite(out[10:]).all()
    assert torch.isnan(out[1:10]).all()
    assert torch.isnan(lse[:, 1:10]).all()


def decode_alone(inputs: Inputs) -> tuple[Tensor, Tensor]:
    arguments: dict[str, Any] = dict(inputs.arguments)
    out = torch.full_like(arguments["q"], math.nan)
    lse = torch.full((out.shape[1], out.shape[0]), math.nan)
    arguments["softmax_scale"] = 0.1
    options = {"alibi_slopes": None, "sinks": None, "block_table": None}
    decode.decode_attention(**{**options, **arguments}, out=out, lse=lse)
    return out, lse


def test_same_inputs_same_bits(finely_cut: None) -> None:
    inputs = prepare(Case((1, 2, 1), (150, 70, 20)), "cpu")
    (out, lse), (again, lse_again) = inputs.run(), inputs.run()
    assert torch.equal(out, again)
    assert torch.equal(lse, lse_again)


KEYS = 1100  # two chunks of batch-invariant mode


@pytest.mark.parametrize("window", [(-1, -1), (1050, -1)], ids=["all keys", "window"])
def test_batch_invariant_rows_have_the_same_bits_anywhere(window: tuple[int, int]) -> None:
    """The last rows of a sequence: in a prompt, alone, and in a draft beside another sequence."""
    inputs = prepare(Case((10, 2), (KEYS, 30), heads=(2, 1), head_dim=16, window=window), "cpu")
    arguments = {**inputs.arguments, "batch_invariant": True, "return_softmax_lse": True}
    q = arguments.pop("q")
    long, long_lse = flash_attn_varlen_func(q=q, **arguments)
    for rows in (1, 3):
        last = slice(10 - rows, 10)
        beside = {**arguments, "cu_seqlens_q": prefix_sums([rows, 2], "cpu"), "max_seqlen_q": max(rows, 2)}
        out, lse = flash_attn_varlen_func(q=torch.cat([q[last], q[10:]]), **beside)
        assert torch.equal(out[:rows], long[last])
        assert torch.equal(lse[:, :rows], long_lse[:, last])
        lens = {"cu_seqlens_q": prefix_sums([rows], "cpu"), "cu_seqlens_k": prefix_sums([KEYS], "cpu")}
        alone = {**arguments, **lens, "max_seqlen_q": rows, "block_table": arguments["block_table"][:1]}
        out, lse = flash_attn_varlen_func(q=q[last], **alone)
        assert torch.equal(out, long[last])
        assert torch.equal(lse, long_lse[:, last])


@pytest.mark.parametrize("case", [CASES[1], CASES[5], CASES[12], CASES[18], CASES[26]], ids=str)
def test_batch_invariant_agrees_with_exact_attention(case: Case) -> None:
    prepare(case, "cpu").check(batch_invariant=True)


def test_a_prompt_beside_rows_does_not_multiply_the_programs_that_merge(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grids: list[tuple[int, ...]] = []

    class Watched(Prepared):
        def __init__(self, kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any]) -> None:
            grids.append(grid)
            super().__init__(kernel, grid, arguments)

    monkeypatch.setattr(decode, "Prepared", Watched)
    for lens_q in ((1, 1), (4, 1), (9, 1), (9, 8)):
        prepare(Case(lens_q, (40, 33)), "cpu").check()
    rows_side_by_side = [grid[1] for grid in grids if len(grid) == 2]
    assert rows_side_by_side == [2, 8, 2, 2]


@triton.jit
def _plan(
    out, cu_seqlens_q, cu_seqlens_k, batch, ranks, least,
    BLOCK_B: tl.constexpr, ONE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Per rank: first unit, end, sequence of the first unit, where that begins, and all units."""
    rank = tl.program_id(0)
    per, total = decode_plan.divide(
        cu_seqlens_q,
        cu_seqlens_k,
        None,
        None,
        batch,
        ranks,
        least,
        2,
        16,
        16,
        BLOCK_B,
        ONE_BLOCK,
    )
    unit = rank * per
    end = tl.minimum(unit + per, total)
    sequence, begin = decode_plan.sequence_of(
        cu_seqlens_q, cu_seqlens_k, None, None, batch, unit, 2, 16, 16, BLOCK_B, ONE_BLOCK
    )
    tl.store(out + rank * 5, unit)
    tl.store(out + rank * 5 + 1, end)
    tl.store(out + rank * 5 + 2, sequence)
    tl.store(out + rank * 5 + 3, begin)
    tl.store(out + rank * 5 + 4, total)


@pytest.mark.parametrize(
    ("lens_q", "lens_k"),
    [
        ((1,) * 5, (1000, 3, 160, 17, 0)),
        ((1, 9, 2, 0, 8), (400, 1000, 33, 50, 500)),
        ((1,) * 20, tuple(range(0, 200, 10))),
        ((0, 9), (5, 50)),
    ],
    ids=["ragged", "some are not decode's", "more than one look", "nothing to do"],
)
@pytest.mark.parametrize(("ranks", "least"), [(4, 1), (9, 3)])
def test_ranks_do_every_unit_once(
    lens_q: tuple[int, ...], lens_k: tuple[int, ...], ranks: int, least: int
) -> None:
    # Units of 16 keys, at least one per item; two heads per KV head fill a tile of 16 rows with 8 tokens.
    units = [
        max(1, math.ceil(n / 16)) if 1 <= rows <= 8 else 0 for rows, n in zip(lens_q, lens_k, strict=True)
    ]
    out = torch.empty(ranks, 5, dtype=torch.int32)
    _plan[(ranks,)](
        out, prefix_sums(lens_q, "cpu"), prefix_sums(lens_k, "cpu"), len(lens_q), ranks, least,
        BLOCK_B=16, ONE_BLOCK=len(lens_q) <= 16,
    )  # fmt: skip
    done: list[int] = []
    for start, end, sequence, begin, total in out.tolist():
        assert total == sum(units)
        if start >= end:
            continue
        assert end - start >= min(least, total - start)
        assert begin == sum(units[:sequence])
        assert begin <= start < begin + units[sequence]
        done.extend(range(start, end))
    assert done == list(range(sum(units)))


@pytest.mark.parametrize("batch", [1, 2, 33, 256, 257, 300, 512, 513])
def test_the_plan_is_the_same_however_many_sequences_are_looked_at_in_one_go(batch: int) -> None:
    block = decode_plan.sequences_at_once(batch)
    assert block == {1: 1, 2: 32, 33: 256, 256: 256, 257: 512, 300: 512, 512: 512, 513: 1024}[batch]
    generator = torch.Generator().manual_seed(batch)
    lens_q, lens_k = (torch.randint(0, most, (batch,), generator=generator).tolist() for most in (11, 900))
    lens_q[0] = 1
    sums = prefix_sums(lens_q, "cpu"), prefix_sums(lens_k, "cpu")
    plans = torch.empty(2, 33, 5, dtype=torch.int32)
    for out, block_b in zip(plans, (block, 128), strict=True):
        _plan[(33,)](out, *sums, batch, 33, 2, BLOCK_B=block_b, ONE_BLOCK=batch <= block_b)
    busy = plans[1, :, 0] < plans[1, :, 1]
    assert busy.any()
    assert torch.equal(plans[0, :, :2], plans[1, :, :2])
    assert torch.equal(plans[0, busy], plans[1, busy])
