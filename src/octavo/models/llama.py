"""Llama (also SmolLM2, TinyLlama, Yi): the plain dense decoder; head_dim is hidden / heads unless stated."""

from __future__ import annotations

from octavo.models.config import ModelConfig
from octavo.models.hf_config import HFConfig, decoder_config


def read_config(hf: HFConfig) -> ModelConfig:
    bias = hf.flag("attention_bias", False)
    return decoder_config(
        hf,
        max_position_embeddings=2048,
        attention_bias=bias,
        attention_output_bias=bias,
        mlp_bias=hf.flag("mlp_bias", False),
    )
