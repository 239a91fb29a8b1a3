"""The decoder that Llama, Mistral, Qwen and their mixtures of experts share; its config tells them apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from octavo.cache.storage import LayerCache
from octavo.layers.attention import Attention
from octavo.layers.attention_metadata import AttentionMetadata
from octavo.layers.embedding import Embedding, LMHead
from octavo.layers.experts import ExpertsMLP
from octavo.layers.mlp import GatedMLP
from octavo.layers.norm import RMSNorm
from octavo.layers.rotary import rope_table
from octavo.models.config import ExpertsConfig, ModelConfig
from octavo.models.weights import layouts
from octavo.models.weights.checkpoint import Shape
from octavo.models.weights.parameters import Parameters

KVCaches = Sequence[LayerCache]

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def tensor_shapes(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """Every tensor such a checkpoint has, under its Hugging Face name, in the order the model reads them.

    The head is not among them: a tied checkpoint need not hold it.
    """
    hidden = config.hidden_size
    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield EMBEDDING, (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        at = f"model.layers.{layer}."
        yield at + "input_layernorm.weight", (hidden,)
        for name, width in (("q", q_width), ("k", kv_width), ("v", kv_width)):
            yield at + f"self_attn.{name}_proj.weight", (width, hidden)
            if config.attention_bias:
                yield at + f"self_attn.{name}_proj.bias", (width,)
        if config.qk_norm:
            yield at + "self_attn.q_norm.weight", (config.head_dim,)
            yield at + "self_attn.k_norm.weight", (config.head_dim,)
        yield at + "self_attn.o_proj.weight", (hidden, q_width)
        if config.attention_output_bias:
            yield at + "self_attn.o_proj.bias", (hidden,)
        yield at + "post_attention_layernorm.weight", (hidden,)
        if config.experts is not None and config.experts.layers[layer]:
            yield from _expert_shapes(config.experts, hidden, at + "mlp.")
        else:
            yield from _mlp_shapes(hidden, config.intermediate_size, at + "mlp.", bias=config.mlp_bias)
    yield "model.norm.weight", (hidden,)


def _mlp_shapes(hidden: int, wide: int, at: str, *, bias: bool) -> Iterator[tuple[str, Shape]]:
    for name, rows, columns in (("gate", wide, hidden), ("up", wide, hidden), ("down", hidden, wide)):
        yield at + f"{name}_proj.weight", (rows, columns)
        if bias:
            yield at + f"{name}_proj.bias", (rows,)


def _expert_shapes(experts: ExpertsConfig, hidden: int, at: str) -> Iterator[tuple[str, Shape]]:
    yield at + "gate.weight", (experts.num_experts, hidden)
    for expert in range(experts.num_experts):
        yield from _mlp_shapes(hidden, experts.intermediate_size, f"{at}experts.{expert}.", bias=False)
    if experts.shared_size:
        yield from _mlp_shapes(hidden, experts.shared_size, at + "shared_expert.", bias=False)
        yield at + "shared_expert_gate.weight", (1, hidden)


def stored_parts(shapes: Mapping[str, Shape]) -> dict[str, layouts.Part]:
    """Where those tensors are in a checkpoint of these shapes that stores them in another way."""
    return layouts.experts(shapes)


def build(config: ModelConfig, parameters: Parameters, max_model_len: int | None) -> DecoderCausalLM:
    """The network, read from `parameters`."""
    return DecoderCausalLM(config, parameters, max_model_len)


@dataclass(frozen=True, eq=False, slots=True)
class DecoderLayer:
    input_norm: RMSNorm
    attention: Attention
    post_attention_norm: RMSNorm
    mlp: GatedMLP | ExpertsMLP


class DecoderCausalLM:
    """A decoder of identical layers around a residual stream, with an embedding and a language-model head.

    Built complete from `parameters`: each matrix is read, fused and packed before the next one is read.
    No position may reach `max_model_len` (the longest the config allows unless given).
    """

    def __init__(self, config: ModelConfig, parameters: Parameters, max_model_len: int | None = None) -> None:
        self.config = config
        self.embedding = Embedding(parameters.matrix(EMBEDDING))
        table = rope_table(config.rope, max_model_len).to(parameters.device)
        self.layers = [_read_layer(config, parameters, layer, table) for layer in range(config.num_layers)]
        self.norm = RMSNorm(parameters.vector("model.norm.weight"), config.norm_eps)
        tied = parameters.ties_head(EMBEDDING, HEAD)
        self.head = LMHead(self.embedding.weight if tied else parameters.matrix(HEAD))
        self.weights_form = self.head.weight.form

    def __call__(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: KVCaches,
        meta: AttentionMetadata,
    ) -> torch.Tensor:
        return self.forward(input_ids, positions, kv_caches, meta)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: KVCaches,
        meta: AttentionMetadata,
    ) -> torch.Tensor:
        """Hidden states of the T packed tokens.

        input_ids, positions: (T,) int64; a token's position is its index in its own sequence. kv_caches: one
        per layer; the new tokens' K/V are written at meta.slot_mapping. Nothing here waits for a GPU.
        Returns (T, hidden) in the model's dtype, the final norm applied.
        """
        x: torch.Tensor = self.embedding(input_ids)
        residual: torch.Tensor | None = None
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            qkv, residual = layer.attention.qkv.after_norm(layer.input_norm, x, residual)
            attended = layer.attention.attend(qkv, positions, kv_cache, meta)
            x, residual = layer.attention.output.onto(attended, residual)
            x, residual = layer.mlp.after_norm(layer.post_attention_norm, x, residual)
        return self.norm.add(x, residual)[0]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden (R, hidden), only the rows that need logits -> (R, vocab), of its dtype."""
        return self.head(hidden)


