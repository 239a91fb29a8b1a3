"""Tiny Hugging Face models as oracles, and a driver that runs ours over a paged cache without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from octavo.cache.storage import LayerCache
from octavo.layers.attention_metadata import AttentionMetadata
from octavo.models.registry import LoadedModel

CLASSES: dict[str, tuple[Any, Any]] = {
    "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel),
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen2_moe": (transformers.Qwen2MoeConfig, transformers.Qwen2MoeForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
}
TINY = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 101,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
TINY_OF: dict[str, dict[str, Any]] = {
    "gpt2": {
        "n_embd": 48,
        "n_layer": 3,
        "n_head": 6,
        "n_positions": 64,
        "n_inner": None,
        "vocab_size": 101,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "mixtral": {**TINY, "num_local_experts": 5},
    "qwen2_moe": {**TINY, **EXPERTS, "head_dim": 8, "shared_expert_intermediate_size": 24},
    "qwen3_moe": {**TINY, **EXPERTS},
}
"""Configs of architectures that have more, or other, keys than `TINY`."""


def tiny_hf_model(model_type: str, seed: int = 0, **overrides: Any) -> Any:
    """A random float32 Transformers model of that type, with weights large enough for all parts to matter."""
    config_class, model_class = CLASSES[model_type]
    config = config_class(**{**TINY_OF.get(model_type, TINY), **overrides}, attn_implementation="eager")
    model = model_class(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith(("norm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight")):
                parameter.copy_(1 + 0.2 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)
    return model


def saved(model: Any, folder: Path, **options: Any) -> str:
    """`model` written as Transformers writes it; the folder's path."""
    model.save_pretrained(folder, **options)
    return str(folder)


def hf_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """(len(ids), vocab): one forward over the whole sequence, without a cache."""
    with torch.inference_mode():
        return model(torch.tensor([list(ids)], device=model.device), use_cache=False).logits[0].float()


class PagedDriver:
    """Runs a loaded model over a paged cache: unwritten slots are NaN, blocks are handed out shuffled.

    kv_cache_dtype: the model's, or one byte wide, with scales.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        block_size: int = 4,
        num_blocks: int = 64,
        kv_cache_dtype: torch.dtype | None = None,
    ) -> None:
        config = loaded.config
        self.model = loaded.model
        self.device = loaded.device
        self.block_size = block_size
        slots = (num_blocks, block_size, config.num_kv_heads)

        def unwritten() -> LayerCache:
            nans = torch.full((2, *slots, config.head_dim), torch.nan, device=loaded.device)
            if kv_cache_dtype is None:
                return LayerCache(*nans.to(loaded.dtype))
            scales = torch.full((2, *slots), torch.nan, device=loaded.device)
            return LayerCache(*nans.to(kv_cache_dtype), *scales)

        self.kv_caches = [unwritten() for _ in range(config.num_layers)]
        self.free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
        self.tables: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}

    def step(self, chunks: dict[str, Sequence[int]]) -> dict[str, torch.Tensor]:
        """One step over new tokens of several sequences; for each the logits (n, vocab) of its new tokens."""
        slots: list[int] = []
        positions: list[int] = []
        q_ends, k_ends = [0], [0]
        for name, ids in chunks.items():
            past = self.lengths.get(name, 0)
            table = self.tables.setdefault(name, [])
            length = past + len(ids)
            while len(table) * self.block_size < length:
                table.append(self.free.pop())
            for position in range(past, length):
                positions.append(position)
                block, offset = divmod(position, self.block_size)
                slots.append(table[block] * self.block_size + offset)
            q_ends.append(q_ends[-1] + len(ids))
            k_ends.append(k_ends[-1] + length)
            self.lengths[name] = length
        width = max(len(self.tables[name]) for name in chunks) + 1
        rows = [self.tables[name] + [-1] * (width - len(self.tables[name])) for name in chunks]
        meta = AttentionMetadata(
            slot_mapping=torch.tensor(slots, device=self.device),
            cu_seqlens_q=torch.tensor(q_ends, dtype=torch.int32, device=self.device),
            cu_seqlens_k=torch.tensor(k_ends, dtype=torch.int32, device=self.device),
            block_table=torch.tensor(rows, dtype=torch.int32, device=self.device),
            max_seqlen_q=max(len(ids) for ids in chunks.values()),
            max_seqlen_k=max(self.lengths[name] for name in chunks),
        )
        flat = torch.tensor([token for ids in chunks.values() for token in ids], device=self.device)
        with torch.inference_mode():
            hidden = self.model(flat, torch.tensor(positions, device=self.device), self.kv_caches, meta)
            logits = self.model.compute_logits(hidden).float()
        return {name: logits[q_ends[i] : q_ends[i + 1]] for i, name in enumerate(chunks)}

    def greedy(self, prompt: Sequence[int], num_tokens: int, name: str = "greedy") -> list[int]:
        """The prompt in one step, then `num_tokens` greedy tokens."""
        tokens: list[int] = []
        new: Sequence[int] = prompt
        for _ in range(num_tokens):
            tokens.append(int(self.step({name: new})[name][-1].argmax()))
            new = tokens[-1:]
        return tokens


def random_ids(num_tokens: int, vocab_size: int = 101, seed: int = 0) -> list[int]:
    return torch.randint(0, vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
