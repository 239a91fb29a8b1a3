"""Checkpoints that store the same tensors in another way: fused experts, Mixtral's names, GPT-2's layouts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.models import PagedDriver, hf_logits, random_ids, saved, tiny_hf_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.errors import WeightsError
from octavo.models.registry import load_model

IDS = random_ids(17, seed=1)
Tensors = dict[str, Tensor]


def rewritten(model_type: str, folder: Path, change: Callable[[Tensors], Tensors]) -> tuple[str, Tensor]:
    """A folder whose checkpoint went through `change`, and the logits that Transformers has for it."""
    hf = tiny_hf_model(model_type)
    path = saved(hf, folder)
    tensors = change(load_file(folder / "model.safetensors"))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return path, hf_logits(hf, IDS)


def fused(tensors: Tensors) -> Tensors:
    """One tensor of all experts, as Transformers 5 holds them: (E, 2 I, H), gate first, and (E, H, I)."""
    result = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(3):
        at = f"model.layers.{layer}.mlp.experts."

        def every(kind: str, at: str = at) -> Tensor:
            return torch.stack([tensors[f"{at}{expert}.{kind}_proj.weight"] for expert in range(5)])

        result[at + "gate_up_proj"] = torch.cat([every("gate"), every("up")], dim=1)
        result[at + "down_proj"] = every("down")
    return result


def without_prefix_and_with_masks(tensors: Tensors) -> Tensors:
    """GPT-2 as it was published: no prefix, and the causal mask of each layer among the weights."""
    result = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    for layer in range(3):
        result[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 64, 64).tril()
        result[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    return result


@pytest.mark.parametrize(
    ("model_type", "change"),
    [
        ("qwen3_moe", fused),
        ("qwen2_moe", fused),
        ("mixtral", dict),  # its own names: block_sparse_moe, w1, w2, w3
        ("gpt2", dict),
        ("gpt2", without_prefix_and_with_masks),
    ],
)
def test_the_model_is_the_same(model_type: str, change: Callable[[Tensors], Tensors], tmp_path: Path) -> None:
    path, expected = rewritten(model_type, tmp_path, change)
    seen: list[tuple[int, int]] = []
    loaded = load_model(path, progress=lambda name, done, total: seen.append((done, total)))
    torch.testing.assert_close(PagedDriver(loaded).step({"a": IDS})["a"], expected, rtol=0, atol=1e-4)
    assert [done for done, _ in seen] == list(range(1, seen[-1][1] + 1))


def test_a_fused_checkpoint_that_lacks_a_tensor_or_has_another_shape_is_refused(tmp_path: Path) -> None:
    def cut(tensors: Tensors) -> Tensors:
        result = fused(tensors)
        result["model.layers.1.mlp.experts.down_proj"] = result["model.layers.1.mlp.experts.down_proj"][:4]
        return result

    path, _ = rewritten("qwen3_moe", tmp_path, cut)
    with pytest.raises(WeightsError, match=r"missing.*model.layers.1.mlp.experts.4.down_proj.weight"):
        load_model(path)

    def narrow(tensors: Tensors) -> Tensors:
        result = fused(tensors)
        result["model.layers.1.mlp.experts.gate_up_proj"] = torch.zeros(5, 38, 48)
        return result

    path, _ = rewritten("qwen3_moe", tmp_path, narrow)
    with pytest.raises(WeightsError, match=r"0.gate_proj.weight: expected \(20, 48\), got \(19, 48\)"):
        load_model(path)
