"""Qwen2-MoE: Qwen2's attention, and beside the experts one that every token goes to, behind a gate."""

from __future__ import annotations

from octavo.errors import ModelError
from octavo.models.config import ModelConfig
from octavo.models.hf_config import HFConfig, decoder_config, qwen_experts, windows_by_layer_type


def read_config(hf: HFConfig) -> ModelConfig:
    if hf.flag("use_sliding_window", False) and "layer_types" not in hf:
        raise ModelError("config: use_sliding_window is on: layer_types must say in which layers")
    return decoder_config(
        hf,
        max_position_embeddings=32_768,
        attention_bias=hf.flag("qkv_bias", True),
        sliding_window=windows_by_layer_type(hf, max_window_layers=28),
        experts=qwen_experts(hf, num_experts=60, num_per_token=4, intermediate_size=1408, shared_size=5632),
    )
