"""What `fuse` tries before it replaces anything: modules that differ from our kernels in one thing only."""

import types

import pytest
import torch
import transformers
from helpers.hf_generation import prompts, tiny_model
from torch import nn
from torch.nn import functional
from transformers.activations import ACT2FN
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4MLP

from octavo.integrations.transformers import Fused, angles, fuse, unfuse

LEFT_ALONE = "computes something else"


class Norm(nn.Module):
    """A plain one, whose subclasses are not."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(64)), 1e-6

    def forward(self, x):
        return self.wide(x.float(), self.weight.float()).to(x.dtype)

    def wide(self, x, weight):
        return functional.rms_norm(x, (64,), weight, self.eps)


class ClampsInput(Norm):
    def wide(self, x, weight):
        return super().wide(x.clamp(-60, 60), weight)


class ClampsWeight(Norm):
    def wide(self, x, weight):
        return super().wide(x, weight.clamp(-2, 2))


class ClampsOutput(Norm):
    def wide(self, x, weight):
        return super().wide(x, weight).clamp(-8, 8)


class ClampsPeaks(Norm):
    def wide(self, x, weight):
        return weight * functional.rms_norm(x, (64,), None, self.eps).clamp(-3, 3)


class OnePercentMore(Norm):
    def wide(self, x, weight):
        return 1.01 * super().wide(x, weight)


class TrainsApart(Norm):
    def wide(self, x, weight):
        return super().wide(x, weight) + self.training


class GatedMLP(nn.Module):
    def __init__(self, activation=None):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 12), nn.Linear(8, 12)
        self.down_proj, self.act_fn = nn.Linear(12, 8), activation or nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Drops(GatedMLP):
    def forward(self, x):
        inner = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(functional.dropout(inner, 0.5, self.training))


class SiLU(nn.Module):
    """One by name."""

    def forward(self, x):
        return 2 * functional.silu(x)


def deepseek_v4():
    return DeepseekV4MLP(transformers.DeepseekV4Config(hidden_size=16, intermediate_size=24))


dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


@dtypes
@pytest.mark.parametrize(
    "made",
    [ClampsInput, ClampsWeight, ClampsOutput, ClampsPeaks, OnePercentMore, deepseek_v4],
)
def test_what_differs_in_one_thing_is_left_alone(made, dtype):
    module = made().to(dtype).eval()
    state = torch.get_rng_state()
    assert fuse(nn.ModuleList([module])) == Fused(left_alone={f"{type(module).__name__} {LEFT_ALONE}": 1})
    assert torch.equal(torch.get_rng_state(), state)


@dtypes
def test_what_does_not_is_replaced(dtype):
    assert fuse(nn.ModuleList([Norm(), GatedMLP(), GatedMLP(ACT2FN["silu"])]).to(dtype)) == Fused(1, 2)


@pytest.mark.parametrize("made", [TrainsApart, Drops])
def test_what_trains_apart_does_so(made):
    module = made()
    x = torch.randn(3, 64 if made is TrainsApart else 8)
    with torch.no_grad():
        torch.manual_seed(0)
        want = module(x)
        for is_trained in (True, False):
            unfuse(module)
            assert not fuse(nn.ModuleList([module.train(is_trained)])).left_alone
            torch.manual_seed(0)
            assert torch.equal(module.train()(x), want)
            assert not torch.allclose(module.eval()(x), want)


class HalfOnly(Norm):
    def forward(self, x):
        if x.dtype == torch.float32:
            raise TypeError
        return super().forward(x)


def test_what_does_not_run_in_float32_is_tried_in_its_own_dtype():
    assert fuse(nn.ModuleList([HalfOnly().half()])) == Fused(1)


def test_an_activation_is_known_by_what_it_is():
    patched = GatedMLP(ACT2FN["silu"])
    patched.act_fn.forward = torch.relu
    model = nn.ModuleList([GatedMLP(), GatedMLP(SiLU()), patched]).eval()
    x = torch.randn(3, 8)
    with torch.no_grad():
        want = [m(x) for m in model]
        assert fuse(model) == Fused(mlps=1)
        for module, exact in zip(model, want, strict=True):
            torch.testing.assert_close(module(x), exact)
        model[0].act_fn = patched.act_fn
        model[0].gate_proj, model[0].up_proj, model[0].down_proj = (
            patched.gate_proj,
            patched.up_proj,
            patched.down_proj,
        )
        assert torch.equal(model[0](x), want[2])


def test_a_default_device_is_not_where_a_model_is():
    model = tiny_model("qwen3")
    for layer in model.model.layers:
        layer.mlp = nn.Identity()
    torch.set_default_device("meta")
    try:
        assert fuse(model) == Fused(norms=9, rotary=2)
    finally:
        torch.set_default_device(None)


def launches_of_rotary(model, monkeypatch, batch):
    counts = []
    before = angles._Call.__call__
    monkeypatch.setattr(angles._Call, "__call__", lambda *args: counts.append(1) or before(*args))
    with torch.no_grad():
        model(torch.tensor(prompts(*[6] * batch)), use_cache=False)
    return len(counts)


SIZES = {
    "vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "pad_token_id": 0,
    "num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": None,
}  # fmt: skip


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", ["Apertus", "GPTNeoX", "StableLm"])
def test_rotary_embeddings_that_are_counted_run(name, batch, monkeypatch):
    """Norms of heads whose tokens follow each other in memory; a part of each head, inside and outside."""
    config = getattr(transformers, f"{name}Config")(**SIZES, max_position_embeddings=32768)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    found = fuse(model)
    assert found.rotary == (0 if name == "GPTNeoX" else 2)
    assert launches_of_rotary(model, monkeypatch, batch) == found.rotary


def test_pairs_that_are_neighbours_are_not_counted():
    attention = next(m for m in tiny_model("llama").modules() if type(m).__name__ == "LlamaAttention")
    attention.config = types.SimpleNamespace(rope_interleave=True)
    assert fuse(nn.ModuleList([attention])) == Fused(
        left_alone={"LlamaAttention turns pairs that are neighbours": 1}
    )
