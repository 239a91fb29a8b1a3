"""Overlapped steps of real models: the tokens that only the device knows are the next step's input."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from helpers.models import saved, tiny_hf_model

from octavo.config import EngineConfig
from octavo.engine import build
from octavo.engine.build import build_engine
from octavo.engine.core import Engine
from octavo.engine.request import Request
from octavo.engine.sampler import Sampler
from octavo.models.registry import LoadedModel, load_model
from octavo.sampling_params import SamplingParams

VOCAB_SIZE = 101
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 5, "n": 3},
    {"logprobs": 2, "prompt_logprobs": 1},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.2},
    {"min_tokens": 4, "stop_token_ids": list(range(0, VOCAB_SIZE, 5))},
    {"logit_bias": {3: 4.0}, "temperature": 1.0},
    {"ignore_eos": False, "temperature": 1.0, "top_p": 0.9},
]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(saved(tiny_hf_model("llama"), tmp_path_factory.mktemp("model")), dtype="float32")


def outputs(loaded: LoadedModel, with_kernel: bool, **options: Any) -> tuple[Any, Engine]:
    limits = {"num_blocks": 80, "block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 24} | options
    engine = build_engine(EngineConfig(model="m", **limits), loaded, None)
    engine.runner.sampler = Sampler(VOCAB_SIZE, with_kernel=with_kernel)
    rng = random.Random(0)
    start = [rng.randrange(VOCAB_SIZE) for _ in range(12)]
    requests = []
    for i, given in enumerate(OPTIONS * 3):
        prompt = start[: rng.randint(0, 12)] + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 12))]
        params = SamplingParams(**({"max_tokens": rng.randint(4, 20), "seed": i, "ignore_eos": True} | given))
        requests.append(engine.add_request(prompt, params))
    while engine.has_work:
        engine.step()
        engine.scheduler.check()
    assert engine.cache.num_owned == 0
    found = [
        (request.output.outputs, request.output.prompt_logprobs) for request in requests if request.output
    ]
    assert len(found) == len(requests)
    return found, engine


@pytest.mark.parametrize("with_kernel", [False, True])
@pytest.mark.parametrize("limits", [{}, {"num_blocks": 12}, {"max_num_batched_tokens": 7}], ids=str)
def test_the_same_tokens_as_one_step_after_the_other(
    loaded: LoadedModel, with_kernel: bool, limits: dict[str, int]
) -> None:
    limits = {"enable_prefix_caching": False} | limits
    expected, _ = outputs(loaded, with_kernel, overlap=False, **limits)
    for run_ahead in (1, 4):
        found, engine = outputs(loaded, with_kernel, overlap=True, run_ahead=run_ahead, **limits)
        for (ours, our_prompt), (theirs, their_prompt) in zip(found, expected, strict=True):
            assert [c.token_ids for c in ours] == [c.token_ids for c in theirs]
            assert [c.finish_reason for c in ours] == [c.finish_reason for c in theirs]
            assert (our_prompt is None) == (their_prompt is None)
        assert ("num_blocks" in limits) == (engine.stats().num_preemptions > 0)


@pytest.mark.parametrize("with_kernel", [False, True])
def test_bad_logits_end_their_row_alone(
    loaded: LoadedModel, with_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step behind it is launched with whatever stands for the token that could not be drawn."""
    limits = {"num_blocks": 80, "block_size": 4, "overlap": True}

    def run() -> list[Request]:
        engine = build_engine(EngineConfig(model="m", **limits), loaded, None)
        engine.runner.sampler = Sampler(VOCAB_SIZE, with_kernel=with_kernel)
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        requests = [engine.add_request([i + 1, 7], params) for i in range(3)]
        while engine.has_work:
            engine.step()
        assert engine.cache.num_owned == 0
        return requests

    expected = [request.sequences[0].output_token_ids for request in run()]
    compute_logits = loaded.model.compute_logits
    num_steps = 0

    def poisoned(self: object, hidden: torch.Tensor) -> torch.Tensor:
        nonlocal num_steps
        num_steps += 1
        logits = compute_logits(hidden).clone()
        logits[1] = torch.nan if num_steps == 5 else logits[1]
        return logits

    monkeypatch.setattr(build, "smallest_step", lambda: ([1, 1], [1, 1]))  # it has a second row
    monkeypatch.setattr(type(loaded.model), "compute_logits", poisoned)
    good, bad, fine = run()
    assert [good.sequences[0].output_token_ids, fine.sequences[0].output_token_ids] == expected[::2]
    assert bad.sequences[0].output_token_ids == expected[1][:3]
    assert bad.output is not None
    assert bad.output.error is not None
    assert bad.output.error.startswith("the model's logits hold NaN")


def test_with_prefix_hits(loaded: LoadedModel) -> None:
    expected, _ = outputs(loaded, False, overlap=False, enable_prefix_caching=False)
    found, engine = outputs(loaded, False, overlap=True)
    assert engine.stats().num_hit_tokens > 0
    assert [[c.token_ids for c in ours] for ours, _ in found] == [
        [c.token_ids for c in theirs] for theirs, _ in expected
    ]


def test_log_probabilities_are_those_of_the_same_tokens(loaded: LoadedModel) -> None:
    expected, _ = outputs(loaded, False, overlap=False)
    found, _ = outputs(loaded, False, overlap=True)
    num_compared = 0
    for (ours, our_prompt), (theirs, their_prompt) in zip(found, expected, strict=True):
        assert [entry and list(entry) for entry in our_prompt or ()] == [
            entry and list(entry) for entry in their_prompt or ()
        ]
        for mine, yours in zip(ours, theirs, strict=True):
            for a, b in zip(mine.logprobs or (), yours.logprobs or (), strict=True):
                assert list(a) == list(b)
                assert [x.logprob for x in a.values()] == pytest.approx(
                    [x.logprob for x in b.values()], abs=1e-4
                )
                num_compared += 1
    assert num_compared > 20
