"""Mixtral: Mistral with experts in every layer; no window unless stated."""

from __future__ import annotations

from octavo.models.config import ExpertsConfig, ModelConfig
from octavo.models.hf_config import HFConfig, decoder_config, number_of_layers, read_window


def read_config(hf: HFConfig) -> ModelConfig:
    num_layers = number_of_layers(hf)
    return decoder_config(
        hf,
        max_position_embeddings=131_072,
        sliding_window=(read_window(hf) if "sliding_window" in hf else None,) * num_layers,
        experts=ExpertsConfig(
            layers=(True,) * num_layers,
            num_experts=hf.integer("num_local_experts" if "num_local_experts" in hf else "num_experts", 8),
            num_per_token=hf.integer("num_experts_per_tok", 2),
            intermediate_size=hf.integer("intermediate_size"),
            normalised=True,
        ),
    )
