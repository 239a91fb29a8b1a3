"""GPT-2 (and DistilGPT-2): learned positions, layer norms, one head per query head, a GELU in the middle."""

from __future__ import annotations

from octavo.errors import ModelError
from octavo.layers.rope_config import RopeConfig
from octavo.models.config import ModelConfig
from octavo.models.hf_config import (
    HFConfig,
    check_activation,
    checkpoint_dtype,
    number_of_layers,
    refuse_unsupported,
)

# What would change the scores of attention, and is off in every published GPT-2.
_UNSUPPORTED = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}


def read_config(hf: HFConfig) -> ModelConfig:
    refuse_unsupported(hf, heads=("GPT2LMHeadModel",))
    check_activation(hf, "activation_function", "gelu_new")
    for key, known in _UNSUPPORTED.items():
        if hf.flag(key, known) is not known:
            raise ModelError(f"config: {key} = {str(not known).lower()} is not supported")
    hf = hf.renamed({"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
                     "n_positions": "max_position_embeddings"})  # fmt: skip
    hidden_size, num_heads = hf.integer("hidden_size"), hf.integer("num_attention_heads")
    if num_heads < 1 or hidden_size % num_heads:
        raise ModelError(f"config: n_embd ({hidden_size}) must be a multiple of n_head ({num_heads})")
    num_layers, num_positions = number_of_layers(hf), hf.integer("max_position_embeddings", 1024)
    return ModelConfig(
        model_type="gpt2",
        network="gpt2_decoder",
        hidden_size=hidden_size,
        intermediate_size=hf.integer("n_inner", 4 * hidden_size),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        vocab_size=hf.integer("vocab_size"),
        max_position_embeddings=num_positions,
        norm_eps=hf.number("layer_norm_epsilon", 1e-5),
        rope=RopeConfig(
            rotary_dim=0,
            max_position_embeddings=num_positions,
            original_max_position_embeddings=num_positions,
        ),
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        tie_word_embeddings=hf.flag("tie_word_embeddings", True),
        sliding_window=(None,) * num_layers,
        dtype=checkpoint_dtype(hf),
    )
