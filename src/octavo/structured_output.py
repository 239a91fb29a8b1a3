"""The form that an output is to have: a schema, any JSON object, a pattern or a grammar, as checked text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Never

from octavo.errors import RequestError, shown

MAX_GRAMMAR_CHARS = 131_072
"""Longest schema, pattern or grammar that `StructuredOutput` takes."""

JSON_FORM: Final[Any] = {
    "whitespace_pattern": r"( |\n[ \t]{0,40})",
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,
}
"""llguidance's options for JSON: white space cannot run on, and what it cannot hold to is refused."""


@dataclass(frozen=True, slots=True, init=False)
class StructuredOutput:
    """What the output must look like: exactly one of the four. Frozen, hashable, picklable.

    json_schema: the output is JSON that the schema accepts, its properties in the schema's order. Given as a
        dict or as JSON text, kept as text.
    json_object: the output is any JSON object.
    regex: the whole output matches the pattern (Rust's syntax: no look-around, no back-references; ``\\d`` is
        kept as ``[0-9]``).
    lark: a context-free grammar in llguidance's dialect of Lark; its start rule is `start`.

    Raises:
        RequestError: none or several are given, one has the wrong type, is no JSON or is too long. Whether a
            grammar compiles is found out when the request is added; see docs/structured_output.md.
    """

    json_schema: str | None
    json_object: bool
    regex: str | None
    lark: str | None

    def __init__(
        self,
        json_schema: Mapping[str, Any] | str | None = None,
        json_object: bool = False,
        regex: str | None = None,
        lark: str | None = None,
    ) -> None:
        flag: object = json_object  # whatever was handed in
        if not isinstance(flag, bool):
            got = f"{shown(flag)} ({type(flag).__name__})"
            raise RequestError(f"json_object must be True or False, got {got}")
        given = {"json_schema": json_schema, "json_object": json_object or None, "regex": regex, "lark": lark}
        names = [name for name, value in given.items() if value is not None]
        if len(names) != 1:
            raise RequestError(
                "structured_output takes exactly one of json_schema, json_object, regex and lark; got "
                f"{' and '.join(names) or 'none'}"
            )
        object.__setattr__(self, "json_schema", None if json_schema is None else _schema_text(json_schema))
        object.__setattr__(self, "json_object", json_object)
        object.__setattr__(self, "regex", None if regex is None else _pattern(regex))
        object.__setattr__(self, "lark", None if lark is None else _grammar_text("lark", lark))


def lark_json(schema: Mapping[str, Any] | str) -> str:
    """What stands for `schema` in a Lark grammar; its JSON has the form that `json_schema` asks for.

    Raises:
        RequestError: as for `StructuredOutput`.
    """
    rest = _schema_text(schema)[1:]
    return f'%json {{"x-guidance":{json.dumps(JSON_FORM)}{"" if rest == "}" else ","}{rest}'


def _grammar_text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{name} must be a string, got {shown(value)} ({type(value).__name__})")
    if len(value) > MAX_GRAMMAR_CHARS:
        raise RequestError(
            f"{name} has {len(value):,} characters; the limit is {MAX_GRAMMAR_CHARS:,}; shorten it"
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{name} is not valid Unicode ({error.reason}); remove the surrogates") from error
    return value


def _pattern(value: object) -> str:
    """The pattern with ``\\d`` as ASCII's digits: whoever writes it seldom means those of all scripts."""

    def plain(escape: re.Match[str]) -> str:
        return "[0-9]" if escape[0] == r"\d" else escape[0]

    return re.sub(r"\\.", plain, _grammar_text("regex", value), flags=re.DOTALL)


def _schema_text(value: object) -> str:
    """The schema as JSON text with no spaces, keys in their order: equal schemas are compiled once."""
    what = "json_schema"
    try:
        if isinstance(value, str):
            value = json.loads(_grammar_text(what, value), parse_constant=_no_constant)
        if not isinstance(value, Mapping):
            raise RequestError(
                f"{what} must be a JSON object (a dict, or its text), got {shown(value)}; "
                "json_object=True allows any object"
            )
        text = json.dumps(dict(value), separators=(",", ":"), allow_nan=False)
    except RequestError:
        raise
    except RecursionError as error:
        raise RequestError(f"{what} is nested too deeply, or holds itself") from error
    except (TypeError, ValueError) as error:
        raise RequestError(f"{what} is not JSON: {error}") from error
    if "x-guidance" in value:
        raise RequestError(
            f"{what} holds 'x-guidance', options of llguidance, which are fixed here; remove it"
        )
    if r"\ud" in text:  # half a character, perhaps, which JSON can write and no text can hold
        _grammar_text(what, json.dumps(dict(value), ensure_ascii=False))
    return _grammar_text(what, text)


def _no_constant(name: str) -> Never:
    raise ValueError(f"{name} is no JSON number")
