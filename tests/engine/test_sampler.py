"""The sampler: each option by hand, their order, bad rows, and log probabilities."""

import math
from collections import Counter

import pytest
import torch
from helpers.sampling import choose, sample, sequence, tally
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from octavo.engine.sampler import NO_TOKEN, Sampler

NAN, INF = math.nan, math.inf


# Greedy and what changes the logits before it.


def test_greedy_takes_the_highest_and_of_equals_the_lower_id():
    assert choose([1.0, 3.0, 2.0, 3.0]) == 1
    assert choose([1.0, 3.0, 2.0, 3.5], temperature=1e-6, top_k=3, top_p=0.5) == 3


def test_top_k_of_one_is_greedy_at_any_temperature():
    assert tally([0.0, 0.01, 0.0], 200, temperature=100.0, top_k=1) == {1: 200}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"allowed_token_ids": [0, 2]}, 2),
        ({"logit_bias": {0: 2.5}}, 0),
        ({"logit_bias": {1: -0.75, 2: 0.5}}, 2),
        ({"min_tokens": 1, "stop_token_ids": [1]}, 2),
        ({"min_tokens": 1, "eos": [1, 2]}, 0),
        ({"min_tokens": 1, "eos": [1], "ignore_eos": True}, 1),
        ({"repetition_penalty": 2.0, "prompt": [1]}, 2),  # 3 / 2 < 2
        ({"repetition_penalty": 1.25, "prompt": [1]}, 1),  # 3 / 1.25 > 2
        ({"repetition_penalty": 2.0, "prompt": [0], "output": [1, 2]}, 1),  # .5, 1.5, 1
        ({"presence_penalty": 1.5, "prompt": [1]}, 1),  # the prompt does not count
        ({"presence_penalty": 1.5, "output": [1, 1, 1]}, 2),  # 3 - 1.5 once
        (
            {"presence_penalty": 1.5, "repetition_penalty": 1.01, "prompt": [1]},
            1,
        ),  # 3 / 1.01, nothing taken off
        ({"presence_penalty": 0.9, "output": [1, 1, 1]}, 1),
        ({"frequency_penalty": 0.4, "output": [1, 1]}, 1),  # 3 - 0.8
        ({"frequency_penalty": 0.4, "output": [1, 1, 1]}, 2),  # 3 - 1.2
        ({"presence_penalty": -1.5, "output": [2]}, 2),  # 2 + 1.5
        # allowed ids are cut first: a bias does not bring a token back.
        ({"allowed_token_ids": [0], "logit_bias": {1: 100.0}}, 0),
        # bias before penalties: (2 + 3) / 2 < 3, but 2 / 2 + 3 > 3
        ({"logit_bias": {2: 3.0}, "repetition_penalty": 2.0, "prompt": [2]}, 1),
    ],
    ids=str,
)
def test_greedy_option(options, expected):
    assert choose([1.0, 3.0, 2.0], **options) == expected


def test_repetition_penalty_multiplies_negative_logits():
    assert choose([-1.0, -1.5, -9.0], repetition_penalty=2.0, prompt=[0]) == 1


@pytest.mark.parametrize("penalty", [0.5, 1.3, 4.0])
def test_repetition_penalty_is_that_of_transformers(penalty):
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(1))
    seq = sequence(
        prompt=[3, 4, 5, 3], output=[6, 4], repetition_penalty=penalty, logprobs=0, temperature=0.0
    )
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([seq.token_ids]), logits.clone())
    # Force the choice between a seen token and an unseen one on a fine scale.
    for token in range(7):
        for other in (10, 11):
            pair = sequence(
                prompt=[3, 4, 5, 3],
                output=[6, 4],
                repetition_penalty=penalty,
                allowed_token_ids=[token, other],
            )
            assert sample(logits, [pair]).token_ids == [
                max(token, other, key=lambda i: float(expected[0, i]))
            ]


def test_min_tokens_ends_when_enough_were_made():
    sampler, logits = Sampler(3), torch.tensor([[1.0, 3.0, 2.0]])
    seq = sequence(min_tokens=2, eos=[1])
    chosen = []
    for _ in range(4):
        [token] = sampler.sample(logits, [seq]).token_ids
        seq.token_ids.append(token)
        chosen.append(token)
    assert chosen == [2, 2, 1, 1]


