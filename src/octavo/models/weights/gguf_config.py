"""A model's config from GGUF metadata, by way of the Hugging Face keys. No torch."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from typing import Any

from octavo.errors import ModelError, WeightsError, nearest, shown
from octavo.gguf_file import GGUFArray, GGUFFile
from octavo.models.config import ModelConfig

ARCHITECTURES = ("llama", "qwen2", "qwen3")
ROPE_FREQS = "rope_freqs.weight"
_F32, _F16, _BF16 = 0, 1, 30
_DTYPES = {_F32: "float32", _F16: "float16", _BF16: "bfloat16"}


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """The config that `file` describes; ModelError names what is unsupported."""
    metadata = file.metadata
    arch = metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise ModelError(
            f"{file.path}: unknown GGUF architecture {shown(arch)}{nearest(str(arch), ARCHITECTURES)}; "
            f"known: {', '.join(ARCHITECTURES)}"
        )
    if metadata.get("split.count", 1) > 1:
        raise ModelError(
            f"{file.path}: is one of {metadata['split.count']} parts of a split GGUF; merge them first "
            "(llama-gguf-split --merge)"
        )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise WeightsError(f"{file.path}: tensor token_embd.weight is missing")

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{arch}.{key}", default)
        if isinstance(value, GGUFArray):
            raise ModelError(f"{file.path}: {arch}.{key} differs by layer, which is not supported")
        return value

    hidden, heads = get("embedding_length"), get("attention.head_count")
    if not all(isinstance(value, int | None) for value in (hidden, heads, get("attention.key_length"))):
        raise ModelError(
            f"{file.path}: embedding_length, head_count and key_length of {arch} must be integers"
        )
    # In GGUF an absent key length always means hidden / heads, also where Hugging Face has another default.
    head_dim = get("attention.key_length") or (hidden // heads if hidden and heads else None)
    if head_dim and get("attention.value_length", head_dim) != head_dim:
        raise ModelError(
            f"{file.path}: keys of {head_dim} features with values of {get('attention.value_length')} "
            "are not supported"
        )
    window = get("attention.sliding_window")
    if window and arch != "llama":
        raise ModelError(
            f"{file.path}: {arch}.attention.sliding_window does not say which layers; not supported"
        )
    hf = {
        # Mistral's GGUF files say llama; the window is what tells them apart.
        "model_type": "mistral" if window else arch,
        "sliding_window": window,
        "hidden_size": hidden,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv"),
        "head_dim": head_dim,
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "num_local_experts": get("expert_count"),
        "dtype": _DTYPES.get(embedding.ggml_type),
        "rope_parameters": _rope_parameters(file, get, head_dim),
    }
    config = ModelConfig.from_hf(hf)
    factors = _rope_factors(file, config.rope.rotary_dim)
    return replace(
        config,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        attention_output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        rope=replace(config.rope, freq_factors=factors),
    )


def _rope_parameters(file: GGUFFile, get: Any, head_dim: int | None) -> dict[str, Any]:
    kind = get("rope.scaling.type", "none")
    factor = get("rope.scaling.factor") or get("rope.scale_linear") or 1.0
    if kind == "none" and get("rope.scale_linear"):
        kind = "linear"
    known = ("none", "linear", "yarn")
    if kind not in known:
        raise ModelError(f"{file.path}: unknown rope scaling type {shown(kind)}; known: {', '.join(known)}")
    for key in ("rope.scaling.yarn_log_multiplier", "rope.scaling.yarn_ext_factor", "rope.scaling.alpha"):
        if get(key):
            raise ModelError(f"{file.path}: {key} = {get(key)} is not supported")
    parameters: dict[str, Any] = {"rope_theta": get("rope.freq_base", 10_000.0)}
    rotary_dim = get("rope.dimension_count")
    if rotary_dim and head_dim:
        parameters["partial_rotary_factor"] = rotary_dim / head_dim
    if kind != "none" and factor != 1.0:
        parameters["rope_type"] = kind
        parameters["factor"] = factor
    if kind == "yarn" and factor != 1.0:
        parameters["original_max_position_embeddings"] = get("rope.scaling.original_context_length")
        parameters["beta_fast"] = get("rope.scaling.yarn_beta_fast")
        parameters["beta_slow"] = get("rope.scaling.yarn_beta_slow")
        own = get("rope.scaling.yarn_attn_factor") or get("rope.scaling.attn_factor")
        if own:
            # GGUF's factor comes on top of YaRN's own one, Hugging Face's replaces it.
            parameters["attention_factor"] = own * (1.0 + 0.1 * math.log(factor))
    return parameters


def _rope_factors(file: GGUFFile, rotary_dim: int) -> tuple[float, ...] | None:
    tensor = file.tensors.get(ROPE_FREQS)
    if tensor is None:
        return None
    if tensor.shape != (rotary_dim // 2,) or tensor.ggml_type != _F32:
        raise WeightsError(
            f"{file.path}: tensor {ROPE_FREQS}: expected {(rotary_dim // 2,)} in F32, got {tensor.shape} "
            f"of type {tensor.ggml_type}"
        )
    return struct.unpack(f"<{rotary_dim // 2}f", file.read(tensor.offset, rotary_dim * 2))
