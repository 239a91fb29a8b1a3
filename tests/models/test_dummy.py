"""Dummy weights are drawn where they are to be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.models.registry import load_model
from octavo.models.weights.dummy import DummyCheckpoint

CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 101,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


@pytest.fixture
def filled(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The tensors that a dummy checkpoint was asked to fill."""
    found: list[torch.Tensor] = []
    read_into = DummyCheckpoint.read_into

    def spy(checkpoint: DummyCheckpoint, name: str, out: torch.Tensor) -> None:
        found.append(out)
        read_into(checkpoint, name, out)

    monkeypatch.setattr(DummyCheckpoint, "read_into", spy)
    return found


def test_they_are_drawn_on_the_device_they_are_for(tmp_path: Path, filled: list[torch.Tensor]) -> None:
    """Drawn on the CPU, those of a small model take five seconds before they are copied."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    load_model(str(tmp_path), load_format="dummy", device="meta")
    assert len(filled) > 40
    assert {out.device.type for out in filled} == {"meta"}


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_matrix_that_is_not_packed_is_the_very_tensor_that_was_filled(
    tmp_path: Path, filled: list[torch.Tensor], deterministic: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    options: Any = {"device": "meta", "deterministic": deterministic}
    model = load_model(str(tmp_path), load_format="dummy", **options).model
    assert model.weights_form == ("invariant" if deterministic else "dense")
    storages = {out.untyped_storage()._cdata for out in filled}
    for layer in model.layers:
        assert layer.attention.qkv.weight.data.untyped_storage()._cdata in storages
        assert layer.attention.output.weight.data.untyped_storage()._cdata in storages


def test_values_depend_on_the_name_and_the_seed_alone() -> None:
    shapes = dict.fromkeys(("a", "b"), (4, 300))

    def read(name: str, seed: int) -> torch.Tensor:
        out = torch.empty(4, 300)
        DummyCheckpoint(shapes, seed).read_into(name, out)
        return out

    first = read("a", 1)
    assert torch.equal(first, read("a", 1))
    assert not torch.equal(first, read("a", 2))
    assert not torch.equal(first, read("b", 1))
    assert first.abs().max() <= 0.1
    assert first.std() == pytest.approx(300**-0.5, rel=0.1)
