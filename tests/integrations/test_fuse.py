"""`fuse`: the same model with Octavo's norms, gated MLPs and rotary embeddings, and the same results."""

import copy
import functools
import gc
import io
import logging
import pickle
import weakref

import numpy as np
import pytest
import torch
import transformers
from helpers.hf_generation import batching, continued, greedy, padded, prompts, tiny_model
from helpers.kernels import IMPLEMENTATIONS
from torch import nn

from octavo.errors import ConfigError
from octavo.integrations import transformers as integration
from octavo.integrations.transformers import Fused, angles, fuse, fused, unfuse
from octavo.kernels import backend, known_calls

ROWS = prompts(13, 20, 1, 17)
KINDS = {
    "qwen3": Fused(norms=9, mlps=2, rotary=2),
    "llama": Fused(norms=5, mlps=2, rotary=2),
    "qwen2": Fused(norms=5, mlps=2, rotary=2),
    "mistral-window": Fused(norms=5, mlps=2, rotary=2),
    "gemma2-softcap-window": Fused(rotary=2, left_alone={"Gemma2RMSNorm computes something else": 9}),
    "gpt_oss-sinks-window": Fused(
        norms=5, left_alone={"GptOssAttention has angles of another form": 2}
    ),
    "gpt2": Fused(),
}  # fmt: skip
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def launches(monkeypatch):
    """How often each of our kernels ran."""
    counts = {"norm": 0, "silu": 0, "rotary": 0}

    def counted(what, function):
        def call(*args, **kwargs):
            counts[what] += 1
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(fused, "rms_norm", counted("norm", fused.rms_norm))
    monkeypatch.setattr(fused, "silu_and_mul", counted("silu", fused.silu_and_mul))
    monkeypatch.setattr(angles._Call, "__call__", counted("rotary", angles._Call.__call__))
    return counts


@torch.no_grad()
def logits(model, **inputs):
    inputs = inputs or padded(ROWS)
    found = model(**inputs).logits[inputs["attention_mask"] == 1]
    return found if found.dtype == torch.float64 else found.float()


@kinds
def test_a_left_padded_batch_generates_the_same_tokens(kind, launches):
    model = tiny_model(kind)
    want = model.generate(**padded(ROWS), generation_config=greedy())
    exact = logits(model)
    found = fuse(model)
    assert found == KINDS[kind]
    launches.update(norm=0, silu=0, rotary=0)
    assert model.generate(**padded(ROWS), generation_config=greedy()).tolist() == want.tolist()
    assert launches == {"norm": 10 * found.norms, "silu": 10 * found.mlps, "rotary": 10 * found.rotary}
    torch.testing.assert_close(logits(model), exact, rtol=1e-4, atol=1e-4)


@kinds
def test_bfloat16_is_as_near_to_float32_as_before(kind):
    model = tiny_model(kind)
    exact = logits(model)
    theirs = (logits(model.bfloat16()) - exact).abs()
    fuse(model)
    ours = (logits(model) - exact).abs()
    assert ours.square().mean().sqrt() <= 1.5 * theirs.square().mean().sqrt()
    assert ours.max() <= 2 * theirs.max()


@pytest.mark.parametrize("attention", ["sdpa", "eager", "octavo"])
def test_with_every_attention(attention, launches):
    model = tiny_model("qwen3", attention)
    ids = torch.tensor(prompts(11))
    want = model.generate(ids, generation_config=greedy())
    fuse(model)
    assert model.generate(ids, generation_config=greedy()).tolist() == want.tolist()
    assert min(launches.values()) >= 20


@pytest.mark.parametrize("room", IMPLEMENTATIONS)
def test_on_the_kernels_of_every_room(room, launches):
    model = tiny_model("qwen3", "sdpa", num_hidden_layers=1)
    inputs = padded(prompts(5, 3))
    want = model.generate(**inputs, generation_config=greedy(4))
    exact = logits(model, **inputs)
    with backend.use(room), np.errstate(all="ignore"):  # lanes that are masked later
        fuse(model)
        launches.update(norm=0, silu=0, rotary=0)
        assert model.generate(**inputs, generation_config=greedy(4)).tolist() == want.tolist()
        assert launches == {"norm": 4 * 5, "silu": 4, "rotary": 4}
        torch.testing.assert_close(logits(model, **inputs), exact, rtol=1e-4, atol=1e-4)
        alone = logits(model, **padded(prompts(5, 3)[:1]))  # the strides of both, in half as many rows
        torch.testing.assert_close(alone, exact[:5], rtol=1e-4, atol=1e-4)
        model.model.norm.variance_epsilon = 0.5
        got = logits(model, **inputs)
    unfuse(model)
    torch.testing.assert_close(got, logits(model, **inputs), rtol=1e-4, atol=1e-4)


