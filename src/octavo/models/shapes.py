"""The KV cache of any decoder from its config alone, and the configs of models people ask about.

Architectures that the engine runs are read as the engine reads them (`octavo.models.config`). Sizing a cache
needs five numbers, so it works for others, too. Configs are plain Hugging Face `config.json` dicts. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.cache.spec import DTYPE_BYTES, KVCacheSpec, canonical_dtype
from octavo.errors import ModelError, nearest
from octavo.models.config import MODEL_TYPES, ModelConfig

Config = Mapping[str, Any]

# Names of the same number in different families; the first that is present and not null counts.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "n_embed")
_MAX_LEN = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx")

# What a family's config class takes when the key is absent; everybody else derives hidden / heads.
_DEFAULT_HEAD_DIM = dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), 256)

# Every n-th layer is full, the others have the window.
_WINDOW_PATTERN = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4, "gpt_oss": 2}

# What decides the cache of an architecture that the engine runs. The rest of the config is left out, so that
# a model which only its other parts make unsupported (quantised weights, a rope type) can be sized.
_DECISIVE = frozenset({
    "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "sliding_window", "use_sliding_window",
    "max_window_layers", "layer_types", "n_embd", "n_layer", "n_head", "n_positions",
})  # fmt: skip

# Layer types that keep a state of fixed size instead of keys and values.
_WITHOUT_KV = frozenset({"linear_attention", "conv", "mamba", "recurrent"})


def text_config(config: Config) -> Config:
    """The part that describes the decoder: the config itself, or `text_config` within a multimodal one."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) and _first(config, _LAYERS) is None else config


def max_positions(config: Config) -> int | None:
    """The longest sequence of the model: what the config states, or its architecture's default, or None."""
    model = _engine_config(text_config(config))
    if model is not None:
        return model.max_position_embeddings
    value = _first(text_config(config), _MAX_LEN)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def checkpoint_dtype(config: Config) -> str:
    """The dtype the checkpoint is stored in when that is a cache dtype too, else "float32"."""
    for part in (text_config(config), config):
        for key in ("dtype", "torch_dtype"):
            value = part.get(key)
            if isinstance(value, str) and value.removeprefix("torch.") in DTYPE_BYTES:
                return canonical_dtype(value)
    return "float32"


def kv_cache_spec(
    model: ModelConfig, *, dtype: str, block_size: int = 16, scales: str | None = None
) -> KVCacheSpec:
    """The KV cache of a model that the engine runs; the engine allocates this very one.

    `scales` None means those that the engine keeps: per token and head for dtypes of one byte.
    """
    windows = model.sliding_window
    return KVCacheSpec(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=dtype,
        block_size=block_size,
        windows=windows if any(window is not None for window in windows) else None,
        scales=_engine_scales(dtype) if scales is None else scales,
    )


def _engine_scales(dtype: str) -> str:
    return "token_head" if DTYPE_BYTES[canonical_dtype(dtype)] == 1 else "tensor"


def spec_from_config(
    config: Config, *, dtype: str | None = None, block_size: int = 16, scales: str | None = None
) -> KVCacheSpec:
    """The KV cache of the model that `config` describes.

    `dtype` None means the checkpoint's, `scales` None those that the engine keeps. ModelError names a number
    that is missing or makes no sense, ConfigError a dtype, block size or scale form that does not exist.
    """
    dtype = checkpoint_dtype(config) if dtype is None else dtype
    config = text_config(config)
    model = _engine_config(config)
    if model is not None:
        return kv_cache_spec(model, dtype=dtype, block_size=block_size, scales=scales)
    num_layers = _number(config, _LAYERS)
    num_heads = _number(config, _HEADS)
    windows = _windows(config, num_layers)
    num_kv_layers = len(windows)
    if num_kv_layers == 0:
        raise ModelError(
            "config: no layer of this model keeps keys and values, so there is no KV cache to size"
        )
    cache: dict[str, Any] = {
        "num_layers": num_kv_layers,
        "dtype": dtype,
        "block_size": block_size,
        "windows": windows if any(window is not None for window in windows) else None,
        "scales": _engine_scales(dtype) if scales is None else scales,
    }
    if config.get("kv_lora_rank") is not None:
        latent = _number(config, ("kv_lora_rank",)) + _number(config, ("qk_rope_head_dim",))
        return KVCacheSpec(num_kv_heads=1, head_dim=latent, value_head_dim=0, **cache)
    head_dim = _head_dim(config, num_heads)
    # Only GGUF metadata tells the two widths apart; see `octavo.cli.kv`.
    value_head_dim = config.get("value_head_dim") or head_dim
    return KVCacheSpec(
        num_kv_heads=_kv_heads(config, num_heads), head_dim=head_dim, value_head_dim=value_head_dim, **cache
    )


