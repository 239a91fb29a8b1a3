"""What an engine takes of a GPU's memory, gives back, and says of what does not fit or cannot be done."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import random_ids, saved, tiny_hf_model

from octavo import LLM, SamplingParams
from octavo.errors import CapacityError, ConfigError
from octavo.models.registry import load_model
from octavo.models.shapes import KNOWN_SHAPES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(tiny_hf_model("qwen3"), tmp_path_factory.mktemp("model"))


def test_qwen3_06b_with_dummy_weights_generates_and_gives_its_memory_back(tmp_path: Path) -> None:
    config = {**KNOWN_SHAPES["qwen3-0.6b"], "vocab_size": 151936, "intermediate_size": 3072}
    config |= {"tie_word_embeddings": True, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.ones(64, 64, device="cuda").matmul(torch.ones(64, 64, device="cuda"))  # cuBLAS takes its workspace
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    with LLM(tmp_path, load_format="dummy", max_model_len=4096, max_num_seqs=16) as llm:
        assert (llm.config.device, llm.config.dtype, llm.config.kv_cache_dtype) == (
            "cuda", "bfloat16", "bfloat16",
        )  # fmt: skip
        cache = llm.engine.runner.kv_cache
        assert cache.device.type == "cuda"
        assert cache.num_blocks == 16 * 256, "what its requests can use, and not all that is free"
        assert torch.cuda.memory_allocated() > before[0] + cache.nbytes
        outputs = llm.generate(
            [random_ids(length, 151936, seed=length) for length in (3, 40, 700)],
            SamplingParams(max_tokens=16, ignore_eos=True),
            use_tqdm=False,
        )
        assert [len(output.token_ids) for output in outputs] == [16] * 3
        assert all(output.error is None for output in outputs)
        del cache
    gc.collect()
    assert torch.cuda.memory_allocated() - before[0] < 64 * 2**20
    assert torch.cuda.memory_reserved() - before[1] < 64 * 2**20
    assert llm.stats().num_owned_blocks == 0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"quantization": "int8"}, ConfigError, "quantization='int8' is a form of weights for the CPU"),
        ({"num_threads": 2}, ConfigError, "num_threads=2 is for a model on the CPU"),
        ({"kv_cache_memory": "1000TiB"}, CapacityError, "are available: at most"),
        ({"num_blocks": 10**9}, CapacityError, "are available: at most"),
    ],
)
def test_what_a_gpu_cannot_do_is_named(
    folder: str, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    small: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 64}
    with pytest.raises(error, match=message):
        LLM(folder, load_format="dummy", **small, **options)


@contextmanager
def no_memory_left() -> Iterator[None]:
    """No allocation succeeds: torch may take no more of the device, and all that it holds back is taken."""
    gc.collect()
    torch.cuda.empty_cache()
    taken: list[torch.Tensor] = []
    torch.cuda.set_per_process_memory_fraction(0.0)
    try:
        for power in range(40, 8, -1):
            with suppress(torch.OutOfMemoryError):
                while True:
                    taken.append(torch.empty(1 << power, dtype=torch.uint8, device="cuda"))
        yield
    finally:
        taken.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_weights_that_do_not_fit_are_refused_with_numbers(folder: str) -> None:
    refusal = r"the weights of .* take .* in float32, and cuda has"
    with no_memory_left(), pytest.raises(CapacityError, match=refusal):
        load_model(folder, device="cuda", dtype="float32")
    assert load_model(folder, device="cuda", dtype="float32").weights_nbytes > 0
