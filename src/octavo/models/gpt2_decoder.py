"""The decoder of GPT-2: learned positions, layer norms before attention and before a plain MLP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from octavo.cache.storage import LayerCache
from octavo.layers.attention import Attention
from octavo.layers.attention_metadata import AttentionMetadata
from octavo.layers.embedding import Embedding, LMHead
from octavo.layers.mlp import GeluMLP
from octavo.layers.norm import LayerNorm
from octavo.models.config import ModelConfig
from octavo.models.weights import layouts
from octavo.models.weights.checkpoint import Shape
from octavo.models.weights.parameters import Parameters

EMBEDDING = "transformer.wte.weight"
POSITIONS = "transformer.wpe.weight"
HEAD = "lm_head.weight"


def tensor_shapes(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """Every tensor such a checkpoint has, but the head, in the order the model reads them: (out, in)."""
    hidden, wide = config.hidden_size, config.intermediate_size
    yield EMBEDDING, (config.vocab_size, hidden)
    yield POSITIONS, (config.max_position_embeddings, hidden)
    for layer in range(config.num_layers):
        at = f"transformer.h.{layer}."
        yield from _affine(at + "ln_1", hidden)
        yield from _affine(at + "attn.c_attn", 3 * hidden, hidden)
        yield from _affine(at + "attn.c_proj", hidden, hidden)
        yield from _affine(at + "ln_2", hidden)
        yield from _affine(at + "mlp.c_fc", wide, hidden)
        yield from _affine(at + "mlp.c_proj", hidden, wide)
    yield from _affine("transformer.ln_f", hidden)


def _affine(name: str, *shape: int) -> Iterator[tuple[str, Shape]]:
    yield name + ".weight", shape
    yield name + ".bias", shape[:1]


def stored_parts(shapes: Mapping[str, Shape]) -> dict[str, layouts.Part]:
    """Where those tensors are in a checkpoint: GPT-2's projections are stored (in, out)."""
    return layouts.gpt2(shapes)


def build(config: ModelConfig, parameters: Parameters, max_model_len: int | None) -> GPT2CausalLM:
    """The network, read from `parameters`; all its positions, whatever `max_model_len`."""
    return GPT2CausalLM(config, parameters)


@dataclass(frozen=True, eq=False, slots=True)
class GPT2Layer:
    attention_norm: LayerNorm
    attention: Attention
    mlp_norm: LayerNorm
    mlp: GeluMLP


class GPT2CausalLM:
    """See `DecoderCausalLM`. No position may reach `config.max_position_embeddings`."""

    def __init__(self, config: ModelConfig, parameters: Parameters) -> None:
        self.config = config
        self.embedding = Embedding(parameters.matrix(EMBEDDING))
        self.positions = Embedding(parameters.matrix(POSITIONS, is_quantised=False))
        self.layers = [_read_layer(config, parameters, layer) for layer in range(config.num_layers)]
        self.norm = parameters.layer_norm("transformer.ln_f", config.norm_eps)
        tied = parameters.ties_head(EMBEDDING, HEAD)
        self.head = LMHead(self.embedding.weight if tied else parameters.matrix(HEAD))
        self.weights_form = self.head.weight.form

    def __call__(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[LayerCache],
        meta: AttentionMetadata,
    ) -> torch.Tensor:
        """Hidden states of the T packed tokens; see `DecoderCausalLM.forward`."""
        x = self.embedding(input_ids) + self.positions(positions)
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            x = x + layer.attention(layer.attention_norm(x), positions, kv_cache, meta)
            x = x + layer.mlp(layer.mlp_norm(x))
        return self.norm(x)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden (R, hidden), only the rows that need logits -> (R, vocab), of its dtype."""
        return self.head(hidden)


def _read_layer(config: ModelConfig, parameters: Parameters, layer: int) -> GPT2Layer:
    at = f"transformer.h.{layer}."
    return GPT2Layer(
        attention_norm=parameters.layer_norm(at + "ln_1", config.norm_eps),
        attention=Attention(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            qkv=parameters.linear(at + "attn.c_attn"),
            output=parameters.linear(at + "attn.c_proj"),
            rope_table=None,
        ),
        mlp_norm=parameters.layer_norm(at + "ln_2", config.norm_eps),
        mlp=GeluMLP(up=parameters.linear(at + "mlp.c_fc"), down=parameters.linear(at + "mlp.c_proj")),
    )
