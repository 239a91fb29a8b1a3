"""What requests of the OpenAI API share: the fields, and how strictly they are read.

Every body is read strictly: a field nobody knows, "8" where a number belongs, or 1.5 where an integer does is
status 400 naming the field. `null` means the default, everywhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Protocol, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from octavo.errors import RequestError, shown
from octavo.sampling_params import SamplingParams
from octavo.serve.api_errors import ApiError, format_error
from octavo.structured_output import StructuredOutput

T = TypeVar("T")
Many = Annotated[list[T], Field(fail_fast=True)]
"""A list in a body. Only its first bad item is told of: an error costs far more than the item it is about."""

MAX_ITEMS = 10_000
"""Most messages, parts, tools, prompts, stop tokens or biases in one list."""
MAX_ALLOWED_TOKENS = 100_000
MAX_TOP_LOGPROBS = 20
"""Most alternatives per token that a response carries."""
MAX_METADATA = 16
"""OpenAI's limit."""
MAX_STOPS = 64
MAX_STOP_LENGTH = 1024
_MAX_FIELDS = 20
"""An object with so many fields is looked at field by field, whatever their names are."""
DEFAULT_TEMPERATURE = 1.0
"""OpenAI's default, for models whose generation_config.json recommends none."""
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for /v1/completions; the other endpoints go on to the end of the context."""


class Body(BaseModel):
    """The base of every JSON object that a client sends."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, value: Any) -> Any:
        # More fields than there are would each become an error of its own.
        if isinstance(value, dict) and len(value) > max(_MAX_FIELDS, len(cls.model_fields)):
            raise PydanticCustomError(
                "too_many_fields", "more fields than are known: {num}", {"num": len(value)}
            )
        return value


def kinds(expected: str, kind_of: Callable[[Any], str | None]) -> Discriminator:
    """Tells the kinds a field may have apart before it is read, so that an error is about one of them, and is
    `expected` where `kind_of` gives None. (A tag in brackets is left out where the message says which field
    it is.)
    """
    return Discriminator(kind_of, custom_error_type="kind", custom_error_message=f"expected {expected}")


def text_or_list(value: object) -> str | None:
    """For `kinds`."""
    return "(text)" if isinstance(value, str) else "(list)" if isinstance(value, list) else None


def unsupported(way_out: str) -> Any:
    """The type of a field that is known but not served: null passes, everything else is an error."""

    def refuse(value: object) -> None:
        if value is not None:
            message = "not supported by this server; {way_out}"
            raise PydanticCustomError("unsupported", message, {"way_out": way_out})

    return Annotated[None, BeforeValidator(refuse), Field(description=f"Not supported; {way_out}.")]


def _can_be_sent_back(value: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        message = "not valid Unicode: it holds a lone surrogate"
        raise PydanticCustomError("lone_surrogate", message) from error
    except RecursionError as error:
        raise PydanticCustomError("recursion", "nested too deeply") from error
    return value


AnyObject = dict[Any, Any]
"""Any JSON object. Its keys are texts as they are; checked one by one, each could be an error of its own."""
JsonObject = Annotated[AnyObject, AfterValidator(_can_be_sent_back)]
"""Any JSON object, whose texts have a UTF-8 form."""

_Ignored = Annotated[Any, Field(description="Accepted, and without effect on the answer.")]


def _check_metadata(value: object) -> object:
    if isinstance(value, Mapping):
        _check_size(value, MAX_METADATA)
    return value


class IgnoredFields(Body):
    """Fields of the OpenAI API that concern its accounts and storage. They are accepted and have no effect:
    nothing here is stored, billed or tiered. docs/openai_api.md lists them.
    """

    user: str | None = Field(default=None, description="Accepted, and without effect on the answer.")
    metadata: Annotated[dict[str, str] | None, BeforeValidator(_check_metadata)] = Field(
        default=None, description="Accepted, and without effect on the answer."
    )
    store: _Ignored = None
    service_tier: _Ignored = None
    safety_identifier: _Ignored = None
    prompt_cache_key: _Ignored = None
    prompt_cache_retention: _Ignored = None
    prompt_cache_options: _Ignored = None


def _check_size(value: Mapping[Any, Any], most: int) -> None:
    if len(value) > most:
        message = "expected at most {most} entries, got {num}"
        raise PydanticCustomError("too_many_entries", message, {"most": most, "num": len(value)})


def _bias_keys(value: object) -> object:
    if isinstance(value, Mapping):
        _check_size(value, MAX_ITEMS)
        for key in value:
            # Plain decimal only: int() would also take "1_0", " 1" and other scripts' digits.
            if not (isinstance(key, str) and re.fullmatch(r"0|[1-9][0-9]{0,17}", key)):
                raise PydanticCustomError(
                    "token_id",
                    'expected keys that are token ids, such as "1234", got {key}',
                    {"key": shown(key)},
                )
        for key, bias in value.items():
            if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
                return {key: bias}  # one error is enough
    return value


LogitBias = Annotated[
    dict[str, Annotated[float, Field(ge=-100, le=100)]],
    BeforeValidator(_bias_keys),
    Field(description="Token id (as a string) to a value from -100 to 100 that is added to its logit."),
]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Stop = Annotated[
    Annotated[StopText, Tag("(text)")]
    | Annotated[Many[StopText], Field(max_length=MAX_STOPS), Tag("(list)")],
    kinds("a string or a list of strings", text_or_list),
]
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, Field(ge=1, le=2**63 - 1)]


