"""Tiny models of every network: the same greedy tokens however a request is run, as Transformers has them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import triton_here
from helpers.models import PagedDriver, hf_logits, random_ids, saved, tiny_hf_model

from octavo import SamplingParams
from octavo.config import EngineConfig
from octavo.engine.build import build_engine
from octavo.engine.stats import EngineStats
from octavo.kernels import backend
from octavo.models.registry import LoadedModel, load_model

NUM_NEW = 12
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"tie_word_embeddings": False},
    "qwen3_moe": {"norm_topk_prob": True, "decoder_sparse_step": 2},
    "qwen2_moe": {"head_dim": 8},
    "mixtral": {"sliding_window": 9},
}
SHARED = random_ids(20, seed=9)
PROMPTS = [[*(SHARED if i % 2 else []), *random_ids(2 + 4 * i, seed=i)] for i in range(6)]


def run(
    loaded: LoadedModel, prompts: Sequence[Sequence[int]], **options: Any
) -> tuple[list[list[int]], EngineStats]:
    options = {"num_blocks": 200, "block_size": 4, "max_model_len": 64} | options
    engine = build_engine(EngineConfig.from_options("tiny", **options), loaded, None)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
    requests = [engine.add_request(prompt, params) for prompt in prompts]
    while engine.has_work:
        engine.step()
    stats = engine.stats()
    engine.close()
    return [list(request.output.outputs[0].token_ids) for request in requests if request.output], stats


@pytest.mark.parametrize("model_type", MODELS)
def test_alone_batched_chunked_preempted_and_from_the_prefix_cache(model_type: str, tmp_path: Path) -> None:
    hf = tiny_hf_model(model_type, seed=6, **MODELS[model_type])
    loaded = load_model(saved(hf, tmp_path))
    alone = [run(loaded, [prompt])[0][0] for prompt in PROMPTS]
    for prompt, answer in zip(PROMPTS, alone, strict=True):
        assert hf_logits(hf, prompt + answer)[len(prompt) - 1 : -1].argmax(-1).tolist() == answer
    assert run(loaded, PROMPTS)[0] == alone
    assert run(loaded, PROMPTS[::-1], max_num_batched_tokens=7)[0] == alone[::-1]
    preempted, stats = run(loaded, PROMPTS, num_blocks=20, enable_prefix_caching=False)
    assert preempted == alone
    assert stats.num_preemptions > 0
    hits, stats = run(loaded, PROMPTS, max_num_seqs=1)
    assert hits == alone
    assert stats.num_hit_tokens > 0


@pytest.mark.skipif(not triton_here.interpreted(), reason="tests/gpu has the compiled kernels")
@pytest.mark.parametrize("model_type", ["gpt2", "qwen3_moe"])
def test_the_triton_kernels_are_as_exact_as_the_reference(model_type: str, tmp_path: Path) -> None:
    hf = tiny_hf_model(model_type)
    loaded = load_model(saved(hf, tmp_path), dtype="float16")  # float32 would be packed for the CPU
    ids = random_ids(11, seed=1)
    exact = hf_logits(hf, ids)
    errors = {}
    for room in ("reference", "triton"):
        driver = PagedDriver(loaded)
        with backend.use(room), np.errstate(all="ignore"):
            pieces = [driver.step({"a": ids[:9]})["a"], *(driver.step({"a": [i]})["a"] for i in ids[9:])]
        errors[room] = float((torch.cat(pieces) - exact).square().mean().sqrt())
    assert 0 < errors["triton"] <= 2 * errors["reference"] < 0.05
