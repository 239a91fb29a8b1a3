"""Grammars of whole answers, tried against texts that fit and texts that do not."""

from __future__ import annotations

import functools
from typing import Any

import llguidance
import numpy as np
import pytest
from helpers.tokenizers_by_hand import byte_level, smollm2_path

from octavo.engine.grammar import GrammarCompiler, fill_masks
from octavo.models.source import ModelSource
from octavo.serve.api_errors import ApiError
from octavo.serve.chat_grammar import CallRules, constraint
from octavo.serve.chat_protocol import FunctionDefinition
from octavo.structured_output import MAX_GRAMMAR_CHARS, StructuredOutput
from octavo.text.recipe import TokenizerRecipe
from octavo.text.tokenizer import Tokenizer, load_tokenizer

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = FunctionDefinition(name="weather", parameters=CITY)
STRICT = FunctionDefinition(name="weather", parameters=CITY, strict=True)
ODD = FunctionDefinition(
    name='a"\\/ü', parameters={"type": "object", "properties": {}, "additionalProperties": False}
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
ODD_CALL = '<tool_call>\n{"name": "a\\"\\\\/ü", "arguments": {}}\n</tool_call>'
JSON = StructuredOutput(json_schema={**CITY, "additionalProperties": False})


@functools.cache
def _tokenizer() -> tuple[Tokenizer, Any]:
    tokenizer = load_tokenizer(ModelSource("gguf", smollm2_path(), "smollm2"))
    return tokenizer, llguidance.LLTokenizer(tokenizer._backend.to_str())


def reach(output: StructuredOutput, text: str) -> str:
    """`whole` when the text fits, `begun` when it could go on to, else where it stops to fit."""
    tokenizer, for_matcher = _tokenizer()
    grammar = output.lark
    if grammar is None:
        assert output.json_schema is not None
        grammar = llguidance.LLMatcher.grammar_from_json_schema(output.json_schema)
    matcher = llguidance.LLMatcher(for_matcher, grammar, log_level=0)
    assert not matcher.get_error()
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    num = matcher.try_consume_tokens(token_ids)
    if num < len(token_ids):
        return f"stops after {tokenizer.decode(token_ids[:num])!r}"
    return "whole" if matcher.is_accepting() else "begun"


def fits(output: StructuredOutput | None, text: str) -> bool:
    assert output is not None
    return reach(output, text) == "whole"


def rules(
    *functions: FunctionDefinition, must_call: bool = True, many: bool = True, **more: Any
) -> CallRules:
    return CallRules(functions, must_call, many, **more)


def test_without_a_wish_nothing_is_constrained() -> None:
    assert constraint(None, None, None) is None
    assert constraint(None, None, True) is None
    assert constraint(None, rules(WEATHER, must_call=False), False) is None


def test_a_format_alone_is_passed_on_as_it_is() -> None:
    assert constraint(JSON, None, None) is JSON
    own = StructuredOutput(lark="start: A")
    assert constraint(own, None, True) is own
    assert constraint(own, rules(WEATHER, must_call=False), True) is own


def test_a_forced_call_is_one_whole_call() -> None:
    output = constraint(None, rules(WEATHER, many=False), None)
    assert fits(output, CALL)
    for text in (
        f"{CALL}\n{CALL}",
        "Sure!",
        f"\n{CALL}",
        CALL.replace("weather", "other"),
        CALL.replace("city", "town"),
    ):
        assert not fits(output, text), text


def test_several_functions_and_calls() -> None:
    output = constraint(None, rules(WEATHER, ODD), None)
    for text in (CALL, ODD_CALL, f"{CALL}\n{ODD_CALL}\n{CALL}"):
        assert fits(output, text), text
    assert not fits(output, ODD_CALL.replace("{}}", '{"city": "Bonn"}}'))


@pytest.mark.parametrize("reasons", [None, False, True], ids=["never", "may", "opened"])
def test_reasoning_comes_first_where_there_is_any(reasons: bool | None) -> None:
    for output, answer in (
        (constraint(None, rules(WEATHER), reasons), CALL),
        (constraint(JSON, None, reasons), '{"city":"Bonn"}'),
        (constraint(StructuredOutput(regex=r"\d/\d|x"), None, reasons), "1/2"),
    ):
        thought = "I <b> {\n</think>\n\n" + answer
        if reasons is None and output is not None and output.regex is not None:
            continue
        assert fits(output, answer) is (reasons is not True)
        assert fits(output, thought) is (reasons is True)
        assert fits(output, f"<think>\n{thought}") is (reasons is not None)
        assert not fits(output, f"{thought} and more")


def test_a_format_and_calls_are_alternatives() -> None:
    output = constraint(JSON, rules(WEATHER, must_call=False), None)
    assert fits(output, CALL)
    assert fits(output, '{"city":"Bonn"}')
    assert not fits(output, "Hello")
    forced = constraint(JSON, rules(WEATHER), None)
    assert fits(forced, CALL)
    assert not fits(forced, '{"city":"Bonn"}')


@pytest.mark.parametrize(
    ("calls", "more_than_one"),
    [
        (rules(STRICT, must_call=False), True),
        (rules(WEATHER, must_call=False, is_subset=True), True),
        (rules(WEATHER, must_call=False, many=False), False),
    ],
    ids=["strict", "a part of the tools", "one call"],
)
def test_where_calls_are_bound_text_stays_free(calls: CallRules, more_than_one: bool) -> None:
    output = constraint(None, calls, None)
    for text in ("", "Hello <tool", f"Hello\n{CALL}", CALL, f"<think>\nHm\n</think>\n\n{CALL}"):
        assert fits(output, text), text
    assert fits(output, f"{CALL}\n{CALL}") is more_than_one
    for text in (CALL.replace("city", "town"), CALL.replace("weather", "other"), "<tool_call>x"):
        assert not fits(output, text), text


def test_parameters_that_no_grammar_can_hold_are_told_by_function() -> None:
    long = FunctionDefinition(name="f", parameters={"title": "x" * MAX_GRAMMAR_CHARS})
    with pytest.raises(ApiError, match="tools: the parameters of 'f' cannot be kept to") as caught:
        constraint(None, rules(long), None)
    assert (caught.value.status, caught.value.param) == (400, "tools")


@pytest.mark.parametrize(
    "added", [["<tool_call>", "</tool_call>"], []], ids=["tags are tokens", "tags are text"]
)
def test_the_tags_may_be_tokens_of_their_own(added: list[str]) -> None:
    backend = byte_level({}, special=["<end>"], added=added)
    tokenizer = Tokenizer(TokenizerRecipe(backend, "by hand"))
    eos = tokenizer.token_to_id("<end>")
    assert eos is not None
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [eos])
    try:
        output = constraint(None, rules(WEATHER, many=False), None)
        assert output is not None
        grammar = compiler.compile(output)
        mask = np.zeros((1, grammar.num_mask_words), np.int32)
        token_ids = tokenizer.encode(CALL, add_special_tokens=False)
        assert (token_ids[0] == tokenizer.token_to_id("<tool_call>")) is bool(added)
        for token_id in [*token_ids, eos]:
            fill_masks([grammar], mask)
            allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")
            assert allowed[token_id], tokenizer.token_text(token_id)
            assert allowed[eos] == (token_id == eos)
            grammar.accept(token_id)
    finally:
        compiler.close()
