"""The way the sampler goes on a GPU: one call of `octavo.kernels.sample`, one read. Run here on the CPU."""

import math
from unittest import mock

import pytest
import torch
from helpers.sampling import sequence

from octavo.engine import draw
from octavo.engine.sampler import NO_TOKEN, Sampler
from octavo.kernels import sampling

NAN, INF = math.nan, math.inf


def sample(logits, sequences, *, with_kernel=True):
    return Sampler(logits.shape[1], with_kernel=with_kernel).sample(logits, sequences)


def random_logits(num_rows, size=60):
    return torch.randn(num_rows, size, generator=torch.Generator().manual_seed(0)) * 2


GREEDY = [
    {},
    {"temperature": 5.0, "top_k": 1},
    {"allowed_token_ids": [3, 9, 20]},
    {"logit_bias": {4: 9.5, 5: -3.0}},
    {"min_tokens": 2, "stop_token_ids": [7]},
    {"repetition_penalty": 1.7, "prompt": [1, 2, 3], "output": [4, 4, 5]},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5, "output": [4, 4, 5]},
    {"logprobs": 0},
    {"logprobs": 5},
    {"logprobs": -1, "logit_bias": {1: 50.0}},
]


def test_greedy_rows_and_log_probabilities_are_those_of_the_cpu():
    logits = random_logits(len(GREEDY))
    sequences = [sequence(seed=i, **options) for i, options in enumerate(GREEDY)]
    assert sample(logits, sequences) == sample(logits, sequences, with_kernel=False)


def test_a_draw_of_the_whole_row_is_that_of_the_cpu():
    """In order of id on both; only filtered draws may differ."""
    logits = random_logits(300, 1000)
    sequences = [sequence(seed=i, temperature=0.2 + i / 200, min_p=0.01 * (i % 2)) for i in range(300)]
    assert sample(logits, sequences) == sample(logits, sequences, with_kernel=False)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.05, 0.1, 0.15, 0.2, 0.5]),
        ({"min_p": 0.25, "top_k": 2}, [0, 0, 0, 2 / 7, 5 / 7]),
        ({"top_k": 4, "top_p": 0.75}, [0, 0, 15 / 85, 20 / 85, 50 / 85]),
        ({"allowed_token_ids": [1, 3]}, [0, 1 / 3, 0, 2 / 3, 0]),
    ],
    ids=str,
)
def test_draws_follow_the_distribution(options, expected):
    num = 20_000
    logits = torch.tensor([0.05, 0.1, 0.15, 0.2, 0.5]).log().expand(num, -1)
    output = sample(logits, [sequence(seed=i, temperature=1.0, **options) for i in range(num)])
    counts = torch.bincount(torch.tensor(output.token_ids), minlength=5).tolist()
    assert [t for t in range(5) if counts[t]] == [t for t in range(5) if expected[t]]
    chi_square = sum((n - p * num) ** 2 / (p * num) for n, p in zip(counts, expected, strict=True) if p)
    assert chi_square < 18.47


def test_positions_follow_the_sequence():
    sampler, logits, seq = Sampler(60, with_kernel=True), random_logits(1), sequence(seed=5, temperature=1.5)
    for _ in range(20):
        [token] = sampler.sample(logits, [seq]).token_ids
        assert sample(logits, [seq]).token_ids == [token]
        seq.token_ids.append(token)
    assert len(set(seq.token_ids)) > 5


@pytest.mark.parametrize(
    "options", [{"temperature": 1.0, "top_k": 40, "top_p": 0.9}, {}, {"temperature": 1.0}], ids=str
)
def test_bad_rows_end_in_an_error_that_says_why(options):
    logits = random_logits(5)
    alone = sample(logits[:1], [sequence(seed=0, **options)])
    logits[1], logits[2], logits[3, 7] = NAN, -INF, INF
    sequences = [sequence(seed=seed, logprobs=2, **options) for seed in range(4)]
    sequences.append(sequence(allowed_token_ids=[1], min_tokens=1, eos=[1], logprobs=1, **options))
    output = sample(logits, sequences)
    assert output.token_ids == [*alone.token_ids, *[NO_TOKEN] * 4]
    assert output.logprobs[0] is not None
    assert output.logprobs[1:] == [None] * 4
    reasons = (
        "hold NaN",
        "every logit the model gave is -inf",
        "hold +inf",
        "leave no token to choose",
    )
    assert sorted(output.errors) == [1, 2, 3, 4]
    for row, reason in enumerate(reasons, start=1):
        assert reason in output.errors[row]


def test_nan_behind_allowed_token_ids_is_still_an_error():
    output = sample(torch.tensor([[1.0, NAN]]), [sequence(allowed_token_ids=[0])])
    assert output.token_ids == [NO_TOKEN]
    assert "hold NaN" in output.errors[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bit_logits(dtype):
    logits = random_logits(len(GREEDY)).to(dtype)
    sequences = [sequence(seed=i, **options) for i, options in enumerate(GREEDY)]
    assert sample(logits, sequences) == sample(logits.float(), sequences)


@pytest.mark.parametrize("filtered", [False, True])
def test_filters_come_all_together_or_not_at_all(filtered):
    """Each subset would be one more kernel to compile while a request waits."""
    rows = [sequence(temperature=1.0), sequence(), sequence(temperature=1.0, min_p=0.1 * filtered)]
    with mock.patch.object(sampling, "sample", wraps=sampling.sample) as kernel:
        sample(random_logits(3), rows)
    given = kernel.call_args.kwargs
    assert [given[name] is not None for name in ("top_k", "top_p", "min_p")] == [filtered] * 3
    assert given["temperature"].tolist() == [1.0, 0.0, 1.0]


def test_read_gives_back_what_it_got_through_one_copy():
    tensors = [
        torch.tensor([5, -1, 2**62]),
        torch.tensor([[0.1, -INF], [NAN, 3e38]]),
        torch.empty(0, 4, dtype=torch.int64),
    ]
    with mock.patch.object(torch.Tensor, "is_cpu", new=False):
        found = draw.Read(tensors).wait()
    for got, given in zip(found, tensors, strict=True):
        assert got.shape == given.shape
        torch.testing.assert_close(got.to(given.dtype), given, rtol=0, atol=0, equal_nan=True)
