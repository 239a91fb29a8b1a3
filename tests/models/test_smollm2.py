"""The real SmolLM2-135M: our logits against Transformers on the same dequantised weights."""

from __future__ import annotations

import pytest
import torch
from helpers.models import PagedDriver, hf_logits
from helpers.smollm2 import transformers_smollm2

from octavo.models.registry import load_model

pytestmark = pytest.mark.model

PROMPT = [504, 3575, 282, 4649, 314, 7042, 28, 284, 260, 3575, 282, 4986, 314]


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
    expected = hf_logits(transformers_smollm2(), PROMPT + tokens[:-1])
    torch.testing.assert_close(torch.cat(pieces), expected, rtol=0, atol=5e-4)
    assert expected[len(PROMPT) - 1 :].argmax(1).tolist() == tokens
