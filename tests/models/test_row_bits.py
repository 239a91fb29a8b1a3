"""A row's logits are the same bits whatever else is in the step, in every network and form of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import PagedDriver, random_ids, saved, tiny_hf_model

from octavo.kernels.cpu import threads
from octavo.models.registry import load_model

# Sizes that are no multiple of a vector, so that rows begin anywhere in one.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"intermediate_size": 83, "num_key_value_heads": 3, "head_dim": 10}),
    "gpt2": ("gpt2", {"n_inner": 83, "n_embd": 42, "n_head": 3}),
    "qwen3_moe": ("qwen3_moe", {"moe_intermediate_size": 21, "hidden_size": 42, "norm_topk_prob": True}),
    "qwen2_moe": ("qwen2_moe", {"shared_expert_intermediate_size": 19, "moe_intermediate_size": 21}),
    "mixtral": ("mixtral", {"intermediate_size": 21, "num_local_experts": 9, "num_experts_per_tok": 5}),
}
PROMPTS = {f"{i}": random_ids(3 + 5 * i, seed=i) for i in range(6)}


@pytest.mark.parametrize("quantization", [None, "float16", "int8"])
@pytest.mark.parametrize("name", MODELS)
def test_alone_in_a_batch_and_in_chunks(name: str, quantization: str | None, tmp_path: Path) -> None:
    model_type, overrides = MODELS[name]
    loaded = load_model(saved(tiny_hf_model(model_type, **overrides), tmp_path), quantization=quantization)
    with threads.torch_threads(1):  # as the engine runs it
        together = PagedDriver(loaded).step(PROMPTS)
        decoded = PagedDriver(loaded)
        decoded.step({key: ids[:-1] for key, ids in PROMPTS.items()})
        last = decoded.step({key: ids[-1:] for key, ids in PROMPTS.items()})
        for key, ids in PROMPTS.items():
            alone = PagedDriver(loaded).step({key: ids})[key]
            assert torch.equal(together[key], alone)
            assert torch.equal(last[key][0], alone[-1])
            in_chunks = PagedDriver(loaded)
            pieces = [in_chunks.step({key: ids[first : first + 4]})[key] for first in range(0, len(ids), 4)]
            assert torch.equal(torch.cat(pieces), alone)