def _read_layer(config: ModelConfig, parameters: Parameters, layer: int, table: torch.Tensor) -> DecoderLayer:
    at = f"model.layers.{layer}."
    attention = at + "self_attn."

    def norm(name: str) -> RMSNorm:
        return RMSNorm(parameters.vector(name), config.norm_eps)

    return DecoderLayer(
        input_norm=norm(at + "input_layernorm.weight"),
        attention=Attention(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            qkv=parameters.linear(*(attention + name for name in ("q_proj", "k_proj", "v_proj"))),
            output=parameters.linear(attention + "o_proj"),
            rope_table=table,
            q_norm=norm(attention + "q_norm.weight") if config.qk_norm else None,
            k_norm=norm(attention + "k_norm.weight") if config.qk_norm else None,
            sliding_window=config.sliding_window[layer],
        ),
        post_attention_norm=norm(at + "post_attention_layernorm.weight"),
        mlp=_read_experts(config.experts, parameters, at + "mlp.")
        if config.experts is not None and config.experts.layers[layer]
        else _read_mlp(parameters, at + "mlp."),
    )


def _read_mlp(parameters: Parameters, at: str) -> GatedMLP:
    return GatedMLP(
        gate_up=parameters.linear(at + "gate_proj", at + "up_proj"),
        down=parameters.linear(at + "down_proj"),
    )


def _read_experts(experts: ExpertsConfig, parameters: Parameters, at: str) -> ExpertsMLP:
    each = [f"{at}experts.{expert}." for expert in range(experts.num_experts)]
    has_shared = experts.shared_size > 0
    # A rounded router sends tokens to other experts, and is a ten-thousandth of the weights.
    return ExpertsMLP(
        router=parameters.linear(at + "gate", is_quantised=False),
        gate_up=parameters.experts([(one + "gate_proj.weight", one + "up_proj.weight") for one in each]),
        down=parameters.experts([(one + "down_proj.weight",) for one in each]),
        num_per_token=experts.num_per_token,
        normalised=experts.normalised,
        shared=_read_mlp(parameters, at + "shared_expert.") if has_shared else None,
        shared_gate=parameters.linear(at + "shared_expert_gate", is_quantised=False) if has_shared else None,
    )
