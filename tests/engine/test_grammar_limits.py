"""Grammars that are made to hurt are refused in bounded time, and the next one is served."""

import json
import os
import random
import signal
import string
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from helpers.grammar import make_grammar_engine, run_all, smollm2_tokenizer, structured

from octavo.engine import grammar_trial
from octavo.engine.core import Engine
from octavo.engine.grammar_trial import GrammarTrial
from octavo.errors import EngineError, RequestError
from octavo.structured_output import StructuredOutput, lark_json


def words(count: int, size: int) -> list[str]:
    source = random.Random(0)
    return ["".join(source.choices(string.ascii_lowercase, k=size)) for _ in range(count)]


def chain(count: int) -> str:
    return "\n".join([*(f"r{i}: r{i + 1}" for i in range(count)), f'r{count}: "a"', "start: r0"])


def doubling(count: int, keyword: str) -> dict[str, Any]:
    """A definition that holds two of the one before, and so on: 2^count of the first."""
    parts: dict[str, Any] = {"a0": {"type": "string", "pattern": "x"}}
    for i in range(1, count):
        parts[f"a{i}"] = {keyword: [{"$ref": f"#/$defs/a{i - 1}"}] * 2}
    return {"$defs": parts, "$ref": f"#/$defs/a{count - 1}"}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


HURTFUL = {
    # Rules a thousand deep take the stack: the process that compiles ends on the spot.
    "a long chain of rules": StructuredOutput(lark=chain(5000)),
    # 2^30 copies take all memory.
    "all of doubled": StructuredOutput(json_schema=doubling(30, "allOf")),
    "alternatives multiplied": StructuredOutput(
        json_schema={
            "allOf": [
                {"anyOf": [{"properties": {f"p{i}_{j}": {"type": "string"}}} for j in range(10)]}
                for i in range(12)
            ]
        }
    ),
    "a part of itself": StructuredOutput(json_schema={"$ref": "#"}),
    "rules that never begin": StructuredOutput(lark="start: a\na: b\nb: a"),
    "parentheses": StructuredOutput(regex="(" * 50_000 + "a" + ")" * 50_000),
    "brackets": StructuredOutput(lark="start: " + "[" * 50_000 + '"a"' + "]" * 50_000),
    "repeated a billion times": StructuredOutput(regex="a{1000000000}"),
    "a far multiple": StructuredOutput(json_schema={"type": "integer", "multipleOf": 999_999_937}),
    "arrays too deep": StructuredOutput(json_schema=nested(200)),
}

