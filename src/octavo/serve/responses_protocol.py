"""The body of POST /v1/responses: the text subset, and the same as a chat request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, Tag, model_validator

from octavo.serve.api_errors import ApiError
from octavo.serve.chat_protocol import (
    CHOICES,
    AllowedToolChoice,
    AllowedTools,
    ChatRequest,
    FunctionCall,
    FunctionDefinition,
    FunctionName,
    Message,
    NamedTool,
    TextPart,
    Tool,
    ToolCall,
    kind_of_choice,
)
from octavo.serve.protocol import (
    MAX_ITEMS,
    MAX_TOP_LOGPROBS,
    AnyObject,
    Body,
    Count,
    IgnoredFields,
    Int64,
    JsonObject,
    JsonSchemaFormat,
    LogitBias,
    Many,
    ResponseFormat,
    SamplingFields,
    Stop,
    kinds,
    text_or_list,
    unsupported,
)

_Ignored = Annotated[Any, Field(description="Accepted, and without effect on the answer.")]
Status = Literal["in_progress", "completed", "incomplete"]


class InputText(Body):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: _Ignored = None
    logprobs: _Ignored = None
    parsed: _Ignored = None
    prompt_cache_breakpoint: _Ignored = None


class RefusalText(Body):
    type: Literal["refusal"]
    refusal: str


_Part = Annotated[InputText | RefusalText, Field(discriminator="type")]
_Content = Annotated[
    Annotated[str, Tag("(text)")] | Annotated[Many[_Part], Field(max_length=MAX_ITEMS), Tag("(list)")],
    kinds("a string or a list of text parts", text_or_list),
]


class InputMessage(Body):
    """A message, or an output message sent back."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: _Content
    id: str | None = None
    status: Status | None = None
    phase: str | None = None


class FunctionCallItem(Body):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None
    parsed_arguments: _Ignored = None
    caller: _Ignored = None
    namespace: _Ignored = None


class FunctionOutputItem(Body):
    type: Literal["function_call_output"]
    call_id: str
    output: _Content
    id: str | None = None
    name: str | None = None
    status: Status | None = None
    caller: _Ignored = None
    namespace: _Ignored = None


class ReasoningText(Body):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Body):
    type: Literal["reasoning"]
    id: str | None = None
    summary: Many[ReasoningText] | None = None
    content: Many[ReasoningText] | None = None
    encrypted_content: _Ignored = None
    status: Status | None = None


def _kind_of_item(value: object) -> str:
    kind = value.get("type", "message") if isinstance(value, Mapping) else getattr(value, "type", None)
    return str(kind)


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    kinds("type message, function_call, function_call_output or reasoning", _kind_of_item),
]


class FunctionTool(FunctionDefinition):
    """A function; other kinds of tools run on OpenAI's servers and are not here."""

    type: Literal["function"]


class NamedFunction(Body):
    type: Literal["function"]
    name: str


