"""A whole engine over the Triton kernels: compiled where there is a GPU, interpreted elsewhere."""

from __future__ import annotations

import pytest
import torch
from helpers.models import PagedDriver, random_ids, saved, tiny_hf_model

from octavo import SamplingParams
from octavo.config import EngineConfig
from octavo.engine.build import build_engine
from octavo.kernels import backend
from octavo.models.device import resolve_device
from octavo.models.registry import LoadedModel, load_model


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    model = tiny_hf_model("qwen3", num_hidden_layers=2)
    folder = saved(model, tmp_path_factory.mktemp("model"))
    return load_model(folder, device=resolve_device("auto"), dtype="float32")


def greedy(loaded: LoadedModel, room: str) -> list[list[int]]:
    with backend.use(room):
        # Two chunks of a prompt, one beside a decode; blocks that a second request hits.
        config = EngineConfig(model="m", num_blocks=12, block_size=4, max_num_batched_tokens=12)
        engine = build_engine(config, loaded, None)
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        prompts = [random_ids(2), random_ids(13), random_ids(13)[:9]]
        requests = [engine.add_request(prompt, params) for prompt in prompts[:2]]
        engine.step()
        engine.step()
        requests.append(engine.add_request(prompts[2], params))
        while engine.has_work:
            engine.step()
        assert engine.stats().num_hit_tokens > 0
        engine.close()
        return [seq.output_token_ids for request in requests for seq in request.sequences]


def test_greedy_tokens_are_those_of_the_reference(loaded: LoadedModel) -> None:
    assert greedy(loaded, "triton") == greedy(loaded, "reference")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=["fp8", "int8"])
def test_a_quantised_cache_is_written_and_read_as_the_reference_does(
    loaded: LoadedModel, dtype: torch.dtype
) -> None:
    ids = random_ids(12)
    found = []
    for room in ("triton", "reference"):
        driver = PagedDriver(loaded, kv_cache_dtype=dtype)
        with backend.use(room):
            found.append(
                torch.cat([driver.step({"a": chunk})["a"] for chunk in (ids[:9], ids[9:10], ids[10:])])
            )
    # Queries and weights go through float16 where the cache has one byte.
    assert (found[0] - found[1]).square().mean().sqrt() < 0.01 * found[1].std()
