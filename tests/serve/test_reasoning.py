"""Reasoning told from the answer: the same however the text arrives."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.serve.reasoning import (
    CLOSE,
    OPEN,
    ReasoningSplitter,
    prompt_closes_reasoning,
    prompt_opens_reasoning,
    template_reasons,
)


def read(pieces: list[str], is_open: bool) -> tuple[str, str, bool]:
    """(reasoning, content, whether it ended while reasoning)."""
    splitter = ReasoningSplitter(is_open=is_open)
    events = [event for piece in pieces for event in splitter.push(piece)] + splitter.finish()
    assert all(text for _, text in events)
    kinds = [kind for kind, _ in events]
    assert kinds == sorted(kinds, reverse=True), "reasoning comes first"
    texts = ["".join(text for kind, text in events if kind == wanted) for wanted in ("reasoning", "content")]
    assert splitter.has_reasoned or not texts[0]
    return texts[0], texts[1], splitter.in_reasoning


CASES = {
    "as Qwen3 writes it": (
        "<think>\nHm, 2.\n\n</think>\n\nIt is 2.\n",
        False,
        ("Hm, 2.", "It is 2.\n", False),
    ),
    "opened by the prompt": ("Hm,\n 2.\n</think>\n\nIt is 2.", True, ("Hm,\n 2.", "It is 2.", False)),
    "nothing thought": ("<think>\n\n</think>\n\nHi", False, ("", "Hi", False)),
    "no reasoning": ("Hi <think>a</think> b", False, ("", "Hi <think>a</think> b", False)),
    "cut off": ("<think>\nWell, I\n", False, ("Well, I", "", True)),
    "cut off in the tag": ("<think>a</thi", False, ("a</thi", "", True)),
    "white space before": (" \n<think>a</think>b", False, ("a", "b", False)),
    "only white space": (" \n", False, ("", " \n", False)),
    "half an opening tag": ("<thin", False, ("", "<thin", False)),
    "other tags inside": ("<think>a <b> </thunk></think>c", False, ("a <b> </thunk>", "c", False)),
    "closed twice": ("a</think>b</think>c", True, ("a", "b</think>c", False)),
    "indented answer": ("<think>a</think>\n  code", False, ("a", "  code", False)),
}


@pytest.mark.parametrize(("text", "is_open", "expected"), CASES.values(), ids=CASES)
def test_text_is_split_the_same_however_it_is_cut(
    text: str, is_open: bool, expected: tuple[str, str, bool]
) -> None:
    for size in range(1, len(text) + 1):
        assert read([text[i : i + size] for i in range(0, len(text), size)], is_open) == expected, size


_FRAGMENTS = st.sampled_from([OPEN, CLOSE, "<", "think>", "</", "\n", " ", "a", "\n\n"])


@settings(max_examples=200, deadline=None)
@given(st.lists(_FRAGMENTS, max_size=12).map("".join), st.booleans(), st.data())
def test_any_text_is_split_the_same_however_it_is_cut(text: str, is_open: bool, data: st.DataObject) -> None:
    whole = read([text], is_open)
    assert read(list(text), is_open) == whole
    at = data.draw(st.integers(0, len(text)))
    assert read([text[:at], text[at:]], is_open) == whole


def test_reasoning_is_shown_while_it_streams() -> None:
    splitter = ReasoningSplitter(is_open=False)
    told = [splitter.push(piece) for piece in ("<th", "ink>\nLet", " me\n", "see", "\n</think>\n", "\n", "4")]
    assert told == [
        [],
        [("reasoning", "Let")],
        [("reasoning", " me")],
        [("reasoning", "\nsee")],
        [],
        [],
        [("content", "4")],
    ]


@pytest.mark.parametrize(
    ("prompt", "opens", "closes"),
    [
        ("<|im_start|>assistant\n", False, False),
        ("<|im_start|>assistant\n<think>\n", True, False),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False, True),
        ("user: what is <think>?\nassistant:", False, False),
        ("<think>a</think>b<|im_end|>\n<|im_start|>assistant\n<think>", True, False),
    ],
)
def test_the_prompt_tells_where_the_output_begins(prompt: str, opens: bool, closes: bool) -> None:
    assert prompt_opens_reasoning(prompt) is opens
    assert prompt_closes_reasoning(prompt) is closes


def test_only_templates_that_know_reasoning_make_it_so() -> None:
    assert template_reasons({"default": "{{ '<think>\\n\\n</think>' }}"})
    assert not template_reasons({"default": "{{ messages }}"})
    assert not template_reasons({})
