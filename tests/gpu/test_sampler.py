"""The sampler of the engine on the GPU: the CPU's tokens and log probabilities, and one read a step."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from helpers.sampling import sequence

from octavo.engine.sampler import NO_TOKEN, Sampler

OPTIONS = [
    {},
    {"temperature": 5.0, "top_k": 1},
    {"allowed_token_ids": [3, 9, 20]},
    {"logit_bias": {4: 9.5, 5: -3.0}},
    {"min_tokens": 2, "stop_token_ids": [7]},
    {"repetition_penalty": 1.7, "prompt": [1, 2, 3], "output": [4, 4, 5]},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5, "output": [4, 4, 5]},
    {"logprobs": 5},
    {"logprobs": 0, "logit_bias": {1: 50.0}},
]
DRAWN = [{"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.0, "min_p": 0.05, "top_k": 40, "logprobs": 3}]


def test_greedy_tokens_log_probabilities_and_errors_are_those_of_the_cpu() -> None:
    logits = 2 * torch.randn(len(OPTIONS) + 2, 32_000, generator=torch.Generator().manual_seed(0))
    logits[-2, 5] = torch.nan
    logits[-1] = -torch.inf
    sequences = [sequence(seed=i, **options) for i, options in enumerate([*OPTIONS, {}, {"logprobs": 1}])]
    right = Sampler(32_000).sample(logits, sequences)
    ours = Sampler(32_000).sample(logits.cuda(), sequences)
    assert ours.token_ids == right.token_ids
    assert ours.token_ids[-2:] == [NO_TOKEN, NO_TOKEN]
    assert ours.errors == right.errors
    for got, expected in zip(ours.logprobs, right.logprobs, strict=True):
        assert (got is None) == (expected is None)
        if got is not None and expected is not None:
            assert [(token, one.rank) for token, one in got.items()] == [
                (token, one.rank) for token, one in expected.items()
            ]
            assert [one.logprob for one in got.values()] == pytest.approx(
                [one.logprob for one in expected.values()], abs=1e-5
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_waits_for_nothing_but_its_tokens(dtype: torch.dtype) -> None:
    """Penalties, masks, draws and log probabilities included; a new batch, and the same one a step later."""
    sampler = Sampler(32_000)
    logits = torch.randn(len(OPTIONS + DRAWN), 32_000, device="cuda").to(dtype)
    sequences = [sequence(seed=i, **options) for i, options in enumerate(OPTIONS + DRAWN)]
    for _ in range(3):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as waits:
                warnings.simplefilter("always")
                output = sampler.sample(logits, sequences)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        places = [
            f"{Path(one.filename).name}:{one.lineno}" for one in waits if "synchronizing" in str(one.message)
        ]
        assert places == []  # the one wait is for an event, which torch does not count
        assert output.errors == {}
        for seq, token in zip(sequences, output.token_ids, strict=True):
            seq.token_ids.append(token)
