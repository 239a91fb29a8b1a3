"""Every architecture and rope variant: logits and greedy tokens of Transformers, through the paged cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import CLASSES, PagedDriver, hf_logits, random_ids, saved, tiny_hf_model
from transformers import Qwen3ForCausalLM

from octavo.models.registry import load_model

TOLERANCE = 1e-4
LONG, SHORT = 29, 11

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gpt2-one-layer": ("gpt2", {"n_layer": 1}),
    "gpt2-untied-inner": ("gpt2", {"tie_word_embeddings": False, "n_inner": 50}),
    "gpt2-eps": ("gpt2", {"layer_norm_epsilon": 0.1}),
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-mha": ("llama", {"num_key_value_heads": 6}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-head-dim-derived": ("llama", {"head_dim": None}),
    "llama-head-dim-odd-size": ("llama", {"head_dim": 10}),
    "llama-one-layer": ("llama", {"num_hidden_layers": 1}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0}}),
    "llama-dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}),
    "llama-llama3": ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 500.0}}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-yarn-factors": (
        "llama",
        {
            "rope_parameters": {
                **YARN,
                "beta_fast": 8.0,
                "beta_slow": 2.0,
                "truncate": False,
                "mscale": 0.7,
                "mscale_all_dim": 0.4,
            }
        },
    ),
    "llama-yarn-attention-factor": ("llama", {"rope_parameters": {**YARN, "attention_factor": 1.3}}),
    "qwen2": ("qwen2", {"head_dim": 8}),
    "qwen2-tied": ("qwen2", {"head_dim": 8, "tie_word_embeddings": True}),
    "qwen2-theta": ("qwen2", {"head_dim": 8, "rope_parameters": {"rope_theta": 1e6}}),
    "qwen2-window-upper": (
        "qwen2",
        {"head_dim": 8, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen2-yarn": ("qwen2", {"head_dim": 8, "rope_parameters": YARN}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3-layer-types": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3-llama3": ("qwen3", {"rope_parameters": {**LLAMA3, "rope_theta": 500.0}}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe-normalised": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3_moe-every-second-layer": ("qwen3_moe", {"decoder_sparse_step": 2}),
    "qwen3_moe-mlp-only": ("qwen3_moe", {"mlp_only_layers": [0, 2], "attention_bias": True}),
    "qwen3_moe-one-expert": ("qwen3_moe", {"num_experts_per_tok": 1, "num_experts": 1}),
    "qwen3_moe-window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 6}),
    "qwen3_moe-tied": ("qwen3_moe", {"tie_word_embeddings": True}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen2_moe-normalised": ("qwen2_moe", {"norm_topk_prob": True, "qkv_bias": False}),
    "qwen2_moe-window": (
        "qwen2_moe",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1, "mlp_only_layers": [1]},
    ),
    "mixtral": ("mixtral", {}),
    "mixtral-window": ("mixtral", {"sliding_window": 6, "num_experts_per_tok": 1}),
    "mistral-window": ("mistral", {"sliding_window": 6}),
    "mistral-window-1": ("mistral", {"sliding_window": 1}),
    "mistral-window-longer": ("mistral", {"sliding_window": 100}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "mistral-dynamic": ("mistral", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_in_chunks_and_in_a_batch(variant: str, tmp_path: Path) -> None:
    model_type, overrides = VARIANTS[variant]
    hf = tiny_hf_model(model_type, **overrides)
    loaded = load_model(saved(hf, tmp_path))
    long, short = random_ids(LONG, seed=1), random_ids(SHORT, seed=2)
    driver = PagedDriver(loaded)
    # Two chunks of the prompt, the second mixed with another request's prefill, then decode steps for both.
    pieces = [driver.step({"long": long[:10]})["long"]]
    mixed = driver.step({"short": short[:-2], "long": long[10:-2]})
    pieces.append(mixed["long"])
    short_pieces = [mixed["short"]]
    for i in (-2, -1):
        last = driver.step({"long": [long[i]], "short": [short[i]]})
        pieces.append(last["long"])
        short_pieces.append(last["short"])
    torch.testing.assert_close(torch.cat(pieces), hf_logits(hf, long), rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(torch.cat(short_pieces), hf_logits(hf, short), rtol=0, atol=TOLERANCE)
    assert hf_logits(hf, long).std() > 0.3, (
        "the oracle's logits must be varied, or the comparison says nothing"
    )


@pytest.mark.parametrize("model_type", sorted(CLASSES))
def test_greedy_tokens_equal_transformers(model_type: str, tmp_path: Path) -> None:
    # chosen so that the answer is not one token over and over
    overrides: dict[str, Any] = {"tie_word_embeddings": False} if model_type == "gpt2" else {"head_dim": 8}
    hf = tiny_hf_model(model_type, seed=6 if model_type == "qwen2_moe" else 3, **overrides)
    loaded = load_model(saved(hf, tmp_path))
    prompt = random_ids(9, seed=4)
    expected = list(prompt)
    for _ in range(20):
        expected.append(int(hf_logits(hf, expected)[-1].argmax()))
    assert PagedDriver(loaded).greedy(prompt, 20) == expected[9:]
    assert len(set(expected[9:])) > 5


OLD_KEYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "theta": ({"rope_theta": 300.0}, {"rope_theta": 300.0}),
    "linear": (
        {"rope_scaling": {"type": "linear", "factor": 3.0}, "rope_theta": 300.0},
        {"rope_type": "linear", "factor": 3.0, "rope_theta": 300.0},
    ),
    "dynamic": (
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0},
    ),
    "llama3": ({"rope_scaling": LLAMA3, "rope_theta": 500.0}, {**LLAMA3, "rope_theta": 500.0}),
    "yarn": (
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
        {**YARN, "rope_theta": 10_000.0},
    ),
}


@pytest.mark.parametrize("name", OLD_KEYS)
def test_old_rope_keys_mean_the_same(name: str, tmp_path: Path) -> None:
    old, new = OLD_KEYS[name]
    hf = tiny_hf_model("llama", rope_parameters=dict(new))
    folder = saved(hf, tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    assert config.pop("rope_parameters")["rope_theta"] == new["rope_theta"]
    path.write_text(json.dumps({**config, **old}))
    ids = random_ids(LONG, seed=1)
    logits = PagedDriver(load_model(folder)).step({"a": ids})["a"]
    torch.testing.assert_close(logits, hf_logits(hf, ids), rtol=0, atol=TOLERANCE)


@pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning")  # its new name is not in older versions
def test_dynamic_rope_equals_cached_decode_past_the_limit(tmp_path: Path) -> None:
    """Past max_position_embeddings the oracle depends on its cache; a token a step is well defined."""
    rope = {"rope_type": "dynamic", "factor": 2.0}
    hf = tiny_hf_model("llama", max_position_embeddings=16, rope_parameters=rope)
    driver = PagedDriver(load_model(saved(hf, tmp_path)))
    ids = random_ids(31, seed=5)
    with torch.inference_mode():
        result = hf(torch.tensor([ids[:12]]), use_cache=True)
        torch.testing.assert_close(
            driver.step({"a": ids[:12]})["a"], result.logits[0], rtol=0, atol=TOLERANCE
        )
        for token in ids[12:]:
            result = hf(torch.tensor([[token]]), past_key_values=result.past_key_values, use_cache=True)
            logits = driver.step({"a": [token]})["a"]
            torch.testing.assert_close(logits, result.logits[0], rtol=0, atol=TOLERANCE)
    # and it is the scaling that is tested: without it the last logits are others
    plain = tiny_hf_model("llama", max_position_embeddings=16)
    assert (hf_logits(plain, ids)[-1] - logits[-1]).abs().max() > 0.01


def test_a_sharded_checkpoint_reads_like_a_single_one(tmp_path: Path) -> None:
    hf = tiny_hf_model("qwen3", attention_bias=True)
    folder = saved(hf, tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    ids = random_ids(LONG, seed=1)
    seen: list[tuple[int, int]] = []
    loaded = load_model(folder, progress=lambda name, done, total: seen.append((done, total)))
    torch.testing.assert_close(
        PagedDriver(loaded).step({"a": ids})["a"], hf_logits(hf, ids), rtol=0, atol=TOLERANCE
    )
    total = len(hf.state_dict())
    assert seen == [(i + 1, total) for i in range(total)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_checkpoints_and_activations(dtype: str, tmp_path: Path) -> None:
    torch_dtype = getattr(torch, dtype)
    folder = saved(tiny_hf_model("qwen3").to(torch_dtype), tmp_path)
    # read back, because .to() has rounded the rope frequencies as well
    in_dtype = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch_dtype).eval()
    ids = random_ids(LONG, seed=1)
    exact = hf_logits(Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), ids)
    # float32 activations read the low-precision weights exactly
    in_float32 = load_model(folder)
    assert in_float32.dtype == torch.float32
    assert in_float32.config.dtype == dtype
    torch.testing.assert_close(PagedDriver(in_float32).step({"a": ids})["a"], exact, rtol=0, atol=TOLERANCE)
    # the low precision itself: within twice the error Transformers makes in it
    loaded = load_model(folder, dtype=dtype)
    logits = PagedDriver(loaded).step({"a": ids})["a"]
    assert logits.dtype == torch.float32
    theirs = (hf_logits(in_dtype, ids) - exact).square().mean().sqrt()
    ours = (logits - exact).square().mean().sqrt()
    assert 0 < ours <= 2 * theirs
