"""`sample`: what each option keeps, how often a token comes, and what cannot be drawn."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.errors import KernelArgumentError, UnsupportedKernelConfig
from octavo.kernels import sample
from octavo.kernels.reference.sampling import uniform

NAN, INF = math.nan, math.inf
DTYPES = {
    "temperature": torch.float32, "top_k": torch.int32, "top_p": torch.float32, "min_p": torch.float32,
    "seeds": torch.int64, "positions": torch.int64,
}  # fmt: skip


def arguments(num_rows: int, **options: Any) -> dict[str, Tensor]:
    """One value for all rows or a list of one each; by default row r has seed r and position 0."""
    given = {"temperature": 1.0, "seeds": list(range(num_rows)), "positions": 0, **options}
    return {
        name: torch.tensor(value if isinstance(value, list) else [value] * num_rows, dtype=DTYPES[name])
        for name, value in given.items()
    }


def draws(logits: list[float], num: int, **options: Any) -> list[int]:
    """The tokens of `num` rows with the same logits and the seeds 0, 1, 2, ..."""
    rows = torch.tensor(logits).expand(num, -1)
    return sample(rows, **arguments(num, **options)).tolist()


def kept(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> list[int]:
    """The ids that can be drawn, by the words of the docstring, one token at a time."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    weight = [math.exp((x - max(logits)) / temperature) for x in logits]
    order = [i for i in order if weight[i] >= min_p][: top_k if 0 < top_k < len(logits) else None]
    if top_p < 1:
        total, reached = sum(weight[i] for i in order), 0.0
        for place, i in enumerate(order):
            reached += weight[i]
            if reached >= top_p * total:
                order = order[: place + 1]
                break
    return sorted(i for i in order if weight[i] > 0)


PROBS = [0.05, 0.1, 0.15, 0.2, 0.5]
LOGITS = [math.log(p) for p in PROBS]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, PROBS),
        ({"temperature": 0.5}, [p * p / 0.325 for p in PROBS]),
        ({"top_k": 3}, [0, 0, 15 / 85, 20 / 85, 50 / 85]),
        ({"top_p": 0.65}, [0, 0, 0, 2 / 7, 5 / 7]),
        ({"min_p": 0.25}, [0, 0, 15 / 85, 20 / 85, 50 / 85]),
        ({"min_p": 0.25, "top_k": 2}, [0, 0, 0, 2 / 7, 5 / 7]),
        ({"top_k": 4, "top_p": 0.75}, [0, 0, 15 / 85, 20 / 85, 50 / 85]),  # 70 / 95 is not enough
        ({"min_p": 0.15, "top_p": 0.8}, [0, 0, 15 / 85, 20 / 85, 50 / 85]),  # 70 / 95 again
        ({"top_k": 0, "top_p": 1.0, "min_p": 0.0}, PROBS),
        ({"top_k": -1}, PROBS),
        ({"top_k": 5}, PROBS),
        ({"temperature": 1e9}, [0.2] * 5),
    ],
    ids=str,
)
def test_tokens_come_as_often_as_their_probability_says(options, expected):
    num = 20_000
    found = draws(LOGITS, num, **options)
    counts = [found.count(token) for token in range(5)]
    assert [token for token in range(5) if counts[token]] == [t for t, p in enumerate(expected) if p]
    chi_square = sum((n - p * num) ** 2 / (p * num) for n, p in zip(counts, expected, strict=True) if p)
    assert chi_square < 18.47  # the 99.9 % point with 4 degrees of freedom


@pytest.mark.parametrize("seed", range(6))
def test_what_can_be_drawn_is_what_the_filters_keep(seed):
    rng = torch.Generator().manual_seed(seed)
    logits = (torch.randn(12, generator=rng) * 2).round(decimals=0 if seed % 2 else 3).tolist()
    for temperature, top_k, top_p, min_p in [
        (1.0, 4, 1.0, 0.0), (0.7, 0, 0.8, 0.0), (1.3, 0, 1.0, 0.2), (1.0, 6, 0.7, 0.05), (0.9, 12, 0.3, 0.01),
    ]:  # fmt: skip
        options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        assert sorted(set(draws(logits, 3000, **options))) == kept(logits, **options), options


