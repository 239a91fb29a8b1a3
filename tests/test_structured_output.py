"""StructuredOutput: what it takes, what it keeps, what is refused and how the refusal reads."""

import pickle
from typing import Any

import pytest

import octavo
from octavo.errors import RequestError
from octavo.sampling_params import SamplingParams
from octavo.structured_output import MAX_GRAMMAR_CHARS, StructuredOutput

SCHEMA = {"type": "object", "properties": {"z": {"type": "string"}, "a": {"type": "integer"}}}


def test_a_schema_is_kept_as_text_in_the_order_of_its_keys():
    wanted = '{"type":"object","properties":{"z":{"type":"string"},"a":{"type":"integer"}}}'
    assert StructuredOutput(json_schema=SCHEMA).json_schema == wanted
    spaced = '{ "type":\n"object", "properties": {"z": {"type": "string"}, "a": {"type": "integer"}}}'
    assert StructuredOutput(json_schema=spaced) == StructuredOutput(json_schema=SCHEMA)


def test_digits_are_those_of_ascii():
    assert StructuredOutput(regex=r"\d+[\d_]\\d\D\w").regex == r"[0-9]+[[0-9]_]\\d\D\w"


def test_it_is_a_value():
    one, other = StructuredOutput(regex="a+"), StructuredOutput(regex="a+")
    assert one == other
    assert hash(one) == hash(other)
    assert one != StructuredOutput(lark="a+")
    assert pickle.loads(pickle.dumps(one)) == one
    params = SamplingParams(structured_output=one)
    assert pickle.loads(pickle.dumps(params)) == params
    assert hash(params) == hash(SamplingParams(structured_output=other))
    assert octavo.StructuredOutput is StructuredOutput


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exactly one of json_schema, json_object, regex and lark; got none"),
        ({"regex": "a", "lark": "start: B"}, "got regex and lark"),
        ({"json_object": True, "json_schema": {}}, "got json_schema and json_object"),
        ({"json_object": 1}, "json_object must be True or False, got 1"),
        ({"json_schema": [1]}, "json_schema must be a JSON object"),
        ({"json_schema": "true"}, "json_schema must be a JSON object"),
        ({"json_schema": "{'a': 1}"}, "json_schema is not JSON: Expecting property name"),
        ({"json_schema": '{"maximum": NaN}'}, "json_schema is not JSON: NaN is no JSON number"),
        ({"json_schema": {"maximum": float("inf")}}, "json_schema is not JSON"),
        ({"json_schema": {"const": b"x"}}, "json_schema is not JSON: Object of type bytes"),
        ({"json_schema": nested(100_000)}, "json_schema is nested too deeply"),
        (
            {"json_schema": '{"not":' * 100_000 + "1" + "}" * 100_000},
            "json_schema has 800,001 characters",
        ),
        ({"json_schema": '{"a":' * 20_000 + "1" + "}" * 20_000}, "json_schema is nested too deeply"),
        ({"json_schema": {"x-guidance": {"lenient": True}}}, "json_schema holds 'x-guidance'"),
        ({"json_schema": {"const": "x" * MAX_GRAMMAR_CHARS}}, "the limit is 131,072"),
        ({"regex": b"a"}, "regex must be a string, got b'a'"),
        ({"regex": "\ud800"}, "regex is not valid Unicode"),
        ({"lark": "x" * (MAX_GRAMMAR_CHARS + 1)}, "lark has 131,073 characters; the limit is 131,072"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str):
    with pytest.raises(RequestError) as caught:
        StructuredOutput(**options)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_schema_that_holds_itself_is_refused():
    schema: dict[str, Any] = {}
    schema["items"] = schema
    with pytest.raises(RequestError, match="json_schema is not JSON: Circular reference"):
        StructuredOutput(json_schema=schema)


def test_options_that_contradict_it_are_refused_by_name():
    with pytest.raises(RequestError, match="ignore_eos=True contradicts structured_output"):
        SamplingParams(structured_output=StructuredOutput(json_object=True), ignore_eos=True)
    with pytest.raises(RequestError, match="structured_output must be a StructuredOutput, as in"):
        SamplingParams(structured_output={"json_object": True})  # type: ignore[arg-type]
