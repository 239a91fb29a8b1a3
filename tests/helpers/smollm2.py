"""SmolLM2-135M-Instruct in Transformers, from the packaged GGUF by a road that shares no code with ours."""

from __future__ import annotations

import functools
import re
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from helpers.tokenizers_by_hand import smollm2_path

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEADS = {"attn_q": 9, "attn_k": 3}


@functools.cache
def transformers_smollm2() -> Any:
    """A float32 LlamaForCausalLM; shared, so leave it as it is."""
    config = transformers.LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    state = {}
    for tensor in gguf.GGUFReader(smollm2_path()).tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        layer, part = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", tensor.name).groups()  # type: ignore[union-attr]
        if part in _HEADS:  # llama.cpp stores the halves of each head interleaved
            rows, columns = values.shape
            values = values.reshape(_HEADS[part], rows // _HEADS[part] // 2, 2, columns).swapaxes(1, 2)
            values = values.reshape(rows, columns)
        prefix = f"model.layers.{layer}." if layer else ""
        state[f"{prefix}{_NAMES[part]}.weight"] = torch.from_numpy(np.array(values))
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    assert not [name for name, p in model.named_parameters() if p.is_meta]
    return model.eval()


def greedy_choices(prompt: list[int], output: list[int]) -> list[int]:
    """What Transformers' greedy decoding chooses at every position of `output`, given what stands before it.

    Equal to `output` exactly when `output` is Transformers' own greedy answer.
    """
    tokens = torch.tensor([prompt + output])
    with torch.inference_mode():
        logits = transformers_smollm2()(tokens, use_cache=False).logits[0]
    choices: list[int] = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    return choices
