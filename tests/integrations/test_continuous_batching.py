"""Continuous batching with `octavo` gives the tokens of `generate`, through both of its conventions."""

from types import SimpleNamespace

import pytest
import torch
from helpers.hf_generation import (
    KINDS,
    batching,
    continued,
    greedy,
    prompts,
    stock_attention,
    tiny_model,
    with_attention,
)

from octavo.integrations import transformers as integration

WITHOUT_WINDOW = ["qwen3", "llama", "qwen2"]
WITH_WINDOW = ["mistral-window", "gemma2-softcap-window", "gpt_oss-sinks-window"]
ROWS = prompts(13, 20, 1, 33)


def alone(model, rows, **options):
    """What `generate` makes of each prompt by itself."""
    ids = (torch.tensor([row]) for row in rows)
    return [model.generate(i, generation_config=greedy(**options))[0, i.shape[1] :].tolist() for i in ids]


@pytest.mark.parametrize("kind", WITHOUT_WINDOW)
def test_prompts_are_varlen_and_decoding_reads_the_block_table(kind, computed_by):
    model = tiny_model(kind, stock_attention(kind))
    want = alone(model, ROWS)
    got = continued(with_attention(model, "octavo"), ROWS, batching())
    assert got == want
    assert set(computed_by) == {"varlen", "block table"}
    assert computed_by["block table"] >= 8 * 2  # steps of decoding, layers


@pytest.mark.parametrize("kind", WITH_WINDOW)
def test_layers_with_a_window_keep_a_ring_and_are_always_varlen(kind, computed_by):
    model = tiny_model(kind, stock_attention(kind))
    want = alone(model, ROWS)
    got = continued(with_attention(model, "octavo"), ROWS, batching())
    assert got == want
    assert set(computed_by) == {"varlen"}


@pytest.mark.parametrize("kind", ["qwen3", *WITH_WINDOW])
def test_prompts_in_chunks_beside_decoding(kind, computed_by):
    """16 tokens in a step: long prompts come in parts, and lengths of 1 and more meet in a batch."""
    model = tiny_model(kind, stock_attention(kind))
    want = alone(model, ROWS)
    got = continued(with_attention(model, "octavo"), ROWS, batching(max_batch_tokens=16))
    assert got == want


@pytest.mark.parametrize("page_size", [4, 32])
def test_page_sizes(page_size, computed_by):
    model = tiny_model("qwen3")
    want = alone(model, ROWS)
    got = continued(model, ROWS, batching(page_size, num_blocks=64))
    assert got == want
    assert "block table" in computed_by


def test_pages_that_are_no_power_of_two_are_read_without_a_block_table(computed_by):
    model = tiny_model("qwen3")
    want = alone(model, ROWS)
    computed_by.clear()
    assert continued(model, ROWS, batching(24)) == want
    assert set(computed_by) == {"varlen"}


def test_a_cache_too_small_for_all_and_shared_prefixes(computed_by):
    model = tiny_model("qwen3")
    shared = prompts(32)[0]
    rows = [shared + row for row in prompts(3, 5, 2, 9, 1, 7, seed=4)]
    want = alone(model, rows)
    assert continued(model, rows, batching(num_blocks=8, max_batch_tokens=48)) == want
    assert "block table" in computed_by


def test_several_samples_of_a_prompt_share_its_pages():
    model = tiny_model("qwen3")
    rows = prompts(18, 7)
    want = alone(model, rows)
    only_the_best = {"do_sample": True, "top_k": 1, "num_return_sequences": 3}
    found = continued(model, rows, batching(), **only_the_best)
    assert {tuple(tokens) for tokens in found} == {tuple(tokens) for tokens in want}


def test_no_mask_is_allocated_and_attention_is_as_before_afterwards(monkeypatch):
    model = tiny_model("qwen3")
    with model.continuous_batching_context_manager(
        generation_config=greedy(4), continuous_batching_config=batching()
    ) as manager:
        request = manager.add_request(ROWS[0], max_new_tokens=4)
        result = manager.get_result(request, timeout=60)
        assert len(result.generated_tokens) == 4
        assert manager.batch_processor.inputs_and_outputs.attention_mask is None
    assert model.config._attn_implementation == "octavo"


def gradients(model, ids):
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_training_after_continuous_batching_is_unharmed(kind, computed_by):
    """Gradients come from Transformers' own attention, whatever the kernels did in between."""
    overrides = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0} if kind == "gpt2" else {}
    model = tiny_model(kind, stock_attention(kind), **overrides)
    ids = torch.tensor(prompts(14, 14))
    want = gradients(model.train(), ids)
    continued(with_attention(model, "octavo"), ROWS, batching(), max_new_tokens=3)
    computed_by.clear()
    got = gradients(model.train(), ids)
    assert set(computed_by) == {"stock"}
    for name, gradient in want.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("facts", "asked", "is_used"),
    [
        ({"layer_types": ["full_attention"]}, 6, True),
        ({"layer_types": None, "sliding_window": None}, 6, True),
        ({"layer_types": ["full_attention", "sliding_attention"]}, 6, False),
        ({"layer_types": None, "sliding_window": 8}, 6, False),
        ({"layer_types": ["full_attention"]}, 0, False),
    ],
    ids=str,
)
def test_a_block_table_is_made_where_it_can_be_used(facts, asked, is_used):
    from transformers.generation.continuous_batching import initialization

    config = SimpleNamespace(_attn_implementation="octavo", **facts)
    resolved = batching(max_blocks_per_request=asked)
    initialization.ensure_decode_fast_path_is_available(config, resolved, True)
    assert resolved.max_blocks_per_request == (asked if is_used else 0)


def test_registering_twice_wraps_nothing_twice():
    from transformers.generation.continuous_batching import initialization

    before = initialization.is_flash_attention_requested, initialization.ensure_decode_fast_path_is_available
    integration.register()
    after = initialization.is_flash_attention_requested, initialization.ensure_decode_fast_path_is_available
    assert after == before


def test_other_implementations_are_what_they_were(computed_by):
    from transformers.generation.continuous_batching import initialization

    asked = initialization.is_flash_attention_requested
    assert asked(requested_attention_implementation="flash_attention_2")
    assert asked(requested_attention_implementation="flash_attention_3", version=3)
    assert not asked(requested_attention_implementation="sdpa")
    model = tiny_model("qwen3", "sdpa")
    assert continued(model, ROWS[:2], batching()) == alone(model, ROWS[:2])
    assert not computed_by
