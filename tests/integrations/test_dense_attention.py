"""Ordinary caches in every layout, over each implementation of the kernel; and what is left to others."""

import weakref
from unittest import mock

import numpy as np
import pytest
import torch
from helpers import triton_here
from helpers.hf_generation import greedy, padded, prompts, stock_attention, tiny_model, with_attention
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CompileConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sliding_window_causal_mask_function

from octavo.errors import UnsupportedKernelConfig
from octavo.integrations.transformers import attention, dense, octavo_mask, paged_attention, stock
from octavo.integrations.transformers import plan as plans
from octavo.kernels import backend

needs_interpreter = pytest.mark.skipif(not triton_here.interpreted(), reason="kernels run on a GPU here")
ROOMS = ["cpu", "reference", pytest.param("triton", marks=needs_interpreter)]


def module(**attributes):
    return mock.Mock(spec=torch.nn.Module, num_key_value_groups=3, is_causal=True, **attributes)


def by_head(batch, tokens, heads, dim, capacity=None):
    """(B, H, T, D) as a cache holds it; with a capacity, the first tokens of a longer one."""
    return torch.randn(batch, heads, capacity or tokens, dim)[:, :, :tokens]


def by_token(batch, tokens, heads, dim, capacity=None):
    """The same as projections leave it."""
    return torch.randn(batch, capacity or tokens, heads, dim)[:, :tokens].transpose(1, 2)


def odd(batch, tokens, heads, dim, capacity=None):
    """Sequences that are not a whole number of rows apart."""
    return torch.randn(batch, heads * tokens * dim + 3)[:, 3:].view(batch, heads, tokens, dim)


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("layout", [by_head, by_token, odd])
@pytest.mark.parametrize("num_queries", [1, 3, 11])
@pytest.mark.parametrize("first", [(0, 0), (4, 0)], ids=["unpadded", "padded"])
def test_layouts(room, layout, num_queries, first):
    """Two layers of each layout in one forward: what the first one found out holds for the second."""
    torch.manual_seed(0)
    real = torch.arange(16)[None] >= torch.tensor(first)[:, None]
    made = {"batch_size": 2, "q_length": num_queries, "kv_length": 16, "q_offset": 16 - num_queries}
    mask = octavo_mask(**made, attention_mask=real)
    matrix = plans.of_mask(mask, 0, 0, None).dense()
    rows = real[:, -num_queries:]
    with backend.use(room), np.errstate(all="ignore"):
        for _ in range(2):
            q = layout(2, num_queries, 6, 16)
            k, v = layout(2, 16, 2, 16, 20), layout(2, 16, 2, 16, 20)
            got, _ = attention(module(), q, k, v, mask, scaling=0.2)
            want, _ = sdpa_attention_forward(module(), q, k, v, matrix, scaling=0.2)
            torch.testing.assert_close(got[rows], want[rows], rtol=1e-5, atol=1e-5)
            assert torch.isfinite(got).all()
    assert len(plans.of_mask(mask, 0, 0, None).calls) == 1


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("num_queries", [1, 3])
def test_layers_of_one_forward_that_differ(room, num_queries):
    """In layout, numbers of heads, scale, softcap or sinks: nothing of one layer is taken for another's."""
    torch.manual_seed(4)
    q, wide = by_token(1, num_queries, 6, 16), by_token(1, num_queries, 12, 16)
    k, v = by_head(1, 16, 2, 16), by_head(1, 16, 2, 16)
    sinks = torch.randn(6)
    layers = [
        ((q, k, v), {}),
        ((q, by_head(1, 16, 2, 16, 20), by_head(1, 16, 2, 16, 20)), {}),
        ((q, by_token(1, 16, 2, 16), v), {}),
        ((by_head(1, num_queries, 6, 16, 9), k, v), {}),
        ((wide, k, v), {}),
        ((q, k, v), {"scaling": 0.9}),
        ((q, k, v), {"softcap": 2.0}),
        ((q, k, v), {"s_aux": sinks}),
        ((q, k, v), {"s_aux": 2 * sinks}),
    ]
    mask = octavo_mask(1, num_queries, 16, q_offset=16 - num_queries)
    with backend.use(room), np.errstate(all="ignore"):
        for tensors, options in [*layers, *layers]:
            got, _ = attention(module(), *tensors, mask, **options)
            alone = octavo_mask(1, num_queries, 16, q_offset=16 - num_queries)
            want, _ = attention(module(), *(x.clone() for x in tensors), alone, **options)
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    kept = plans.of_mask(mask, 0, 0, None).calls
    assert len(kept) == len(layers) - 1


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("num_queries", [1, 3, 11])
def test_values_of_another_dtype_are_left_to_sdpa(room, num_queries):
    """As autocast leaves them, where rotary gives float32 keys; also after a layer that has a kernel."""
    torch.manual_seed(5)
    q, k, v = by_token(2, num_queries, 6, 16), by_head(2, 16, 2, 16), by_head(2, 16, 2, 16)
    mask = octavo_mask(2, num_queries, 16, q_offset=16 - num_queries)
    matrix = plans.of_mask(mask, 0, 0, None).dense()
    with backend.use(room), np.errstate(all="ignore"):
        attention(module(), q, k, v, mask)
        with torch.autocast("cpu", torch.bfloat16):
            got, _ = attention(module(), q, k, v.bfloat16(), mask)
            want, _ = sdpa_attention_forward(module(), q, k, v.bfloat16(), matrix)
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma2-softcap-window", "gpt2"])
def test_autocast(kind, computed_by):
    """Models with rotary embeddings have keys and values of two dtypes there; GPT-2 has a kernel."""
    model, inputs = tiny_model(kind), padded(prompts(5, 12))
    real = inputs["attention_mask"].bool()
    found = {}
    for name in (stock_attention(kind), "octavo"):
        with_attention(model, name)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            alone = model(inputs["input_ids"]).logits
            found[name] = alone, model(**inputs).logits[real]
            found[name] += tuple(
                model.generate(
                    **inputs, generation_config=greedy(4, output_logits=True, return_dict_in_generate=True)
                ).logits
            )
    for got, want in zip(found["octavo"], found[stock_attention(kind)], strict=True):
        torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)
    assert computed_by == {"dense" if kind == "gpt2" else "stock": 2 * 6}


