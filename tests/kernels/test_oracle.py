"""The oracle of the Triton tests is a formula of ours; this ties it to torch's, and to being refuted."""

import math

import pytest
import torch
from helpers.attention_cases import Case, Sequence, assert_within_ratio, attend_one, attention, prepare
from helpers.kernels import Batch, sdpa

from octavo.kernels import backend

SLOPES, SINKS = torch.tensor([0.5, 0.25, 0.0, 1.0]), torch.tensor([0.0, 1.0, -2.0, 3.0])
OPTIONS = [
    {},
    {"causal": True},
    {"causal": True, "window": (3, 0)},
    {"window": (2, 4)},
    {
        "causal": True,
        "slopes": torch.tensor([0.5, 0.25, 0.0, 1.0]),
        "sinks": torch.tensor([0.0, 1.0, -2.0, 3.0]),
    },
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "full")
def test_the_formula_is_scaled_dot_product_attention(options: dict) -> None:
    batch = Batch.random([5, 3, 1, 4], [5, 9, 12, 2])
    expected = sdpa(batch, **options)
    arguments = {"causal": False, "window": (-1, -1), "scale": 0.125} | options
    parts = [attend_one(Sequence(*one), torch.float64, **arguments)[0] for one in batch.sequences()]
    torch.testing.assert_close(torch.cat(parts), expected, rtol=0, atol=1e-12)


def test_the_first_visible_key_is_left_padding() -> None:
    batch = Batch.random([3], [9])
    cut = Batch([3], [7], batch.q, batch.k[2:], batch.v[2:])
    out, _ = attend_one(
        Sequence(batch.q, batch.k, batch.v), torch.float64, 0.125, True, (-1, -1), first_key=2
    )
    torch.testing.assert_close(out, sdpa(cut, causal=True), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "case",
    [
        Case((1, 0, 20, 5), (33, 4, 20, 2), sinks=True),
        Case((1, 9), (33, 20), block_size=0, alibi="batch", causal=False),
        Case((4, 9), (33, 20), interleaved=True, softcap=5.0, window=(7, 0), alibi="head"),
    ],
    ids=str,
)
def test_a_prepared_case_is_what_the_reference_sees(case: Case) -> None:
    with backend.use("reference"):
        prepare(case, "cpu").check()


def test_the_rule_refuses_a_lost_key_and_a_value_that_is_no_number() -> None:
    inputs = prepare(Case((1, 20), (33, 20)), "cpu")
    exact, plain = attention(inputs, torch.float64)[0], attention(inputs, torch.bfloat16)[0]
    assert_within_ratio(plain, exact, plain)
    k = inputs.sequences[0].k
    k[5] = 0.0
    wrong = attention(inputs, torch.float64)[0].bfloat16()
    with pytest.raises(AssertionError, match="worst"):
        assert_within_ratio(wrong, exact, plain)
    wrong[0, 0, 0] = math.nan
    with pytest.raises(AssertionError, match="1 values are not finite"):
        assert_within_ratio(wrong, exact, plain)
