"""The body of POST /v1/chat/completions, and the same as what the model's chat template reads."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, Tag, model_validator

from octavo.serve.api_errors import ApiError
from octavo.serve.protocol import (
    MAX_ITEMS,
    MAX_TOP_LOGPROBS,
    AnyObject,
    Body,
    Count,
    GenerationFields,
    JsonObject,
    Many,
    kinds,
    text_or_list,
    unsupported,
)


class TextPart(Body):
    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: Any = Field(default=None, description="Accepted, and without effect.")


class RefusalPart(Body):
    type: Literal["refusal"]
    refusal: str


Content = Annotated[
    Annotated[str, Tag("(text)")]
    | Annotated[
        Many[Annotated[TextPart | RefusalPart, Field(discriminator="type")]],
        Field(max_length=MAX_ITEMS),
        Tag("(list)"),
    ],
    kinds("a string or a list of text parts", text_or_list),
]


class FunctionCall(Body):
    name: str
    arguments: str = Field(description="JSON, as the model wrote it.")
    parsed_arguments: Any = Field(default=None, description="What the client's parse() adds; without effect.")


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = Field(default=None, description="Left over from a stream's delta; without effect.")


class Message(Body):
    """One message. `developer` is another word for `system`; `content` is a string or text parts.

    The fields that an answer's `message` carries are all accepted, so that it can be sent back as it came.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Many[ToolCall] | None = Field(default=None, max_length=MAX_ITEMS)
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(default=None, description="Another name of `reasoning_content`.")
    refusal: str | None = None
    annotations: Any = Field(default=None, description="Accepted, and without effect.")
    audio: unsupported("send text") = None  # type: ignore[valid-type]
    function_call: unsupported("use tool_calls") = None  # type: ignore[valid-type]
    parsed: Any = Field(default=None, description="What the client's parse() adds; without effect.")


class FunctionDefinition(Body):
    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    parameters: JsonObject | None = Field(
        default=None, description="A JSON schema; no parameters if left out."
    )
    strict: bool | None = Field(default=None, description="Calls keep to `parameters` in every case.")


class Tool(Body):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: Many[NamedTool] = Field(min_length=1)


class AllowedToolChoice(Body):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


CHOICES = "'none', 'auto', 'required', or an object of type 'function' or 'allowed_tools'"


def kind_of_choice(value: object) -> str | None:
    """For `kinds`, with `CHOICES`."""
    if isinstance(value, str):
        return "(word)"
    kind = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    return {"function": "(function)", "allowed_tools": "(allowed)"}.get(str(kind))


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("(word)")]
    | Annotated[NamedTool, Tag("(function)")]
    | Annotated[AllowedToolChoice, Tag("(allowed)")],
    kinds(CHOICES, kind_of_choice),
]


class ChatRequest(GenerationFields):
    """The body of POST /v1/chat/completions."""

    messages: Many[Message] = Field(min_length=1, max_length=MAX_ITEMS)
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Many[Tool] | None = Field(default=None, max_length=MAX_ITEMS)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = Field(
        default=None,
        max_length=32,
        description="For templates that read it; `none` turns enable_thinking off.",
    )
    modalities: Many[Literal["text"]] | None = None
    # Extensions.
    chat_template_kwargs: AnyObject | None = Field(
        default=None, description='Variables of the chat template, such as {"enable_thinking": false}.'
    )
    documents: Many[AnyObject] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    # Known, and not served.
    audio: unsupported("this server answers with text") = None  # type: ignore[valid-type]
    functions: unsupported("use tools") = None  # type: ignore[valid-type]
    function_call: unsupported("use tool_choice") = None  # type: ignore[valid-type]
    prediction: unsupported("leave it out") = None  # type: ignore[valid-type]
    web_search_options: unsupported("offer a search function in tools") = None  # type: ignore[valid-type]
    moderation: unsupported("moderate on your side") = None  # type: ignore[valid-type]
    verbosity: unsupported("say in a message how long the answer should be") = None  # type: ignore[valid-type]

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        # ApiError, not ValueError: it can name the field that is too much.
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise ApiError(
                400,
                f"max_tokens ({both[0]}) and max_completion_tokens ({both[1]}) differ; give one of them",
                param="max_tokens",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        names = [tool.function.name for tool in self.tools or []]
        twice = next((name for name, count in Counter(names).items() if count > 1), None)
        if twice is not None:
            raise ApiError(400, f"tools: two functions are named {twice!r}", param="tools")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as chat templates expect them: no nulls, no `developer`, arguments as objects."""
    return [_template_message(message) for message in messages]


def _template_message(message: Message) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    content = message.content
    if content is None and message.refusal is not None:
        content = message.refusal
    has_reasoned = (message.reasoning_content, message.reasoning) != (None, None)
    if content is None and message.role == "assistant" and has_reasoned:
        content = ""  # an answer that ended while it reasoned
    if isinstance(content, list):
        plain["content"] = [
            {"type": "text", "text": part.text if isinstance(part, TextPart) else part.refusal}
            for part in content
        ]
    elif content is not None:
        plain["content"] = content
    if message.tool_calls:
        plain["tool_calls"] = [_template_call(call) for call in message.tool_calls]
    for name in ("name", "tool_call_id", "reasoning_content", "reasoning"):
        if (value := getattr(message, name)) is not None:
            plain[name] = value
    return plain


def _template_call(call: ToolCall) -> dict[str, Any]:
    arguments: Any = call.function.arguments
    # Templates write an object as JSON themselves; some would quote a string once more.
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        parsed = None  # what a model wrote may be no JSON; it goes back as it came
    function = {
        "name": call.function.name,
        "arguments": parsed if isinstance(parsed, dict) else arguments,
    }
    plain: dict[str, Any] = {"type": "function", "function": function}
    return plain if call.id is None else {"id": call.id, **plain}


def template_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The functions as chat templates print them."""
    return [{"type": "function", "function": _template_function(tool.function)} for tool in tools]


def _template_function(function: FunctionDefinition) -> dict[str, Any]:
    fields = (
        ("name", function.name),
        ("description", function.description),
        ("parameters", function.parameters),
    )
    return {name: value for name, value in fields if value is not None}