class StreamOptions(Body):
    include_usage: bool | None = Field(
        default=None, description="Send one more chunk, with the usage and no choices, before `[DONE]`."
    )
    include_obfuscation: bool | None = Field(
        default=None, description="Accepted, and without effect: chunks are never padded with random text."
    )


class JsonSchemaFormat(Body):
    name: str | None = None
    description: str | None = None
    schema_: JsonObject | None = Field(default=None, alias="schema")
    strict: bool | None = Field(default=None, description="Without effect: the schema is always kept.")


class ResponseFormat(Body):
    """`{"type": "text"}`, `{"type": "json_object"}`, or `{"type": "json_schema", "json_schema": {...}}`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


def _text_or_object(value: object) -> str | None:
    return "(text)" if isinstance(value, str) else "(object)" if isinstance(value, dict) else None


class StructuredOutputs(Body):
    """An extension: what the answer must look like; exactly one field."""

    json_: (
        Annotated[
            Annotated[AnyObject, Tag("(object)")] | Annotated[str, Tag("(text)")],
            kinds("an object or a string", _text_or_object),
        ]
        | None
    ) = Field(default=None, alias="json", description="A JSON schema.")
    json_object: bool | None = None
    regex: str | None = None
    choice: Many[str] | None = Field(default=None, min_length=1, description="One of these texts.")
    grammar: str | None = Field(default=None, description="A grammar in llguidance's Lark syntax.")


class SamplingFields(Body):
    """How tokens are chosen: what chat, completions and responses have in common, extensions included."""

    model: str | None = Field(default=None, description="One of /v1/models; the served model when left out.")
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    stream: bool | None = None
    # Extensions, by the names that vLLM gave them.
    top_k: Annotated[int, Field(ge=-1, le=2**63 - 1)] | None = None
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, ge=1e-6, le=1e6)
    min_tokens: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    stop_token_ids: Many[Annotated[int, Field(ge=0)]] | None = Field(default=None, max_length=MAX_ITEMS)
    allowed_token_ids: Many[Annotated[int, Field(ge=0)]] | None = Field(
        default=None, min_length=1, max_length=MAX_ALLOWED_TOKENS
    )
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: str | None = Field(
        default=None, max_length=1024, description="Prompts share cached K/V only under the same salt."
    )
    priority: Int64 | None = Field(default=None, description="Lower runs first; 0 when left out.")

    @property
    def limit(self) -> int | None:
        """Most tokens to generate, as the request states it."""
        return None

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives per token; None when no log probabilities are asked for."""
        return None


class GenerationFields(SamplingFields, IgnoredFields):
    """What chat and completions have in common."""

    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: LogitBias | None = None
    max_tokens: Count | None = None
    n: Count | None = None
    seed: Int64 | None = None
    stop: Stop | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            # ApiError, not ValueError: it can name the field.
            raise ApiError(400, "stream_options is only for stream: true", param="stream_options")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_tokens


def _kind_of_prompt(value: object) -> str | None:
    if isinstance(value, str):
        return "(text)"
    if not isinstance(value, list):
        return None
    first = value[0] if value else ""
    if isinstance(first, list):
        return "(lists of ids)"
    if isinstance(first, int) and not isinstance(first, bool):
        return "(ids)"
    return "(texts)" if isinstance(first, str) else None


Prompt = Annotated[
    Annotated[str, Tag("(text)")]
    | Annotated[Many[str], Field(min_length=1, max_length=MAX_ITEMS), Tag("(texts)")]
    | Annotated[Many[int], Tag("(ids)")]
    | Annotated[Many[Many[int]], Field(max_length=MAX_ITEMS), Tag("(lists of ids)")],
    kinds("a string, a list of strings, a list of token ids, or a list of such lists", _kind_of_prompt),
]


class CompletionRequest(GenerationFields):
    """The body of POST /v1/completions."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: unsupported("ask for n and choose among them") = None  # type: ignore[valid-type]
    suffix: unsupported("write the model's own infill format into the prompt") = None  # type: ignore[valid-type]

    @property
    def limit(self) -> int | None:
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class ModelFacts(Protocol):
    """What a request's options are checked against; `octavo.serve.messages.ModelCard` is one."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def defaults(self) -> Mapping[str, Any]:
        """The model's generation_config.json."""


_SAME_NAME = frozenset(
    (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "n",
        "seed",
        "stop",
        "min_tokens",
        "stop_token_ids",
        "allowed_token_ids",
        "ignore_eos",
        "skip_special_tokens",
        "include_stop_str_in_output",
    )
)


