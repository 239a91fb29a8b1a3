"""KV caches from configs: the keys of each family, and the shapes that are built in."""

import pytest

from octavo.errors import ConfigError, ModelError
from octavo.models.config import MODEL_TYPES, ModelConfig
from octavo.models.shapes import (
    KNOWN_SHAPES,
    checkpoint_dtype,
    known_shape,
    kv_cache_spec,
    max_positions,
    spec_from_config,
    suggest_shape,
)

LLAMA = {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32}
OTHER = LLAMA | {"model_type": "olmo"}  # an architecture that the engine does not run


@pytest.mark.parametrize(
    ("num_kv_heads", "num_bytes"), [(32, 524_288), (8, 131_072), (1, 16_384), (None, 524_288)]
)
def test_c58_bytes_follow_the_kv_heads(num_kv_heads: int | None, num_bytes: int) -> None:
    config = LLAMA | {"num_key_value_heads": num_kv_heads}
    assert spec_from_config(config, dtype="float16").bytes_per_token == num_bytes


def test_c58_absent_kv_heads_are_the_query_heads_and_gpt2_has_its_own_names() -> None:
    assert spec_from_config(LLAMA, dtype="float16").bytes_per_token == 524_288
    gpt2 = {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768}
    assert spec_from_config(gpt2, dtype="float16").bytes_per_token == 36_864


@pytest.mark.parametrize(
    ("config", "head_dim"),
    [
        ({"model_type": "qwen3", "hidden_size": 5120, "num_attention_heads": 64, "head_dim": 128}, 128),
        ({"model_type": "qwen3", "hidden_size": 1024, "num_attention_heads": 16, "head_dim": 128}, 128),
        ({"model_type": "qwen3", "hidden_size": 1024, "num_attention_heads": 16}, 128),
        ({"model_type": "qwen3", "hidden_size": 1024, "num_attention_heads": 16, "head_dim": None}, 128),
        ({"model_type": "llama", "hidden_size": 1024, "num_attention_heads": 16}, 64),
        ({"model_type": "llama", "hidden_size": 1024, "num_attention_heads": 16, "head_dim": None}, 64),
        ({"model_type": "gemma2", "hidden_size": 2304, "num_attention_heads": 8}, 256),
    ],
)
def test_c50_head_dim_stated_by_family_or_derived(config: dict[str, object], head_dim: int) -> None:
    assert spec_from_config({"num_hidden_layers": 2, **config}).head_dim == head_dim


def test_latent_attention_keeps_one_vector() -> None:
    spec = spec_from_config(KNOWN_SHAPES["deepseek-v3"])
    assert (spec.num_kv_heads, spec.head_dim, spec.value_width) == (1, 576, 0)
    assert spec.bytes_per_token == 70_272


@pytest.mark.parametrize(
    ("more", "windows"),
    [
        ({}, None),
        ({"sliding_window": None}, None),
        ({"model_type": "mistral", "sliding_window": 9}, (9, 9, 9, 9)),
        ({"model_type": "mistral"}, (4096, 4096, 4096, 4096)),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "llama", "sliding_window": 9}, None),
        *((more | {"model_type": qwen, "sliding_window": 9}, windows)
          for qwen in ("qwen2", "qwen3")
          for more, windows in (
              ({}, None),
              ({"use_sliding_window": False}, None),
              ({"use_sliding_window": True, "max_window_layers": 3}, (None, None, None, 9)),
          )),
        ({"model_type": "qwen3_moe", "sliding_window": 9}, None),
        ({"model_type": "qwen3_moe", "sliding_window": 9, "use_sliding_window": True}, (9, 9, 9, 9)),
        ({"model_type": "qwen2_moe", "sliding_window": 9}, None),
        ({"model_type": "mixtral"}, None),
        ({"model_type": "mixtral", "sliding_window": 9}, (9, 9, 9, 9)),
        ({"sliding_window": 9}, (9, 9, 9, 9)),
        ({"model_type": "gemma2", "sliding_window": 9}, (9, None, 9, None)),
        ({"model_type": "gemma3_text", "sliding_window": 9, "sliding_window_pattern": 3}, (9, 9, None, 9)),
        ({"sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"] * 2},
         (None, 9, None, 9)),
        ({"sliding_window": 9, "layer_types": ["full_attention"] * 4}, None),
    ],
)  # fmt: skip
def test_windows(more: dict[str, object], windows: tuple[int | None, ...] | None) -> None:
    config = {
        "model_type": "olmo",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        **more,
    }
    assert spec_from_config(config).windows == windows


def test_layers_without_keys_and_values_do_not_count() -> None:
    config = OTHER | {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}
    assert spec_from_config(config).num_layers == 1
    with pytest.raises(ModelError, match="no KV cache to size"):
        spec_from_config(config | {"layer_types": ["linear_attention"] * 4})


# What the config leaves out is what the engine would take.
@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("change", [{}, {"sliding_window": 9}, {"head_dim": 32, "num_key_value_heads": 2}])
def test_an_architecture_that_the_engine_runs_is_read_as_the_engine_reads_it(
    model_type: str, change: dict[str, object]
) -> None:
    config = LLAMA | {"model_type": model_type} | change
    model = ModelConfig.from_hf(config | {"vocab_size": 7, "intermediate_size": 5})
    assert spec_from_config(config, dtype="float16", block_size=32) == kv_cache_spec(
        model, dtype="float16", block_size=32
    )
    assert max_positions(config) == model.max_position_embeddings > 0