def test_the_token_is_where_the_random_number_falls_in_order_of_id():
    num = 500
    points = uniform(torch.arange(num), torch.zeros(num, dtype=torch.int64)).tolist()
    ends = [0.05, 0.15, 0.3, 0.5, 1.0]
    assert draws(LOGITS, num) == [next(i for i, end in enumerate(ends) if end > u) for u in points]
    # 0.5 and 0.15 are kept by top_k=3 with 0.2: they keep their places
    ends = [0, 0, 15 / 85, 35 / 85, 1.0]
    assert draws(LOGITS, num, top_k=3) == [next(i for i, end in enumerate(ends) if end > u) for u in points]


@pytest.mark.parametrize("options", [{"top_k": 3}, {"top_p": 0.55}, {"top_k": 4, "top_p": 0.7}], ids=str)
def test_of_equal_logits_the_lower_ids_are_kept(options):
    # Five equal tokens; 3 of 5 for each of these options.
    logits = [-INF, 1.0, 1.0, -INF, 1.0, 1.0, 1.0]
    assert sorted(set(draws(logits, 400, **options))) == [1, 2, 4]


def test_greedy_takes_the_lowest_id_of_the_highest_whatever_the_filters():
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0], [5.0, -INF, -0.0, 0.0], [-0.0, 0.0, -1.0, -1.0]])
    options = arguments(3, temperature=0.0, top_k=2, top_p=0.1, min_p=0.9)
    assert sample(logits, **options).tolist() == [1, 0, 0]


@pytest.mark.parametrize("temperature", [1e-30, 1e-45, 1e-3], ids=str)
def test_a_tiny_temperature_takes_the_highest_and_shares_between_equals(temperature):
    assert set(draws([-3e38, 2.0, -INF, 2.5, 2.5, 0.0], 100, temperature=temperature)) == {3, 4}


@pytest.mark.parametrize("options", [{"top_p": 1e-30}, {"top_k": 1}, {"min_p": 1.0}], ids=str)
def test_the_strictest_filters_leave_the_highest(options):
    assert set(draws([0.0, 1.0, 0.999, -5.0], 50, temperature=50.0, **options)) == {1}


def test_a_token_without_probability_is_never_drawn():
    logits = [-INF, 0.0, -2000.0, -INF, 0.0, -INF]
    assert set(draws(logits, 500)) == {1, 4}
    assert set(draws(logits, 500, top_k=5, top_p=0.9999)) == {1, 4}


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"top_k": 40, "top_p": 0.9}], ids=str)
def test_rows_without_a_distribution_have_no_token(options):
    """flashinfer-ai/flashinfer#2455: a NaN row read out of bounds."""
    logits = torch.randn(6, 200, generator=torch.Generator().manual_seed(0))
    alone = sample(logits[:1], **arguments(1, **options))
    logits[1], logits[2], logits[3, 7], logits[4, 199] = NAN, -INF, INF, NAN
    ids, logprobs = sample(logits, **arguments(6, **options), return_logprobs=True)
    assert ids[:1].equal(alone)
    assert ids[1:5].tolist() == [-1] * 4
    assert ids[5] >= 0
    assert logprobs[1:5].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_log_probabilities_are_those_of_the_logits_alone(dtype):
    logits = torch.randn(9, 300, generator=torch.Generator().manual_seed(1)).to(dtype) * 5
    kept_logits = logits.clone()
    options = arguments(9, temperature=[0.0, 0.5, 2.0] * 3, top_k=[0, 5, 50] * 3, top_p=0.9)
    ids, logprobs = sample(logits, **options, return_logprobs=True)
    exact = torch.log_softmax(logits.double(), dim=1).gather(1, ids[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), exact, rtol=1e-6, atol=1e-6)
    assert logprobs.dtype == torch.float32
    assert ids.equal(sample(logits, **options))
    assert logits.equal(kept_logits)