def to_sampling_params(request: SamplingFields, card: ModelFacts, **more: Any) -> SamplingParams:
    """The options of a request over the model's own defaults; `more` are SamplingParams by name, over both.

    Without a limit in the request or the model's advice, as many tokens are generated as the context holds.

    Raises:
        ApiError: status 400, an option is out of range for this model; `param` names the field.
        RequestError: two options contradict each other.
    """
    options: dict[str, Any] = {
        name: value
        for name in request.model_fields_set & _SAME_NAME
        if (value := getattr(request, name)) is not None
    }
    if "temperature" not in options and _recommends_no_temperature(card.defaults):
        options["temperature"] = DEFAULT_TEMPERATURE
    limit = request.limit
    options["max_tokens"] = card.defaults.get("max_new_tokens") if limit is None else limit
    options["logprobs"] = request.num_logprobs
    if bias := getattr(request, "logit_bias", None):
        for key in bias:
            _check_token_id("logit_bias", int(key), card.vocab_size)
        options["logit_bias"] = {int(key): value for key, value in bias.items()}
    for name in ("stop_token_ids", "allowed_token_ids"):
        for token_id in options.get(name, ()):
            _check_token_id(name, token_id, card.vocab_size)
    if "structured_output" not in more:
        options["structured_output"] = structured_output(request)
    params = SamplingParams.from_generation_config(card.defaults, **options | more)
    params.validate_for(card.vocab_size, card.max_model_len)
    return params


def _recommends_no_temperature(defaults: Mapping[str, Any]) -> bool:
    return defaults.get("temperature") is None and defaults.get("do_sample") is None


def _check_token_id(name: str, token_id: int, vocab_size: int) -> None:
    if token_id >= vocab_size:
        raise ApiError(
            400,
            f"{name} names token id {token_id}, outside the vocabulary (0 to {vocab_size - 1})",
            param=name,
        )


def structured_output(
    request: SamplingFields, format_field: str = "response_format"
) -> StructuredOutput | None:
    """The request's `response_format` or `structured_outputs` as a StructuredOutput, or None.

    Raises ApiError (400) when both are given, or one is incomplete, too long or no schema.
    """
    try:
        return _structured_output(request)
    except RequestError as error:
        raise format_error(str(error), *format_place(request, format_field)) from error


def format_place(request: SamplingFields, format_field: str = "response_format") -> tuple[str, str]:
    """The field that says what to write, and the place in it; `format_field` is what response_format is
    called.
    """
    if (own := request.structured_outputs) is not None:
        given = [name.rstrip("_") for name, value in own if value is not None and value is not False]
        return "structured_outputs", ".".join(["structured_outputs", *given[:1]])
    return format_field, {
        "response_format": "response_format.json_schema.schema",
        "text.format": "text.format.schema",
    }[format_field]


def _structured_output(request: SamplingFields) -> StructuredOutput | None:
    response_format: ResponseFormat | None = getattr(request, "response_format", None)
    if response_format is not None and response_format.type != "json_schema":
        if response_format.json_schema is not None:
            raise ApiError(
                400,
                "response_format.json_schema belongs to type 'json_schema', "
                f"got type {response_format.type!r}",
                param="response_format",
            )
        if response_format.type == "text":
            response_format = None
    own = request.structured_outputs
    if own is None:
        return None if response_format is None else _from_response_format(response_format)
    if response_format is not None:
        raise ApiError(
            400,
            "response_format and structured_outputs both say what to write; give one",
            param="structured_outputs",
        )
    given = {name: value for name, value in own if value is not None and value is not False}
    if len(given) != 1:
        raise ApiError(
            400,
            "structured_outputs: expected exactly one of json, json_object, regex, choice, grammar; got "
            f"{', '.join(name.rstrip('_') for name in given) or 'none'}",
            param="structured_outputs",
        )
    if own.json_ is not None:
        return StructuredOutput(json_schema=own.json_)
    if own.json_object:
        return StructuredOutput(json_object=True)
    if own.regex is not None:
        return StructuredOutput(regex=own.regex)
    if own.choice is not None:
        return StructuredOutput(regex="|".join(_literal(text) for text in own.choice))
    return StructuredOutput(lark=own.grammar)


def _literal(text: str) -> str:
    """A pattern that matches just this text. `re.escape` writes escapes that Rust's regexes do not know."""
    return re.sub(r"[\\.+*?()|\[\]{}^$#&~-]", r"\\\g<0>", text)


def _from_response_format(response_format: ResponseFormat) -> StructuredOutput:
    if response_format.type == "json_object":
        return StructuredOutput(json_object=True)
    wrapper = response_format.json_schema
    if wrapper is None or wrapper.schema_ is None:
        raise ApiError(
            400,
            "response_format.json_schema.schema is missing: type 'json_schema' needs the schema to keep",
            param="response_format.json_schema.schema",
        )
    return StructuredOutput(json_schema=wrapper.schema_)