def test_continuous_batching(launches):
    model = tiny_model("qwen3")
    want = continued(model, ROWS, batching())
    fuse(model)
    assert continued(model, ROWS, batching()) == want
    assert min(launches.values()) >= 20


def test_a_training_step_has_the_same_gradients_to_the_bit(launches):
    plain, model = tiny_model("qwen3", "sdpa"), tiny_model("qwen3", "sdpa")
    fuse(model)
    launches.update(norm=0, silu=0, rotary=0)
    ids = torch.tensor(prompts(9, 9))
    for m in (plain, model):
        m.train()
        m(input_ids=ids, labels=ids).loss.backward()
    for (name, want), (_, got) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(want.grad, got.grad), name
    assert set(launches.values()) == {0}
    for m in (plain, model):  # weights at rest, gradients of the inputs
        m.requires_grad_(False)
        m.x = m.get_input_embeddings()(ids).requires_grad_()
        m(inputs_embeds=m.x).logits.square().sum().backward()
    assert torch.equal(plain.x.grad, model.x.grad)
    assert set(launches.values()) == {0}
    model.eval()(input_ids=ids)  # gradients are on, and nothing wants any
    assert min(launches.values()) > 0


def test_only_classes_change_and_come_back():
    model = tiny_model("qwen3")
    before = [(m, type(m), dict(m.__dict__)) for m in model.modules()]
    names = [type(m).__name__ for m in model.modules()]
    first = fuse(model)
    now = [type(m) for m in model.modules()]
    assert sum(a is not b for a, (_, b, _) in zip(now, before, strict=True)) == 9 + 2 + 2
    assert [type(m).__name__ for m in model.modules()] == names
    assert all(isinstance(m, c) for m, c, _ in before)
    assert fuse(model) == first
    assert [type(m) for m in model.modules()] == now
    unfuse(model)
    unfuse(model)
    for module, own, content in before:
        assert type(module) is own
        assert module.__dict__.keys() == content.keys()
        assert all(module.__dict__[name] is x for name, x in content.items())


@pytest.mark.parametrize("copied", ["deepcopy", "pickle", "save"])
def test_a_copy_is_fused_and_has_its_own_weights(copied, launches):
    model = tiny_model("qwen3")
    fuse(model)
    want = logits(model)
    if copied == "deepcopy":
        other = copy.deepcopy(model)
    elif copied == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    launches.update(norm=0, silu=0, rotary=0)
    assert torch.equal(logits(other), want)
    assert launches == {"norm": 9, "silu": 2, "rotary": 2}
    unfuse(other)
    assert {type(m) for m in other.modules()} == {type(m) for m in tiny_model("qwen3").modules()}


def test_what_is_saved_is_what_was_saved_before(tmp_path):
    model = tiny_model("qwen3")
    keys = list(model.state_dict())
    fuse(model)
    assert list(model.state_dict()) == keys
    model.save_pretrained(tmp_path)
    assert "octavo" not in (tmp_path / "config.json").read_text()
    again = type(model).from_pretrained(tmp_path, attn_implementation="octavo")
    torch.testing.assert_close(logits(again), logits(model), rtol=1e-4, atol=1e-4)


def test_nothing_keeps_a_model_alive():
    model = tiny_model("qwen3")
    fuse(model)
    logits(model)
    gone = weakref.ref(model.model.layers[0].input_layernorm)
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_hooks_run_and_see_the_right_numbers():
    model = tiny_model("llama")
    layer = model.model.layers[0]
    seen = {}

    def watch(part):
        modules = {
            "norm": layer.input_layernorm, "q": layer.self_attn.q_proj, "attention": layer.self_attn,
            "gate": layer.mlp.gate_proj, "act": layer.mlp.act_fn, "mlp": layer.mlp,
        }  # fmt: skip
        for name, module in modules.items():

            def hook(_, __, out, name=name):
                seen.setdefault(name, []).append(out[0].clone() if isinstance(out, tuple) else out)

            module.register_forward_hook(hook)

    watch(layer)
    logits(model)
    fuse(model)
    logits(model)
    assert len(seen) == 6
    for name, (want, *got) in seen.items():
        assert len(got) == 1, name  # `fuse` itself runs nobody's hooks
        torch.testing.assert_close(got[0], want, rtol=1e-4, atol=1e-4)


