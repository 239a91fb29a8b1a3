"""What pydantic has against a value, in the words of our other errors: what was expected, and what came."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from octavo.errors import shown

_KINDS: Final = {
    **dict.fromkeys(("int_type", "int_parsing", "int_parsing_size", "int_from_float"), "an integer"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    "finite_number": "a finite number",
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    "string_type": "a string",
    "list_type": "a list",
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "an object"),
    "none_required": "null",
}
_BOUNDS: Final = {
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "too_short": "at least {min_length} {things}",
    "too_long": "at most {max_length} {things}",
    "string_too_short": "at least {min_length} {things}",
    "string_too_long": "at most {max_length} {things}",
    "literal_error": "{expected}",
    "union_tag_invalid": "{discriminator} to be one of {expected_tags}",
    "union_tag_not_found": "an object with {discriminator}",
}
_JSON_WORDS: Final = {"True": "true", "False": "false", "None": "null"}
# Quoted text is passed over: a word in it, too, is text.
_QUOTED_OR_WORD: Final = re.compile(
    r"""'(?:[^'\\]|\\.)*'?|"(?:[^"\\]|\\.)*"?|\b(?:True|False|None)\b""", re.DOTALL
)


def problem(error: Mapping[str, Any]) -> str:
    """``expected an integer, got 'x'`` for one of pydantic's `errors()`, the value shortened."""
    kind, given = error["type"], error.get("input")
    if kind == "missing":
        return "this field is missing"
    if kind == "extra_forbidden":
        return "this field is not known"
    said = {name: _as_in_json(value) for name, value in error.get("ctx", {}).items()}
    if kind in _KINDS:
        what = f"expected {_KINDS[kind]}"
    elif kind == "string_unicode":
        what = "not valid Unicode: it holds a lone surrogate"
    elif said.get("le") == 2**63 - 1 or said.get("ge") == -(2**63):
        what = "expected a 64-bit integer"
    elif kind in _BOUNDS:
        length = said.get("min_length", said.get("max_length"))
        thing = "character" if kind.startswith("string_") else "item"
        what = "expected " + _BOUNDS[kind].format(**said, things=thing if length == 1 else f"{thing}s")
    else:
        what = error["msg"].removeprefix("Value error, ")
        if what.startswith("Input should be "):
            what = f"expected {what.removeprefix('Input should be ')}"
        if ", got " in what:
            return what
    return f"{what}, got {_in_json_words(shown(given))}"


def _as_in_json(value: Any) -> Any:
    """A bound or a choice as clients write it."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return _in_json_words(value) if isinstance(value, str) else value


def _in_json_words(text: str) -> str:
    return _QUOTED_OR_WORD.sub(lambda found: _JSON_WORDS.get(found[0], found[0]), text)