def test_a_plan_keeps_no_kernel_of_a_room_that_was_forced_before():
    q, k, v = by_token(1, 1, 6, 16), by_head(1, 16, 2, 16), by_head(1, 16, 2, 16)
    mask = octavo_mask(1, 1, 16, q_offset=15)
    with mock.patch.object(backend, "implementation_of", wraps=backend.implementation_of) as asked:
        for room in ("cpu", "reference"):
            with backend.use(room):
                attention(module(), q, k, v, mask)
                attention(module(), q, k, v, mask)
    assert asked.call_count == 2
    assert len(plans.of_mask(mask, 0, 0, None).calls) == 2


class Launches(TorchDispatchMode):
    """Which operators would be launches on a GPU: all that are no views, and make no empty tensor."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and not func._schema.name.startswith(("aten::empty", "aten::new_empty")):
            self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("batch", "num_queries", "copies"), [(1, 1, []), (3, 1, []), (1, 12, ["clone"] * 2)], ids=str
)
def test_a_layer_is_its_kernel_and_nothing_else(monkeypatch, batch, num_queries, copies):
    """As on a GPU, where each operator is a launch: besides the kernel, a prompt's keys and values by token.

    A step's mask is what one key more adds to the lengths, and where the runs of keys begin.
    """
    monkeypatch.setattr(backend, "implementation_of", lambda *_: "triton")
    ran = []
    monkeypatch.setattr(backend, "select", lambda *_: lambda *tensors, **_: ran.append(tensors[0].shape))
    real = torch.arange(16)[None] >= torch.arange(batch)[:, None]
    made = {"batch_size": batch, "q_length": num_queries, "kv_length": 16, "q_offset": 16 - num_queries}
    with torch.no_grad():
        octavo_mask(**made, attention_mask=real)
        made |= {"kv_length": 17, "q_offset": 17 - num_queries}
        real = torch.cat([real, torch.ones(batch, 1, dtype=torch.bool)], 1)
        with Launches() as of_mask:
            mask = octavo_mask(**made, attention_mask=real)
        q, k, v = by_token(batch, num_queries, 6, 16), by_head(batch, 17, 2, 16), by_head(batch, 17, 2, 16)
        with Launches() as first:
            attention(module(), q, k, v, mask)
        with Launches() as later:
            attention(module(), q, k, v, mask)
    assert of_mask.names == ["add"]
    assert first.names == copies + (["arange", "add"] if batch > 1 else [])
    assert later.names == copies
    assert len(ran) == 2


@pytest.mark.parametrize("room", ["cpu", "reference"])
def test_another_forward_finds_out_anew(room):
    """Plans without padding are remembered by their shape; what is kept of their kernels is not."""
    q, k, v = by_token(1, 1, 6, 16), by_head(1, 16, 2, 16), by_head(1, 16, 2, 16)
    masks = [octavo_mask(1, 1, 16, q_offset=15) for _ in range(2)]
    with backend.use(room):
        attention(module(), q, k, v, masks[0])
    first, second = (plans.of_mask(mask, 0, 0, None) for mask in masks)
    assert first.rows is second.rows
    assert (len(first.calls), len(second.calls)) == (1, 0)
    kept = weakref.ref(first)
    del first, masks
    assert kept() is None


@pytest.mark.parametrize("room", ROOMS)
def test_one_sequence_mixed_layouts_and_what_lies_behind_the_length(room):
    """A static cache: slots behind the length hold NaN here. K and V differ in layout."""
    torch.manual_seed(1)
    q, k, v = by_token(2, 1, 6, 16), by_head(2, 24, 2, 16), by_token(2, 24, 2, 16)
    k[:, :, 17:], v[:, :, 17:] = float("nan"), float("nan")
    mask = octavo_mask(2, 1, 24, q_offset=torch.tensor(16))
    with backend.use(room), np.errstate(all="ignore"):
        got, _ = attention(module(), q, k, v, mask)
        lone, _ = attention(module(), q[:1], k[:1], v[:1], octavo_mask(1, 1, 24, q_offset=16))
    want, _ = sdpa_attention_forward(module(), q, k[:, :, :17], v[:, :, :17], None)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lone, want[:1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("room", ROOMS)
def test_window_softcap_and_sinks(room):
    torch.manual_seed(2)
    q, k, v = by_token(2, 12, 6, 16), by_head(2, 12, 2, 16), by_head(2, 12, 2, 16)
    sinks = torch.randn(6)
    mask = octavo_mask(2, 12, 12, mask_function=sliding_window_causal_mask_function(5))
    with backend.use(room), np.errstate(all="ignore"):
        got, _ = attention(module(), q, k, v, mask, scaling=0.3, softcap=2.0, s_aux=sinks)
    keys, values = k.repeat_interleave(3, 1), v.repeat_interleave(3, 1)
    scores = 2.0 * torch.tanh(q @ keys.transpose(2, 3) * 0.3 / 2.0)
    scores = scores.masked_fill(~plans.of_mask(mask, 0, 0, None).dense(), float("-inf"))
    with_sink = torch.cat([scores, sinks[:, None, None].expand(2, 6, 12, 1)], -1)
    want = (with_sink.softmax(-1)[..., :-1] @ values).transpose(1, 2)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_without_a_mask_it_is_sdpas_rule(computed_by):
    torch.manual_seed(3)
    q, k, v = by_token(2, 4, 6, 16), by_head(2, 4, 2, 16), by_head(2, 4, 2, 16)
    longer = by_head(2, 7, 2, 16), by_head(2, 7, 2, 16)
    for arguments in ((q, k, v), (q[:, :, :1], *longer), (q, *longer)):
        for is_causal in (None, True, False):
            got, _ = attention(module(), *arguments, None, is_causal=is_causal)
            want, _ = sdpa_attention_forward(module(), *arguments, None, is_causal=is_causal)
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert computed_by == {"dense": 7, "stock": 2}


def test_a_mask_cut_or_keys_added_on_the_way_is_an_error():
    q, k, v = by_token(2, 1, 6, 16), by_head(2, 9, 2, 16), by_head(2, 9, 2, 16)
    with pytest.raises(UnsupportedKernelConfig, match=r"2 sequences over 9 keys.*over 8.*sdpa"):
        attention(module(), q, k, v, octavo_mask(2, 1, 8, q_offset=7))


def test_few_keys_none_of_them_hidden_are_left_to_torch_on_a_gpu():
    """Where the host is what takes time. Only the rule is tested here; on a CPU it does not apply."""

    def plan(**arguments):
        return plans.of_mask(octavo_mask(2, 1, 9, q_offset=8, **arguments), 0, 0, None)

    key, wide = torch.empty(2, 2, 9, 16), torch.empty(2, 8, 2**17, 128, device="meta")
    padding = torch.tensor([[0] + [1] * 8, [1] * 9]).bool()
    assert dense.is_launch_bound(key, plan(), None, None)
    assert dense.is_launch_bound(key, plan(mask_function=sliding_window_causal_mask_function(9)), None, None)
    assert not dense.is_launch_bound(
        key, plan(mask_function=sliding_window_causal_mask_function(8)), None, None
    )
    assert not dense.is_launch_bound(key, plan(attention_mask=padding), None, None)
    assert not dense.is_launch_bound(key, plan(), 3.0, None)
    assert not dense.is_launch_bound(key, plan(), None, torch.zeros(6))
    assert not dense.is_launch_bound(wide, plan(), None, None)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)], ids=str)
def test_a_step_that_is_left_to_torch_is_what_sdpa_makes_of_it(heads: tuple[int, int]) -> None:
    class Layer(torch.nn.Module):
        num_key_value_groups, is_causal, layer_idx = heads[0] // heads[1], True, 0

    query, key, value = (torch.randn(2, n, t, 16) for n, t in ((heads[0], 1), (heads[1], 9), (heads[1], 9)))
    expected, _ = sdpa_attention_forward(Layer(), query, key, value, None, scaling=0.3)
    found = stock.Decode(0.3, is_grouped=heads[0] != heads[1])(query, key, value)
    assert found.shape == (2, 1, heads[0], 16)
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected)
    mask = plans.unpadded(2, 1, 9, 9, None, query.device)
    assert plans.carried_by(mask) is not None
    assert plans.carried_by(mask.clone()) is None
    assert plans.carried_by(None) is None


@pytest.mark.parametrize(("dim", "v_dim"), [(288, 288), (24, 16)])
def test_head_dimensions_without_a_kernel_run_as_sdpa_and_that_is_said(dim, v_dim, caplog, monkeypatch):
    monkeypatch.setattr("octavo.integrations.transformers.masks._said", set())
    q, k, v = by_token(2, 3, 6, dim), by_head(2, 3, 2, dim), by_head(2, 3, 2, v_dim)
    got, _ = attention(module(), q, k, v, octavo_mask(2, 3, 3))
    want, _ = sdpa_attention_forward(module(), q, k, v, None)
    torch.testing.assert_close(got, want)
    assert f"runs as sdpa: no kernel for head dimensions of {dim}" in caplog.text


def test_dropout_and_a_position_bias_run_as_sdpa(computed_by):
    q, k, v = by_token(2, 3, 6, 16), by_head(2, 3, 2, 16), by_head(2, 3, 2, 16)
    attention(module(), q, k, v, octavo_mask(2, 3, 3), dropout=0.5)
    bias = torch.randn(1, 6, 3, 3)
    got, _ = attention(module(), q, k, v, octavo_mask(2, 3, 3), position_bias=bias)
    want, _ = sdpa_attention_forward(module(), q, k, v, None, position_bias=bias, is_causal=True)
    torch.testing.assert_close(got, want)
    assert computed_by == {"stock": 2}


def test_the_paged_function_outside_of_continuous_batching_is_an_error():
    q, k, v = by_token(1, 3, 6, 16), by_head(1, 3, 2, 16), by_head(1, 3, 2, 16)
    with pytest.raises(UnsupportedKernelConfig, match="attn_implementation='octavo'"):
        paged_attention(module(), q, k, v, None)


@pytest.mark.parametrize(
    ("kind", "trained"),
    [("llama", "q_proj"), ("llama", "k_proj"), ("llama", "v_proj"), ("gpt_oss-sinks-window", "sinks")],
)
def test_what_is_trained_alone_gets_its_gradients(kind, trained):
    """Adapters of one projection: in the first layer, nothing else of attention needs a gradient."""
    found = {}
    for name in ("octavo", "eager"):
        model = tiny_model(kind, name)
        for parameter_name, parameter in model.named_parameters():
            parameter.requires_grad_(trained in parameter_name)
        ids = torch.tensor(prompts(11))
        model(ids, labels=ids).loss.backward()
        found[name] = [p.grad for p in model.parameters() if p.requires_grad]
    assert len(found["eager"]) >= 2
    for got, want in zip(found["octavo"], found["eager"], strict=True):
        assert want.norm() > 1e-4
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("needy", ["query", "key", "value", "sinks"])
def test_packed_sequences_compute_no_gradients(needy):
    tensors = {"query": by_token(1, 3, 6, 16), "key": by_head(1, 3, 2, 16), "value": by_head(1, 3, 2, 16)}
    tensors["sinks"] = torch.randn(6)
    tensors[needy].requires_grad_()
    q, k, v, sinks = tensors.values()
    lens = torch.tensor([0, 3])
    lengths = {"cu_seq_lens_q": lens, "cu_seq_lens_k": lens, "max_length_q": 3, "max_length_k": 3}
    with pytest.raises(UnsupportedKernelConfig, match=r"no gradients.*no_grad"):
        attention(module(), q, k, v, None, s_aux=sinks, **lengths)
    with torch.no_grad():
        attention(module(), q, k, v, None, s_aux=sinks, **lengths)


def test_a_compiled_decoding_step_is_one_graph():
    """The step over a static cache compiles whole, attention as one operator; tokens are the same."""
    torch._dynamo.reset()
    model = tiny_model("gpt_oss-sinks-window")
    inputs = padded(prompts(4, 9))
    config = greedy(6, cache_implementation="static")
    want = model.generate(**inputs, generation_config=config)
    config = greedy(6, cache_implementation="static")
    config.compile_config = CompileConfig(backend="aot_eager", fullgraph=True, mode=None)
    config.compile_config._compile_all_devices = True
    with mock.patch.object(dense, "_Call", wraps=dense._Call) as ran:
        got = model.generate(**inputs, generation_config=config)
    assert got.tolist() == want.tolist()
    assert ran.call_count == 6 * 2


def test_a_whole_forward_compiles_with_and_without_padding_and_gradients():
    """Where nothing can be read while it is traced, padding and windows are sdpa's dense mask."""
    torch._dynamo.reset()
    model = tiny_model("mistral-window", num_hidden_layers=1)
    inputs = padded(prompts(5, 11, 3))
    hole = inputs["attention_mask"].clone()
    hole[1, 4] = 0
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        for mask in (inputs["attention_mask"], hole, torch.ones_like(hole)):
            arguments = {"input_ids": inputs["input_ids"], "attention_mask": mask, "use_cache": False}
            want = model(**arguments).logits[mask == 1]
            got = compiled(**arguments).logits[mask == 1]
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        alone = {"input_ids": inputs["input_ids"], "use_cache": False}
        torch.testing.assert_close(compiled(**alone).logits, model(**alone).logits, rtol=1e-4, atol=1e-4)
    want = model(**inputs, labels=inputs["input_ids"]).loss
    got = compiled(**inputs, labels=inputs["input_ids"]).loss
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    got.backward()
