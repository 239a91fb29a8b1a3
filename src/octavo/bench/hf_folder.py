"""Gives Transformers the very weights Octavo runs: a GGUF file, dequantised, as a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from octavo.gguf_file import GGUFFile
from octavo.models.config import load_config
from octavo.models.source import ModelSource
from octavo.models.weights.gguf import GGUFCheckpoint


def write_hf_folder(source: ModelSource, folder: Path) -> None:
    """Writes config.json and model.safetensors (float32). The model must be a llama with default rope."""
    config = load_config(source)
    assert config.model_type == "llama", config.model_type
    assert config.rope.rope_type == "default", config.rope
    tensors = {}
    with GGUFFile(source.path) as file:
        checkpoint = GGUFCheckpoint(file, config)
        for name, shape in checkpoint.shapes.items():
            tensors[name] = torch.empty(shape)
            checkpoint.read_into(name, tensors[name])
        checkpoint.close()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    hf_config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "hidden_act": "silu",
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(hf_config, indent=1))
