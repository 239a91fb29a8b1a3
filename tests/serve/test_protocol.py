"""How strictly bodies are read, what becomes of them, and the numbers that go back."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from helpers.serve import CARD
from helpers.text import letters_tokenizer
from pydantic import ValidationError

from octavo.errors import RequestError
from octavo.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.serve.api_errors import ApiError
from octavo.serve.chat_protocol import ChatRequest
from octavo.serve.protocol import CompletionRequest, IgnoredFields, structured_output, to_sampling_params
from octavo.serve.response_parts import chat_logprobs, completion_logprobs, usage_of
from octavo.serve.responses_protocol import ResponsesRequest
from octavo.structured_output import StructuredOutput

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"prompt": "Hi"}


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate(CHAT | fields)


def params(body: Any, **defaults: Any) -> SamplingParams:
    return to_sampling_params(body, replace(CARD, defaults=defaults))


def refused_field(model: Any, body: dict[str, Any]) -> str:
    """The field that pydantic names; brackets are names of alternatives, not of fields."""
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    return ".".join(str(part) for part in caught.value.errors()[0]["loc"] if str(part)[0] != "(")


WRONG = {
    "temperature": ["1", -0.1, math.inf, math.nan, True, [1]],
    "top_p": ["1", 0, 1.5, False],
    "n": [0, -1, 1.5, "2", True, 2**63],
    "max_tokens": [0, -1, 1.5, "8", -2, 2**63, 10**400, True],
    "seed": [1.5, "1", 2**63, -(2**63) - 1],
    "stop": [1, "", [""], [1], {"a": 1}, ["a"] * 65, "a" * 1025],
    "frequency_penalty": [2.1, "1"],
    "presence_penalty": [-2.1],
    "logit_bias": [{"abc": 5}, {"-1": 5}, {"1.5": 1}, {"01": 1}, {" 1": 1}, {"1_0": 1}, {"١": 1}, [1]],
    "stream": ["true", 1],
    "stream_options": [True, {"include_usages": True}, {"include_usage": "yes"}],
    "top_k": [-2, 1.5],
    "min_p": [-0.1, 1.1],
    "repetition_penalty": [0, -1],
    "ignore_eos": [1, "yes"],
    "stop_token_ids": [[-1], ["1"], 5],
    "allowed_token_ids": [[], [1.5]],
    "cache_salt": [5, "a" * 1025],
    "priority": ["1", 1.5, 2**63],
    "response_format": ["json", {"type": "xml"}, {"type": "json_schema", "json_schema": {"schema": 5}}],
    "structured_outputs": [{"choice": []}, {"regexp": "a"}],
    "model": [5],
}


@pytest.mark.parametrize("model", [ChatRequest, CompletionRequest], ids=["chat", "completions"])
@pytest.mark.parametrize(("field", "value"), [(name, v) for name, values in WRONG.items() for v in values])
def test_a_wrong_value_is_refused_by_its_field(model: Any, field: str, value: Any) -> None:
    body = (CHAT if model is ChatRequest else TEXT) | {"stream": True, field: value}
    assert refused_field(model, body).split(".")[0].split("[")[0] == field


@pytest.mark.parametrize("value", [1e9, -101, "5", math.nan, None])
def test_a_bias_out_of_range_is_refused_by_its_key(value: Any) -> None:
    assert refused_field(ChatRequest, CHAT | {"logit_bias": {"0": value}}) == "logit_bias.0"


@pytest.mark.parametrize("model", [ChatRequest, CompletionRequest, ResponsesRequest])
def test_null_is_the_default_everywhere(model: Any) -> None:
    required = {ChatRequest: CHAT, CompletionRequest: TEXT, ResponsesRequest: {"input": "Hi"}}[model]
    names = [field.alias or name for name, field in model.model_fields.items()]
    nulls = {name: None for name in names if name not in required}
    assert params(model.model_validate(required | nulls)) == params(model.model_validate(required))


@pytest.mark.parametrize("model", [ChatRequest, CompletionRequest, ResponsesRequest])
def test_an_unknown_field_is_refused_by_name(model: Any) -> None:
    body = {ChatRequest: CHAT, CompletionRequest: TEXT, ResponsesRequest: {"input": "Hi"}}[model]
    assert refused_field(model, body | {"temprature": 1}) == "temprature"


@pytest.mark.parametrize(
    ("model", "field", "value"),
    [
        (CompletionRequest, "best_of", 2),
        (CompletionRequest, "suffix", "x"),
        (ChatRequest, "functions", [{"name": "f"}]),
        (ChatRequest, "function_call", "auto"),
        (ChatRequest, "audio", {}),
        (ChatRequest, "prediction", {}),
        (ChatRequest, "verbosity", "low"),
        (ChatRequest, "web_search_options", {}),
        (ResponsesRequest, "previous_response_id", "resp_1"),
        (ResponsesRequest, "conversation", "conv_1"),
        (ResponsesRequest, "background", True),
        (ResponsesRequest, "truncation", "auto"),
        (ResponsesRequest, "include", ["file_search_call.results"]),
    ],
)
def test_what_is_known_but_not_served_is_refused(model: Any, field: str, value: Any) -> None:
    body = {ChatRequest: CHAT, CompletionRequest: TEXT, ResponsesRequest: {"input": "Hi"}}[model]
    assert refused_field(model, body | {field: value}).split(".")[0] == field


def test_objects_must_have_a_form_in_utf8() -> None:
    function = {"name": "f", "parameters": {"title": "\ud800"}}
    tools: list[Any] = [{"type": "function", "function": function}]
    assert refused_field(ChatRequest, CHAT | {"tools": tools}) == "tools.0.function.parameters"
    tools = [{"type": "function", **function}]
    assert refused_field(ResponsesRequest, {"input": "Hi", "tools": tools}) == "tools.0.parameters"


def test_fields_without_effect_are_accepted_whatever_they_hold() -> None:
    fields: dict[str, Any] = {name: {"a": [1]} for name in IgnoredFields.model_fields}
    fields |= {"user": "me", "metadata": {"a": "b"}}
    assert sorted(fields) == [
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    ]
    assert params(chat(**fields)) == params(chat())


def test_every_option_reaches_the_engine() -> None:
    body = chat(
        temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.5, frequency_penalty=0.25,
        presence_penalty=-0.5, n=2, seed=7, stop=["a", "b"], min_tokens=2, stop_token_ids=[3],
        allowed_token_ids=[1, 2, 51], ignore_eos=True, skip_special_tokens=False,
        include_stop_str_in_output=True, logit_bias={"51": -3, "0": 1.5}, max_completion_tokens=9,
        logprobs=True, top_logprobs=4,
    )  # fmt: skip
    assert params(body) == SamplingParams(
        temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.5, frequency_penalty=0.25,
        presence_penalty=-0.5, n=2, seed=7, stop=["a", "b"], min_tokens=2, stop_token_ids=[3],
        allowed_token_ids=[1, 2, 51], ignore_eos=True, skip_special_tokens=False,
        include_stop_str_in_output=True, logit_bias={51: -3, 0: 1.5}, max_tokens=9, logprobs=4,
    )  # fmt: skip
    assert params(chat(structured_outputs={"regex": "a+"})).structured_output == StructuredOutput(regex="a+")


def test_every_sampling_field_of_the_engine_can_be_asked_for() -> None:
    taken = {
        *ChatRequest.model_fields,
        *CompletionRequest.model_fields,
        "structured_output",  # response_format, structured_outputs
        "prompt_logprobs",  # completions: echo with logprobs
    }
    assert set(SamplingParams.__dataclass_fields__) <= taken


def test_defaults_are_the_models_and_then_openais() -> None:
    assert params(chat()) == SamplingParams(temperature=1.0, max_tokens=None)
    assert params(chat(temperature=0)).temperature == 0
    recommended = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 99}
    assert params(chat(), **recommended) == SamplingParams(
        temperature=0.6, top_k=20, top_p=0.95, max_tokens=99
    )
    assert params(chat(top_k=-1, max_tokens=5), **recommended).top_k == 0
    assert params(chat(), do_sample=False).temperature == 0
    assert params(CompletionRequest.model_validate(TEXT)).max_tokens == 16
    assert params(CompletionRequest.model_validate(TEXT | {"max_tokens": 2**31})).max_tokens == 2**31


def test_both_names_of_the_limit_mean_the_same() -> None:
    assert params(chat(max_tokens=3)).max_tokens == params(chat(max_completion_tokens=3)).max_tokens == 3
    assert params(chat(max_tokens=3, max_completion_tokens=3)).max_tokens == 3
    with pytest.raises(ApiError, match=r"max_tokens \(3\) and max_completion_tokens \(4\) differ"):
        chat(max_tokens=3, max_completion_tokens=4)


@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids", "allowed_token_ids"])
def test_ids_outside_the_vocabulary_are_named(field: str) -> None:
    for token_id, is_in in ((51, True), (52, False), (10**17, False)):
        value: Any = {str(token_id): 5} if field == "logit_bias" else [token_id]
        if is_in:
            params(chat(**{field: value}))
            continue
        with pytest.raises(
            ApiError, match=rf"{field} names token id {token_id}, outside .*\(0 to 51\)"
        ) as caught:
            params(chat(**{field: value}))
        assert (caught.value.status, caught.value.param) == (400, field)


def test_fields_that_need_another_are_refused_without_it() -> None:
    with pytest.raises(ApiError, match="top_logprobs needs logprobs") as caught:
        chat(top_logprobs=2)
    assert caught.value.param == "top_logprobs"
    with pytest.raises(ApiError, match="stream_options is only for stream: true"):
        chat(stream_options={"include_usage": True})
    assert params(chat(logprobs=True)).logprobs == 0
    assert params(chat(logprobs=False)).logprobs is None


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutput(json_object=True)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            StructuredOutput(json_schema=SCHEMA),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, StructuredOutput(json_schema=SCHEMA)),
        (
            {"structured_outputs": {"json": '{"type": "string"}'}},
            StructuredOutput(json_schema={"type": "string"}),
        ),
        ({"structured_outputs": {"json_object": True}}, StructuredOutput(json_object=True)),
        ({"structured_outputs": {"regex": "a|b"}}, StructuredOutput(regex="a|b")),
        ({"structured_outputs": {"choice": ["a.b", "c|(d)"]}}, StructuredOutput(regex=r"a\.b|c\|\(d\)")),
        ({"structured_outputs": {"grammar": "start: A"}}, StructuredOutput(lark="start: A")),
    ],
)
def test_formats_become_constraints(fields: dict[str, Any], expected: StructuredOutput | None) -> None:
    assert structured_output(chat(**fields)) == expected
    assert structured_output(CompletionRequest.model_validate(TEXT | fields)) == expected


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        (
            {"response_format": {"type": "json_schema"}},
            "schema is missing",
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_object", "json_schema": {"schema": {}}}},
            "belongs to type 'json_schema', got type 'json_object'",
            "response_format",
        ),
        ({"structured_outputs": {}}, "exactly one of .* got none", "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "got regex, choice", "structured_outputs"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "give one",
            "structured_outputs",
        ),
    ],
)
def test_formats_that_say_nothing_or_two_things_are_refused(
    fields: dict[str, Any], message: str, param: str
) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        structured_output(chat(**fields))
    assert (caught.value.status, caught.value.param) == (400, param)


def test_contradictions_are_the_engines_to_tell() -> None:
    with pytest.raises(RequestError, match=r"min_tokens \(5\) is above max_tokens \(3\)"):
        params(chat(min_tokens=5, max_tokens=3))


# What goes back.


def output(*choices: list[int], num_prompt: int = 5, num_cached: int = 4) -> RequestOutput:
    outputs = [CompletionOutput(i, "", ids, "stop") for i, ids in enumerate(choices)]
    return RequestOutput("r", None, [0] * num_prompt, outputs, num_cached, RequestMetrics(0, 0, 0, 0, 0))


def test_usage_counts_a_prompt_once_and_every_choice() -> None:
    assert usage_of([output([1, 2], [3])]) == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    two = usage_of([output([1]), output([1, 2], num_prompt=7, num_cached=0)], num_reasoning_tokens=2)
    assert two["prompt_tokens"] == 12
    assert two["total_tokens"] == 15
    assert two["completion_tokens_details"] == {"reasoning_tokens": 2}


LOGPROBS = {
    3: Logprob(-2.5, 3),
    0: Logprob(-0.5, 1),
    1: Logprob(-1.0, 2),
    2: Logprob(-math.inf, 4),
}


def test_chat_logprobs_are_in_order_of_likelihood_and_finite() -> None:
    tokenizer = letters_tokenizer(52)
    (entry,) = chat_logprobs([3], [LOGPROBS], 2, tokenizer)
    assert entry == {
        "token": "d",
        "logprob": -2.5,
        "bytes": [100],
        "top_logprobs": [
            {"token": "a", "logprob": -0.5, "bytes": [97]},
            {"token": "b", "logprob": -1.0, "bytes": [98]},
        ],
    }
    assert chat_logprobs([3], [LOGPROBS], 0, tokenizer)[0]["top_logprobs"] == []
    assert chat_logprobs([2], [LOGPROBS], 4, tokenizer)[0]["logprob"] == -9999.0


def test_completion_logprobs_have_the_older_form() -> None:
    tokenizer = letters_tokenizer(52)
    assert completion_logprobs([0, 3], [None, LOGPROBS], 2, tokenizer, text_offset=5) == {
        "tokens": ["a", "d"],
        "token_logprobs": [None, -2.5],
        "top_logprobs": [None, {"a": -0.5, "b": -1.0}],
        "text_offset": [5, 6],
    }
    assert completion_logprobs([3], [LOGPROBS], 0, tokenizer)["top_logprobs"] is None
