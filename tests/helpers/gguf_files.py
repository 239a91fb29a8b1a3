"""GGUF files of tiny models, written the way llama.cpp's converter does, from a Transformers model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[rest]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def permuted(rows: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """The row order of q and k in files of architecture llama: each head's two halves interleaved."""
    head_dim = rows.shape[0] // num_heads
    halves = rows.reshape(num_heads, 2, head_dim // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def write_gguf(
    path: Path,
    hf: Any,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    edit: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    skip: tuple[str, ...] = (),
    arch: str | None = None,
    metadata: bool = True,
) -> str:
    """Write `hf` as a GGUF file whose matrices have the type `kind`; `edit` may add keys and tensors."""
    config = hf.config
    arch = arch or config.model_type
    writer = gguf.GGUFWriter(path, arch)
    if metadata:
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_token_list(["a", "bc", "é"])
    edit(writer)
    for name, value in hf.state_dict().items():
        if name in skip:
            continue
        array = value.float().numpy()
        if arch == "llama" and "q_proj" in name:
            array = permuted(array, config.num_attention_heads)
        if arch == "llama" and "k_proj" in name:
            array = permuted(array, config.num_key_value_heads)
        if array.ndim == 2 and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(gguf_name(name), quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)
