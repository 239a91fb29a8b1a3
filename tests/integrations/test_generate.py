"""`generate` and plain forwards with `octavo` give what Transformers' own attention gives."""

import inspect

import pytest
import torch
from helpers.hf_generation import (
    KINDS,
    greedy,
    padded,
    prompts,
    stock_attention,
    tiny_model,
    with_attention,
)
from transformers import DynamicCache

kinds = pytest.mark.parametrize("kind", KINDS)
ROWS = prompts(13, 20, 1, 17)


def both(kind, run, **overrides):
    """(Transformers' own result, ours) of `run(model)`."""
    model = tiny_model(kind, stock_attention(kind), **overrides)
    want = run(model)
    return want, run(with_attention(model, "octavo"))


def cache_argument(model):
    """A dynamic cache under the name that this version of Transformers has for it."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return {name: DynamicCache(config=model.config)}


@kinds
def test_a_left_padded_batch_generates_the_same_tokens(kind, computed_by):
    want, got = both(kind, lambda m: m.generate(**padded(ROWS), generation_config=greedy()))
    assert got.tolist() == want.tolist()
    assert computed_by == {"dense": 10 * 2}


@kinds
def test_a_batch_without_padding_generates_the_same_tokens(kind, computed_by):
    ids = torch.tensor(prompts(12, 12, 12))
    want, got = both(kind, lambda m: m.generate(ids, generation_config=greedy()))
    assert got.tolist() == want.tolist()
    assert computed_by == {"dense": 10 * 2}


@kinds
def test_a_row_of_a_padded_batch_generates_what_it_generates_alone(kind):
    model = tiny_model(kind)
    together = model.generate(**padded(ROWS), generation_config=greedy())[:, 20:]
    alone = [model.generate(torch.tensor([row]), generation_config=greedy())[0, len(row) :] for row in ROWS]
    assert together.tolist() == [row.tolist() for row in alone]


@kinds
@pytest.mark.parametrize("side", [None, "left"])
def test_a_static_cache(kind, side, computed_by):
    inputs = padded(ROWS) if side else {"input_ids": torch.tensor(prompts(9, 9))}
    config = greedy(cache_implementation="static")
    want, got = both(kind, lambda m: m.generate(**inputs, generation_config=config))
    assert got.tolist() == want.tolist()
    assert set(computed_by) == {"dense"}


@kinds
def test_without_a_cache(kind, computed_by):
    want, got = both(kind, lambda m: m.generate(**padded(ROWS), generation_config=greedy(use_cache=False)))
    assert got.tolist() == want.tolist()
    assert set(computed_by) == {"dense"}


@kinds
@pytest.mark.parametrize("side", ["left", "right"])
def test_logits_of_real_tokens_do_not_depend_on_the_padding_side(kind, side, computed_by):
    inputs = padded(ROWS, side)
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)

    @torch.no_grad()
    def logits(model):
        return model(**inputs, position_ids=positions).logits[inputs["attention_mask"] == 1]

    want, got = both(kind, logits)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert set(computed_by) == {"dense"}


@kinds
def test_logits_in_bfloat16_are_as_near_to_float32_as_those_of_transformers(kind):
    inputs = padded(ROWS)
    real = inputs["attention_mask"] == 1

    @torch.no_grad()
    def logits(model):
        return model(**inputs).logits[real].float()

    model = tiny_model(kind, stock_attention(kind))
    exact = logits(model)
    theirs = (logits(model.bfloat16()) - exact).abs()
    ours = (logits(with_attention(model, "octavo")) - exact).abs()
    assert ours.square().mean().sqrt() <= 1.5 * theirs.square().mean().sqrt()
    assert ours.max() <= 2 * theirs.max()


def test_prompts_longer_than_the_window_that_grow_in_chunks(computed_by):
    """A second turn: several new tokens over a cache that the window has already cut."""
    first, second = torch.tensor(prompts(15, 15)), torch.tensor(prompts(7, 7, seed=2))

    @torch.no_grad()
    def logits(model):
        cache = cache_argument(model)
        model(first, **cache)
        return model(second, **cache).logits

    for kind in ("mistral-window", "gemma2-softcap-window", "qwen3"):
        want, got = both(kind, logits)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert set(computed_by) == {"dense"}


@pytest.mark.parametrize("kind", ["qwen3", "mistral-window"])
def test_beam_search(kind, computed_by):
    config = greedy(6, num_beams=3, num_return_sequences=2)
    want, got = both(kind, lambda m: m.generate(**padded(ROWS), generation_config=config))
    assert got.tolist() == want.tolist()
    assert set(computed_by) == {"dense"}


def test_assisted_decoding_which_cuts_its_cache_back(computed_by):
    assistant = tiny_model("qwen3", seed=3, num_hidden_layers=1)
    ids = torch.tensor(prompts(11))
    plain = tiny_model("qwen3").generate(ids, generation_config=greedy(12))
    assisted = tiny_model("qwen3").generate(ids, generation_config=greedy(12), assistant_model=assistant)
    looked_up = tiny_model("qwen3").generate(ids, generation_config=greedy(12, prompt_lookup_num_tokens=4))
    assert assisted.tolist() == plain.tolist()
    assert looked_up.tolist() == plain.tolist()
    assert set(computed_by) == {"dense"}


def test_after_a_prompt_padded_on_the_right_sdpa_takes_over_and_that_is_said(
    caplog, computed_by, monkeypatch
):
    """Its padding then lies between tokens, which no length describes."""
    monkeypatch.setattr("octavo.integrations.transformers.masks._said", set())
    prompt, new = padded(ROWS, "right"), torch.tensor([[5], [6], [7], [8]])
    mask = prompt["attention_mask"]
    lengths = mask.sum(-1, keepdim=True)

    @torch.no_grad()
    def logits(model):
        cache = cache_argument(model)
        model(**prompt, **cache)
        seen = torch.cat([mask, torch.ones_like(new)], -1)
        return model(new, attention_mask=seen, position_ids=lengths, **cache).logits

    want, got = both("qwen3", logits)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert computed_by == {"dense": 2, "stock": 2}
    assert "padding between tokens" in caplog.text


def test_kv_heads_equal_to_heads_and_only_one(computed_by):
    for heads in (1, 6):
        want, got = both(
            "llama",
            lambda m: m.generate(**padded(ROWS), generation_config=greedy(5)),
            num_key_value_heads=heads,
        )
        assert got.tolist() == want.tolist()
    assert set(computed_by) == {"dense"}
