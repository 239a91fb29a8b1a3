"""Tiny random Transformers models that generate, and what is compared about them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig

_COMMON = {"vocab_size": 101, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
_SIZES = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
_GPT2 = {"n_embd": 48, "n_layer": 2, "n_head": 3, "n_positions": 256}
_GEMMA2 = {"sliding_window": 6, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 3.0}
_GPT_OSS = {
    "sliding_window": 6,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
# name -> (class prefix, configuration, the stock implementation that can do it)
KINDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "qwen3": ("Qwen3", _SIZES, "sdpa"),
    "llama": ("Llama", _SIZES, "sdpa"),
    "qwen2": ("Qwen2", _SIZES, "sdpa"),
    "mistral-window": ("Mistral", {**_SIZES, "sliding_window": 5}, "sdpa"),
    "gemma2-softcap-window": ("Gemma2", {**_SIZES, **_GEMMA2}, "eager"),
    "gpt2": ("GPT2", _GPT2, "sdpa"),
    "gpt_oss-sinks-window": ("GptOss", {**_SIZES, **_GPT_OSS}, "eager"),
}


def tiny_model(kind: str, attention: str = "octavo", seed: int = 0, **overrides: Any) -> Any:
    """A random float32 model of that kind, with weights large enough for attention to matter."""
    prefix, sizes, _ = KINDS[kind]
    config_class = getattr(transformers, f"{prefix}Config")
    model_class = getattr(transformers, "GPT2LMHeadModel" if prefix == "GPT2" else f"{prefix}ForCausalLM")
    config = config_class(**{**_COMMON, **sizes, **overrides}, attn_implementation=attention)
    model = model_class(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)
            elif "norm" in name or "ln_" in name:
                parameter.add_(0.1 * noise)
            else:
                parameter.copy_(0.3 * noise)
    return model


def stock_attention(kind: str) -> str:
    """Transformers' own implementation that has all that the model needs."""
    return KINDS[kind][2]


def prompts(*lengths: int, seed: int = 1) -> list[list[int]]:
    """Random prompts without the padding token."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 101, (n,), generator=generator).tolist() for n in lengths]


def padded(rows: list[list[int]], side: str = "left") -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` of prompts of different lengths."""
    longest = max(map(len, rows))
    fill = [[0] * (longest - len(row)) for row in rows]
    ones = [[1] * len(row) for row in rows]
    if side == "left":
        ids, mask = [f + r for f, r in zip(fill, rows, strict=True)], zip(fill, ones, strict=True)
        return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor([f + o for f, o in mask])}
    ids, mask = [r + f for f, r in zip(fill, rows, strict=True)], zip(fill, ones, strict=True)
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor([o + f for f, o in mask])}


def greedy(max_new_tokens: int = 10, **options: Any) -> GenerationConfig:
    """Greedy, to exactly that many tokens."""
    options = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0} | options
    return GenerationConfig(max_new_tokens=max_new_tokens, **options)


def with_attention(model: Any, attention: str) -> Any:
    """The same model, with another attention implementation."""
    model.set_attn_implementation(attention)
    return model


def batching(page_size: int = 16, **options: Any) -> ContinuousBatchingConfig:
    """A small paged cache."""
    names = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    size = "page_size" if "page_size" in names else "block_size"  # as Transformers 5.17 calls it
    options = {"num_blocks": 32, "max_batch_tokens": 64, size: page_size} | options
    return ContinuousBatchingConfig(**options)


def continued(model: Any, rows: list[list[int]], config: ContinuousBatchingConfig, **options: Any) -> Any:
    """The tokens that continuous batching makes of each prompt."""
    found = model.generate_batch(
        rows, generation_config=greedy(**options), continuous_batching_config=config
    ).values()
    errors = [output.error for output in found if output.error]
    assert not errors, errors
    return [output.generated_tokens for output in found]
