"""Mistral: Llama with one sliding window for all layers."""

from __future__ import annotations

from octavo.models.config import ModelConfig
from octavo.models.hf_config import HFConfig, decoder_config, number_of_layers, read_window


def read_config(hf: HFConfig) -> ModelConfig:
    return decoder_config(
        hf,
        max_position_embeddings=131_072,
        sliding_window=(read_window(hf),) * number_of_layers(hf),
    )