def _engine_config(config: Config) -> ModelConfig | None:
    """The config as the engine reads it; None for an architecture that the engine does not run."""
    value_head_dim = config.get("value_head_dim")
    if config.get("model_type") not in MODEL_TYPES or value_head_dim not in (None, config.get("head_dim")):
        return None
    decisive = {key: value for key, value in config.items() if key in _DECISIVE}
    return ModelConfig.from_hf({**decisive, "intermediate_size": 1, "vocab_size": 1})


def _kv_heads(config: Config, num_heads: int) -> int:
    if config.get("multi_query") is True and not config.get("new_decoder_architecture"):
        return 1
    num_kv_heads = num_heads if _first(config, _KV_HEADS) is None else _number(config, _KV_HEADS)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"config: num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads "
            f"({num_kv_heads})"
        )
    return num_kv_heads


def _head_dim(config: Config, num_heads: int) -> int:
    if config.get("head_dim") is not None:
        return _number(config, ("head_dim",))
    default = _DEFAULT_HEAD_DIM.get(str(config.get("model_type")))
    if default is not None:
        return default
    hidden_size = _number(config, _HIDDEN)
    if hidden_size % num_heads:
        raise ModelError(
            f"config: hidden_size ({hidden_size}) is no multiple of num_attention_heads ({num_heads}) "
            "and head_dim is not given"
        )
    return hidden_size // num_heads


def _windows(config: Config, num_layers: int) -> tuple[int | None, ...]:
    """For each layer that keeps keys and values its window, the current token included, or None."""
    window = config.get("sliding_window")
    if window is not None:
        window = _number(config, ("sliding_window",))
    types = config.get("layer_types")
    if isinstance(types, list | tuple):
        if len(types) != num_layers:
            raise ModelError(f"config: layer_types has {len(types)} entries for {num_layers} layers")
        if "sliding_attention" in types and window is None:
            raise ModelError("config: layer_types names sliding_attention and sliding_window is missing")
        return tuple(
            window if kind == "sliding_attention" else None for kind in types if kind not in _WITHOUT_KV
        )
    # Qwen configs carry a window that is switched off, and count its first layers out when it is on.
    is_qwen = str(config.get("model_type")).startswith("qwen")
    is_on = config.get("use_sliding_window")
    if window is None or is_on is False or (is_on is None and is_qwen):
        return (None,) * num_layers
    pattern = config.get("sliding_window_pattern") or _WINDOW_PATTERN.get(str(config.get("model_type")))
    if pattern is not None:
        return tuple(window if (i + 1) % pattern else None for i in range(num_layers))
    first = config.get("max_window_layers") if is_on else 0
    return tuple(window if i >= (first or 0) else None for i in range(num_layers))


def _first(config: Config, names: tuple[str, ...]) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _number(config: Config, names: tuple[str, ...]) -> int:
    value = _first(config, names)
    if value is None:
        raise ModelError(f"config: {names[0]} is missing, so the KV cache cannot be sized")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"config: {names[0]} must be a whole number of at least 1, got {value!r}")
    return value


# Known shapes


def _decoder(
    model_type: str, hidden: int, layers: int, heads: int, kv_heads: int, max_len: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": max_len,
        "torch_dtype": "bfloat16",
        **more,
    }


def _gpt2(width: int, layers: int, heads: int) -> dict[str, Any]:
    return {"model_type": "gpt2", "n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": 1024,
            "torch_dtype": "float16"}  # fmt: skip