def test_min_tokens_of_two_rows_end_apart():
    sampler, logits = Sampler(3), torch.tensor([[1.0, 3.0, 2.0]] * 2)
    rows = [sequence(min_tokens=1, eos=[1]), sequence(min_tokens=3, eos=[1])]
    chosen = []
    for _ in range(4):
        chosen.append(sampler.sample(logits, rows).token_ids)
        for seq, token in zip(rows, chosen[-1], strict=True):
            seq.token_ids.append(token)
    assert chosen == [[2, 2], [1, 2], [1, 2], [1, 1]]


def test_end_of_sequence_id_past_the_logits_is_no_error():
    assert choose([1.0, 3.0], min_tokens=1, eos=[1, 2, 5000]) == 0


def test_penalties_follow_a_growing_sequence():
    """One sampler over many steps, other sequences coming and going, equals a fresh sampler at each step."""
    torch.manual_seed(3)
    kept = Sampler(40)
    options = {
        "repetition_penalty": 1.4,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "temperature": 1.0,
    }
    watched = sequence(prompt=[1, 2, 1], seed=9, **options)
    other = sequence(prompt=[5], seed=8, **options)
    for step in range(150):
        logits = torch.randn(2, 40)
        mates = [watched, other] if step % 3 else [watched]
        together = kept.sample(logits[: len(mates)], mates)
        assert together == Sampler(40).sample(logits[: len(mates)], mates)
        for seq, token in zip(mates, together.token_ids, strict=True):
            seq.token_ids.append(token)
    assert len(watched.token_ids) == 153


def test_penalties_restart_when_a_sequence_is_cut_back_or_refilled():
    sampler, logits = Sampler(3), torch.tensor([[1.0, 3.0, 2.0]])
    seq = sequence(output=[1, 1, 1], frequency_penalty=0.4)
    assert sampler.sample(logits, [seq]).token_ids == [2]
    del seq.token_ids[2:]
    assert sampler.sample(logits, [seq]).token_ids == [1]
    seq.token_ids = [0, 1, 1, 1]
    assert sampler.sample(logits, [seq]).token_ids == [2]


# Drawing.


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
        ({"logit_bias": {0: math.log(10)}}, [0.5 / 1.45, 0.1 / 1.45, 0.15 / 1.45, 0.2 / 1.45, 0.5 / 1.45]),
        ({"allowed_token_ids": [1, 3]}, [0, 1 / 3, 0, 2 / 3, 0]),
        ({"temperature": 1e9}, [0.2] * 5),
    ],
    ids=str,
)
def test_draws_follow_the_distribution(options, expected):
    num_draws = 20_000
    counts = tally(LOGITS, num_draws, **{"temperature": 1.0, **options})
    assert set(counts) == {token for token, p in enumerate(expected) if p > 0}
    chi_square = sum(
        (counts[t] - p * num_draws) ** 2 / (p * num_draws) for t, p in enumerate(expected) if p > 0
    )
    # 99.9 % point of chi-square with 4 degrees of freedom; fewer tokens have a lower one.
    assert chi_square < 18.47


def test_draws_of_one_sequence_follow_the_distribution():
    """Positions under one seed, where the test above takes seeds at one position."""
    sampler, logits, counts = Sampler(5), torch.tensor([LOGITS]), Counter()
    seq = sequence(seed=1234, temperature=1.0)
    for _ in range(5000):
        [token] = sampler.sample(logits, [seq]).token_ids
        seq.token_ids.append(token)
        counts[token] += 1
    assert sum((counts[t] - p * 5000) ** 2 / (p * 5000) for t, p in enumerate(PROBS)) < 18.47


def test_extreme_options_stay_in_range():
    wide = [-3e38, 0.0, 3e38]
    assert tally(wide, 20, temperature=1e30, top_p=0.9).keys() <= {0, 1, 2}
    assert tally([0.0, 1e-3, 0.0], 20, temperature=1e-5) == {1: 20}
    assert tally([0.0, 1.0, 2.0], 20, temperature=1.0, top_p=1e-300) == {2: 20}
    assert tally([0.0, 1.0, 2.0], 20, temperature=1.0, top_k=10**9, min_p=1.0) == {2: 20}
    assert tally([7.0], 20, temperature=1.0, top_k=40, top_p=0.9) == {0: 20}


def test_overflow_is_an_error_of_that_row():
    logits = torch.tensor([[3e38, 0.0], [0.0, 1.0]])
    output = sample(logits, [sequence(temperature=1e-3), sequence(temperature=1e-3)])
    assert output.token_ids == [NO_TOKEN, 1]
    assert list(output.errors) == [0]
    assert "float32's range" in output.errors[0]


# Bad rows.


