"""Typed reading of a Hugging Face config.json, in the key styles of Transformers 4 and 5. No torch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any, cast, get_args

from octavo.errors import ModelError, nearest, shown
from octavo.layers.rope_config import RopeConfig, RopeType
from octavo.models.config import ExpertsConfig, ModelConfig

ROPE_TYPES: tuple[str, ...] = get_args(RopeType)
_ROPE_KEYS = frozenset(
    [
        "rope_type",
        "type",
        "rope_theta",
        "partial_rotary_factor",
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "finetuned",
    ]
)
_MAX_LAYERS = 10_000  # beyond any model; keeps a corrupt file from filling memory with layers
_MAX_FACTOR = 2**27
_YARN_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}  # a zero means the default, as in Transformers
_LAYER_TYPES = ("full_attention", "sliding_attention")


class HFConfig:
    """A config.json whose values are checked as they are read; a null counts as absent."""

    def __init__(self, values: Mapping[str, Any], where: str = "config") -> None:
        self._values = values
        self._where = where

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def states(self, key: str) -> bool:
        """Whether the file has the key at all, be it null."""
        return key in self._values

    def keys(self) -> set[str]:
        return {key for key, value in self._values.items() if value is not None}

    def renamed(self, names: Mapping[str, str]) -> HFConfig:
        """The same config with these keys under other names, unless it has those already."""
        values = dict(self._values)
        for old, new in names.items():
            if new not in values and old in values:
                values[new] = values[old]
        return HFConfig(values, self._where)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, "an integer", value)
        if not -(2**63) <= value < 2**63:
            raise self._wrong(key, "an integer of 64 bits", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._required(key, default)
        try:
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                return float(value)
        except OverflowError:  # an integer beyond the floats
            pass
        raise self._wrong(key, "a finite number", value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._required(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def _required(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self._where}: {key} is missing and has no default")
        return value

    def _wrong(self, key: str, expected: str, value: Any) -> ModelError:
        return ModelError(f"{self._where}: {key} must be {expected}, got {shown(value)}")


def decoder_config(
    hf: HFConfig,
    *,
    max_position_embeddings: int,
    head_dim: int | None = None,
    attention_bias: bool = False,
    attention_output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    sliding_window: tuple[int | None, ...] | None = None,
    experts: ExpertsConfig | None = None,
) -> ModelConfig:
    """The part of the config that most decoders share; the arguments are what an architecture decides.

    `max_position_embeddings` and `head_dim` are that architecture's defaults; without a default head_dim
    it is hidden_size / num_attention_heads.
    """
    refuse_unsupported(hf)
    check_activation(hf, "hidden_act", "silu")
    if experts is None:
        _refuse_experts(hf)
    hidden_size = hf.integer("hidden_size")
    num_heads = hf.integer("num_attention_heads")
    num_layers = number_of_layers(hf)
    if num_heads < 1:
        raise ModelError(f"config: num_attention_heads must be at least 1, got {num_heads}")
    if "head_dim" not in hf and head_dim is None:
        if hidden_size % num_heads:
            raise ModelError(
                f"config: head_dim is not stated and hidden_size ({hidden_size}) is not a multiple of "
                f"num_attention_heads ({num_heads})"
            )
        head_dim = hidden_size // num_heads
    head_dim = hf.integer("head_dim", head_dim)
    max_positions = hf.integer("max_position_embeddings", max_position_embeddings)
    tie = hf.get("tie_word_embeddings")
    return ModelConfig(
        model_type=str(hf.get("model_type")),
        hidden_size=hidden_size,
        intermediate_size=hf.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=hf.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        vocab_size=hf.integer("vocab_size"),
        max_position_embeddings=max_positions,
        norm_eps=hf.number("rms_norm_eps", 1e-6),
        rope=read_rope(hf, head_dim, max_positions),
        attention_bias=attention_bias,
        attention_output_bias=attention_output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        tie_word_embeddings=None if tie is None else hf.flag("tie_word_embeddings", False),
        sliding_window=sliding_window or (None,) * num_layers,
        experts=experts,
        dtype=checkpoint_dtype(hf),
    )


def number_of_layers(hf: HFConfig) -> int:
    num_layers = hf.integer("num_hidden_layers")
    if not 1 <= num_layers <= _MAX_LAYERS:
        raise ModelError(f"config: num_hidden_layers must be from 1 to {_MAX_LAYERS}, got {num_layers}")
    return num_layers


def checkpoint_dtype(hf: HFConfig) -> str | None:
    name = str(hf.get("dtype") or hf.get("torch_dtype")).removeprefix("torch.")
    return name if name in ("float32", "bfloat16", "float16") else None


def check_activation(hf: HFConfig, key: str, known: str) -> None:
    """ModelError unless the activation that `key` names is the known one, which is also the default."""
    act = hf.get(key)
    if hf.states(key) and act != known:
        raise ModelError(f"config: {key} {shown(act)} is not supported; known: {known}")


def _refuse_experts(hf: HFConfig) -> None:
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if key in hf and hf.integer(key) > 1:
            raise ModelError(
                f"config: {key} = {hf.get(key)}: experts in model_type {shown(hf.get('model_type'))} are not "
                "supported; known with experts: mixtral, qwen2_moe, qwen3_moe"
            )


def refuse_unsupported(hf: HFConfig, heads: tuple[str, ...] = ()) -> None:
    """ModelError for what no architecture here has: quantised weights, heads other than a language model's
    (...ForCausalLM, or one of `heads`)."""
    if "quantization_config" in hf:
        quantization = hf.get("quantization_config")
        method = (
            quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else "unknown"
        )
        raise ModelError(
            f"config: quantization_config (method {shown(method)}) is not supported: Octavo reads "
            "unquantised safetensors and GGUF files; take the original checkpoint and Octavo's own "
            "quantization option"
        )
    if "architectures" not in hf:
        return
    architectures = hf.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise ModelError(f"config: architectures must be a list of names, got {shown(architectures)}")
    for name in architectures:
        if name not in heads and not str(name).endswith("ForCausalLM"):
            raise ModelError(
                f"config: architectures names {shown(name)}; only language models (...ForCausalLM) are "
                "supported"
            )


def qwen_experts(
    hf: HFConfig, *, num_experts: int, num_per_token: int, intermediate_size: int, shared_size: int = 0
) -> ExpertsConfig:
    """The experts of Qwen: in every `decoder_sparse_step`-th layer that `mlp_only_layers` does not name.

    The arguments are that architecture's defaults; with a `shared_size` it has a shared expert.
    """
    step = hf.integer("decoder_sparse_step", 1)
    if step < 1:
        raise ModelError(f"config: decoder_sparse_step must be at least 1, got {step}")
    dense = hf.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise ModelError(f"config: mlp_only_layers must be a list of layer numbers, got {shown(dense)}")
    return ExpertsConfig(
        layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(number_of_layers(hf))),
        num_experts=hf.integer("num_local_experts", hf.integer("num_experts", num_experts)),
        num_per_token=hf.integer("num_experts_per_tok", num_per_token),
        intermediate_size=hf.integer("moe_intermediate_size", intermediate_size),
        normalised=hf.flag("norm_topk_prob", False),
        shared_size=hf.integer("shared_expert_intermediate_size", shared_size) if shared_size else 0,
    )


def windows_by_layer_type(hf: HFConfig, *, max_window_layers: int) -> tuple[int | None, ...]:
    """One window per layer for Qwen: `layer_types` if stated, else every layer from `max_window_layers` on.

    Without `use_sliding_window` no layer has a window, whatever `sliding_window` says.
    """
    num_layers = number_of_layers(hf)
    window = read_window(hf) if hf.flag("use_sliding_window", False) else None
    if "layer_types" in hf:
        layer_types = hf.get("layer_types")
        if not isinstance(layer_types, list) or len(layer_types) != num_layers:
            raise ModelError(f"config: layer_types must list {num_layers} layers, got {shown(layer_types)}")
        for kind in layer_types:
            if kind not in _LAYER_TYPES:
                raise ModelError(
                    f"config: unknown layer type {shown(kind)}; known: {', '.join(_LAYER_TYPES)}"
                )
        sliding = [kind == "sliding_attention" for kind in layer_types]
        if window is None and any(sliding):
            raise ModelError(
                "config: layer_types has sliding_attention layers, but there is no window: set "
                "use_sliding_window and sliding_window"
            )
    else:
        first = hf.integer("max_window_layers", max_window_layers)
        sliding = [layer >= first for layer in range(num_layers)]
    return tuple(window if is_sliding else None for is_sliding in sliding)


def read_window(hf: HFConfig) -> int | None:
    """`sliding_window`: keys seen, the token itself included; null = all, absent = Hugging Face's 4096."""
    if hf.states("sliding_window") and "sliding_window" not in hf:
        return None
    window = hf.integer("sliding_window", 4096)
    if window < 1:
        raise ModelError(
            f"config: sliding_window must be at least 1 (it counts the token itself), got {window}"
        )
    return window


