"""Qwen3: an RMS norm over every query and key head before rope; head_dim is 128 unless stated."""

from __future__ import annotations

from octavo.models.config import ModelConfig
from octavo.models.hf_config import HFConfig, decoder_config, windows_by_layer_type


def read_config(hf: HFConfig) -> ModelConfig:
    bias = hf.flag("attention_bias", False)
    return decoder_config(
        hf,
        max_position_embeddings=32_768,
        head_dim=128,
        attention_bias=bias,
        attention_output_bias=bias,
        qk_norm=True,
        sliding_window=windows_by_layer_type(hf, max_window_layers=28),
    )