def test_a_row_is_the_same_alone_and_in_a_batch():
    logits = torch.randn(17, 500, generator=torch.Generator().manual_seed(3)) * 2
    options = arguments(
        17,
        temperature=[0.0, 1.0, 0.5, 2.0] * 4 + [1.0],
        top_k=[0, 3, 50] * 5 + [0, 9],
        top_p=[1.0, 0.5] * 8 + [0.9],
        min_p=[0.0, 0.0, 0.1, 0.01] * 4 + [0.0],
        positions=list(range(17)),
    )
    together = sample(logits, **options)
    alone = [
        sample(logits[r : r + 1], **{name: x[r : r + 1] for name, x in options.items()}) for r in range(17)
    ]
    assert together.equal(torch.cat(alone))
    # A row's stride is its own affair.
    wide = torch.full((17, 600), 1e9)
    wide[:, :500] = logits
    assert sample(wide[:, :500], **options).equal(together)


def test_no_rows():
    ids, logprobs = sample(torch.empty(0, 10), **arguments(0), return_logprobs=True)
    assert (ids.shape, ids.dtype) == ((0,), torch.int64)
    assert (logprobs.shape, logprobs.dtype) == ((0,), torch.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(4)}, "logits must be of shape (R, V), V above 0, got shape (4,)"),
        ({"logits": torch.zeros(2, 0)}, "V above 0, got shape (2, 0)"),
        ({"logits": torch.zeros(2, 4).double()}, "logits.dtype must be float32, float16 or bfloat16"),
        ({"logits": torch.zeros(4, 2).t()}, "the last dimension of logits must be contiguous"),
        ({"temperature": torch.zeros(3)}, "temperature must be of shape (2,), got shape (3,)"),
        ({"temperature": torch.zeros(2).double()}, "temperature.dtype must be torch.float32"),
        ({"top_k": torch.zeros(2, dtype=torch.int64)}, "top_k.dtype must be torch.int32"),
        ({"top_p": torch.zeros(2, 1)}, "top_p must be of shape (2,)"),
        ({"min_p": 0.5}, "min_p must be a value of type Tensor | None, got 0.5"),
        ({"seeds": torch.zeros(2)}, "seeds.dtype must be torch.int64"),
        ({"positions": torch.zeros(1, dtype=torch.int64)}, "positions must be of shape (2,)"),
        ({"return_logprobs": "yes"}, "return_logprobs must be True or False, got 'yes'"),
        ({"return_logprobs": 1}, "return_logprobs must be True or False, got 1"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_wrong_arguments_are_named(change, message):
    given = {"logits": torch.zeros(2, 4), **arguments(2, top_k=1, top_p=0.5, min_p=0.1)}
    assert sample(**given).shape == (2,)
    with pytest.raises(KernelArgumentError, match="^sample: .*" + re.escape(message)):
        sample(**(given | change))


def test_gradients_are_refused():
    with pytest.raises(UnsupportedKernelConfig, match=r"logits\.requires_grad"):
        sample(torch.zeros(1, 4, requires_grad=True), **arguments(1))


@pytest.mark.rooms("reference", "triton")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 1.5, "top_k": 9, "top_p": 0.9},
        {"top_p": 0.8},
        {"min_p": 0.05},
        {"temperature": 0.7, "top_k": 50, "top_p": 0.95, "min_p": 0.01},
    ],
    ids=str,
)
@pytest.mark.usefixtures("implementation")
def test_sixteen_bit_logits_count_as_their_float32_copies(options, dtype):
    logits = (3 * torch.randn(12, 300, generator=torch.Generator().manual_seed(2))).to(dtype)
    logits[7, 5], logits[8, 299], logits[9], logits[10, 40:] = NAN, INF, -INF, -INF
    given = arguments(12, **options)
    ids, logprobs = sample(logits, **given, return_logprobs=True)
    wide_ids, wide_logprobs = sample(logits.float(), **given, return_logprobs=True)
    assert ids.tolist() == wide_ids.tolist()
    assert torch.equal(logprobs.nan_to_num(7.0), wide_logprobs.nan_to_num(7.0))
    assert [row for row, token in enumerate(ids.tolist()) if token < 0] == [7, 8, 9]
