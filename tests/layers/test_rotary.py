"""The rope table against Transformers' rotary embedding, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from octavo.layers.rope_config import RopeConfig
from octavo.layers.rotary import inverse_frequencies, rope_table
from octavo.models.config import ModelConfig

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
    "rope_theta": 500_000.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
PARAMETERS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": LLAMA3,
    "llama3-sharp": {**LLAMA3, "factor": 8.0, "low_freq_factor": 2.0, "high_freq_factor": 2.5},
    "yarn": YARN,
    "yarn-factor-null": {**YARN, "factor": None},
    "yarn-untruncated": {**YARN, "truncate": False},
    "yarn-betas": {**YARN, "beta_fast": 16, "beta_slow": 2},
    "yarn-attention-factor": {**YARN, "attention_factor": 0.8},
    "yarn-mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn-mscale-alone": {**YARN, "mscale": 0.5},
    "yarn-short-original": {**YARN, "original_max_position_embeddings": 4},
}
BASE = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 8,
    "max_position_embeddings": 2048,
}


def rope_of(parameters: dict[str, Any], **config: Any) -> RopeConfig:
    return ModelConfig.from_hf({**BASE, **config, "rope_parameters": parameters}).rope


def theirs(parameters: dict[str, Any], num_positions: int) -> torch.Tensor:
    config = LlamaConfig(**{**BASE, "rope_parameters": dict(parameters)})
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(num_positions)[None])
    half = cos.shape[-1] // 2
    return torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=-1)


@pytest.mark.parametrize("name", PARAMETERS)
def test_table_equals_transformers(name: str) -> None:
    table = rope_table(rope_of(PARAMETERS[name]))
    assert table.dtype == torch.float32
    assert table.shape[1] == 64
    torch.testing.assert_close(table[:2048], theirs(PARAMETERS[name], 2048), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("parameters", "num_positions"),
    [
        (PARAMETERS["default"], 2048),
        ({**PARAMETERS["linear"], "factor": 4.0}, 8192),
        (PARAMETERS["dynamic"], 4096),
        (LLAMA3, 2048),
        (YARN, 2048),
        ({**YARN, "factor": 8.0}, 4096),
    ],
    ids=["default", "linear", "dynamic", "llama3", "yarn", "yarn-longer"],
)
def test_number_of_positions(parameters: dict[str, Any], num_positions: int) -> None:
    rope = rope_of(parameters)
    assert rope.num_positions == num_positions
    assert rope_table(rope).shape == (num_positions, 64)


def test_dynamic_turns_position_p_as_a_sequence_of_p_plus_1() -> None:
    rope = rope_of(PARAMETERS["dynamic"])
    table = rope_table(rope)
    for position in (2047, 2048, 2049, 3000, 4095):
        expected = theirs(PARAMETERS["dynamic"], position + 1)[position]
        torch.testing.assert_close(table[position], expected, rtol=0, atol=1e-4)
    # in a sequence that is longer from the start it turns differently there: our one stated difference
    assert (table[3000] - theirs(PARAMETERS["dynamic"], 4096)[3000]).abs().max() > 0.1


@pytest.mark.parametrize("name", ["linear", "llama3", "yarn"])
def test_partial_rotation_covers_the_first_part_of_a_head(name: str) -> None:
    parameters = {**PARAMETERS[name], "partial_rotary_factor": 0.5}
    rope = rope_of(parameters)
    assert rope.rotary_dim == 32
    config = LlamaConfig(**{**BASE, "rope_parameters": {"rope_theta": 10_000.0, **parameters}})
    expected, scale = ROPE_INIT_FUNCTIONS[name](config)
    frequencies, our_scale = inverse_frequencies(rope)
    torch.testing.assert_close(frequencies, expected, rtol=0, atol=0)
    assert our_scale == scale


def test_partial_rotation_from_the_top_level_key() -> None:
    assert rope_of({"rope_type": "default"}, partial_rotary_factor=0.25).rotary_dim == 16


def test_frequency_factors_divide() -> None:
    plain = RopeConfig(rotary_dim=4, max_position_embeddings=8, original_max_position_embeddings=8)
    factored = RopeConfig(
        rotary_dim=4, max_position_embeddings=8, original_max_position_embeddings=8, freq_factors=(1.0, 8.0)
    )
    expected = inverse_frequencies(plain)[0] / torch.tensor([1.0, 8.0])
    assert inverse_frequencies(factored)[0].tolist() == expected.tolist()