def test_weights_that_move_change_dtype_and_are_replaced(launches):
    model = tiny_model("qwen3")
    fuse(model)
    logits(model)
    model.bfloat16()
    unfused = copy.deepcopy(model)
    unfuse(unfused)
    for m in (model, unfused):
        norm = m.model.layers[0].input_layernorm
        norm.weight = nn.Parameter(norm.weight.detach() * 3)
        norm.variance_epsilon = 0.5
        m.model.layers[1].mlp.act_fn = nn.GELU()
    launches.update(norm=0, silu=0, rotary=0)
    got = logits(model)
    assert launches == {"norm": 9, "silu": 1, "rotary": 2}
    error = (got - logits(unfused)).square().mean().sqrt() / got.square().mean().sqrt()
    assert error < 0.03
    # A norm in float32 makes float32 of bfloat16, as its own forward does.
    norm = model.model.norm.float()
    with torch.no_grad():
        assert norm(torch.ones(2, 48, dtype=torch.bfloat16)).dtype == torch.float32


def test_positions_that_differ_from_row_to_row_and_from_call_to_call():
    model = tiny_model("qwen3")
    ids = torch.tensor(prompts(6, 6))
    places = torch.tensor([[0, 1, 2, 3, 4, 5], [3, 7, 8, 20, 21, 40]])
    mask = torch.ones_like(ids)
    inputs = [{"position_ids": p, "input_ids": ids, "attention_mask": mask} for p in (places, places + 5)]
    want = [logits(model, **i) for i in inputs]
    fuse(model)
    for given, exact in zip(inputs, want, strict=True):
        torch.testing.assert_close(logits(model, **given), exact, rtol=1e-4, atol=1e-4)


def rotary_of_a_model():
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    q, k = torch.randn(2, 5, 3, 8).transpose(1, 2), torch.randn(2, 5, 1, 8).transpose(1, 2)
    turn = torch.rand(2, 5, 4).repeat(1, 1, 2)
    return apply_rotary_pos_emb, angles.Rotate(apply_rotary_pos_emb), q, k, turn.cos(), turn.sin()


