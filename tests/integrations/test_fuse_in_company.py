"""`fuse` where others are at work on the model, too: hooks, transforms, captures, parametrizations."""

import functools
import gc
import io
import sys
import types
import weakref

import pytest
import torch
from helpers.hf_generation import prompts, tiny_model
from torch import nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from octavo.integrations.transformers import angles, fuse, fused, unfuse

IDS = torch.tensor(prompts(9))
PLACES = torch.arange(9)[None]


@pytest.fixture
def model():
    return tiny_model("llama", "sdpa").requires_grad_(False)


@pytest.mark.parametrize("layer", ["gate_proj", "up_proj"])
def test_what_a_hook_learns_gets_its_gradients(layer):
    def grad(is_fused):
        model = tiny_model("llama", "sdpa").requires_grad_(False)
        if is_fused:
            fuse(model)
        learned = nn.Parameter(torch.zeros(80))
        model.model.layers[0].mlp.get_submodule(layer).register_forward_hook(lambda _, __, out: out + learned)
        model(input_ids=IDS, labels=IDS).loss.backward()
        return learned.grad

    want = grad(False)
    assert want.norm() > 0.1
    torch.testing.assert_close(grad(True), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_checkpointing_has_the_same_gradients_to_the_bit(is_reentrant):
    def grads(is_fused):
        model = tiny_model("llama", "sdpa").train()
        if is_fused:
            fuse(model)
        x = model.get_input_embeddings()(IDS)
        run = functools.partial(checkpoint, use_reentrant=is_reentrant)
        for layer in model.model.layers:
            x = run(lambda x, layer=layer: layer(x, position_embeddings=model.model.rotary_emb(x, PLACES)), x)
        model.model.norm(x).square().sum().backward()
        return [p.grad for p in model.model.parameters()]

    assert all(torch.equal(*pair) for pair in zip(grads(True), grads(False), strict=True))


def test_products_of_another_layout_are_made_once(model):
    mlp, runs = model.model.layers[0].mlp, []
    x = torch.randn(3, 48)
    want = mlp(x)
    fuse(model)
    mlp.gate_proj.register_forward_hook(lambda _, __, out: runs.append(1) or out.t().contiguous().t())
    torch.testing.assert_close(mlp(x), want)
    assert len(runs) == 1


def test_a_hook_for_all_modules_sees_the_activation(model):
    mlp, seen = model.model.layers[0].mlp, []
    fuse(model)
    hook = nn.modules.module.register_module_forward_hook(lambda module, _, __: seen.append(module))
    try:
        mlp(torch.randn(3, 48))
    finally:
        hook.remove()
    assert seen == [mlp.gate_proj, mlp.act_fn, mlp.up_proj, mlp.down_proj, mlp]


def forward_mode(f, x, t):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, t))).tangent


TRANSFORMS = {
    "forward_ad": forward_mode,
    "jvp": lambda f, x, t: torch.func.jvp(f, (x,), (t,))[1],
    "vmap": lambda f, x, t: torch.vmap(f)(x),
    "make_fx": lambda f, x, t: make_fx(f)(x)(t),
    "grad": lambda f, x, t: torch.func.grad(lambda x: f(x).sum())(x),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # in torch
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("part", ["norm", "layers.0.mlp"])
def test_transforms_see_the_modules_own_operators(model, part, name):
    module = model.model.get_submodule(part)
    x, t = torch.randn(2, 3, 48), torch.randn(2, 3, 48)
    want = TRANSFORMS[name](module, x, t)
    fuse(model)
    assert torch.equal(TRANSFORMS[name](module, x, t), want)


def layers_that_turn(model):
    """Each layer turns what it is given, by the angles that it is given."""
    fuse(model)
    x = torch.randn(1, 4, 48)
    return [
        lambda cos, sin, layer=layer: layer(x, position_embeddings=(cos, sin)) for layer in model.model.layers
    ]


def angles_at(model, *positions):
    return [y.clone() for y in model.model.rotary_emb(torch.zeros(1, 4, 48), torch.tensor([positions]))]


def own(model, layer, cos, sin):
    unfuse(model)
    want = layer(cos, sin)
    fuse(model)
    return want


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "capture"])
def test_angles_that_are_written_over_are_seen(model, mode, monkeypatch):
    with torch.inference_mode(mode == "inference_mode"):
        (cos, sin), others = angles_at(model, 0, 1, 2, 3), angles_at(model, 0, 9, 30, 77)
        first, second = layers_that_turn(model)
        first(cos, sin)  # warming up
        if mode == "capture":
            before = angles._kept[id(cos)]
            monkeypatch.setattr(angles, "_is_capturing", lambda x: True)
            first(cos, sin)
            assert angles._kept[id(cos)] is not before  # what a graph does not make it does not renew
        for new_cos, new_sin in (others, angles_at(model, 5, 6, 7, 50)):
            cos.copy_(new_cos)
            sin.copy_(new_sin)
            torch.testing.assert_close(first(cos, sin), own(model, first, cos, sin))
            first(cos, sin)
            made = angles._kept[id(cos)]
            torch.testing.assert_close(second(cos, sin), own(model, second, cos, sin))
            assert angles._kept[id(cos)] is made  # made once for all layers
        if mode == "capture":
            monkeypatch.undo()
            first(cos, sin)
            assert angles._kept[id(cos)] is not made  # its memory is the graph's


