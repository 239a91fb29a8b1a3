"""Qwen2 and Qwen2.5: bias on q, k, v but not on the output projection; windows on upper layers if asked."""

from __future__ import annotations

from octavo.models.config import ModelConfig
from octavo.models.hf_config import HFConfig, decoder_config, windows_by_layer_type


def read_config(hf: HFConfig) -> ModelConfig:
    return decoder_config(
        hf,
        max_position_embeddings=32_768,
        attention_bias=True,
        sliding_window=windows_by_layer_type(hf, max_window_layers=28),
    )
