"""From a chat request to what the engine is asked: prompt, options, and how the answer is to be read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.errors import RequestError, nearest
from octavo.sampling_params import SamplingParams
from octavo.serve import reasoning, tools
from octavo.serve.answer import AnswerFormat
from octavo.serve.api_errors import ApiError, format_error, named_format, named_prompt, named_text
from octavo.serve.chat_grammar import CallRules, check_calls, constraint
from octavo.serve.chat_protocol import (
    AllowedToolChoice,
    ChatRequest,
    NamedTool,
    Tool,
    template_messages,
    template_tools,
)
from octavo.serve.guard import body_size
from octavo.serve.protocol import format_place, structured_output, to_sampling_params
from octavo.serve.tool_prompt import knows_tools, with_tools_as_text
from octavo.text.chat import render_chat, template_variables

if TYPE_CHECKING:
    from octavo.serve.async_engine import AsyncEngine
    from octavo.serve.settings import ServeSettings
    from octavo.text.tokenizer import Tokenizer

_OWN_FIELDS = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """What `AsyncEngine.submit` takes, and how to read what comes back."""

    prompt: str
    prompt_token_ids: list[int]
    params: SamplingParams
    format: AnswerFormat
    bound_by: tuple[str, str]
    """The field that the constraint on the output comes from, if there is one, and the place in it."""
    prompt_field: str

    def named(self, error: RequestError) -> Exception:
        """The error, naming the client's own field where the engine found its grammar or prompt at fault."""
        named = named_format(error, *self.bound_by)
        return named if named is not error else named_prompt(error, self.prompt_field)


async def prepare_chat(
    body: ChatRequest,
    engine: AsyncEngine,
    settings: ServeSettings,
    *,
    format_field: str = "response_format",
) -> PreparedChat:
    """Render, encode and check a request; `format_field` is what its response_format is called.

    Raises ApiError (400) or RequestError for what it asks that cannot be, EngineError while the model loads.
    """
    tokenizer = engine.tokenizer
    is_chat = format_field == "response_format"
    prompt_field = "messages" if is_chat else "input"
    calls = call_rules(body, settings)
    check_calls(calls)  # before the prompt is written, with the same schemas in it
    prompt, token_ids = await engine.off_loop(
        body_size.get(),
        lambda: _encode(body, engine, settings, has_tools=calls is not None, is_chat=is_chat),
        is_prompt=True,
    )
    reasons: bool | None = None
    if _reasons(tokenizer, settings):
        reasons = reasoning.prompt_opens_reasoning(prompt)
    answer_format = AnswerFormat(reasons, has_tools=calls is not None)
    expects_reasoning = None if reasoning.prompt_closes_reasoning(prompt) else reasons
    bound_by = format_place(body, format_field)
    if calls is not None and not calls.is_free:
        bound_by = "tools", "tools"
    try:
        more: dict[str, Any] = {
            "structured_output": constraint(structured_output(body, format_field), calls, expects_reasoning)
        }
    except RequestError as error:
        raise format_error(str(error), *bound_by) from error
    if body.skip_special_tokens is None and _hides_tags(tokenizer, answer_format):
        more["skip_special_tokens"] = False
    params = to_sampling_params(body, engine.model, **more)
    return PreparedChat(prompt, token_ids, params, answer_format, bound_by, prompt_field)


def call_rules(body: ChatRequest, settings: ServeSettings) -> CallRules | None:
    """What `tools` and `tool_choice` allow; None when no call may be made.

    Raises ApiError (400) for a choice that names no tool, or tools where the server reads no calls.
    """
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise ApiError(400, "tool_choice is only for requests with tools", param="tool_choice")
        return None
    if choice == "none":
        return None
    check_tools(settings)
    functions = {tool.function.name: tool.function for tool in body.tools}
    many = body.parallel_tool_calls is not False
    if isinstance(choice, NamedTool):
        names, must_call, many = [choice.function.name], True, False
    elif isinstance(choice, AllowedToolChoice):
        names = [tool.function.name for tool in choice.allowed_tools.tools]
        must_call = choice.allowed_tools.mode == "required"
    else:
        names, must_call = list(functions), choice == "required"
    for name in names:
        if name not in functions:
            raise ApiError(
                400,
                f"tool_choice names {name!r}, which is not among the tools ({', '.join(functions)})",
                param="tool_choice",
            )
    names = list(dict.fromkeys(names))
    return CallRules([functions[name] for name in names], must_call, many, len(names) < len(functions))


