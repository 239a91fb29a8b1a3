"""A model over a cache of one byte a number: scales go in and out with the tokens they belong to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.models import PagedDriver, random_ids, saved, tiny_hf_model

from octavo.kernels import backend
from octavo.models.registry import LoadedModel, load_model


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = tmp_path_factory.mktemp("model")
    return load_model(saved(tiny_hf_model(request.param), folder))


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float8_e4m3fn, 0.25), (torch.int8, 0.06)], ids=["fp8", "int8"]
)
def test_logits_are_those_of_an_exact_cache_but_for_rounding(
    loaded: LoadedModel, dtype: torch.dtype, bound: float
) -> None:
    ids, others = random_ids(40), random_ids(25, seed=1)
    exact, rounded = PagedDriver(loaded), PagedDriver(loaded, kv_cache_dtype=dtype)
    steps = [{"a": ids[:20]}, {"a": ids[20:33], "b": others[:9]}, {"b": others[9:]}]
    steps += [{"a": [token]} for token in ids[33:]]
    for chunks in steps:
        expected = torch.cat(list(exact.step(chunks).values()))
        with backend.use("reference"):
            found = torch.cat(list(rounded.step(chunks).values()))
        error = (found - expected).square().mean().sqrt() / expected.std()
        assert 0 < error < bound
    for layer in rounded.kv_caches:
        assert layer.k_scale is not None
        written = layer.k_scale.isfinite().flatten(0, 1).all(-1)
        assert written.sum() == len(ids) + len(others)