@pytest.mark.parametrize(
    "options", [{"temperature": 1.0, "top_k": 40, "top_p": 0.9}, {}, {"temperature": 1.0}], ids=str
)
def test_nan_and_empty_rows_end_in_an_error(options):
    """flashinfer#2455: NaN rows read out of bounds. vllm#14126: they showed as an endless run of token 0."""
    logits = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    solo = sample(logits[:1], [sequence(seed=1, **options)])
    logits[1] = NAN
    logits[2] = -INF
    output = sample(logits, [sequence(seed=seed, logprobs=2, **options) for seed in (1, 2, 3)])
    assert output.token_ids == [*solo.token_ids, NO_TOKEN, NO_TOKEN]
    assert output.logprobs[0] is not None
    assert output.logprobs[1:] == [None, None]
    assert sorted(output.errors) == [1, 2]
    assert "NaN" in output.errors[1]
    assert "every logit the model gave is -inf" in output.errors[2]


def test_one_nan_and_one_infinity_are_enough():
    logits = torch.tensor([[1.0, 2.0, NAN], [1.0, 2.0, INF], [1.0, 2.0, -INF]])
    output = sample(logits, [sequence(), sequence(), sequence()])
    assert output.token_ids == [NO_TOKEN, NO_TOKEN, 1]
    assert "hold NaN" in output.errors[0]
    assert "hold +inf" in output.errors[1]


def test_nan_behind_allowed_token_ids_is_still_an_error():
    output = sample(torch.tensor([[1.0, NAN]]), [sequence(allowed_token_ids=[0])])
    assert output.token_ids == [NO_TOKEN]
    assert "hold NaN" in output.errors[0]


def test_options_that_leave_no_token_are_an_error():
    options = {"allowed_token_ids": [1], "min_tokens": 1, "eos": [1]}
    output = sample(torch.zeros(2, 3), [sequence(**options), sequence(seed=1, temperature=1.0, **options)])
    assert output.token_ids == [NO_TOKEN, NO_TOKEN]
    assert set(output.errors.values()) == {
        "the options leave no token to choose: allowed_token_ids, min_tokens, structured_output, logit_bias"
    }


# Log probabilities.


def test_logprobs_come_from_the_raw_logits():
    seq = sequence(temperature=0.0, logprobs=2, logit_bias={0: 100.0}, repetition_penalty=3.0, prompt=[4])
    output = sample(torch.tensor([LOGITS]), [seq])
    assert output.token_ids == [0]
    [entry] = output.logprobs
    assert [(token, value.rank) for token, value in entry.items()] == [(0, 5), (4, 1), (3, 2)]
    assert [value.logprob for value in entry.values()] == pytest.approx(
        [math.log(p) for p in (0.05, 0.5, 0.2)]
    )


def test_logprobs_widths_of_each_row():
    widths = [None, 0, 2, 5, 900, -1]
    output = sample(torch.tensor([LOGITS] * 6), [sequence(logprobs=k) for k in widths])
    assert [entry and list(entry) for entry in output.logprobs] == [
        None, [4], [4, 3], [4, 3, 2, 1, 0], [4, 3, 2, 1, 0], [4, 3, 2, 1, 0],
    ]  # fmt: skip


def test_prompt_logprobs():
    logits = torch.tensor([LOGITS, LOGITS[::-1]])
    before = logits.clone()
    found = Sampler(5).prompt_logprobs(logits, [4, 3], 2)
    assert [[(token, value.rank) for token, value in entry.items()] for entry in found] == [
        [(4, 1), (3, 2)],
        [(3, 4), (0, 1), (1, 2)],
    ]
    assert found[1][3].logprob == pytest.approx(math.log(0.1))
    assert torch.equal(logits, before)
    assert [list(entry) for entry in Sampler(5).prompt_logprobs(logits, [2, 2], -1)] == [
        [2, 4, 3, 1, 0],
        [2, 0, 1, 3, 4],
    ]
    assert Sampler(5).prompt_logprobs(torch.empty(0, 5), [], 3) == []


def test_prompt_logprobs_over_several_tiles():
    sampler = Sampler(50_000)
    logits = torch.randn(100, 50_000)
    found = sampler.prompt_logprobs(logits, list(range(100)), 1)
    expected = torch.log_softmax(logits, dim=1)
    assert [entry[i].logprob for i, entry in enumerate(found)] == expected.diagonal().tolist()
    assert [list(entry)[-1] for entry in found] == logits.argmax(dim=1).tolist()


def test_empty_batch():
    output = sample(torch.empty(0, 5), [])
    assert (output.token_ids, output.logprobs, output.errors) == ([], [], {})