KNOWN_SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _decoder("qwen3", 1024, 28, 16, 8, 40960, head_dim=128),
    "qwen3-1.7b": _decoder("qwen3", 2048, 28, 16, 8, 40960, head_dim=128),
    "qwen3-4b": _decoder("qwen3", 2560, 36, 32, 8, 40960, head_dim=128),
    "qwen3-8b": _decoder("qwen3", 4096, 36, 32, 8, 40960, head_dim=128),
    "qwen3-14b": _decoder("qwen3", 5120, 40, 40, 8, 40960, head_dim=128),
    "qwen3-32b": _decoder("qwen3", 5120, 64, 64, 8, 40960, head_dim=128),
    "qwen3-30b-a3b": _decoder("qwen3_moe", 2048, 48, 32, 4, 40960, head_dim=128),
    "qwen3-235b-a22b": _decoder("qwen3_moe", 4096, 94, 64, 4, 40960, head_dim=128),
    "qwen1.5-moe-a2.7b": _decoder("qwen2_moe", 2048, 24, 16, 16, 8192),
    "llama-3-8b": _decoder("llama", 4096, 32, 32, 8, 8192),
    "llama-3-70b": _decoder("llama", 8192, 80, 64, 8, 8192),
    "llama-3.1-8b": _decoder("llama", 4096, 32, 32, 8, 131072),
    "llama-3.1-70b": _decoder("llama", 8192, 80, 64, 8, 131072),
    "llama-3.2-1b": _decoder("llama", 2048, 16, 32, 8, 131072, head_dim=64),
    "llama-3.2-3b": _decoder("llama", 3072, 28, 24, 8, 131072, head_dim=128),
    "smollm2-135m": _decoder("llama", 576, 30, 9, 3, 8192),
    "smollm2-360m": _decoder("llama", 960, 32, 15, 5, 8192),
    "smollm2-1.7b": _decoder("llama", 2048, 24, 32, 32, 8192),
    "distilgpt2": _gpt2(768, 6, 12),
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "mistral-7b-v0.1": _decoder("mistral", 4096, 32, 32, 8, 32768, sliding_window=4096),
    "mixtral-8x7b-v0.1": _decoder("mixtral", 4096, 32, 32, 8, 32768),
    "mixtral-8x22b-v0.1": _decoder("mixtral", 6144, 56, 48, 8, 65536),
    "gemma-2-2b": _decoder("gemma2", 2304, 26, 8, 4, 8192, head_dim=256, sliding_window=4096),
    "gemma-2-9b": _decoder("gemma2", 3584, 42, 16, 8, 8192, head_dim=256, sliding_window=4096),
    "gemma-2-27b": _decoder("gemma2", 4608, 46, 32, 16, 8192, head_dim=128, sliding_window=4096),
    "gemma-3-1b": _decoder("gemma3_text", 1152, 26, 4, 1, 32768, head_dim=256, sliding_window=512),
    "gemma-3-4b": _decoder("gemma3_text", 2560, 34, 8, 4, 131072, head_dim=256, sliding_window=1024),
    "gemma-3-12b": _decoder("gemma3_text", 3840, 48, 16, 8, 131072, head_dim=256, sliding_window=1024),
    "gemma-3-27b": _decoder("gemma3_text", 5376, 62, 32, 16, 131072, head_dim=128, sliding_window=1024),
    "deepseek-v3": _decoder("deepseek_v3", 7168, 61, 128, 128, 163840, kv_lora_rank=512, qk_rope_head_dim=64),
}  # fmt: skip
"""Config of each known shape, under its lower-case name."""

_PREFIXES = ("meta-",)
_SUFFIXES = ("-instruct", "-base", "-chat", "-hf", "-it", "-pt")


def known_shape(name: str) -> dict[str, Any] | None:
    """The config of a known model: "qwen3-0.6b", "Qwen/Qwen3-0.6B" and "SmolLM2-135M-Instruct" all count."""
    short = name.lower().rsplit("/", 1)[-1]
    for prefix in _PREFIXES:
        short = short.removeprefix(prefix)
    if short not in KNOWN_SHAPES:
        for suffix in _SUFFIXES:
            short = short.removesuffix(suffix)
    return KNOWN_SHAPES.get(short)


def suggest_shape(name: str) -> str:
    """`` (did you mean 'x'?)`` for the known shape closest to `name`, or an empty string."""
    return nearest(name.lower().rsplit("/", 1)[-1], KNOWN_SHAPES)