HARMLESS = {
    "any of doubled": StructuredOutput(json_schema=doubling(30, "anyOf")),
    "a recursive schema": StructuredOutput(
        json_schema={"type": "object", "properties": {"c": {"$ref": "#"}}, "required": ["c"]}
    ),
    "a large enum": StructuredOutput(json_schema={"enum": words(5000, 12)}),
    "a long constant": StructuredOutput(json_schema={"const": "x" * 20_000}),
    "a long string": StructuredOutput(json_schema={"type": "string", "maxLength": 10**9}),
    "many items": StructuredOutput(
        json_schema={"type": "array", "minItems": 10**9, "items": {"type": "null"}}
    ),
    "nested repetitions": StructuredOutput(regex="((a*)*)*b"),
    "alternatives that a backtracking matcher dies of": StructuredOutput(regex="(a|a)*" * 20 + "b"),
    "a set of states that doubles": StructuredOutput(regex="(a|b)*a(a|b){200}"),
    "letters of all alphabets": StructuredOutput(regex=r"\w{1,5000}"),
    "arrays": StructuredOutput(json_schema=nested(50)),
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = make_grammar_engine()
    yield engine
    engine.close()


@pytest.mark.parametrize("name", HURTFUL)
def test_what_hurts_is_refused_and_the_next_is_served(engine: Engine, name: str):
    with pytest.raises(RequestError, match=r"structured_output: \w+ cannot be used: ") as caught:
        engine.add_request([1], structured(HURTFUL[name]))
    assert len(str(caught.value)) < 400
    [good] = run_all(engine, [([1], structured(StructuredOutput(regex="yes|no")))])
    assert good.output is not None
    assert good.output.outputs[0].text in ("yes", "no")


@pytest.mark.parametrize(
    ("hurtful", "problem"),
    [
        (StructuredOutput(json_schema={"$ref": "#"}), "no text satisfies it, or only one that never ends"),
        (StructuredOutput(regex=".*" * 300), "it is too large; make it simpler"),
        # As in tools, whose grammar has schemas with the options of ours in it.
        (
            StructuredOutput(lark="start: " + lark_json({"$ref": "#/nope"})),
            r"at 1\(8\): failed to compile JSON schema: Pointer '/nope' does not exist",
        ),
        (
            StructuredOutput(
                lark="start: " + lark_json({"oneOf": [{"type": "integer"}, {"type": "number"}]})
            ),
            "oneOf is supported only where no value can match two of its parts; use anyOf",
        ),
    ],
)
def test_a_refusal_speaks_of_what_its_reader_can_change(
    engine: Engine, hurtful: StructuredOutput, problem: str
):
    with pytest.raises(RequestError, match=rf"^structured_output: \w+ cannot be used: {problem}$"):
        engine.add_request([1], structured(hurtful))


@pytest.mark.parametrize("name", HARMLESS)
def test_what_only_looks_hurtful_is_served(engine: Engine, name: str):
    request = engine.add_request([1, 2], structured(HARMLESS[name], max_tokens=24))
    slowest = 0.0
    while engine.has_work:
        began = time.thread_time()
        engine.step()
        slowest = max(slowest, time.thread_time() - began)
    assert request.output is not None
    assert request.output.outputs[0].finish_reason in ("stop", "length")
    assert slowest < 0.25


def trial(**options: Any) -> GrammarTrial:
    tokenizer = smollm2_tokenizer()
    tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
    return GrammarTrial(tokens, [0, 1, 2], [2], **options)


# Some seconds of compiling.
LARGE = json.dumps({"grammars": [{"json_schema": {"const": [[i] for i in range(10_000)]}}]})


def test_too_much_processor_time_is_told_as_such():
    with closing(trial(cpu_s=0.05)) as hasty:
        assert hasty.error_of(LARGE) == "it takes more than 0.05 s to compile; make it simpler"
        assert hasty.error_of("start: /a/") is None, "the next one is tried in another process"


def test_a_used_process_that_ends_is_tried_again_afresh():
    with closing(trial()) as used:
        assert used.error_of("start: /a/") is None
        first = used._process
        assert first is not None
        os.kill(first.pid, signal.SIGSEGV)  # as if it had no room left
        first.wait()
        assert used.error_of("start: /b/") is None
        assert used._process is not first


def test_a_silent_process_is_given_up(monkeypatch: pytest.MonkeyPatch):
    with closing(trial()) as slow:
        assert slow.error_of("start: /a/") is None
        monkeypatch.setattr(grammar_trial, "WALL_S", 0.0)
        with pytest.raises(EngineError, match="took longer than 0 s; try again"):
            slow.error_of(LARGE)


def test_a_process_that_does_not_start_is_said_not_to(tmp_path: Path):
    with closing(trial()) as broken:
        broken._command[2] = str(tmp_path / "missing.py")
        with pytest.raises(EngineError, match="the process that tries grammars does not start"):
            broken.error_of("start: /a/")
        broken._command[0] = str(tmp_path / "no interpreter")
        with pytest.raises(EngineError, match=r"does not start: .*No such file"):
            broken.error_of("start: /a/")


def test_nothing_is_tried_after_close():
    closed = trial()
    assert closed.error_of("start: /a/") is None
    closed.close()
    with pytest.raises(EngineError, match="does not start"):
        closed.error_of("start: /a/")
