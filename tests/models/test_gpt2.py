"""GPT-2 in the engine: its limit of positions, its dummy weights, what of it is not supported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import PagedDriver, hf_logits, random_ids, saved, tiny_hf_model
from helpers.tokenizers_by_hand import byte_level

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError, ModelError, RequestError
from octavo.models.config import ModelConfig
from octavo.models.registry import load_model

GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 6,
    "n_positions": 64,
    "vocab_size": 101,
}


def config_of(**changes: Any) -> ModelConfig:
    return ModelConfig.from_hf({**GPT2, **changes})


def test_what_the_config_means() -> None:
    config = config_of()
    assert (config.network, config.num_kv_heads, config.head_dim) == ("gpt2_decoder", 6, 8)
    assert (config.intermediate_size, config.norm_eps, config.tie_word_embeddings) == (192, 1e-5, True)
    assert (config.max_position_embeddings, config.rope.num_positions, config.rope.rotary_dim) == (64, 64, 0)
    assert config_of(n_inner=50).intermediate_size == 50
    assert config_of(architectures=None, n_ctx=64, n_positions=32).max_position_embeddings == 32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_function": "relu"}, "activation_function 'relu' is not supported; known: gelu_new"),
        ({"n_head": 5}, r"n_embd \(48\) must be a multiple of n_head \(5\)"),
        ({"n_head": 0}, r"must be a multiple of n_head \(0\)"),
        ({"n_layer": None}, "num_hidden_layers is missing"),
        ({"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx = true is not supported"),
        ({"scale_attn_weights": False}, "scale_attn_weights = false is not supported"),
        ({"add_cross_attention": True}, "add_cross_attention = true is not supported"),
        ({"layer_norm_epsilon": 0}, "the epsilon of the norms must be above 0, got 0"),
        ({"architectures": ["GPT2ForSequenceClassification"]}, "only language models"),
    ],
)
def test_what_is_wrong_or_unsupported_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        config_of(**changes)


def test_the_engine_gives_the_tokens_of_transformers_up_to_the_last_position(tmp_path: Path) -> None:
    hf = tiny_hf_model("gpt2", seed=3, tie_word_embeddings=False, vocab_size=300)
    folder = saved(hf, tmp_path)
    byte_level({0: b"Hello"}, special=["<|endoftext|>"]).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "generation_config.json").write_text("{}")
    prompt = random_ids(50, seed=4)
    expected = list(prompt)
    for _ in range(14):
        expected.append(int(hf_logits(hf, expected)[-1].argmax()))
    with LLM(folder, num_blocks=20, block_size=4) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
        output = llm.generate([prompt], params)[0]
        assert list(output.token_ids) == expected[50:]
        assert output.finish_reason == "length"
        with pytest.raises(RequestError, match="64"):
            llm.generate([random_ids(65)], params)
    with pytest.raises(ConfigError, match=r"max_model_len: expected 1 to 64, .* got 65"):
        LLM(folder, max_model_len=65)


def test_dummy_weights_make_varied_logits(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    loaded = load_model(str(tmp_path), load_format="dummy")
    logits = PagedDriver(loaded).step({"a": random_ids(20)})["a"]
    assert torch.isfinite(logits).all()
    assert 0.3 < logits.std() < 10
    assert loaded.model.head.weight is loaded.model.embedding.weight
