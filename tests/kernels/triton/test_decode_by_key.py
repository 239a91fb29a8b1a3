"""Decode attention with a row for each key, in the interpreter: what it serves, and what it leaves alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.attention_cases import Case, Inputs, assert_within_ratio, attend_one, attention, prepare

from octavo.kernels.triton import decode, decode_parameters
from octavo.kernels.triton.decode_tuning import TUNING
from octavo.kernels.triton.launch import Prepared
from octavo.kernels.triton.tuning import Parameters

pytestmark = pytest.mark.usefixtures("triton_room")

FP8, INT8 = torch.float8_e4m3fn, torch.int8
RAGGED = (70, 0, 1, 15, 16, 17, 33)
ONE_ROW = (1,) * len(RAGGED)
Use = Callable[..., None]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Sets parameters: by default one warp with two blocks of 16 keys, and ranges as short as a tile."""

    def set_parameters(**changes: int) -> None:
        short = {"BLOCK_N": 32, "num_warps": 1, "LEAST_KEYS": 16, "PROGRAMS": 4, **changes}
        monkeypatch.setattr(decode, "parameters", lambda *asked: {**asked[-1], **short})

    set_parameters()
    return set_parameters


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """BY_KEY of each launch: the warps, 0 by query."""
    made: list[int] = []

    class Watched(Prepared):
        def __init__(self, kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any]) -> None:
            if "BY_KEY" in arguments:
                made.append(arguments["BY_KEY"])
            super().__init__(kernel, grid, arguments)

    monkeypatch.setattr(decode, "Prepared", Watched)
    return made


CASES = [
    Case(ONE_ROW, RAGGED, cache_dtype=FP8),
    Case(ONE_ROW, RAGGED, cache_dtype=FP8, scales="tensor", heads=(8, 2)),
    Case(ONE_ROW, RAGGED, cache_dtype=FP8, scales="token"),
    Case(ONE_ROW, RAGGED, cache_dtype=INT8, scales="token", dtype=torch.float16),
    Case((1, 4, 3, 0, 2), (70, 33, 3, 4, 16), cache_dtype=FP8, scales="token"),
    Case((4, 2), (50, 33), cache_dtype=INT8, scales="tensor", causal=False),
    Case((3, 2), (2, 40), cache_dtype=FP8, scales="token"),  # a row before the first key
    Case((1, 4), (70, 33), cache_dtype=FP8, scales="token", window=(20, -1)),
    Case((4, 3), (40, 33), cache_dtype=FP8, scales="token", window=(7, 2), causal=False),
    Case((1, 2), (70, 33), cache_dtype=INT8, scales="token", sinks=True),
    Case((1, 1), (200, 33), cache_dtype=FP8, scales="token", block_size=64),
    Case((1, 2), (70, 33), cache_dtype=FP8, scales="token", heads=(6, 2)),
    Case((1, 1), (70, 33), cache_dtype=FP8, scales="token", heads=(8, 1), head_dim=128),
    Case((1, 2), (70, 9), cache_dtype=FP8, scales="token", head_dim=80),
    Case((1, 2), (70, 9), cache_dtype=FP8, scales="token", interleaved=True),
    # Beside a prompt a sequence of this kernel has up to eight tokens: here two items of four each.
    Case((8, 12, 1), (70, 40, 33), cache_dtype=FP8, scales="token"),
]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Parameters]]:
    """Of each launch, the key in the table and the defaults."""
    found: list[tuple[str, Parameters]] = []

    def note(kernel: str, device: torch.device, key: str, default: Parameters) -> Parameters:
        found.append((key, default))
        return default

    monkeypatch.setattr(decode, "parameters", note)
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_blocks_of_a_warp_agree_with_exact_attention(case: Case, use: Use, chosen: list[int]) -> None:
    prepare(case, "cpu").check()
    assert chosen == [1]


@pytest.mark.parametrize("case", [CASES[at] for at in (0, 3, 4, 5, 7, 8, 14)], ids=str)
def test_a_block_of_a_warp_agrees_with_exact_attention(case: Case, use: Use, chosen: list[int]) -> None:
    use(num_warps=2)
    prepare(case, "cpu").check()
    assert chosen == [2]


@pytest.mark.parametrize(
    ("keys", "warps", "block_size"),
    [(16, 1, 32), (64, 4, 16), (64, 2, 64), (64, 2, 32), (64, 2, 16), (128, 2, 32)],
    ids=str,
)
def test_any_number_of_warps_and_keys(
    keys: int, warps: int, block_size: int, use: Use, chosen: list[int]
) -> None:
    """In the last two the keys of a warp are two blocks."""
    use(BLOCK_N=keys, num_warps=warps)
    prepare(Case((1, 2), (150, 33), cache_dtype=FP8, scales="token", block_size=block_size), "cpu").check()
    assert chosen == [warps]


def test_one_scale_in_memory(use: Use, chosen: list[int]) -> None:
    inputs = prepare(Case((1, 2), (70, 33), cache_dtype=FP8, scales="tensor"), "cpu")
    scales = {name: torch.tensor([inputs.arguments[name]]) for name in ("k_scale", "v_scale")}
    inputs.arguments |= scales
    inputs.check()
    assert chosen == [1]


