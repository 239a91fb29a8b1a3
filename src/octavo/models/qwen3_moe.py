"""Qwen3-MoE: Qwen3's attention, experts in place of the feed-forward layer; one window for all layers."""

from __future__ import annotations

from octavo.models.config import ModelConfig
from octavo.models.hf_config import HFConfig, decoder_config, number_of_layers, qwen_experts, read_window


def read_config(hf: HFConfig) -> ModelConfig:
    bias = hf.flag("attention_bias", False)
    window = read_window(hf) if hf.flag("use_sliding_window", False) else None
    return decoder_config(
        hf,
        max_position_embeddings=32_768,
        attention_bias=bias,
        attention_output_bias=bias,
        qk_norm=True,
        sliding_window=(window,) * number_of_layers(hf),
        experts=qwen_experts(hf, num_experts=128, num_per_token=8, intermediate_size=768),
    )