def test_angles_die_with_the_cosines_and_are_not_saved_with_them(model):
    cos, sin = angles_at(model, 0, 1, 2, 3)
    layers_that_turn(model)[0](cos, sin)
    file = io.BytesIO()
    torch.save((cos, sin), file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True)[0], cos)
    key, table = id(cos), weakref.ref(angles._kept[id(cos)].table)
    del cos
    assert key not in angles._kept
    assert table() is None


def test_a_norm_of_what_no_kernel_reads_is_the_modules_own():
    norm = nn.RMSNorm(16, eps=1e-6).requires_grad_(False).eval()
    x = torch.randn(16, 5).t()
    want = norm(x)
    fuse(nn.ModuleList([norm]))
    assert torch.equal(norm(x), want)
    with pytest.raises(RuntimeError, match="normalized_shape"):  # torch's own word
        norm(torch.randn(3, 8))


def test_a_norm_keeps_heads_by_token_in_memory():
    norm = nn.RMSNorm(16, eps=1e-6).requires_grad_(False).eval()
    by_token, by_head = torch.randn(2, 5, 3, 16), torch.randn(2, 3, 5, 16)
    want = norm(by_token), norm(by_head)
    fuse(nn.ModuleList([norm]))
    for _ in range(2):
        got = norm(by_token.transpose(1, 2))
        torch.testing.assert_close(got.transpose(1, 2), want[0])
        assert got.transpose(1, 2).is_contiguous()
        got = norm(by_head)
        torch.testing.assert_close(got, want[1])
        assert got.is_contiguous()


NOTEBOOK = """
import torch
from torch import nn

def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    def turned(x):
        a, b = x.chunk(2, -1)
        return x * cos.unsqueeze(1) + torch.cat((-b, a), -1) * sin.unsqueeze(1)
    return turned(q), turned(k)

def scale():
    return 1.0

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qk = nn.Linear(16, 32)

    def forward(self, x, cos, sin):
        q, k = (y.transpose(1, 2) for y in self.qk(x)[:, :, None].chunk(2, -1))
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return max(scale(), 0.5) * q

class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", 0.01 ** (torch.arange(8) / 8))

    def forward(self, x, position_ids):
        turn = (position_ids[..., None] * self.inv_freq).repeat(1, 1, 2)
        return turn.cos(), turn.sin()

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.rotary = Attention(), Rotary()

    def forward(self, x):
        return self.attention(x, *self.rotary(x, torch.arange(x.shape[1])[None]))

model = Model()
"""


@torch.no_grad()
def test_a_notebook_goes_on(monkeypatch):
    notebook = types.ModuleType("notebook")
    monkeypatch.setitem(sys.modules, "notebook", notebook)
    exec(NOTEBOOK, vars(notebook))
    x = torch.randn(1, 4, 16)
    want = notebook.model(x)
    assert fuse(notebook.model).rotary == 1
    torch.testing.assert_close(notebook.model(x), want)
    exec("def scale():\n    return 2.0", vars(notebook))
    torch.testing.assert_close(notebook.model(x), 2 * want)
    gone = weakref.ref(notebook.model), weakref.ref(notebook.Attention)
    del notebook.model, notebook.Attention
    gc.collect()
    assert [g() is None for g in gone] == [True, True]


def test_classes_are_shared_while_they_are_used_and_die_after():
    class Norm(nn.RMSNorm):
        """Of a test."""

    first, second = Norm(8, eps=1e-6), Norm(8, eps=1e-6)
    fuse(nn.ModuleList([first]))
    fuse(nn.ModuleList([second]))
    assert type(first) is type(second) is not Norm
    gone = weakref.ref(Norm)
    del first, second, Norm
    gc.collect()
    assert gone() is None


def test_a_parametrization_that_came_later_stays(model):
    class Doubled(nn.Module):
        def forward(self, x):
            return 2 * x

    fuse(model)
    norm = model.model.norm
    parametrize.register_parametrization(norm, "weight", Doubled())
    want = model(IDS).logits
    fuse(model)
    unfuse(model)
    torch.testing.assert_close(model(IDS).logits, want, rtol=1e-4, atol=1e-4)
    parametrize.remove_parametrizations(norm, "weight")
    assert fused.is_fused(norm)
    unfuse(model)
    assert not fused.is_fused(norm)


def test_layouts_forgotten_in_between_are_learned_again(monkeypatch):
    """As when another thread makes room in them between a question and its answer."""

    class Forgetful(dict):
        def __contains__(self, key):
            found = super().__contains__(key)
            self.clear()
            return found

    monkeypatch.setattr(angles, "_calls", Forgetful())
    q, k, turn = torch.randn(1, 1, 5, 8), torch.randn(1, 1, 5, 8), torch.rand(1, 5, 8)
    want = angles.rotated(q, k, turn, turn)
    got = angles.rotated(q, k, turn, turn)
    assert torch.equal(got[0], want[0])
