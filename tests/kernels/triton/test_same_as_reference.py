"""Every option on every path of attention, in the interpreter: against the formula in float64, tiny shapes.

The tests of the public functions (tests/kernels/test_*.py) run for this room, too; here is what is its own:
which kernels a call goes through, the batch-invariant mode, quantised caches, and any shape.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from helpers.attention_cases import Case, prefix_sums, prepare

from octavo.kernels import flash_attn_varlen_func
from octavo.kernels.triton import prefill

pytestmark = pytest.mark.usefixtures("triton_room")

DECODE = Case((1, 3, 0, 2), (17, 36, 4, 1), head_dim=16)
PREFILL = Case((9, 20), (33, 5), head_dim=16)
PATHS = {"decode": DECODE, "whole": PREFILL, "split": PREFILL}
OPTIONS = {
    "full": {"causal": False},
    "window": {"window": (7, 0)},
    "two-sided-window": {"causal": False, "window": (5, 3)},
    "right-bound-alone": {"causal": False, "window": (-1, 2)},
    "softcap": {"softcap": 5.0},
    "alibi": {"alibi": "head"},
    "sinks": {"sinks": True},
    "negative-scale": {"softmax_scale": -0.1},
    "everything": {"softcap": 8.0, "alibi": "batch", "sinks": True, "window": (9, 0), "softmax_scale": 0.2},
}
FP8, INT8 = torch.float8_e4m3fn, torch.int8


@pytest.fixture(params=PATHS)
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.setattr(prefill, "_splits", lambda *_: 3 if request.param == "split" else 1)
    return PATHS[request.param]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option_on_every_path(case: Case, options: dict) -> None:
    prepare(replace(case, **options), "cpu").check()


@pytest.mark.parametrize("path", [DECODE, PREFILL], ids=["decode", "prefill"])
@pytest.mark.parametrize("options", [{}, OPTIONS["everything"], OPTIONS["two-sided-window"]], ids=str)
def test_batch_invariant_mode(path: Case, options: dict) -> None:
    prepare(replace(path, **options), "cpu").check(batch_invariant=True)


@pytest.mark.parametrize(
    ("cache_dtype", "scales"), [(FP8, "none"), (FP8, "token"), (INT8, "tensor"), (INT8, "token")], ids=str
)
def test_quantised_caches(case: Case, cache_dtype: torch.dtype, scales: str) -> None:
    prepare(replace(case, cache_dtype=cache_dtype, scales=scales), "cpu").check()


def test_batch_invariant_rows_have_the_same_bits_in_any_batch_and_any_chunk() -> None:
    """A row alone, in a batch, and computed with other rows of its sequence; past one chunk of keys, too."""
    inputs = prepare(Case((12,), (1036,), heads=(2, 1), head_dim=16, block_size=64), "cpu")
    used = inputs.arguments
    whole, _ = inputs.check(batch_invariant=True)
    for start, stop in ((0, 3), (11, 12), (0, 9)):
        changes = {
            "q": used["q"][start:stop],
            "cu_seqlens_q": prefix_sums([stop - start], "cpu"),
            "cu_seqlens_k": prefix_sums([1036 - 12 + stop], "cpu"),
            "max_seqlen_q": stop - start,
            "batch_invariant": True,
        }
        assert torch.equal(flash_attn_varlen_func(**used | changes), whole[start:stop])
    beside = {
        "q": torch.cat([used["q"][:1], used["q"]]),
        "cu_seqlens_q": prefix_sums([1, 12], "cpu"),
        "cu_seqlens_k": prefix_sums([40, 1036], "cpu"),
        "block_table": used["block_table"].expand(2, -1),
        "batch_invariant": True,
    }
    assert torch.equal(flash_attn_varlen_func(**used | beside)[1:], whole)


def test_a_window_wider_than_any_sequence_is_no_window(case: Case) -> None:
    unbounded, _ = prepare(replace(case, causal=False), "cpu").check()
    out, _ = prepare(replace(case, causal=False, window=(2**40, 2**31)), "cpu").run()
    assert torch.equal(out, unbounded)


def any_cases(num: int) -> list[Case]:
    rng, cases = random.Random(0), []
    for seed in range(num):
        kv_heads = rng.randint(1, 2)
        batch = rng.randint(1, 3)
        cases.append(
            Case(
                lens_q=tuple(rng.choice([0, 1, 3, 8, 9, 14]) for _ in range(batch)),
                lens_k=tuple(rng.randint(0, 35) for _ in range(batch)),
                heads=(kv_heads * rng.randint(1, 5), kv_heads),
                head_dim=rng.choice([1, 7, 16, 24, 40]),
                dtype=rng.choice([torch.float32, torch.float16, torch.bfloat16]),
                block_size=rng.choice([0, 1, 2, 8, 32]),
                causal=rng.choice([False, True]),
                window=(rng.randint(-1, 20), rng.randint(-1, 20)),
                alibi=rng.choice(["none", "head", "batch"]),
                sinks=rng.choice([False, True]),
                interleaved=rng.choice([False, True]),
                seed=seed,
            )
        )
    return cases


@pytest.mark.parametrize("case", any_cases(14), ids=str)
def test_any_shape_and_any_mask(case: Case) -> None:
    prepare(case, "cpu").check()
