"""Tokens from 16-bit logits: those of their float32 copies, and no copy where nothing needs one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.graph import Replaying
from helpers.models import saved, tiny_hf_model
from helpers.sampling import sequence

from octavo.config import EngineConfig
from octavo.engine.build import build_engine
from octavo.engine.core import Engine
from octavo.engine.sampler import Sampler, SamplerOutput
from octavo.kernels import sampling
from octavo.models.registry import LoadedModel, load_model
from octavo.sampling_params import SamplingParams

VOCAB_SIZE = 101
PLAIN: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 7, "top_p": 0.9},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1},
]
OTHERS: list[dict[str, Any]] = [
    {"logprobs": 3},
    {"temperature": 1.0, "logprobs": 0},
    {"logit_bias": {4: 9.5, 5: -3.0}, "logprobs": 1},
    {"temperature": 1.0, "allowed_token_ids": [3, 9, 20]},
    {"repetition_penalty": 1.7, "prompt": [1, 2, 3], "output": [4, 4, 5]},
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("with_kernel", [False, True])
@pytest.mark.parametrize("kinds", [PLAIN, OTHERS, [*PLAIN, *OTHERS]], ids=["plain", "others", "mixed"])
def test_sixteen_bit_logits_are_their_float32_copies(
    kinds: list[dict[str, Any]], with_kernel: bool, dtype: torch.dtype
) -> None:
    num = 6 * len(kinds)
    logits = (2 * torch.randn(num, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))).to(dtype)
    logits[1, 3], logits[2, 5], logits[3] = math.nan, math.inf, -math.inf

    def sample(logits: torch.Tensor) -> SamplerOutput:
        sequences = [sequence(seed=i, **kinds[i % len(kinds)]) for i in range(num)]
        return Sampler(VOCAB_SIZE, with_kernel=with_kernel).sample(logits, sequences)

    found = sample(logits)
    assert found == sample(logits.float())
    assert sorted(found.errors) == [1, 2, 3]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(saved(tiny_hf_model("qwen3"), tmp_path_factory.mktemp("model")), dtype="bfloat16")


def run(engine: Engine, kinds: list[dict[str, Any]]) -> list[Any]:
    requests = [
        engine.add_request([i + 1, 7], SamplingParams(max_tokens=6, seed=i, ignore_eos=True, **options))
        for i, options in enumerate(kinds)
    ]
    while engine.has_work:
        engine.step()
    outputs = [request.output for request in requests]
    return [(one.token_ids, one.logprobs) for output in outputs if output for one in output.outputs]


@pytest.mark.parametrize("with_graphs", [False, True])
def test_steps_of_plain_rows_draw_from_what_the_head_gives(
    with_graphs: bool, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def engine() -> Engine:
        options = {"num_blocks": 64, "max_num_seqs": 6, "max_num_batched_tokens": 24}
        made = build_engine(EngineConfig(model="m", **options), loaded, None)
        made.runner.sampler = Sampler(VOCAB_SIZE, with_kernel=True)
        if with_graphs:
            Replaying().serve(made)
        return made

    seen: list[torch.dtype] = []
    sample = sampling.sample

    def watched(logits: torch.Tensor, **options: Any) -> Any:
        seen.append(logits.dtype)
        return sample(logits, **options)

    monkeypatch.setattr(sampling, "sample", watched)
    plain = run(engine(), PLAIN)
    assert set(seen) == {torch.bfloat16}
    seen.clear()
    biased = run(engine(), [{"logit_bias": {5: 1.0}}])
    assert torch.float32 in seen
    seen.clear()

    # A head that gives float32, as all that come after it once were given.
    compute_logits = type(loaded.model).compute_logits
    monkeypatch.setattr(
        type(loaded.model), "compute_logits", lambda self, hidden: compute_logits(self, hidden).float()
    )
    assert run(engine(), PLAIN) == plain
    assert run(engine(), [{"logit_bias": {5: 1.0}}]) == biased
    assert set(seen) == {torch.float32}


def test_prompt_log_probabilities_are_those_of_float32(loaded: LoadedModel) -> None:
    logits = torch.randn(3, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)).bfloat16()
    sampler = Sampler(VOCAB_SIZE)
    assert sampler.prompt_logprobs(logits, [1, 2, 3], 2) == sampler.prompt_logprobs(
        logits.float(), [1, 2, 3], 2
    )
