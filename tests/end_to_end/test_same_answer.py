"""The real model in float32: the same greedy tokens however a request is run."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from helpers.smollm2 import greedy_choices

from octavo import SamplingParams
from octavo.config import EngineConfig
from octavo.engine.build import build_engine
from octavo.engine.core import Engine
from octavo.engine.request import Request
from octavo.models.registry import LoadedModel, load_model
from octavo.models.source import resolve_model
from octavo.text.tokenizer import Tokenizer, load_tokenizer

pytestmark = pytest.mark.model

NUM_TOKENS = 40
TOPICS = (
    "The capital of France",
    "Photosynthesis is the process by which",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village by the sea,",
    "The three laws of motion were formulated by",
    "Recipe for apple pie.\n\nIngredients:",
    "SELECT name, age FROM users WHERE",
    "Dear Sir or Madam,\n\nI am writing to",
    "In 1969, the first human being to walk on the Moon",
    "Water boils at 100 degrees Celsius because",
    "Q: What is the largest planet?\nA:",
    "<html>\n<head>\n<title>",
    "The stock market fell sharply on Monday after",
    "To be, or not to be, that is",
    "A prime number is a natural number greater than",
    "The mitochondria are often called",
    "import numpy as np\n\ndef normalize(x):",
    "My favourite season of the year is autumn, since",
    "Chess is played on a board of",
    "The train left the station at half past nine and",
)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model("smollm2-135m")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_model("smollm2-135m"))


@pytest.fixture(scope="module")
def engine_with(loaded: LoadedModel, tokenizer: Tokenizer) -> Callable[..., Engine]:
    """Engines that share the loaded weights."""

    def build(**options: Any) -> Engine:
        config = EngineConfig.from_options(
            "smollm2-135m", **({"num_blocks": 400, "max_model_len": 2048} | options)
        )
        return build_engine(config, loaded, tokenizer)

    return build


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """20 prompts of 5 to about 150 tokens; the longer ones begin alike."""
    rng = random.Random(0)
    filler = "The following notes were taken in class. They are short, and some of them are wrong. "
    texts = [filler * (i % 5 * (i % 3)) + topic for i, topic in enumerate(TOPICS)]
    rng.shuffle(texts)
    return [tokenizer.encode(text) for text in texts]


GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)


def run(engine: Engine, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[Request]:
    requests = [engine.add_request(prompt, params) for prompt in prompts]
    while engine.has_work:
        engine.step()
    engine.scheduler.check()
    assert engine.cache.num_owned == 0
    return requests


def outputs(requests: list[Request]) -> list[list[int]]:
    return [seq.output_token_ids for request in requests for seq in request.sequences]


@pytest.fixture(scope="module")
def solo(engine_with: Callable[..., Engine], prompts: list[list[int]]) -> list[list[int]]:
    """Each request alone, its prompt in one chunk, nothing cached."""
    engine = engine_with(enable_prefix_caching=False, max_num_batched_tokens=1024)
    return [outputs(run(engine, [prompt]))[0] for prompt in prompts]


def test_equal_to_transformers_greedy_output(prompts: list[list[int]], solo: list[list[int]]) -> None:
    assert [len(output) for output in solo] == [NUM_TOKENS] * len(prompts)
    for prompt, output in zip(prompts, solo, strict=True):
        assert output == greedy_choices(prompt, output)


def test_batched_and_again_from_a_warm_cache(
    engine_with: Callable[..., Engine], prompts: list[list[int]], solo: list[list[int]]
) -> None:
    engine = engine_with()
    cold = run(engine, prompts)
    assert outputs(cold) == solo
    warm = run(engine, prompts[::-1])
    assert outputs(warm) == solo[::-1]
    assert sum(request.num_cached_tokens for request in warm) > 500


@pytest.mark.parametrize("chunk", [7, 16, 64])
def test_chunked(
    engine_with: Callable[..., Engine], prompts: list[list[int]], solo: list[list[int]], chunk: int
) -> None:
    assert outputs(run(engine_with(max_num_batched_tokens=chunk), prompts[:10])) == solo[:10]


@pytest.mark.parametrize("block_size", [1, 64])
def test_block_sizes(
    engine_with: Callable[..., Engine], prompts: list[list[int]], solo: list[list[int]], block_size: int
) -> None:
    engine = engine_with(block_size=block_size, num_blocks=6400 // block_size)
    assert outputs(run(engine, prompts[:10])) == solo[:10]


def test_preempted(
    engine_with: Callable[..., Engine], prompts: list[list[int]], solo: list[list[int]]
) -> None:
    engine = engine_with(num_blocks=40)
    assert outputs(run(engine, prompts[:10])) == solo[:10]
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("options", [{}, {"num_blocks": 40}, {"max_num_batched_tokens": 16}], ids=str)
def test_overlapped(
    engine_with: Callable[..., Engine],
    prompts: list[list[int]],
    solo: list[list[int]],
    options: dict[str, int],
) -> None:
    engine = engine_with(overlap=True, **options)
    assert outputs(run(engine, prompts[:10])) == solo[:10]
    assert outputs(run(engine, prompts[:10])) == solo[:10]


def test_forked(engine_with: Callable[..., Engine], prompts: list[list[int]], solo: list[list[int]]) -> None:
    params = SamplingParams(n=3, max_tokens=24, ignore_eos=True)
    engine = engine_with()
    for output, expected in zip(
        outputs(run(engine, prompts[:4], params)), [solo[i] for i in range(4) for _ in range(3)], strict=True
    ):
        assert output == expected[:24]


def test_seeded_sampling_does_not_depend_on_the_batch(
    engine_with: Callable[..., Engine], prompts: list[list[int]]
) -> None:
    """vllm#51226: one seed, one answer, whatever runs beside it."""
    params = SamplingParams(temperature=0.8, seed=42, max_tokens=16, ignore_eos=True)
    alone = outputs(run(engine_with(), [prompts[0]], params))[0]
    engine = engine_with()
    others = [
        SamplingParams(temperature=0.8, max_tokens=16, seed=seed, ignore_eos=True) for seed in (None, 7)
    ]
    for companions in ([], others, others[::-1]):
        for first in (True, False):
            mine = engine.add_request(prompts[0], params) if first else None
            for prompt, companion in zip(prompts[1:], companions, strict=False):
                engine.add_request(prompt, companion)
            mine = mine or engine.add_request(prompts[0], params)
            while engine.has_work:
                engine.step()
            assert outputs([mine])[0] == alone
    assert len(set(alone)) > 4


def test_abort_mid_prefill_leaves_later_answers_alone(
    engine_with: Callable[..., Engine], prompts: list[list[int]], solo: list[list[int]]
) -> None:
    """sglang#38981, on the real model."""
    longest = max(range(len(prompts)), key=lambda i: len(prompts[i]))
    engine = engine_with(max_num_batched_tokens=32)
    doomed = engine.add_request(prompts[longest] + prompts[0], GREEDY)
    engine.step()
    engine.step()
    engine.abort(doomed.request_id)
    request = run(engine, [prompts[longest]])[0]
    assert request.num_cached_tokens == 64
    assert outputs([request])[0] == solo[longest]
