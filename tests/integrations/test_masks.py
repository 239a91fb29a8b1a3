"""The mask function: a plan says exactly what sdpa's matrix says, and what no plan can say stays a matrix."""

import weakref

import numpy as np
import pytest
import torch
from helpers.hf_generation import padded, prompts, tiny_model
from transformers import masking_utils

from octavo.integrations.transformers import octavo_mask
from octavo.integrations.transformers import plan as plans
from octavo.integrations.transformers.masks import _left_padding

CAUSAL = masking_utils.causal_mask_function


def both(**arguments):
    return octavo_mask(**arguments), masking_utils.sdpa_mask(**arguments, allow_is_causal_skip=False)


def padding(*first, width):
    return torch.arange(width)[None] >= torch.tensor(first)[:, None]


@pytest.mark.parametrize("mask_function", [CAUSAL, masking_utils.sliding_window_causal_mask_function(3)])
@pytest.mark.parametrize(
    "shape",
    [
        {"q_length": 6, "kv_length": 6},
        {"q_length": 1, "kv_length": 9, "q_offset": 8},
        {"q_length": 3, "kv_length": 9, "q_offset": 6},
        {"q_length": 2, "kv_length": 4, "q_offset": 9, "kv_offset": 7},  # a dynamic cache cut to its window
        {"q_length": 4, "kv_length": 12, "q_offset": 0},  # a static one, at the start
        {"q_length": 1, "kv_length": 12, "q_offset": torch.tensor(5)},
    ],
    ids=str,
)
@pytest.mark.parametrize("first", [None, (0, 0), (2, 0), (1, 5)])
def test_a_plan_says_what_sdpas_mask_says(mask_function, shape, first):
    if first is not None:
        width = int(shape.get("q_offset", 0)) + shape["q_length"]
        shape = shape | {"attention_mask": padding(*first, width=width)}
    got, want = both(batch_size=2, mask_function=mask_function, **shape)
    assert plans.is_plan(got)
    plan = plans.of_mask(got, 0, 0, None)
    assert plan.dense().expand_as(want).tolist() == want.tolist()
    rows = plans.from_rows(got, shape["q_length"], shape["kv_length"], plan.window)
    assert rows.dense().expand_as(want).tolist() == want.tolist()
    lens = plan.cu_seqlens_k.diff()
    assert plan.max_keys >= int(lens.max())


def test_padding_that_is_none_costs_nothing():
    plan = plans.of_mask(octavo_mask(2, 4, 4, attention_mask=torch.ones(2, 4, dtype=torch.bool)), 0, 0, None)
    assert plan.leftpad is None
    assert plan.is_full


@pytest.mark.parametrize(
    ("rows", "padding"),
    [
        (["1111", "1111"], ()),
        (["0011", "1111"], (2, 0)),
        (["1100", "1111"], ()),
        (["0110", "0001"], (1, 3)),
        (["0000", "1111"], (4, 0)),
        (["0000", "0000"], (4, 4)),
        (["1011", "0111"], None),
        (["0101", "1111"], None),
        (["1111", "1001"], None),
        (["1001", "0110"], None),
    ],
    ids=str,
)
def test_where_padding_is(rows, padding):
    seen = np.array([[token == "1" for token in row] for row in rows])
    assert _left_padding(seen) == padding


def test_real_rows_do_not_see_padding_on_the_right():
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]]).bool()
    got, want = both(batch_size=2, q_length=4, kv_length=4, attention_mask=mask)
    sees = plans.of_mask(got, 0, 0, None).dense().expand_as(want)
    assert sees[:, 0][mask].tolist() == want[:, 0][mask].tolist()


@pytest.mark.parametrize(
    "special",
    [
        {"attention_mask": torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]]).bool()},
        {"mask_function": masking_utils.and_masks(CAUSAL, masking_utils.sliding_window_overlay(2))},
        {"mask_function": masking_utils.or_masks(CAUSAL, lambda b, h, q, k: k == 3)},
        {"mask_function": masking_utils.chunked_causal_mask_function(2, torch.zeros(2, dtype=torch.int))},
        {"mask_function": masking_utils.bidirectional_mask_function},
    ],
    ids=["hole", "other order", "or", "chunked", "bidirectional"],
)
def test_what_no_plan_can_say_is_sdpas_own_mask(special):
    got, want = both(batch_size=2, q_length=4, kv_length=4, **special)
    assert got.dtype == torch.bool
    assert got.tolist() == want.tolist()