@pytest.mark.parametrize("is_inference", [False, True])
def test_angles_are_kept_with_the_cosines_and_only_while_they_are_the_same(is_inference):
    with torch.inference_mode(is_inference):
        theirs, ours, q, k, cos, sin = rotary_of_a_model()
        kept = q.clone(), k.clone()

        def compare(*given):
            for got, want in zip(ours(*given), theirs(*given), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
                assert got.transpose(1, 2).is_contiguous()

        compare(q, k, cos, sin)
        made = angles._kept[id(cos)]
        compare(k, q, cos, sin)
        assert (angles._kept[id(cos)] is made) is not is_inference  # one layer, in another forward
        compare(q, k, cos, sin + 1)
        compare(q, k, cos, sin)
        cos.mul_(2)
        compare(q, k, cos, sin)
        sin.mul_(2)
        compare(q, k, cos, sin)
        known_calls.forget()
        compare(q, k, cos, sin)
        compare(q, k, cos[:1], sin[:1])
        compare(q[:, :, 4:], k[:, :, 4:], cos[:, 4:], sin[:, 4:])
        assert torch.equal(q, kept[0])
        assert torch.equal(k, kept[1])


def test_what_is_no_plain_rotation_is_the_models_own():
    theirs, ours, q, k, cos, sin = rotary_of_a_model()
    square = torch.randn(2, 5, 5, 8).transpose(1, 2)  # as many heads as tokens
    for given in (
        (square, square, cos, sin, 2),
        (q.double(), k, cos, sin),
        (q, k, cos.bfloat16(), sin.bfloat16()),
        (q.transpose(1, 2), k.transpose(1, 2), cos, sin, 2),
        (q[:, :, :0], k[:, :, :0], cos[:, :0], sin[:, :0]),
        (q.transpose(1, 2).repeat(1, 1, 1, 2)[..., ::2].transpose(1, 2), k, cos, sin),
        (q.flip(0).contiguous(), k, cos, sin),
        (q.requires_grad_(), k, cos, sin),
    ):
        for got, want in zip(ours(*given), theirs(*given), strict=True):
            assert torch.equal(got, want)
            assert got.requires_grad == want.requires_grad


class ScaledNorm(nn.Module):
    """A norm to look at, and half as much again."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))
        self.eps = 1e-6

    def forward(self, x):
        return 1.5 * nn.functional.rms_norm(x, (8,), self.weight, self.eps)


class OneOrTheOther(ScaledNorm):
    def __init__(self, is_scaled):
        super().__init__()
        self.is_scaled = is_scaled

    def forward(self, x):
        plain = nn.functional.rms_norm(x, (8,), self.weight, self.eps)
        return 2 * plain if self.is_scaled else plain


class OtherEpsilon(ScaledNorm):
    def forward(self, x):
        return nn.functional.rms_norm(x, (8,), self.weight, 2e-6)


class NeedsMore(ScaledNorm):
    def forward(self, x, gate):
        return x * gate


class TwiceTheGate(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 12), nn.Linear(8, 12)
        self.down_proj, self.act_fn = nn.Linear(12, 8), activation

    def forward(self, x):
        gate = self.gate_proj(x)
        return self.down_proj(self.act_fn(gate) * self.up_proj(x) + 0.1 * gate)


def test_what_computes_something_else_is_left_alone_and_that_is_said(caplog):
    replaced = nn.RMSNorm(8, eps=1e-6)
    replaced.forward = lambda x: x
    with torch.device("meta"):
        elsewhere = nn.RMSNorm(8, eps=1e-6)
    parts = [
        ScaledNorm(), OtherEpsilon(), NeedsMore(), TwiceTheGate(nn.SiLU()), TwiceTheGate(nn.GELU()),
        nn.LayerNorm(8, bias=False), nn.LayerNorm(8), nn.RMSNorm(8, eps=1e-6), replaced, elsewhere,
        OneOrTheOther(False), OneOrTheOther(True),
    ]  # fmt: skip
    model = nn.ModuleList(parts)
    state = torch.get_rng_state()
    with caplog.at_level(logging.INFO, "octavo"):
        found = fuse(model)
    assert torch.equal(torch.get_rng_state(), state)
    said = {
        "ScaledNorm computes something else": 1,
        "OneOrTheOther computes something else": 1,
        "OtherEpsilon computes something else": 1,
        "TwiceTheGate computes something else": 1,
        "LayerNorm computes something else": 1,
        "RMSNorm has a forward of somebody else's": 1,
        "RMSNorm has no weights here in float32, float16 or bfloat16": 1,
    }
    raised = {r: n for r, n in found.left_alone.items() if r not in said}
    assert {r: n for r, n in found.left_alone.items() if r in said} == said
    assert list(raised.values()) == [1]
    assert next(iter(raised)).startswith("NeedsMore does not run like one: TypeError: ")
    assert found == Fused(norms=2, left_alone=found.left_alone)
    assert [fused.is_fused(m) for m in parts] == [False] * 7 + [True] + [False] * 2 + [True, False]
    assert caplog.messages == [f"octavo: ModuleList fused: {found}"]
    assert "left alone: 1 ScaledNorm computes something else" in str(found)


def test_angles_whose_halves_differ_are_no_rotation(monkeypatch):
    model = tiny_model("qwen3")
    rotary = type(model.model.rotary_emb)
    before = rotary.forward

    def forward(self, x, position_ids):
        cos, sin = before(self, x, position_ids)
        return cos * torch.linspace(0.5, 1.5, 16), sin

    monkeypatch.setattr(rotary, "forward", forward)
    want = logits(model)
    reason = "Qwen3Attention has angles of another form"
    assert fuse(model) == Fused(norms=9, mlps=2, left_alone={reason: 2})
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-4)


def test_a_decorator_that_hides_what_it_decorates(monkeypatch):
    model = tiny_model("qwen3")
    attention = type(model.model.layers[0].self_attn)
    hidden = {"forward": attention.forward}
    wrapped = functools.wraps(attention.forward)(lambda *args, **kwargs: hidden["forward"](*args, **kwargs))
    monkeypatch.setattr(attention, "forward", wrapped)
    reason = "Qwen3Attention has a forward that cannot be given another rotary function"
    assert fuse(model) == Fused(norms=9, mlps=2, left_alone={reason: 2})


def test_no_model_at_all():
    for function in (fuse, unfuse):
        with pytest.raises(ConfigError, match=f"{function.__name__}: model must be a torch.nn.Module, got"):
            function("Qwen/Qwen3-0.6B")


def test_torch_compile_sees_the_models_own_operators():
    model = tiny_model("qwen3", "sdpa")
    want = logits(model)
    fuse(model)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    torch.testing.assert_close(logits(compiled), want, rtol=0, atol=0)
    assert len(graphs) == 1
    calls = {str(node.target) for node in graphs[0].graph.nodes}
    assert not any("octavo" in call for call in calls)
    assert any("rsqrt" in call for call in calls)


SIZES = {
    "vocab_size": 101, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MOE = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MLA = {
    "moe_intermediate_size": 32, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 24,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 6,
}  # fmt: skip
LAGUNA = MOE | {
    "num_attention_heads_per_layer": [6, 4], "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 6, "shared_expert_intermediate_size": 32,
}  # fmt: skip
OTHERS = {
    "Qwen3Moe": (MOE, (9, 0, 2)),
    "Phi3": ({}, (5, 0, 2)),  # one projection for gate and up
    "Cohere": ({}, (0, 2, 0)),  # pairs are neighbours
    "Glm": ({"head_dim": 16}, (5, 0, 0)),  # and only half of a head is turned
    "Gemma3": ({"head_dim": 16, "sliding_window": 6}, (0, 0, 2)),  # two kinds of angles
    "Olmo2": ({}, (9, 2, 2)),  # norms behind the layers
    "StableLm": ({}, (0, 2, 2)),  # a quarter of each head is turned
    "DeepseekV3": (MLA, (9, 2, 0)),  # turns by a function of another name,
    "DeepseekV3 halves": (MLA | {"rope_interleave": False}, (9, 2, 2)),  # or by this one
    # Layers of unlike heads and angles, turned in part by its own function; gates, shared experts.
    "Laguna": (LAGUNA, (9, 2, 0)),
}
if not hasattr(transformers, "LagunaConfig"):  # older ones do without it
    del OTHERS["Laguna"]


def other_model(name, **more):
    changes, _ = OTHERS[name]
    name = name.split()[0]
    config = f"{name}TextConfig" if name == "Gemma3" else f"{name}Config"
    torch.manual_seed(0)
    sizes = SIZES | changes | more
    return getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, config)(**sizes)).eval()


@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures_are_right_whatever_is_replaced(name):
    model = other_model(name)
    inputs = padded(prompts(9, 17, 3))
    want = logits(model, **inputs)
    found = fuse(model)
    torch.testing.assert_close(logits(model, **inputs), want, rtol=1e-4, atol=1e-4)
    assert (found.norms, found.mlps, found.rotary) == OTHERS[name][1], found


@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures_in_bfloat16_are_as_near_to_float32_as_before(name):
    """With every expert asked for all tokens: where a rounded bit chooses another one, nothing is near."""
    model = other_model(name, num_experts_per_tok=4)
    inputs = padded(prompts(9, 17, 3))
    exact = logits(model, **inputs)
    theirs = (logits(model.bfloat16(), **inputs) - exact).abs()
    found = fuse(model)
    ours = (logits(model, **inputs) - exact).abs()
    assert ours.square().mean().sqrt() <= 1.5 * theirs.square().mean().sqrt()
    assert ours.max() <= 2 * theirs.max()
    assert (found.norms, found.mlps) == OTHERS[name][1][:2], found  # some turn in float32 throughout


def test_the_names_of_this_room():
    assert set(integration.__all__) == {
        "Fused", "attention", "fuse", "octavo_mask", "paged_attention", "register", "unfuse",
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_does_not_round_too_much_to_be_tried(dtype):
    assert fuse(tiny_model("qwen3").to(dtype)) == KINDS["qwen3"]


def test_double_precision_stays_double(launches):
    model = tiny_model("qwen3")
    fuse(model)  # before it is double
    want = logits(unfused := tiny_model("qwen3").double())
    launches.update(norm=0, silu=0, rotary=0)
    assert torch.equal(logits(model.double()), want)
    assert set(launches.values()) == {0}
    found = fuse(unfused)
    assert found.norms + found.mlps + found.rotary == 0
    assert "Qwen3RMSNorm has no weights here in float32, float16 or bfloat16" in found.left_alone