def check_tools(settings: ServeSettings) -> None:
    """Raises ApiError (400) where the server was started without tools."""
    if settings.tool_parser == "none":
        raise ApiError(400, "tools: this server was started with tool_parser 'none'", param="tools")


def render_prompt(
    body: ChatRequest,
    tokenizer: Tokenizer,
    settings: ServeSettings,
    *,
    has_tools: bool,
    effort_field: str = "reasoning_effort",
) -> str:
    """The prompt of a chat request, as its model's template writes it; see `prepare_chat` for errors.

    has_tools: show the request's tools to the model. effort_field: what the client calls reasoning_effort.
    """
    messages = template_messages(body.messages)
    functions: list[Tool] = body.tools or [] if has_tools else []
    shown = template_tools(functions)
    options = _template_options(body, tokenizer, effort_field)
    is_native = settings.tool_parser == "hermes" or knows_tools(tokenizer.chat_templates)
    if not is_native and (shown or any(m.tool_calls or m.role == "tool" for m in body.messages)):
        messages, shown = with_tools_as_text(messages, shown), []
    return render_chat(
        tokenizer,
        messages,
        tools=shown or None,
        add_generation_prompt=not body.continue_final_message
        if body.add_generation_prompt is None
        else body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        documents=body.documents,
        **options,
    )


def _encode(
    body: ChatRequest, engine: AsyncEngine, settings: ServeSettings, *, has_tools: bool, is_chat: bool
) -> tuple[str, list[int]]:
    effort_field = "reasoning_effort" if is_chat else "reasoning.effort"
    try:
        prompt = render_prompt(
            body, engine.tokenizer, settings, has_tools=has_tools, effort_field=effort_field
        )
        # The template writes the special tokens itself, BOS included.
        return prompt, engine.encode(prompt, add_special_tokens=False)
    except RequestError as error:
        field = "messages" if is_chat else "input"
        raise named_text(error, body, field) from error


def _template_options(body: ChatRequest, tokenizer: Tokenizer, effort_field: str) -> dict[str, Any]:
    options = dict(body.chat_template_kwargs or {})
    readable = template_variables(tokenizer)
    for name in options:
        if name == "chat_template":
            raise ApiError(
                400,
                "chat_template_kwargs.chat_template: a request cannot bring a template of its own",
                param="chat_template_kwargs",
            )
        if name in _OWN_FIELDS:
            raise ApiError(
                400,
                f"chat_template_kwargs.{name}: this is a field of the request itself; give it there",
                param="chat_template_kwargs",
            )
        if name not in readable:
            raise ApiError(
                400,
                f"chat_template_kwargs.{name}: this model's chat template does not read it"
                f"{nearest(name, readable)}; leave it out",
                param="chat_template_kwargs",
            )
    if body.documents and "documents" not in readable:
        message = "documents: this model's chat template does not read it; leave it out"
        raise ApiError(400, message, param="documents")
    effort = body.reasoning_effort
    if effort is not None:
        if "reasoning_effort" in readable:
            options.setdefault("reasoning_effort", effort)
        elif "enable_thinking" in readable:
            options.setdefault("enable_thinking", effort != "none")
        elif effort != "none":
            raise ApiError(
                400,
                f"{effort_field}: this model's chat template knows neither reasoning_effort nor "
                "enable_thinking; leave it out",
                param=effort_field,
            )
    return options


def _reasons(tokenizer: Tokenizer, settings: ServeSettings) -> bool:
    if settings.reasoning_parser == "auto":
        return reasoning.template_reasons(tokenizer.chat_templates)
    return settings.reasoning_parser != "none"


def _hides_tags(tokenizer: Tokenizer, answer_format: AnswerFormat) -> bool:
    """Whether a tag that must be read is a special token, which would be left out of the text."""
    tags: list[str] = []
    if answer_format.reasons is not None:
        tags += [reasoning.OPEN, reasoning.CLOSE]
    if answer_format.has_tools:
        tags += [tools.OPEN, tools.CLOSE]
    ids = [token_id for tag in tags if (token_id := tokenizer.token_to_id(tag)) is not None]
    return any(not tokenizer.decode([token_id]) for token_id in ids)
