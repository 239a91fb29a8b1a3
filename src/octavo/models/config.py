"""The shape of a model, read from config.json or GGUF metadata. No torch: enough for `octavo kv`.

The rules that differ between architectures are in the file of that model type (llama.py, qwen2.py, ...).
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import ModelError, nearest, shown
from octavo.gguf_file import GGUFFile
from octavo.layers.rope_config import RopeConfig
from octavo.models.source import ModelSource

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)
_MAX_POSITIONS = 2**27  # a rope table of tens of GB; more is a mistake in the file
# Hugging Face `model_type` -> the module of this package that reads its config.
MODEL_TYPES = ("gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """The layers that have experts in place of one feed-forward layer.

    `layers` tells for each layer of the model whether it is one. A token goes to `num_per_token` of
    `num_experts` experts of `intermediate_size`; `normalised`: their weights are divided by their sum.
    `shared_size` is the intermediate size of an expert that every token goes to, 0 where there is none.
    """

    layers: tuple[bool, ...]
    num_experts: int
    num_per_token: int
    intermediate_size: int
    normalised: bool
    shared_size: int = 0

    def __post_init__(self) -> None:
        for name in ("num_experts", "num_per_token", "intermediate_size"):
            if getattr(self, name) < 1:
                raise ModelError(
                    f"config: {name} of the experts must be at least 1, got {getattr(self, name)}"
                )
        if self.num_per_token > self.num_experts:
            raise ModelError(
                f"config: num_experts_per_tok ({self.num_per_token}) must be at most the number of experts "
                f"({self.num_experts})"
            )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder.

    `network` is the module of this package that builds it. `max_position_embeddings` is the length the
    config states (the default context of the engine); `rope.num_positions` is the longest one that rope
    scaling allows; `rope.rotary_dim` is 0 for a model that learned its positions. `norm_eps` is that of
    every norm. `attention_bias` is the bias of q, k and v, `attention_output_bias` that of the output
    projection. `sliding_window` has one entry per layer: the number of keys a token sees, itself included,
    or None for all. `experts` is None for a model without. `tie_word_embeddings` is what the config says
    (None: nothing); what holds is decided by what is in the checkpoint. `dtype` is the one the checkpoint is
    stored in; None where the config does not say, or it is no float dtype.
    """

    model_type: str
    network: str = "decoder"
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    norm_eps: float
    rope: RopeConfig
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool | None = None
    sliding_window: tuple[int | None, ...]
    experts: ExpertsConfig | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise ModelError(f"config: {name} must be at least 1, got {getattr(self, name)}")
        if not self.norm_eps > 0:
            raise ModelError(f"config: the epsilon of the norms must be above 0, got {self.norm_eps:g}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"config: num_attention_heads ({self.num_heads}) must be a multiple of num_key_value_heads "
                f"({self.num_kv_heads})"
            )
        rotary_dim = self.rope.rotary_dim
        if self.network == "decoder" and (rotary_dim < 2 or rotary_dim % 2 or rotary_dim > self.head_dim):
            raise ModelError(
                f"config: the rotary dimension must be even and from 2 to head_dim ({self.head_dim}), "
                f"got {rotary_dim}"
            )
        if self.rope.num_positions > _MAX_POSITIONS:
            raise ModelError(
                f"config: {self.rope.num_positions} positions (max_position_embeddings, scaled) are more "
                f"than the {_MAX_POSITIONS} Octavo has room for"
            )
        if len(self.sliding_window) != self.num_layers:
            raise ModelError(
                f"config: {len(self.sliding_window)} sliding windows for {self.num_layers} layers"
            )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """The config of a config.json; ModelError names what is missing, unknown or unsupported."""
        model_type = config.get("model_type")
        if not isinstance(model_type, str):
            got = "is missing" if model_type is None else f"must be a string, got {type(model_type).__name__}"
            raise ModelError(f"config: model_type {got}; known architectures: {', '.join(MODEL_TYPES)}")
        if model_type not in MODEL_TYPES:
            raise ModelError(
                f"config: unknown model_type {shown(model_type)}{nearest(model_type, MODEL_TYPES)}; "
                f"known: {', '.join(MODEL_TYPES)}"
            )
        from octavo.models.hf_config import HFConfig

        module = importlib.import_module(f"octavo.models.{model_type}")
        result = module.read_config(HFConfig(config))
        assert isinstance(result, ModelConfig)
        return result


def load_config(source: ModelSource) -> ModelConfig:
    """Read the config of a model folder or GGUF file. Loads no torch and no weights."""
    if source.kind == "gguf":
        from octavo.models.weights.gguf_config import config_from_gguf

        with GGUFFile(source.path) as file:
            return config_from_gguf(file)
    return ModelConfig.from_hf(load_json(source.path / "config.json"))


def load_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; ModelError when there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"model: {path} does not exist") from error
    except OSError as error:
        raise ModelError(f"model: {path} cannot be read: {error.strerror}; check its permissions") from error
    except RecursionError as error:
        raise ModelError(f"model: {path} is nested too deeply to be a config") from error
    except ValueError as error:
        raise ModelError(f"model: {path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"model: {path} must hold a JSON object, got {type(value).__name__}")
    return value
