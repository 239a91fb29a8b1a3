"""The real SmolLM2-135M: our logits against Transformers on the same dequantised weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from helpers.gguf_files import NAMES
from helpers.models import PagedDriver, hf_logits
from transformers import LlamaConfig, LlamaForCausalLM

from octavo.models.registry import load_model
from octavo.models.source import resolve_model

pytestmark = pytest.mark.model

PROMPT = [504, 3575, 282, 4649, 314, 7042, 28, 284, 260, 3575, 282, 4986, 314]
HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64


def oracle(path: Path) -> Any:
    """Transformers' Llama with the file's weights, read by the gguf package itself."""
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
    )
    state: dict[str, torch.Tensor] = {}
    names = {value: key for key, value in NAMES.items()}
    for tensor in gguf.GGUFReader(path).tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        *where, stem, kind = tensor.name.split(".")
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(stem)
        if heads:
            values = values.reshape(heads, HEAD_DIM // 2, 2, -1).swapaxes(1, 2).reshape(values.shape)
        prefix = f"model.layers.{where[1]}." if where else ""
        state[f"{prefix}{names[stem]}.{kind}"] = torch.from_numpy(np.array(values))
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


def test_logits_and_greedy_tokens_equal_transformers() -> None:
    loaded = load_model("smollm2-135m")
    assert (loaded.config.num_layers, loaded.config.num_heads, loaded.config.num_kv_heads) == (30, 9, 3)
    assert loaded.generation_config == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    assert loaded.model.head.weight is loaded.model.embedding.weight
    driver = PagedDriver(loaded, block_size=16)
    pieces = [driver.step({"a": PROMPT[:5]})["a"], driver.step({"a": PROMPT[5:]})["a"]]
    tokens = [int(pieces[-1][-1].argmax())]
    while len(tokens) < 20:
        pieces.append(driver.step({"a": tokens[-1:]})["a"])
        tokens.append(int(pieces[-1][-1].argmax()))
    # one forward over all of it: its greedy choice at each position must be the token we took there
    expected = hf_logits(oracle(resolve_model("smollm2-135m").path), PROMPT + tokens[:-1])
    torch.testing.assert_close(torch.cat(pieces), expected, rtol=0, atol=5e-4)
    assert expected[len(PROMPT) - 1 :].argmax(1).tolist() == tokens
