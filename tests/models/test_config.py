from __future__ import annotations

import errno
import importlib
import json
import math
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ModelError
from octavo.models.config import ModelConfig, load_config
from octavo.models.decoder import tensor_shapes
from octavo.models.source import ModelSource

BASE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
}


def config_of(**changes: Any) -> ModelConfig:
    return ModelConfig.from_hf({**BASE, **changes})


def without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in BASE.items() if key not in keys}


# TensorRT-LLM#5912 and friends: head_dim is what the config states, else the architecture's default.
@pytest.mark.parametrize(
    ("changes", "head_dim", "q_rows", "qkv_rows"),
    [
        (
            {"model_type": "qwen3", "hidden_size": 5120, "num_attention_heads": 64, "head_dim": 128},
            128,
            8192,
            10_240,
        ),
        ({"model_type": "qwen3", "head_dim": 128}, 128, 2048, 4096),
        ({"model_type": "qwen3"}, 128, 2048, 4096),
        ({"model_type": "qwen3", "head_dim": None}, 128, 2048, 4096),
        ({}, 64, 1024, 2048),
        ({"head_dim": None}, 64, 1024, 2048),
        ({"head_dim": 80}, 80, 1280, 2560),
        ({"model_type": "mistral"}, 64, 1024, 2048),
        ({"model_type": "mistral", "hidden_size": 1000, "head_dim": 64}, 64, 1024, 2048),
        ({"model_type": "qwen2"}, 64, 1024, 2048),
    ],
    ids=[
        "stated",
        "0.6b",
        "qwen3-absent",
        "qwen3-null",
        "llama-absent",
        "llama-null",
        "llama-stated",
        "mistral",
        "uneven",
        "qwen2",
    ],
)
def test_head_dim(changes: dict[str, Any], head_dim: int, q_rows: int, qkv_rows: int) -> None:
    config = config_of(**changes)
    assert config.head_dim == head_dim
    shapes = dict(tensor_shapes(config))
    at = "model.layers.0.self_attn."
    assert shapes[at + "q_proj.weight"] == (q_rows, config.hidden_size)
    assert shapes[at + "o_proj.weight"] == (config.hidden_size, q_rows)
    assert sum(shapes[f"{at}{name}_proj.weight"][0] for name in "qkv") == qkv_rows


def test_absent_kv_heads_are_the_query_heads() -> None:
    assert ModelConfig.from_hf(without("num_key_value_heads")).num_kv_heads == 16
    assert config_of(num_key_value_heads=None).num_kv_heads == 16
    assert config_of(num_key_value_heads=1).num_kv_heads == 1


