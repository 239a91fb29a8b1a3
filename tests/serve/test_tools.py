"""Tool calls read from text: the same however it arrives, and nothing of the format shown as content."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo.serve.tools import CLOSE, OPEN, Event, ToolCallParser

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


def read(pieces: list[str], *, is_cut: bool = False) -> list[Event]:
    """The events of a text, with neighbours of one kind joined."""
    parser = ToolCallParser()
    events = [event for piece in pieces for event in parser.push(piece)] + parser.finish(is_cut=is_cut)
    assert all(event.text for event in events)
    assert parser.num_calls == sum(event.kind == "tool_name" for event in events)
    joined: list[Event] = []
    for event in events:
        if joined and joined[-1].kind == event.kind != "tool_name":
            event = Event(event.kind, joined.pop().text + event.text)
        joined.append(event)
    return joined


def content(text: str) -> Event:
    return Event("content", text)


def call(name: str, arguments: str) -> list[Event]:
    return [Event("tool_name", name), Event("tool_arguments", arguments)]


CASES = {
    "text": ("Hello  there. \n", [content("Hello  there. \n")]),
    "one call": (CALL, call("weather", '{"city": "Köln"}')),
    "text, then a call": (
        f"Let me look.\n\n{CALL}",
        [content("Let me look."), *call("weather", '{"city": "Köln"}')],
    ),
    "text around calls": (
        f"A {CALL}\n{CALL}\n\nB c",
        [content("A"), *call("weather", '{"city": "Köln"}') * 2, content("B c")],
    ),
    "tags and quotes within a string": (
        '<tool_call>{"name": "say", "arguments": {"text": "a </tool_call> \\" } {"}}</tool_call>',
        call("say", '{"text": "a </tool_call> \\" } {"}'),
    ),
    "nested arguments, spaced oddly": (
        '<tool_call>{ "name" :"f" , "arguments" : {"a": [1, {"b": {}}], "c": null} }</tool_call>',
        call("f", '{"a": [1, {"b": {}}], "c": null}'),
    ),
    "arguments first": ('<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', call("f", '{"x": 1}')),
    "parameters": ('<tool_call>{"name": "f", "parameters": {"x": 1}}</tool_call>', call("f", '{"x": 1}')),
    "no arguments": ('<tool_call>{"name": "f"}</tool_call>', call("f", "{}")),
    "null arguments": ('<tool_call>{"name": "f", "arguments": null}</tool_call>', call("f", "{}")),
    "arguments in a string": (
        '<tool_call>{"name": "f", "arguments": "{\\"x\\": \\"\\u00fc\\"}"}</tool_call>',
        call("f", '{"x": "ü"}'),
    ),
    "a brace too many": (
        '<tool_call>{"name": "f", "arguments": {}}}\n</tool_call>x',
        [*call("f", "{}"), content("x")],
    ),
    "closing tag forgotten": (
        '<tool_call>{"name": "f", "arguments": {}}\n<tool_call>{"name": "g", "arguments": {}}',
        [*call("f", "{}"), *call("g", "{}")],
    ),
    "other keys": (
        '<tool_call>{"id": 7, "name": "f", "x": [1], "arguments": {}}</tool_call>',
        call("f", "{}"),
    ),
    "no JSON": ("a <tool_call>nonsense</tool_call> b", [content("a <tool_call>nonsense</tool_call> b")]),
    "no name": ('<tool_call>{"nome": "f"}</tool_call>', [content('<tool_call>{"nome": "f"}</tool_call>')]),
    "name is a number": (
        '<tool_call>{"name": 5}</tool_call>',
        [content('<tool_call>{"name": 5}</tool_call>')],
    ),
    "nearly a tag": ("1 <tool_cal> 2 < 3 <tool", [content("1 <tool_cal> 2 < 3 <tool")]),
    "begun, then ended by itself": ('x <tool_call>{"na', [content('x <tool_call>{"na')]),
}


@pytest.mark.parametrize(("text", "expected"), CASES.values(), ids=CASES)
def test_text_is_read_the_same_however_it_is_cut(text: str, expected: list[Event]) -> None:
    for size in range(1, len(text) + 1):
        assert read([text[i : i + size] for i in range(0, len(text), size)]) == expected, size


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x <tool_c", [content("x")]),
        ('x <tool_call>\n{"na', [content("x")]),
        ('<tool_call>{"name": "f", "arguments": {"a": "b', call("f", '{"a": "b')),
        ("1 <", [content("1 <")]),
        ('<tool_call>{"name": "f", "arguments": {}}\n</tool', call("f", "{}")),
    ],
    ids=["half a tag", "no name yet", "within arguments", "a lone bracket", "half a closing tag"],
)
def test_what_the_token_limit_cuts_off_is_never_shown_in_half(text: str, expected: list[Event]) -> None:
    for size in range(1, len(text) + 1):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert read(pieces, is_cut=True) == expected, size


def test_a_call_is_told_as_soon_as_it_is_known() -> None:
    parser = ToolCallParser()
    told = [
        parser.push(piece)
        for piece in ("Look: <tool", '_call>{"name": "f', '", "arguments": {"a', '": 1', "}}", "</tool_call>")
    ]
    assert told == [
        [content("Look:")],
        [],
        [Event("tool_name", "f"), Event("tool_arguments", '{"a')],
        [Event("tool_arguments", '": 1')],
        [Event("tool_arguments", "}")],
        [],
    ]


def test_deep_nesting_is_text_and_no_crash() -> None:
    text = '<tool_call>{"x": ' + "[" * 100_000 + "]" * 100_000 + "}</tool_call>"
    assert "".join(event.text for event in read([text])) == text


_FRAGMENTS = st.sampled_from(
    [
        OPEN,
        CLOSE,
        "<",
        "tool",
        "_call>",
        "</",
        '{"name": "f", "arguments": ',
        '"f"',
        "{",
        "}",
        ": ",
        '"',
        "\\",
        " ",
        "a",
    ]
)


@settings(max_examples=150, deadline=None)
@given(st.lists(_FRAGMENTS, max_size=14).map("".join), st.data(), st.booleans())
@example("<tool_call>\\", None, False)
def test_any_text_is_read_the_same_however_it_is_cut(
    text: str, data: st.DataObject | None, is_cut: bool
) -> None:
    whole = read([text], is_cut=is_cut)
    assert read(list(text), is_cut=is_cut) == whole
    if data is not None:
        at = data.draw(st.integers(0, len(text)))
        assert read([text[:at], text[at:]], is_cut=is_cut) == whole


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=80, deadline=None)
@given(
    st.text(st.characters(exclude_characters="<", exclude_categories=("Cs",)), max_size=12),
    st.lists(
        st.tuples(st.text(min_size=1, max_size=6), st.dictionaries(st.text(max_size=4), _JSON, max_size=3)),
        max_size=3,
    ),
    st.integers(1, 9),
)
def test_what_is_written_is_what_is_read(
    text: str, calls: list[tuple[str, dict[str, object]]], size: int
) -> None:
    written = [
        f"{OPEN}\n{json.dumps({'name': name, 'arguments': arguments})}\n{CLOSE}" for name, arguments in calls
    ]
    whole = text + "\n".join(written)
    events = read([whole[i : i + size] for i in range(0, len(whole), size)])
    texts = [event.text for event in events if event.kind == "content"]
    assert "".join(texts) == (text.rstrip() if calls else text)
    names = [event.text for event in events if event.kind == "tool_name"]
    arguments = [json.loads(event.text) for event in events if event.kind == "tool_arguments"]
    assert list(zip(names, arguments, strict=True)) == calls