class AllowedFunctions(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Many[NamedFunction] = Field(min_length=1)


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: JsonObject | None = Field(default=None, alias="schema")
    strict: bool | None = Field(default=None, description="Without effect: the schema is always kept.")


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: unsupported("say in the input how long the answer should be") = None  # type: ignore[valid-type]


class ReasoningOptions(Body):
    effort: str | None = Field(default=None, max_length=32)
    summary: _Ignored = None
    generate_summary: _Ignored = None


class ResponsesStreamOptions(Body):
    include_obfuscation: bool | None = Field(default=None, description="Accepted, and without effect.")


class ResponsesRequest(SamplingFields, IgnoredFields):
    """The body of POST /v1/responses."""

    input: Annotated[
        Annotated[str, Tag("(text)")]
        | Annotated[Many[InputItem], Field(min_length=1, max_length=MAX_ITEMS), Tag("(list)")],
        kinds("a string or a list of items", text_or_list),
    ]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    tools: Many[FunctionTool] | None = Field(default=None, max_length=MAX_ITEMS)
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("(word)")]
            | Annotated[NamedFunction, Tag("(function)")]
            | Annotated[AllowedFunctions, Tag("(allowed)")],
            kinds(CHOICES, kind_of_choice),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Many[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = Field(
        default=None, description="reasoning.encrypted_content is accepted: reasoning is given in plain text."
    )
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    stream_options: ResponsesStreamOptions | None = None
    max_tool_calls: Annotated[Any, Field(description="For tools that run on the server; without effect.")] = (
        None
    )
    # Extensions.
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: LogitBias | None = None
    seed: Int64 | None = None
    stop: Stop | None = None
    chat_template_kwargs: AnyObject | None = None
    # Known, and not served.
    previous_response_id: unsupported("nothing is stored here; send the conversation as input") = None  # type: ignore[valid-type]
    conversation: unsupported("nothing is stored here; send the conversation as input") = None  # type: ignore[valid-type]
    prompt: unsupported("nothing is stored here; send instructions and input") = None  # type: ignore[valid-type]
    context_management: unsupported("shorten the input on your side") = None  # type: ignore[valid-type]
    moderation: unsupported("moderate on your side") = None  # type: ignore[valid-type]

    @model_validator(mode="after")
    def _check_can_be_sent_back(self) -> Self:
        # A response repeats these.
        for name in ("user", "metadata", "instructions", "text", "tools", "tool_choice"):
            try:
                json.dumps(self.model_dump(include={name}), ensure_ascii=False).encode()
            except UnicodeEncodeError:
                message = f"{name}: not valid Unicode: it holds a lone surrogate"
                raise ApiError(400, message, param=name) from None
        return self

    @property
    def has_logprobs(self) -> bool:
        return self.top_logprobs is not None or "message.output_text.logprobs" in (self.include or ())

    def as_chat(self) -> ChatRequest:
        """The same request, as /v1/chat/completions would be asked it.

        Raises ApiError (400) for fields that contradict each other.
        """
        shared = {name: getattr(self, name) for name in _SHARED}
        return ChatRequest(
            **shared,
            messages=self._messages(),
            max_completion_tokens=self.max_output_tokens,
            logprobs=self.has_logprobs,
            top_logprobs=self.top_logprobs,
            tools=[_chat_tool(tool) for tool in self.tools or ()],
            tool_choice=_chat_choice(self.tool_choice),
            response_format=_chat_format(self.text),
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
        )

    def _messages(self) -> list[Message]:
        messages = [] if self.instructions is None else [Message(role="system", content=self.instructions)]
        if isinstance(self.input, str):
            return [*messages, Message(role="user", content=self.input)]
        answer: Message | None = None  # an assistant's turn is several items
        for item in self.input:
            if isinstance(item, FunctionOutputItem):
                answer = None
                messages.append(
                    Message(role="tool", content=_chat_content(item.output), tool_call_id=item.call_id)
                )
                continue
            if isinstance(item, InputMessage) and item.role != "assistant":
                answer = None
                messages.append(Message(role=item.role, content=_chat_content(item.content)))
                continue
            if answer is None or _begins_turn(item, answer):
                answer = Message(role="assistant")
                messages.append(answer)
            if isinstance(item, InputMessage):
                answer.content = _chat_content(item.content)
            elif isinstance(item, FunctionCallItem):
                call = FunctionCall(name=item.name, arguments=item.arguments)
                answer.tool_calls = [*(answer.tool_calls or ()), ToolCall(id=item.call_id, function=call)]
            else:
                answer.reasoning_content = "\n".join(part.text for part in item.content or item.summary or ())
        return messages


_SHARED = (
    *(name for name in SamplingFields.model_fields if name != "stream"),
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
    "seed",
    "stop",
    "parallel_tool_calls",
    "chat_template_kwargs",
)


def _begins_turn(item: InputMessage | FunctionCallItem | ReasoningItem, answer: Message) -> bool:
    """Whether an assistant's item can no longer belong to the turn before it."""
    if isinstance(item, FunctionCallItem):
        return False
    has_spoken = answer.content is not None or bool(answer.tool_calls)
    return has_spoken or (isinstance(item, ReasoningItem) and answer.reasoning_content is not None)


def _chat_content(content: str | list[InputText | RefusalText]) -> str | list[Any]:
    if isinstance(content, str):
        return content
    texts = [part.text if isinstance(part, InputText) else part.refusal for part in content]
    return texts[0] if len(texts) == 1 else [TextPart(type="text", text=text) for text in texts]


def _chat_tool(tool: FunctionTool) -> Tool:
    function = FunctionDefinition(
        name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
    )
    return Tool(type="function", function=function)


def _chat_choice(
    choice: Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions | None,
) -> Literal["none", "auto", "required"] | NamedTool | AllowedToolChoice | None:
    if isinstance(choice, NamedFunction):
        return NamedTool(type="function", function=FunctionName(name=choice.name))
    if isinstance(choice, AllowedFunctions):
        tools = [NamedTool(type="function", function=FunctionName(name=tool.name)) for tool in choice.tools]
        return AllowedToolChoice(
            type="allowed_tools", allowed_tools=AllowedTools(mode=choice.mode, tools=tools)
        )
    return choice


def _chat_format(text: TextOptions | None) -> ResponseFormat | None:
    if text is None or text.format is None:
        return None
    if text.format.type != "json_schema":
        return ResponseFormat(type=text.format.type)
    if text.format.schema_ is None:
        message = "text.format.schema is missing: type 'json_schema' needs the schema to keep"
        raise ApiError(400, message, param="text.format.schema")
    return ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(schema=text.format.schema_))
