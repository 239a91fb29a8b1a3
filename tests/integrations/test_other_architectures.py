"""Models with something that the kernels cannot do, or do not know of: whoever computes it, it is right."""

import pytest
import torch
import transformers
from helpers.hf_generation import greedy, padded, prompts

COMMON = {"vocab_size": 101, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
SIZES = COMMON | {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
BART = {
    "d_model": 48, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 3,
    "decoder_attention_heads": 3, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "decoder_start_token_id": 1, "forced_eos_token_id": None,
}  # fmt: skip
T5 = {"d_model": 48, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 3, "decoder_start_token_id": 0}
MLA = {
    "moe_intermediate_size": 32, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 24,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 6,
}  # fmt: skip
CHUNKS = {"head_dim": 16, "num_local_experts": 2, "intermediate_size_mlp": 64, "attention_chunk_size": 8}
MOE = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# configuration, model, and whether some layer runs on Octavo's kernel
MODELS = {
    "encoder and decoder": ("BartConfig", "BartForConditionalGeneration", COMMON | BART, True),
    "position bias": ("T5Config", "T5ForConditionalGeneration", COMMON | T5, False),
    "latent attention": ("DeepseekV3Config", "DeepseekV3ForCausalLM", SIZES | MLA, False),
    "chunks": ("Llama4TextConfig", "Llama4ForCausalLM", SIZES | CHUNKS, False),
    "experts": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", SIZES | MOE, True),
    "alibi": (
        "BloomConfig",
        "BloomForCausalLM",
        COMMON | {"hidden_size": 48, "n_layer": 2, "n_head": 3},
        False,
    ),
    "fused projection": ("Phi3Config", "Phi3ForCausalLM", SIZES, True),
}


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_eager(name, computed_by):
    config_class, model_class, sizes, has_kernel = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.2 / parameter.shape[-1] ** 0.5)
    found = []
    for attention in ("eager", "octavo"):
        model.set_attn_implementation(attention)
        tokens = model.generate(**padded(prompts(9, 17, 3)), generation_config=greedy(8))
        found.append(tokens.tolist())
    assert found[0] == found[1]
    assert (computed_by["dense"] > 0) == has_kernel