def test_the_mask_of_packed_sequences_is_made_when_somebody_asks_for_it(monkeypatch):
    """Some versions of continuous batching have it made in every step, and never look at it."""
    apart = masking_utils.packed_sequence_mask_function(torch.tensor([[0, 0, 1, 1]]))
    arguments = {"batch_size": 1, "q_length": 4, "kv_length": 4}
    packed = masking_utils.and_masks(CAUSAL, apart)
    want = masking_utils.sdpa_mask(**arguments, mask_function=packed, allow_is_causal_skip=False)
    with monkeypatch.context() as patch:
        patch.delattr(masking_utils, "sdpa_mask")
        deferred = octavo_mask(**arguments, mask_function=packed)
    assert not plans.is_plan(deferred)
    assert plans.undeferred(deferred).tolist() == want.tolist()
    assert plans.undeferred(deferred) is plans.undeferred(deferred)


def test_packed_sequences_do_not_see_each_other(computed_by):
    """Positions that begin again in one row are several sequences: a dense mask, and sdpa's result."""
    first, second = prompts(6, 5)
    ids = torch.tensor([first + second])
    positions = torch.tensor([[*range(6), *range(5)]])
    model = tiny_model("qwen3")
    with torch.no_grad():
        packed = model(ids, position_ids=positions, use_cache=False).logits[0]
        alone = [model(torch.tensor([row])).logits[0] for row in (first, second)]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-4, atol=1e-4)
    assert computed_by == {"stock": 2, "dense": 4}


def test_packed_sequences_with_lengths_go_to_the_kernel(computed_by):
    first, second = prompts(6, 5)
    ids = torch.tensor([first + second])
    model = tiny_model("qwen3")
    lens = torch.tensor([0, 6, 11])
    with torch.no_grad():
        packed = model(
            ids, position_ids=torch.tensor([[*range(6), *range(5)]]), use_cache=True, cu_seq_lens_q=lens,
            cu_seq_lens_k=lens, max_length_q=6, max_length_k=6,
        ).logits[0]  # fmt: skip
        alone = [model(torch.tensor([row])).logits[0] for row in (first, second)]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-4, atol=1e-4)
    assert computed_by == {"varlen": 2, "dense": 4}


def test_a_mask_that_somebody_made_is_obeyed(computed_by):
    ids = torch.tensor(prompts(5))
    mask = torch.ones(5, 5).tril().bool()[None, None]
    mask[..., 3:, 1] = False
    with torch.no_grad():
        got = tiny_model("qwen3")(ids, attention_mask=mask).logits
        want = tiny_model("qwen3", "sdpa")(ids, attention_mask=mask).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert computed_by == {"stock": 2}


def test_unpadded_plans_are_made_once():
    def rows():
        return plans.of_mask(octavo_mask(2, 4, 4), 4, 4, None).rows

    first = rows()
    assert rows() is first
    with torch.inference_mode():
        assert rows() is not first


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_dense_mask_of_an_unpadded_plan_is_made_once_and_freed_with_its_mask(mode):
    """The plan is remembered by its shape; its matrix, Q times T for each sequence, must not be."""
    window = masking_utils.sliding_window_causal_mask_function(3)
    with mode():
        mask = octavo_mask(2, 9, 9, mask_function=window)
        made = plans.of_mask(mask, 9, 9, 3).dense()
        assert plans.of_mask(mask, 9, 9, 3).dense() is made
        matrix = weakref.ref(made)
        del mask, made
        assert matrix() is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_plan_is_freed_with_its_mask(mode):
    with mode():
        mask = octavo_mask(2, 1, 9, q_offset=torch.tensor(5))
        plan = weakref.ref(plans.of_mask(mask, 1, 9, None))
        plan().first_rows(9), plan().dense()
        assert plan() is not None
        del mask
        assert plan() is None


def test_no_matrix_is_made_for_a_padded_batch(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a dense mask")

    monkeypatch.setattr(masking_utils, "sdpa_mask", refuse)
    monkeypatch.setattr(plans.Plan, "dense", refuse)
    for kind in ("qwen3", "mistral-window"):
        batch = padded(prompts(3, 9))
        found = tiny_model(kind).generate(**batch, max_new_tokens=3)
        assert found.shape == (2, batch["input_ids"].shape[1] + 3)
