"""SmolLM2-135M on a GPU: Transformers' greedy tokens in float32; in bfloat16 and small caches nearly so."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from octavo import LLM, RequestOutput, SamplingParams

pytestmark = pytest.mark.model

TOPICS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village by the sea,",
    "Q: What is the largest planet?\nA:",
    "In 1969, the first human being to walk on the Moon",
    "import numpy as np\n\ndef normalize(x):",
)
FILLER = "The following notes were taken in class. They are short, and some of them are wrong. "
PROMPTS = [*TOPICS, *(FILLER * 30 + topic for topic in TOPICS)]
GREEDY = SamplingParams(max_tokens=48, ignore_eos=True)


@pytest.fixture(scope="module")
def oracle() -> Any:
    from helpers.smollm2 import transformers_smollm2  # which needs the package gguf

    assert torch.get_float32_matmul_precision() == "highest"
    return copy.deepcopy(transformers_smollm2()).to("cuda")


def choices(oracle: Any, output: RequestOutput) -> tuple[list[int], list[int]]:
    """What was generated, and what Transformers chooses at each position given what stands before it."""
    prompt, tokens = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
    with torch.inference_mode():
        logits = oracle(torch.tensor([prompt + tokens], device="cuda"), use_cache=False).logits[0]
    return tokens, logits[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_float32_gives_transformers_greedy_tokens(oracle: Any, enable_prefix_caching: bool) -> None:
    with LLM("smollm2-135m", dtype="float32", enable_prefix_caching=enable_prefix_caching) as llm:
        assert llm.config.device == "cuda"
        for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False):
            tokens, expected = choices(oracle, output)
            assert len(tokens) == 48
            assert tokens == expected


@pytest.mark.parametrize(
    ("kv_cache_dtype", "least"), [("auto", 0.95), ("int8", 0.93), ("fp8", 0.9)], ids=lambda value: str(value)
)
def test_bfloat16_and_small_caches_choose_nearly_always_the_same(
    oracle: Any, kv_cache_dtype: str, least: float
) -> None:
    with LLM("smollm2-135m", kv_cache_dtype=kv_cache_dtype) as llm:
        assert llm.config.dtype == "bfloat16"
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    pairs = [pair for output in outputs for pair in zip(*choices(oracle, output), strict=True)]
    assert sum(ours == theirs for ours, theirs in pairs) >= least * len(pairs)
    assert " Paris" in outputs[0].outputs[0].text
