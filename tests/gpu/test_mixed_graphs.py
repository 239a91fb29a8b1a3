"""Steps with prompts from graphs, over one-byte caches and layers with windows, against launched kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from helpers.models import random_ids, saved, tiny_hf_model

from octavo import SamplingParams
from octavo.config import EngineConfig
from octavo.engine.build import build_engine
from octavo.engine.core import Engine
from octavo.engine.request import Request
from octavo.kernels.triton.monitor import forbid_compiles
from octavo.models.registry import LoadedModel, load_model

VOCAB_SIZE = 503
# A head_dim that Hopper's kernel has, too.
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
WINDOWS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("qwen3", {}),
    "all": ("mistral", {"sliding_window": 20}),
    "some": ("qwen3", {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}),
}


class Case(NamedTuple):
    """Layers with windows, the dtypes of model and cache, and by how much log probabilities may differ.

    In float32 by what sums in another order do. A cache of one byte makes more of that: a value between two
    steps is rounded to one or the other.
    """

    windows: str
    dtype: str
    kv_cache_dtype: str
    tolerance: float


CASES = [
    Case("all", "float32", "auto", 1e-3),
    Case("some", "float32", "auto", 1e-3),
    Case("none", "float32", "fp8", 0.05),
    Case("none", "float32", "int8", 0.05),
    Case("some", "bfloat16", "auto", 0.25),
    Case("none", "bfloat16", "fp8", 0.5),
    Case("none", "bfloat16", "int8", 0.5),
    Case("some", "bfloat16", "fp8", 0.5),
]


@pytest.fixture
def loaded(case: Case, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    model_type, options = WINDOWS[case.windows]
    sizes = SIZES | {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 512, "intermediate_size": 256}
    folder = saved(tiny_hf_model(model_type, **sizes, **options), tmp_path_factory.mktemp("model"))
    return load_model(folder, device="cuda", dtype=case.dtype)


def engine_for(loaded: LoadedModel, case: Case, **options: Any) -> Engine:
    # Without hits, which would have tokens computed in other chunks.
    sizes: dict[str, Any] = {"num_blocks": 512, "max_num_seqs": 16, "max_num_batched_tokens": 256}
    sizes |= {"enable_prefix_caching": False, "kv_cache_dtype": case.kv_cache_dtype}
    return build_engine(EngineConfig(model="m", **sizes, **options), loaded, None)


def run(engine: Engine) -> list[Request]:
    """Prompts of 1 to 150 tokens, each beside the rows that came before it."""
    params = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=5)
    requests = []
    for i, length in enumerate([1, 2, 7, 8, 9, 17, 33, 150, 100, 16, 5, 120, 70]):
        requests.append(engine.add_request(random_ids(length, VOCAB_SIZE, seed=i), params))
        engine.step()
    while engine.has_work:
        engine.step()
    assert not [seq.error for request in requests for seq in request.sequences if seq.error]
    return requests


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:3])))
def test_tokens_and_their_log_probabilities_are_those_of_launched_kernels(
    case: Case, loaded: LoadedModel
) -> None:
    eager = engine_for(loaded, case, enforce_eager=True, overlap=False)
    expected = run(eager)
    eager.close()
    engine = engine_for(loaded, case)
    mixed = engine.runner._mixed
    assert mixed is not None
    buckets: list[int] = []
    replay = mixed.replay

    def replaying(batch: Any) -> torch.Tensor:
        buckets.append(len(batch.input_ids))
        return replay(batch)

    vars(mixed)["replay"] = replaying
    with forbid_compiles():
        found = run(engine)
    del vars(mixed)["replay"]
    assert len(buckets) == engine.stats().num_steps
    assert {16, 64, 128, 192} <= set(buckets)
    engine.close()
    for before, after in zip(expected, found, strict=True):
        assert_alike(before, after, case)


def assert_alike(expected: Request, found: Request, case: Case) -> None:
    """The same tokens, up to one for which another was as good as equal; from there on texts are others."""
    before, after = expected.sequences[0], found.sequences[0]
    assert before.logprobs is not None
    assert after.logprobs is not None
    pairs = list(zip(before.output_token_ids, after.output_token_ids, strict=True))
    assert len(pairs) == 24
    parted = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    if case.kv_cache_dtype == "auto" and case.dtype == "float32":
        assert parted == len(pairs)
    for i, (a, b) in enumerate(pairs[: parted + 1]):
        entries, others = before.logprobs[i], after.logprobs[i]
        assert entries is not None
        assert others is not None
        assert {a, b} <= entries.keys() & others.keys()
        for token in entries.keys() & others.keys():
            assert others[token].logprob == pytest.approx(entries[token].logprob, abs=case.tolerance)
