"""Tool calls as Qwen3 and Hermes write them, read while they stream.

::

    <tool_call>
    {"name": "weather", "arguments": {"city": "Bonn"}}
    </tool_call>
"""

from __future__ import annotations

import json
from typing import Literal, NamedTuple

from octavo.serve.held_text import num_held, split_at

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Event(NamedTuple):
    """A piece of an answer. `tool_name` begins a call; the `tool_arguments` that follow belong to it."""

    kind: Literal["reasoning", "content", "tool_name", "tool_arguments"]
    text: str


class ToolCallParser:
    """Splits one choice's text into content and calls as it grows; how it is cut does not matter.

    A call is told as soon as its name is complete, its arguments as they come, exactly as the model wrote
    them. White space around calls belongs to the format and is dropped. What stands between the tags and is
    no call is content, tags included. Text that may still be half a tag is held back.
    """

    def __init__(self) -> None:
        self._state: Literal["content", "call", "close"] = "content"
        self._held = ""
        self._follows_call = False
        self._space_before = ""
        self._scanner = _CallScanner()
        self.num_calls = 0

    def push(self, text: str) -> list[Event]:
        """What the further text makes certain, in order; texts are not empty."""
        out: list[Event] = []
        text, self._held = self._held + text, ""
        while text:
            if self._state == "content":
                text = self._push_content(text, out)
            elif self._state == "call":
                text = self._push_call(text, out)
            else:
                text = self._push_close(text)
        return out

    def finish(self, *, is_cut: bool) -> list[Event]:
        """What was held back when the output ended.

        `is_cut`: it ended at its limit of tokens; what then looks like the beginning of a call is one, and is
        not shown.
        """
        held, self._held = self._held, ""
        if self._state == "call" and not self._scanner.is_named and not is_cut:
            held = self._space_before + OPEN + self._scanner.raw
        elif self._state != "content":
            return []
        elif is_cut and (begun := num_held(held, OPEN)) > 1:  # a lone "<" is more often just that
            held = held[:-begun].rstrip()
        if self.num_calls:
            held = held.rstrip()
        return [Event("content", held)] if held else []

    def _push_content(self, text: str, out: list[Event]) -> str:
        if self._follows_call:
            text = text.lstrip()
        before, after, held = split_at(text, OPEN)
        shown = before.rstrip()
        if shown:
            self._follows_call = False
            out.append(Event("content", shown))
        if after is None:
            # White space is shown once it is known that no call comes after it.
            self._held = before[len(shown) :] + held
            return ""
        self._space_before = before[len(shown) :]
        self._state, self._scanner = "call", _CallScanner()
        return after

    def _push_call(self, text: str, out: list[Event]) -> str:
        scanner = self._scanner
        was_named = scanner.is_named
        used = scanner.push(text, out)
        if scanner.is_named and not was_named:
            self.num_calls += 1
        if scanner.is_named and scanner.is_over:
            self._state = "close"
        elif scanner.is_over:
            out.append(Event("content", self._space_before + OPEN + scanner.raw))
            self._state, self._follows_call = "content", False
        return text[used:]

    def _push_close(self, text: str) -> str:
        """Drops what stands before the closing tag, or before another call where it was forgotten."""
        closed, opened = text.find(CLOSE), text.find(OPEN)
        if closed < 0 and opened < 0:
            self._held = text[len(text) - max(num_held(text, CLOSE), num_held(text, OPEN)) :]
            return ""
        self._state, self._follows_call = "content", True
        is_closed = closed >= 0 and not 0 <= opened < closed
        return text[closed + len(CLOSE) :] if is_closed else text[opened:]


class _CallScanner:
    """Reads one `{"name": ..., "arguments": ...}`, a character at a time.

    `is_over` is set at its closing brace, or where it turns out to be no call; `is_named` once a call was
    announced. `raw` is all text read, and is kept only until the name is known.
    """

    def __init__(self) -> None:
        self.raw = ""
        self.is_named = self.is_over = False
        self._expected: Literal["object", "key", "colon", "value", "inside", "next"] = "object"
        self._name: str | None = None
        self._arguments = ""  # not told yet
        self._has_arguments = False
        self._key = ""
        self._value = ""
        self._is_streamed = False
        self._depth = 0
        self._in_string = self._is_escaped = False

    def push(self, text: str, out: list[Event]) -> int:
        """Reads until the call is over; returns how many characters that took."""
        num_used = 0
        for char in text:
            num_used += 1
            self._read(char)
            if self.is_over:
                break
        if not self.is_named:
            self.raw += text[:num_used]
            if self._name:
                self.is_named = True
                out.append(Event("tool_name", self._name))
        if self.is_named:
            if self.is_over and not self._has_arguments:
                self._arguments = "{}"
            if self._arguments:
                out.append(Event("tool_arguments", self._arguments))
            self._arguments = ""
        return num_used

    def _read(self, char: str) -> None:
        match self._expected:
            case "inside":
                self._read_inside(char)
            case _ if char.isspace():
                pass
            case "object":
                self._expect("key", char == "{")
            case "key":
                if char == '"':
                    self._begin(char, is_key=True)
                else:
                    self.is_over = True
            case "colon":
                self._expect("value", char == ":")
            case "value":
                self._begin(char, is_key=False)
            case "next":
                self.is_over = char != ","
                self._expected = "key"

    def _expect(self, expected: Literal["key", "value"], is_right: bool) -> None:
        self._expected = expected
        self.is_over = not is_right

    def _begin(self, char: str, *, is_key: bool) -> None:
        if is_key:
            self._key = ""
        self._value = ""
        self._depth = 0
        self._in_string = self._is_escaped = False
        self._is_streamed = self._key in ("arguments", "parameters") and char in "{["
        self._has_arguments |= self._is_streamed
        self._expected = "inside"
        self._read_inside(char)

    def _read_inside(self, char: str) -> None:
        """One character of a key or a value."""
        is_scalar = not self._in_string and self._depth == 0 and bool(self._value) and not self._is_streamed
        if is_scalar and (char in ",}" or char.isspace()):
            self._end()
            if not self.is_over:
                self._read(char)
            return
        if self._is_streamed:
            self._arguments += char
        else:
            self._value += char
        if self._in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self._in_string = False
        elif char == '"':
            self._in_string = True
            return
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        else:
            return
        if not self._in_string and self._depth <= 0:
            self._end()

    def _end(self) -> None:
        """A key or a value is complete."""
        if self._is_streamed:
            self._expected, self._is_streamed, self._key = "next", False, ""
            return
        try:
            value = json.loads(self._value, strict=False)  # models do write line breaks into strings
        except (ValueError, RecursionError):
            self.is_over = True
            return
        if not self._key:
            self._key, self._expected = value, "colon"
            return
        if self._key == "name" and self._name is None:
            self._name = value if isinstance(value, str) else ""
            self.is_over = not self._name
        elif self._key in ("arguments", "parameters") and value is not None:
            # Some models put the object into a string.
            self._arguments += value if isinstance(value, str) else self._value
            self._has_arguments = True
        self._expected, self._key = "next", ""
