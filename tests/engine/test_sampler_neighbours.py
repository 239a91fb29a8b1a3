"""A row of the sampler never sees its neighbours."""

import math

import pytest
import torch
from helpers.sampling import sample, sequence
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.sampler import Sampler

NAN, INF = math.nan, math.inf


def run(sampler, sequences, steps, logits_of):
    for _ in range(steps):
        logits = torch.stack([logits_of(seq) for seq in sequences])
        for seq, token in zip(sequences, sampler.sample(logits, sequences).token_ids, strict=True):
            seq.token_ids.append(token)


def fixed_logits(seq):
    """Logits that depend on a sequence's own tokens only, as a model's would."""
    generator = torch.Generator().manual_seed(hash(tuple(seq.token_ids)))
    return torch.randn(2000, generator=generator) * 3


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.05}], ids=str)
def test_seeded_request_repeats_beside_any_mate(options):
    """vllm#51226, vllm#2514: reproducible only while the other rows of the batch were seeded too."""

    def first():
        return sequence(prompt=[1, 2], seed=42, temperature=0.8, **options)

    alone, unseeded, seeded, second = first(), first(), first(), first()
    run(Sampler(2000), [alone], 16, fixed_logits)
    run(Sampler(2000), [unseeded, sequence(prompt=[3], seed=987_654_321, temperature=1.5)], 16, fixed_logits)
    run(Sampler(2000), [seeded, sequence(prompt=[3], seed=7, top_k=3, temperature=0.3)], 16, fixed_logits)
    run(Sampler(2000), [sequence(prompt=[3], seed=7), second], 16, fixed_logits)
    assert alone.token_ids == unseeded.token_ids == seeded.token_ids == second.token_ids
    other = sequence(prompt=[1, 2], seed=43, temperature=0.8, **options)
    run(Sampler(2000), [other], 16, fixed_logits)
    assert other.token_ids != alone.token_ids


def test_two_continuations_of_one_prompt_differ_and_repeat():
    def pair():
        made = [sequence(prompt=[1], seed=seed, temperature=0.8) for seed in (5, 6)]
        run(Sampler(2000), made, 16, fixed_logits)
        return [seq.token_ids for seq in made]

    first, second = pair()
    assert first != second
    assert pair() == [first, second]


def test_one_sampler_follows_a_changing_batch():
    """As many rows as before, but other ones, or the same in another order."""
    sampler, logits = Sampler(3), torch.tensor([[1.0, 3.0, 2.0]] * 2)
    one, two, three = sequence(allowed_token_ids=[0]), sequence(logit_bias={2: 5.0}), sequence()
    assert sampler.sample(logits, [one, two]).token_ids == [0, 2]
    assert sampler.sample(logits, [two, one]).token_ids == [2, 0]
    assert sampler.sample(logits, [two, three]).token_ids == [2, 1]
    assert sampler.sample(logits[:1], [three]).token_ids == [1]


OPTIONS = [
    {},
    {"logprobs": 3},
    {"temperature": 0.7},
    {"temperature": 1.3, "min_p": 0.1},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.0, "top_k": 900, "top_p": 0.9, "logprobs": 0},
    {"temperature": 0.5, "top_p": 0.8, "logprobs": -1},
    {"temperature": 2.0, "top_p": 0.99, "min_p": 0.01},
    {"repetition_penalty": 1.3, "output": [3, 4]},
    {"temperature": 1.0, "frequency_penalty": 0.5, "output": [3, 3]},
    {"allowed_token_ids": [1, 5, 9], "temperature": 1.0},
    {"min_tokens": 2, "eos": [4], "logit_bias": {7: 3.0}},
    {"nan": True, "temperature": 1.0, "top_k": 40, "top_p": 0.9},
]


def make_row(choice, seed, size):
    options = dict(OPTIONS[choice])
    is_nan = options.pop("nan", False)
    generator = torch.Generator().manual_seed(seed)
    # Rounded to bfloat16, logits of one row are often equal, as a model's are.
    logits = (torch.randn(size, generator=generator) * 3).bfloat16().float()
    if is_nan:
        logits[seed % size] = NAN
    return logits, sequence(seed=seed, **options)


@settings(max_examples=80, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, len(OPTIONS) - 1), st.integers(0, 10_000)), min_size=1, max_size=12
    ),
    size=st.sampled_from([10, 128, 1111]),
    data=st.data(),
)
def test_a_row_is_the_same_in_any_batch(rows, size, data):
    made = [make_row(choice, seed, size) for choice, seed in rows]
    solo = [sample(logits[None], [seq]) for logits, seq in made]
    order = data.draw(st.permutations(range(len(made))))
    batch = sample(torch.stack([made[i][0] for i in order]), [made[i][1] for i in order])
    assert batch.token_ids == [solo[i].token_ids[0] for i in order]
    assert batch.logprobs == [solo[i].logprobs[0] for i in order]
    assert batch.errors == {place: solo[i].errors[0] for place, i in enumerate(order) if solo[i].errors}


@pytest.mark.parametrize("size", [49_152, 50_257])
def test_a_row_is_the_same_in_a_wide_batch(size):
    """More rows than one tile holds, at the size of a real vocabulary."""
    made = [make_row(i % (len(OPTIONS) - 1), i, size) for i in range(60)]
    made = [(logits, seq) for logits, seq in made if seq.params.logprobs != -1]
    batch = sample(torch.stack([logits for logits, _ in made]), [seq for _, seq in made])
    for i in range(0, len(made), 5):
        assert sample(made[i][0][None], [made[i][1]]).token_ids == [batch.token_ids[i]]


def test_logits_are_not_modified():
    made = [make_row(choice, choice, 64) for choice in range(len(OPTIONS))]
    logits = torch.stack([row for row, _ in made])
    before = logits.clone()
    sample(logits, [seq for _, seq in made])
    assert torch.equal(logits.view(torch.int32), before.view(torch.int32))  # bits: NaN is not equal to itself
