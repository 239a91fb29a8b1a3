"""What a chat answer must look like, as one grammar: forced tool calls, formats, and reasoning before either.

A schema alone would begin at the first token, so that a model could no longer reason first; and a call has
tags around it. These grammars are in llguidance's Lark syntax, with the request's own schemas inside.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.errors import RequestError
from octavo.serve import reasoning, tools
from octavo.serve.api_errors import ApiError
from octavo.structured_output import StructuredOutput, lark_json

if TYPE_CHECKING:
    from octavo.serve.chat_protocol import FunctionDefinition

_ANY_TEXT = "(?s:.*)"


@dataclass(frozen=True, slots=True)
class CallRules:
    """Which calls may be made. `must_call`: nothing but calls; `many`: more than one; `is_subset`: the model
    is told of further functions, which it may not call.
    """

    functions: Sequence[FunctionDefinition]
    must_call: bool
    many: bool
    is_subset: bool = False

    @property
    def is_free(self) -> bool:
        """Whether calls need only be read: the model may write what it likes."""
        is_bound = self.must_call or not self.many or self.is_subset
        return not is_bound and not any(function.strict for function in self.functions)


def check_calls(calls: CallRules | None) -> None:
    """ApiError (400) for parameters that are no schema, or one too long, where calls must keep to them."""
    if calls is not None and not calls.is_free:
        _functions(calls)


def constraint(
    answer: StructuredOutput | None, calls: CallRules | None, reasons: bool | None
) -> StructuredOutput | None:
    """The constraint on the whole output; None leaves it free.

    answer: the format the request asked for; a grammar of its own goes for the whole output as it is.
    calls: None when none may be made. reasons: None when the model does not reason, else whether the prompt
    has already opened `<think>`.

    Raises ApiError (400) for parameters that are no schema.
    """
    if answer is not None and answer.lark is not None and not (calls is not None and calls.must_call):
        return answer
    if calls is None:
        if answer is None or reasons is None:
            return answer
        return _lark(_start(reasons, "answer"), *_thinking(reasons), _answer(answer))
    if calls.must_call:
        return _lark(_start(reasons, "calls"), *_thinking(reasons), *_calls(calls))
    if answer is not None:
        start = _start(reasons, "(calls | answer)")
        return _lark(start, *_thinking(reasons), *_calls(calls), _answer(answer))
    if calls.is_free:
        return None
    # Any text, but its first opening tag must lead to a whole call; reasoning is text like any other.
    return _lark(
        f"start: (up_to_tag rest_of_call){'*' if calls.many else '?'} TEXT?",
        f"up_to_tag[lazy]: /{_ANY_TEXT}{tools.OPEN}/",
        f"TEXT: /(?s:.+)/ & ~/{_ANY_TEXT}{tools.OPEN}{_ANY_TEXT}/",
        *_functions(calls),
    )


def _lark(*rules: str) -> StructuredOutput:
    return StructuredOutput(lark="\n".join(rules) + "\n")


def _start(reasons: bool | None, body: str) -> str:
    if reasons is None:
        return f"start: {body}"
    return f"start: thinking {body}" if reasons else f"start: (OPEN_THINKING thinking)? {body}"


def _thinking(reasons: bool | None) -> list[str]:
    if reasons is None:
        return []
    # Newlines after the tag are a lexeme of their own: they belong to the format, not to the answer.
    end = _regex(reasoning.CLOSE)
    rules = ["thinking: up_to_end NEWLINES?", f"up_to_end[lazy]: /{_ANY_TEXT}{end}/", r"NEWLINES: /\n+/"]
    return rules if reasons else [*rules, f"OPEN_THINKING: {json.dumps(reasoning.OPEN)}"]


def _calls(calls: CallRules) -> list[str]:
    more = r' ("\n" call)*' if calls.many else ""
    return [f"calls: call{more}", f'call: "{tools.OPEN}" rest_of_call', *_functions(calls)]


def _functions(calls: CallRules) -> list[str]:
    names = " | ".join(f"function_{i}" for i in range(len(calls.functions)))
    rules = [rf'rest_of_call: "\n" ({names}) "\n{tools.CLOSE}"']
    for i, function in enumerate(calls.functions):
        head = f'{{"name": {json.dumps(function.name, ensure_ascii=False)}, "arguments": '
        try:
            arguments = lark_json({"type": "object"} if function.parameters is None else function.parameters)
        except RequestError as error:
            message = f"tools: the parameters of {function.name!r} cannot be kept to: {error}"
            raise ApiError(400, message, param="tools") from error
        rules += [
            f'function_{i}: {json.dumps(head, ensure_ascii=False)} arguments_{i} "}}"',
            f"arguments_{i}: {arguments}",
        ]
    return rules


def _answer(answer: StructuredOutput) -> str:
    if answer.regex is not None:
        return f"answer: /{_regex(answer.regex)}/"
    schema = {"type": "object"} if answer.json_object else answer.json_schema
    assert schema is not None
    return f"answer: {lark_json(schema)}"


def _regex(pattern: str) -> str:
    """A pattern as it stands between slashes."""

    def escaped(match: re.Match[str]) -> str:
        return {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(match[0], match[0])

    return re.sub(r"\\.|/|\n", escaped, pattern, flags=re.DOTALL)