@pytest.mark.parametrize(
    ("changes", "biases"),
    [
        ({}, (False, False, False)),
        ({"attention_bias": True}, (True, True, False)),
        ({"mlp_bias": True}, (False, False, True)),
        ({"model_type": "qwen2"}, (True, False, False)),
        ({"model_type": "qwen2", "attention_bias": False}, (True, False, False)),
        ({"model_type": "qwen3"}, (False, False, False)),
        ({"model_type": "qwen3", "attention_bias": True}, (True, True, False)),
        ({"model_type": "mistral"}, (False, False, False)),
    ],
)
def test_biases(changes: dict[str, Any], biases: tuple[bool, bool, bool]) -> None:
    config = config_of(**changes)
    assert (config.attention_bias, config.attention_output_bias, config.mlp_bias) == biases


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 8}, (None,) * 4),
        ({"model_type": "mistral"}, (4096,) * 4),
        ({"model_type": "mistral", "sliding_window": None}, (None,) * 4),
        ({"model_type": "mistral", "sliding_window": 8}, (8,) * 4),
        ({"model_type": "qwen2", "sliding_window": 8}, (None,) * 4),
        ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True}, (None,) * 4),
        (
            {"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3},
            (None, None, None, 8),
        ),
        ({"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 0}, (4096,) * 4),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (8, None, 8, None),
        ),
        (
            {"model_type": "qwen3", "use_sliding_window": False, "layer_types": ["full_attention"] * 4},
            (None,) * 4,
        ),
    ],
)
def test_sliding_windows(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert config_of(**changes).sliding_window == windows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "lama"},
            r"unknown model_type 'lama' \(did you mean 'llama'\?\); known: gpt2, llama, mistral,",
        ),
        ({"model_type": "deepseek_v3"}, "unknown model_type 'deepseek_v3'"),
        ({"model_type": None}, "model_type is missing"),
        ({"model_type": ["llama"]}, "model_type must be a string, got list; known"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; known: silu"),
        (
            {"quantization_config": {"quant_method": "awq"}},
            r"quantization_config \(method 'awq'\) is not supported",
        ),
        ({"num_local_experts": 8}, "num_local_experts = 8: experts in model_type 'llama' are not supported"),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            "architectures names 'LlamaForSequenceClassification'",
        ),
        (
            {"rope_scaling": {"type": "longrope"}},
            "unknown rope type 'longrope'; known: default, linear, dynamic, yarn, llama3",
        ),
        (
            {"rope_parameters": {"rope_type": "lama3"}},
            r"unknown rope type 'lama3' \(did you mean 'llama3'\?\)",
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters: factor is missing"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0.5}}, "factor must be from 1 to .*, got 0.5"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": "2"}},
            "factor must be a finite number, got '2'",
        ),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor is missing"),
        (
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 2.0,
                    "low_freq_factor": 4,
                    "high_freq_factor": 4,
                }
            },
            r"low_freq_factor \(4.0\) must be above 0 and below high_freq_factor \(4.0\)",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "that differ by layer type are not supported",
        ),
        ({"rope_scaling": [1]}, r"rope_scaling must be an object, got \[1\]"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": float("inf")}},
            "factor must be a finite number",
        ),
        ({"rope_theta": 1.0}, "rope_theta must be above 1, got 1.0"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_fast": -1}},
            "beta_fast must be positive",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 0}},
            "original_max_position_embeddings must be at least 1, got 0",
        ),
        (
            {"head_dim": 2, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "rope type 'dynamic' needs a rotary dimension above 2, got 2",
        ),
        ({"num_hidden_layers": 2**40}, "num_hidden_layers must be from 1 to 10000, got 1099511627776"),
        (
            {"model_type": "mistral", "num_hidden_layers": -1},
            "num_hidden_layers must be from 1 to 10000, got -1",
        ),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor must be above 0 and at most 1, got 1.5"),
        ({"max_position_embeddings": 2**40}, "1099511627776 positions .* are more than the 134217728"),
        ({"architectures": "LlamaForCausalLM"}, "architectures must be a list"),
        ({"partial_rotary_factor": 0.01}, "rotary dimension must be even and from 2 to head_dim"),
        ({"head_dim": 65}, r"rotary dimension must be even and from 2 to head_dim \(65\), got 65"),
        ({"head_dim": 0}, "head_dim must be at least 1, got 0"),
        (
            {"hidden_size": 1000, "num_attention_heads": 16},
            r"hidden_size \(1000\) is not a multiple of num_attention_heads",
        ),
        (
            {"num_key_value_heads": 6},
            r"num_attention_heads \(16\) must be a multiple of num_key_value_heads \(6\)",
        ),
        ({"rope_parameters": []}, r"rope_parameters must be an object, got \[\]"),
        ({"rope_scaling": 0}, "rope_scaling must be an object, got 0"),
        ({"rope_parameters": {"rope_type": ""}}, "unknown rope type ''"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 1e300}}, "factor must be from 1 to 134217728"),
        ({"hidden_act": None}, "hidden_act None is not supported; known: silu"),
        ({"hidden_act": ""}, "hidden_act '' is not supported"),
        ({"rms_norm_eps": -1}, "the epsilon of the norms must be above 0, got -1"),
        ({"rms_norm_eps": 0}, "the epsilon of the norms must be above 0, got 0"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a finite number, got 1000"),
        ({"architectures": ""}, "architectures must be a list of names, got ''"),
        ({"architectures": []}, r"architectures must be a list of names, got \[\]"),
        ({"hidden_size": 2**63}, "hidden_size must be an integer of 64 bits, got 9223372036854775808"),
        ({"num_attention_heads": 0}, "num_attention_heads must be at least 1, got 0"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers must be an integer, got '4'"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false, got 'yes'"),
        ({"model_type": "mistral", "sliding_window": -1}, "sliding_window must be at least 1"),
        ({"model_type": "qwen3", "layer_types": ["full_attention"]}, "layer_types must list 4 layers"),
        (
            {"model_type": "qwen3", "layer_types": ["chunked_attention"] * 4},
            "unknown layer type 'chunked_attention'",
        ),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"] * 4}, "there is no window"),
    ],
)
def test_what_is_wrong_or_unsupported_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        config_of(**changes)


def test_the_base_of_those_errors_is_a_good_config() -> None:
    config = config_of()
    assert (config.num_layers, config.norm_eps, config.tie_word_embeddings) == (4, 1e-6, None)
    assert config.dtype is None
    assert config_of(dtype="float8_e4m3fn").dtype is None
    assert config_of(torch_dtype="bfloat16").dtype == "bfloat16"
    assert config_of(dtype="float16", torch_dtype="bfloat16").dtype == "float16"


def test_an_unused_rope_key_is_said_aloud() -> None:
    with pytest.warns(UserWarning, match="keys that are not used: mrope_section"):
        rope = config_of(rope_parameters={"rope_type": "default", "mrope_section": [1, 2]}).rope
    assert rope == config_of(rope_parameters={"rope_type": "default"}).rope


def test_rope_keys_old_and_new() -> None:
    new = config_of(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}).rope
    old = config_of(rope_scaling={"type": "linear", "factor": 2.0}, rope_theta=5e5).rope
    assert new == old
    assert (new.rope_type, new.theta, new.factor, new.rotary_dim) == ("linear", 5e5, 2.0, 64)
    assert config_of(rope_scaling=None, rope_theta=None).rope.theta == 10_000.0


