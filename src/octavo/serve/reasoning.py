"""Tells a model's reasoning (`<think> ... </think>`) from its answer, piece by piece."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from octavo.serve.held_text import split_at

OPEN, CLOSE = "<think>", "</think>"

Kind = Literal["reasoning", "content"]


def template_reasons(chat_templates: Mapping[str, str]) -> bool:
    """Whether a model's templates know reasoning at all; without it `<think>` is text like any other."""
    return any(CLOSE in template for template in chat_templates.values())


def prompt_opens_reasoning(prompt: str) -> bool:
    """Whether the prompt ends inside `<think>`, so that the output begins with reasoning."""
    return prompt.rfind(OPEN) > prompt.rfind(CLOSE) and prompt.rstrip().endswith(OPEN)


def prompt_closes_reasoning(prompt: str) -> bool:
    """Whether the prompt ends in an empty `<think></think>`: the template was told not to think."""
    return prompt.rstrip().endswith(CLOSE)


class ReasoningSplitter:
    """Splits one choice's text into reasoning and content as it grows; how it is cut does not matter.

    `<think>` counts only as the very first text of the output (white space aside): later it is content.
    Newlines around reasoning and at the head of what follows it belong to the format and are dropped.
    Text that may still be half a tag is held back.
    """

    def __init__(self, *, is_open: bool) -> None:
        self._state: Literal["start", "reasoning", "after", "content"] = "reasoning" if is_open else "start"
        self._held = ""
        self._newlines = ""
        self._is_blank = True
        self.has_reasoned = is_open
        """Whether any of the output was reasoning."""

    @property
    def in_reasoning(self) -> bool:
        """Whether the text ends inside reasoning."""
        return self._state == "reasoning"

    def push(self, text: str) -> list[tuple[Kind, str]]:
        """What the further text makes certain, in order; pieces are not empty."""
        out: list[tuple[Kind, str]] = []
        text = self._held + text
        self._held = ""
        if self._state == "start":
            stripped = text.lstrip()
            if stripped.startswith(OPEN):
                text, self._state = stripped[len(OPEN) :], "reasoning"
                self.has_reasoned = True
            elif OPEN.startswith(stripped):
                self._held = text
                return out
            else:
                self._state = "content"
        if self._state == "reasoning":
            before, after, self._held = split_at(text, CLOSE)
            self._add_reasoning(before, out)
            if after is None:
                return out
            text, self._newlines, self._state = after, "", "after"
        if self._state == "after":
            text = text.lstrip("\n")
            if not text:
                return out
            self._state = "content"
        if text:
            out.append(("content", text))
        return out

    def finish(self) -> list[tuple[Kind, str]]:
        """What was held back when the output ended."""
        held, self._held = self._held, ""
        out: list[tuple[Kind, str]] = []
        if self._state == "reasoning":
            self._add_reasoning(held, out)
        elif held:
            out.append(("content", held))
        return out

    def _add_reasoning(self, text: str, out: list[tuple[Kind, str]]) -> None:
        text = self._newlines + text
        if self._is_blank:
            text = text.lstrip("\n")
        shown = text.rstrip("\n")
        # Newlines may turn out to be the last before the end, which are dropped.
        self._newlines = text[len(shown) :]
        if shown:
            self._is_blank = False
            out.append(("reasoning", shown))