def test_what_is_not_of_the_cache_may_be_unsupported() -> None:
    extra = {"quantization_config": {"quant_method": "awq"}, "rope_scaling": {"rope_type": "longrope"}}
    assert spec_from_config(LLAMA | extra) == spec_from_config(LLAMA)


def test_a_config_that_the_engine_refuses_is_refused() -> None:
    with pytest.raises(ModelError, match="num_attention_heads must be at least 1, got 0"):
        spec_from_config(LLAMA | {"num_attention_heads": 0})


def test_multi_query_flag_and_multimodal_configs() -> None:
    assert spec_from_config({"n_layer": 2, "n_head": 8, "n_embd": 64, "multi_query": True}).num_kv_heads == 1
    nested = {
        "model_type": "gemma3",
        "torch_dtype": "bfloat16",
        "text_config": LLAMA | {"max_position_embeddings": 77},
    }
    assert spec_from_config(nested).num_layers == 32
    assert (checkpoint_dtype(nested), max_positions(nested)) == ("bfloat16", 77)


@pytest.mark.parametrize(
    ("config", "dtype"),
    [({}, "float32"), ({"torch_dtype": "bfloat16"}, "bfloat16"), ({"dtype": "float16"}, "float16"),
     ({"torch_dtype": "float64"}, "float32"), ({"torch_dtype": None}, "float32")],
)  # fmt: skip
def test_the_dtype_of_the_checkpoint(config: dict[str, object], dtype: str) -> None:
    assert checkpoint_dtype(config) == dtype


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a whole number of at least 1, got 0"),
        (
            {"num_key_value_heads": 5},
            r"num_attention_heads \(32\) must be a multiple of num_key_value_heads \(5\)",
        ),
        ({"hidden_size": 4097}, r"hidden_size \(4097\) is no multiple of num_attention_heads \(32\)"),
        ({"head_dim": "128"}, "head_dim must be a whole number of at least 1, got '128'"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim is missing"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 32 layers"),
        (
            {"layer_types": ["sliding_attention"] * 32},
            "names sliding_attention and sliding_window is missing",
        ),
    ],
)
def test_configs_that_make_no_sense_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        spec_from_config(OTHER | change)


def test_an_unknown_dtype_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="unknown KV cache dtype 'fp4'"):
        spec_from_config(LLAMA, dtype="fp4")


@pytest.mark.parametrize(
    ("name", "kib"),
    [("qwen3-0.6b", 112), ("qwen3-1.7b", 112), ("qwen3-4b", 144), ("qwen3-8b", 144), ("qwen3-14b", 160),
     ("qwen3-32b", 256), ("qwen3-30b-a3b", 96), ("qwen3-235b-a22b", 188), ("qwen1.5-moe-a2.7b", 192),
     ("mixtral-8x7b-v0.1", 128), ("mixtral-8x22b-v0.1", 224), ("distilgpt2", 18), ("llama-3-8b", 128),
     ("llama-3-70b", 320), ("llama-3.2-1b", 32),
     ("llama-3.2-3b", 112), ("smollm2-135m", 22.5), ("smollm2-360m", 40), ("smollm2-1.7b", 192), ("gpt2", 36),
     ("gpt2-medium", 96), ("gpt2-large", 180), ("gpt2-xl", 300), ("mistral-7b-v0.1", 128),
     ("gemma-2-9b", 336), ("gemma-3-27b", 496), ("deepseek-v3", 68.625)],
)  # fmt: skip
def test_known_shapes_in_two_bytes(name: str, kib: float) -> None:
    assert spec_from_config(KNOWN_SHAPES[name]).bytes_per_token == kib * 1024


def test_every_known_shape_can_be_sized_and_states_its_length() -> None:
    for config in KNOWN_SHAPES.values():
        assert spec_from_config(config).bytes_per_token > 0
        assert (max_positions(config) or 0) >= 1024


@pytest.mark.parametrize(
    ("name", "known"),
    [("Qwen/Qwen3-0.6B", "qwen3-0.6b"), ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
     ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m"), ("google/gemma-3-1b-it", "gemma-3-1b"),
     ("GPT2", "gpt2"), ("qwen3-0.6", None), ("", None)],
)  # fmt: skip
def test_names_people_write(name: str, known: str | None) -> None:
    assert known_shape(name) == (KNOWN_SHAPES[known] if known else None)


def test_the_nearest_known_shape_is_suggested() -> None:
    assert suggest_shape("Qwen/Qwen3-0.6") == " (did you mean 'qwen3-0.6b'?)"
    assert suggest_shape("zzz") == ""


def test_gemma_3_mixes_five_window_layers_with_one_full_layer() -> None:
    windows = spec_from_config(KNOWN_SHAPES["gemma-3-1b"]).windows
    assert windows is not None
    assert [i for i, window in enumerate(windows) if window is None] == [5, 11, 17, 23]
    assert {window for window in windows if window} == {512}