def read_rope(hf: HFConfig, head_dim: int, max_position_embeddings: int) -> RopeConfig:
    """From `rope_parameters` (Transformers 5) or `rope_scaling` and `rope_theta` (before; wins, as there)."""
    values: Mapping[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        stated = hf.get(key)
        if not isinstance(stated, Mapping | None):
            raise ModelError(f"config: {key} must be an object, got {shown(stated)}")
        values = values or stated or {}
    if any(isinstance(value, Mapping) for value in values.values()):
        raise ModelError(
            "config: rope_parameters that differ by layer type are not supported "
            f"(found {', '.join(sorted(values))})"
        )
    rope = HFConfig(values, "config: rope_parameters")
    rope_type = next((rope.get(key) for key in ("rope_type", "type") if key in rope), "default")
    if rope_type not in ROPE_TYPES:
        raise ModelError(
            f"config: unknown rope type {shown(rope_type)}{nearest(str(rope_type), ROPE_TYPES)}; "
            f"known: {', '.join(ROPE_TYPES)}"
        )
    unknown = rope.keys() - _ROPE_KEYS
    if unknown:
        warnings.warn(
            f"config: rope_parameters has keys that are not used: {', '.join(sorted(unknown))}",
            stacklevel=2,
        )
    original = max_position_embeddings
    if rope_type in ("yarn", "llama3"):
        inner = rope.integer("original_max_position_embeddings", max_position_embeddings)
        original = hf.integer("original_max_position_embeddings", inner)
    if original < 1:
        raise ModelError(f"config: original_max_position_embeddings must be at least 1, got {original}")
    factor = 1.0
    if rope_type != "default":
        # YaRN alone may leave its factor to the two lengths.
        implied = max_position_embeddings / original if rope_type == "yarn" else None
        factor = rope.number("factor", implied)
        if not 1.0 <= factor <= _MAX_FACTOR:
            raise ModelError(f"config: rope_parameters: factor must be from 1 to {_MAX_FACTOR}, got {factor}")
    theta = rope.number("rope_theta", hf.number("rope_theta", 10_000.0))
    if theta <= 1.0:
        raise ModelError(f"config: rope_theta must be above 1, got {theta}")
    partial = rope.number("partial_rotary_factor", hf.number("partial_rotary_factor", 1.0))
    llama3 = rope_type == "llama3"
    low = rope.number("low_freq_factor", None if llama3 else 1.0)
    high = rope.number("high_freq_factor", None if llama3 else 4.0)
    if llama3 and not 0 < low < high:
        raise ModelError(
            f"config: rope_parameters: low_freq_factor ({low}) must be above 0 and below "
            f"high_freq_factor ({high})"
        )
    if not 0 < partial <= 1:
        raise ModelError(f"config: partial_rotary_factor must be above 0 and at most 1, got {partial}")
    rotary_dim = int(head_dim * partial)
    if rope_type == "dynamic" and rotary_dim <= 2:
        raise ModelError(f"config: rope type 'dynamic' needs a rotary dimension above 2, got {rotary_dim}")
    betas = {key: rope.number(key, default) or default for key, default in _YARN_BETAS.items()}
    for key, value in betas.items():
        if value < 0:
            raise ModelError(f"config: rope_parameters: {key} must be positive, got {value}")
    return RopeConfig(
        rope_type=cast(RopeType, rope_type),
        theta=theta,
        rotary_dim=rotary_dim,
        max_position_embeddings=max_position_embeddings,
        original_max_position_embeddings=original,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        attention_factor=_optional(rope, "attention_factor"),
        beta_fast=betas["beta_fast"],
        beta_slow=betas["beta_slow"],
        mscale=_optional(rope, "mscale"),
        mscale_all_dim=_optional(rope, "mscale_all_dim"),
        truncate=rope.flag("truncate", True),
    )


def _optional(hf: HFConfig, key: str) -> float | None:
    return hf.number(key) if key in hf else None