def test_places_of_values_and_scales_may_differ_from_those_of_keys(use: Use, chosen: list[int]) -> None:
    """Values in a cache with heads before slots; scales of keys with heads and slots before blocks."""
    inputs = prepare(Case((1, 2), (70, 33), cache_dtype=FP8, scales="token"), "cpu")
    out, lse = inputs.check()
    arguments = inputs.arguments
    arguments["v"] = arguments["v"].transpose(1, 2).contiguous().transpose(1, 2)
    arguments["k_scale"] = arguments["k_scale"].permute(2, 1, 0).contiguous().permute(2, 1, 0)
    again, lse_again = inputs.run()
    assert torch.equal(again, out)
    assert torch.equal(lse_again, lse)
    assert set(chosen) == {1}


def test_padding_on_the_left_is_not_seen(use: Use, chosen: list[int]) -> None:
    inputs = prepare(Case((2, 1), (70, 33), cache_dtype=FP8, scales="token"), "cpu")
    padding = (21, 16)
    out, _ = run_padded(inputs, padding)
    for b, sequence in enumerate(inputs.sequences):
        exact, plain = (
            attend_one(sequence, dtype, 64**-0.5, True, (-1, -1), first_key=padding[b])[0]
            for dtype in (torch.float64, torch.bfloat16)
        )
        rows = slice(0, 2) if b == 0 else slice(2, 3)
        assert_within_ratio(out[rows], exact, plain, strict=False)
    assert chosen == [1]