def test_original_length_of_yarn() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0}
    assert config_of(rope_parameters=yarn).rope.original_max_position_embeddings == 4096
    inner = {**yarn, "original_max_position_embeddings": 1024}
    assert config_of(rope_parameters=inner).rope.original_max_position_embeddings == 1024
    # Transformers gives a top-level key precedence
    outer = config_of(rope_parameters=inner, original_max_position_embeddings=2048)
    assert outer.rope.original_max_position_embeddings == 2048


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "config.json does not exist"),
        ("{", "config.json is not valid JSON"),
        ("[]", "config.json must hold a JSON object, got list"),
        ("[" * 100_000, "config.json is nested too deeply to be a config"),
    ],
)
def test_a_broken_config_file(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        load_config(ModelSource("folder", tmp_path, "x"))


def test_a_config_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *args: Any, **options: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ModelError, match=r"config\.json cannot be read: Permission denied; check"):
        load_config(ModelSource("folder", tmp_path, "x"))


@pytest.mark.parametrize(
    "key", ["model_type", "hidden_act", "rope_parameters", "hidden_size", "architectures"]
)
def test_a_refusal_is_short_whatever_the_value(key: str) -> None:
    for value in ("x" * 10**6, ["x" * 10**6] * 1000):
        with pytest.raises(ModelError) as caught:
            config_of(**{key: value})
        assert len(str(caught.value)) < 400


def test_a_config_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    assert load_config(ModelSource("folder", tmp_path, "x")) == config_of()


MOE: dict[str, Any] = {
    **BASE,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
}


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, (True, True, True, True)),
        ({"decoder_sparse_step": 2}, (False, True, False, True)),
        ({"mlp_only_layers": [0, 3]}, (False, True, True, False)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, (False, False, False, True)),
        ({"decoder_sparse_step": 5}, (False, False, False, False)),
        ({"mlp_only_layers": None}, (True, True, True, True)),
        ({"model_type": "mixtral", "decoder_sparse_step": 2}, (True, True, True, True)),
    ],
)
def test_which_layers_have_experts(changes: dict[str, Any], layers: tuple[bool, ...]) -> None:
    experts = ModelConfig.from_hf({**MOE, **changes}).experts
    assert experts is not None
    assert experts.layers == layers


def test_experts_of_each_architecture() -> None:
    qwen3 = ModelConfig.from_hf(MOE).experts
    assert qwen3 is not None
    assert (qwen3.num_experts, qwen3.num_per_token, qwen3.intermediate_size) == (8, 2, 96)
    assert (qwen3.normalised, qwen3.shared_size) == (False, 0)
    renamed = {key: value for key, value in MOE.items() if key != "num_experts"} | {"num_local_experts": 6}
    local = ModelConfig.from_hf(renamed).experts
    assert local is not None
    assert local.num_experts == 6
    qwen2 = ModelConfig.from_hf({**MOE, "model_type": "qwen2_moe", "norm_topk_prob": True}).experts
    assert qwen2 is not None
    assert (qwen2.normalised, qwen2.shared_size) == (True, 5632)
    mixtral = ModelConfig.from_hf({**MOE, "model_type": "mixtral"}).experts
    assert mixtral is not None
    assert (mixtral.intermediate_size, mixtral.normalised) == (3072, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_experts_per_tok": 9},
            r"per_tok \(9\) must be at most the number of experts \(8\)",
        ),
        ({"num_experts_per_tok": 0}, "num_per_token of the experts must be at least 1, got 0"),
        ({"num_experts": 0}, "num_experts of the experts must be at least 1, got 0"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be at least 1, got 0"),
        ({"mlp_only_layers": "all"}, "mlp_only_layers must be a list of layer numbers, got 'all'"),
        ({"mlp_only_layers": [True]}, "mlp_only_layers must be a list of layer numbers"),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false, got 1"),
        ({"model_type": "qwen2_moe", "use_sliding_window": True}, "layer_types must say in which layers"),
    ],
)
def test_experts_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_hf({**MOE, **changes})


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (
            {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024,
             "vocab_size": 50257},
            124_439_808,
        ),
        (
            {**MOE, "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
             "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
             "moe_intermediate_size": 768, "vocab_size": 151936},
            30_532_122_624,
        ),
        (
            {"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336,
             "num_hidden_layers": 32, "num_attention_heads": 32,
             "num_key_value_heads": 8, "vocab_size": 32000},
            46_702_792_704,
        ),
    ],
    ids=["gpt2", "qwen3-30b-a3b", "mixtral-8x7b"],
)  # fmt: skip
def test_a_published_model_has_the_published_number_of_parameters(
    config: dict[str, Any], parameters: int
) -> None:
    model = ModelConfig.from_hf(config)
    network = importlib.import_module(f"octavo.models.{model.network}")
    shapes = dict(network.tensor_shapes(model))
    if not model.tie_word_embeddings:
        shapes[network.HEAD] = (model.vocab_size, model.hidden_size)
    assert sum(math.prod(shape) for shape in shapes.values()) == parameters
