"""One choice's text, read as it grows: reasoning, content and tool calls."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.errors import EngineError
from octavo.outputs import OPTIONS_AT_FAULT
from octavo.serve import reasoning
from octavo.serve.api_errors import ApiError
from octavo.serve.reasoning import ReasoningSplitter
from octavo.serve.tools import Event, ToolCallParser

if TYPE_CHECKING:
    from octavo.outputs import CompletionOutput, RequestOutput
    from octavo.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model's text is to be read. `reasons`: None is text without reasoning, else whether the prompt
    already opened it. `has_tools`: tool calls are parsed.
    """

    reasons: bool | None = None
    has_tools: bool = False

    def reader(self) -> AnswerReader:
        return AnswerReader(self)


class AnswerReader:
    """Turns the pieces of one choice into events; see `Event`. The same events however the text was cut,
    but for where reasoning, content and arguments are cut themselves.
    """

    def __init__(self, format: AnswerFormat) -> None:
        self._splitter = None if format.reasons is None else ReasoningSplitter(is_open=format.reasons)
        self._tools = ToolCallParser() if format.has_tools else None

        self.is_plain = self._splitter is None and self._tools is None
        """Whether all of the text is content."""

    @property
    def num_calls(self) -> int:
        return self._tools.num_calls if self._tools else 0

    @property
    def has_reasoned(self) -> bool:
        return self._splitter is not None and self._splitter.has_reasoned

    @property
    def in_reasoning(self) -> bool:
        return self._splitter is not None and self._splitter.in_reasoning

    def push(self, text: str) -> list[Event]:
        """What the further text makes certain, in order; texts are not empty."""
        if self.is_plain:
            return [Event("content", text)] if text else []
        if self._splitter is None:
            return self._push_content(text)
        return self._read_tools(self._splitter.push(text))

    def finish(self, *, is_cut: bool) -> list[Event]:
        """What was held back when the output ended; `is_cut`: at its limit of tokens."""
        events = [] if self._splitter is None else self._read_tools(self._splitter.finish())
        return events if self._tools is None else [*events, *self._tools.finish(is_cut=is_cut)]

    def _read_tools(self, pieces: Sequence[tuple[reasoning.Kind, str]]) -> list[Event]:
        events: list[Event] = []
        for kind, text in pieces:
            events += self._push_content(text) if kind == "content" else [Event(kind, text)]
        return events

    def _push_content(self, text: str) -> list[Event]:
        return [Event("content", text)] if self._tools is None else self._tools.push(text)


@dataclass(slots=True)
class Call:
    """A tool call; `id` is ours, made when its name is known."""

    name: str
    arguments: str = ""
    id: str = field(default_factory=lambda: new_id("call"))


@dataclass(slots=True)
class Answer:
    """A whole answer. `content` is None when there is no text beside reasoning or calls."""

    content: str | None
    reasoning: str | None
    calls: list[Call]
    finish_reason: str
    num_reasoning_tokens: int


def read_answer(choice: CompletionOutput, format: AnswerFormat, tokenizer: Tokenizer) -> Answer:
    """What a finished choice says."""
    reader = format.reader()
    events = reader.push(choice.text) + reader.finish(is_cut=choice.finish_reason == "length")
    texts = {"content": "", "reasoning": ""}
    calls: list[Call] = []
    for kind, text in events:
        if kind == "tool_name":
            calls.append(Call(text))
        elif kind == "tool_arguments":
            calls[-1].arguments += text
        else:
            texts[kind] += text
    return Answer(
        content=texts["content"] or (None if calls or reader.in_reasoning else ""),
        reasoning=texts["reasoning"] or None,
        calls=calls,
        finish_reason=finish_reason(choice.finish_reason, bool(calls)),
        num_reasoning_tokens=num_reasoning_tokens(choice.token_ids, reader, tokenizer),
    )


def finish_reason(reason: str | None, has_calls: bool) -> str:
    """OpenAI's word for how a choice ended."""
    if reason == "stop" and has_calls:
        return "tool_calls"
    return "length" if reason == "length" else "stop"


def check_end(choice: CompletionOutput, output: RequestOutput) -> None:
    """Raise what the client is told of a choice that did not end by itself or at its limit."""
    if choice.finish_reason in ("error", "abort"):
        raise ended_badly(choice.finish_reason, output.error)


def ended_badly(reason: str, error: str | None) -> Exception:
    """What the client is told of a choice that ended with `error` or `abort`."""
    if reason == "abort":
        return EngineError("the request was aborted")
    why = error or "the engine failed at this request"
    return ApiError(400 if why.startswith(OPTIONS_AT_FAULT) else 500, why)


def num_reasoning_tokens(token_ids: Sequence[int], reader: AnswerReader, tokenizer: Tokenizer) -> int:
    """How many of a choice's tokens were reasoning, its closing tag included."""
    if not reader.has_reasoned:
        return 0
    if reader.in_reasoning:
        return len(token_ids)
    return place_of(reasoning.CLOSE, token_ids, tokenizer)[1]


def place_of(tag: str, token_ids: Sequence[int], tokenizer: Tokenizer) -> tuple[int, int]:
    """The first token of a tag, and the one after its last; both are the number of tokens where it is not."""
    tag_id = tokenizer.token_to_id(tag)
    if tag_id is not None and tag_id in token_ids:
        first = token_ids.index(tag_id)
        return first, first + 1
    tail = ""
    for i, token_id in enumerate(token_ids):  # it may come in pieces
        tail = tail[1 - len(tag) :] + tokenizer.token_text(token_id)
        if tag in tail:
            first, text = i, tokenizer.token_text(token_id)
            while tag not in text:
                first -= 1
                text = tokenizer.token_text(token_ids[first]) + text
            return first, i + 1
    return len(token_ids), len(token_ids)


def new_id(prefix: str) -> str:
    """A fresh identifier, such as ``chatcmpl-3f…``; unguessable."""
    separator = "-" if prefix in ("chatcmpl", "cmpl") else "_"
    return f"{prefix}{separator}{secrets.token_hex(12)}"