def run_padded(inputs: Inputs, padding: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    arguments = {**inputs.arguments, "softmax_scale": 64**-0.5, "alibi_slopes": None, "sinks": None}
    out = torch.full_like(arguments["q"], math.nan)
    lse = torch.full((out.shape[1], out.shape[0]), math.nan)
    leftpad = torch.tensor(padding, dtype=torch.int32)
    decode.decode_attention(**arguments, out=out, lse=lse, leftpad=leftpad)
    return out, lse


@pytest.mark.parametrize("warps", [2, 1])
def test_unseen_keys_are_not_even_read(warps: int, use: Use, chosen: list[int]) -> None:
    """What lies left of a window, and its entries of the table, may be anything."""
    use(num_warps=warps)
    case = Case((1, 2), (70, 33), window=(16, -1), cache_dtype=FP8, scales="token")
    inputs = prepare(case, "cpu")
    out, lse = inputs.check()
    for b, first in enumerate((70 - 1 - 16, 33 - 2 - 16)):
        unseen = inputs.slots[b][:first]
        for name in ("k", "v"):
            inputs.arguments[name].view(torch.uint8)[unseen // 16, unseen % 16] = 0x7F  # NaN
            inputs.arguments[f"{name}_scale"][unseen // 16, unseen % 16] = math.nan
        inputs.arguments["block_table"][b, : first // 16] = -(2**30)
    again, lse_again = inputs.run()
    assert torch.equal(again, out)
    assert torch.equal(lse_again, lse)
    assert set(chosen) == {warps}


def test_the_other_form_answers_alike(use: Use) -> None:
    inputs = prepare(Case((1, 4), (150, 70), cache_dtype=FP8, scales="token", sinks=True), "cpu")
    by_key, lse = inputs.check()
    use(BY_KEY=0)
    by_query, other_lse = inputs.check()
    assert_within_ratio(by_key, by_query.double(), attention(inputs, torch.bfloat16)[0], strict=False)
    torch.testing.assert_close(lse, other_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("scales", "block_size", "key", "programs", "registers"),
    [
        ("none", 16, "bs16", 4, 200),
        ("tensor", 16, "bs16", 4, 200),
        ("token", 16, "bs16 scales", 5, 168),
        ("token", 64, "bs64 scales", 4, 200),
    ],
)
def test_what_bytes_take_by_default(
    scales: str, block_size: int, key: str, programs: int, registers: int, asked: list, chosen: list[int]
) -> None:
    case = Case((1, 4), (150, 20), cache_dtype=FP8, scales=scales, block_size=block_size, head_dim=128)
    for dtype, name in ((FP8, "fp8"), (INT8, "int8")):
        prepare(
            replace(case, cache_dtype=dtype, scales="token" if key.endswith("scales") else "tensor"), "cpu"
        ).check()
        ((found, given),) = asked
        assert found == f"M8 G2 D128 bf16 {name} {key}"
        assert [given[one] for one in ("BLOCK_N", "num_warps", "num_stages")] == [64, 2, 3]
        assert [given[one] for one in ("PROGRAMS", "maxnreg")] == [programs, registers]
        assert chosen == [2]
        asked.clear()
        chosen.clear()


SERVED = Case((1, 2), (40, 9), cache_dtype=FP8, scales="token")
NOT_SERVED = {
    "16 bits": replace(SERVED, cache_dtype=None, scales="none"),
    "float32": replace(SERVED, dtype=torch.float32),
    "ten rows of a draft": replace(SERVED, lens_q=(1, 5)),
    "nine heads": replace(SERVED, heads=(9, 1), lens_q=(1, 1)),
    "softcap": replace(SERVED, softcap=2.0),
    "ALiBi": replace(SERVED, alibi="head"),
    "blocks of 8": replace(SERVED, block_size=8),
    "rows of 72 bytes": replace(SERVED, head_dim=72, heads=(2, 1)),
    "heads of 32": replace(SERVED, head_dim=32),
    "heads of 160": replace(SERVED, head_dim=160),
}


@pytest.mark.parametrize("case", NOT_SERVED.values(), ids=NOT_SERVED)
def test_what_it_does_not_serve_takes_the_other_form_and_its_parameters(
    case: Case, asked: list, chosen: list[int]
) -> None:
    prepare(SERVED, "cpu").check()
    prepare(case, "cpu").check()
    assert chosen == [2, 0]
    (served, _), (key, given) = asked
    assert served == "M8 G2 D64 bf16 fp8 bs16 scales"
    assert key.startswith("M16 ")
    assert not key.endswith("scales")
    assert (given["BY_KEY"], given["num_warps"]) == (0, 4)
    assert given["maxnreg"] == (0 if key.startswith(("M16 G2 D64 bf16 bs", "M16 G2 D64 fp32")) else 128)


@pytest.mark.parametrize("name", ["k", "v"])
def test_odd_places_of_either_cache_take_the_other_form(name: str, asked: list, chosen: list[int]) -> None:
    """Blocks or slots 8 bytes further apart than a multiple of 16."""
    inputs = prepare(SERVED, "cpu")
    cache = inputs.arguments[name]
    wide = torch.zeros(*cache.shape[:2], 136).to(cache.dtype)
    wide[..., :128].view(torch.uint8).copy_(cache.flatten(2).view(torch.uint8))
    inputs.arguments[name] = wide[..., :128].unflatten(2, (2, 64))
    inputs.check()
    assert chosen == [0]
    assert asked[0][0] == "M16 G2 D64 bf16 fp8 bs16"


def facts_of_a_call(k: Any) -> dict[str, Any]:
    return {
        "q": torch.empty(1, 4, 128, dtype=torch.bfloat16), "k": k, "GROUP": 2, "HEAD_DIM": 128,
        "BLOCK_SIZE": 16, "softcap": None, "alibi_slopes": None,
        **{f"{of}_stride_block": 4096 for of in ("k", "v")},
        **{f"{of}_stride_slot": 256 for of in ("k", "v")},
        **{f"{of}_scale_stride_slot": 2 for of in ("k", "v")},
    }  # fmt: skip


@pytest.mark.parametrize("name", ["k", "v", "k_scale", "v_scale"])
def test_places_in_a_block_fit_32_bits(name: str) -> None:
    facts = facts_of_a_call(torch.empty(1, dtype=FP8))
    for stride, fits in ((2**27 - 16, True), (2**27, False)):
        assert decode_parameters._goes_by_key(facts | {f"{name}_stride_slot": stride}, 1) is fits


def test_gpus_without_its_instruction_take_the_other_form() -> None:
    for device, is_served in (("cuda", True), ("xpu", False)):
        k = SimpleNamespace(dtype=FP8, device=SimpleNamespace(type=device), element_size=lambda: 1)
        assert decode_parameters._goes_by_key(facts_of_a_call(k), 1) is is_served


def test_keys_in_one_run_take_the_other_form(asked: list, chosen: list[int]) -> None:
    inputs = prepare(replace(SERVED, block_size=512), "cpu")
    inputs.arguments["block_table"] = inputs.arguments["block_table"][:, :1].contiguous()
    inputs.check()
    assert chosen == [0]
    assert asked[0][0] == "M16 G2 D64 bf16 fp8 bs0"


def test_other_makers_gpus_take_the_other_form(
    asked: list, chosen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    prepare(SERVED, "cpu").check()
    assert chosen == [0]
    assert asked[0][0] == "M16 G2 D64 bf16 fp8 bs16"


def test_a_table_may_choose_the_other_form(use: Use, chosen: list[int]) -> None:
    use(BY_KEY=0)
    prepare(SERVED, "cpu").check()
    assert chosen == [0]


@pytest.mark.parametrize("case", TUNING.cases[::3], ids=lambda case: case["key"])
def test_what_is_tuned_is_what_such_calls_look_up(case: Any, asked: list) -> None:
    heads, kv_heads, head_dim, dtype, block_size, has_scales = case["model"]
    call = Case((1,), (20,), (heads, kv_heads), head_dim, block_size=block_size)
    if dtype != torch.bfloat16:
        call = replace(call, cache_dtype=dtype, scales="token" if has_scales else "tensor")
    prepare(call, "cpu").check()
    assert asked == [(case["key"], case["default"])]
    assert case["default"] in case["space"]
    by_key = {one["BY_KEY"] for one in case["space"]}
    assert by_key == ({0, 1} if case["key"].startswith("M8 ") else {0})
