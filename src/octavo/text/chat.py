"""Chat messages to a prompt, through the model's own Jinja template, rendered as Transformers renders it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from octavo.errors import RequestError, nearest, shown

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer

# Reasoning travels under several names; templates read the first.
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_MAX_DEPTH = 100  # far beyond any JSON schema; a structure that holds itself ends here


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    /,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    documents: Sequence[Mapping[str, Any]] | None = None,
    chat_template: str | None = None,
    **template_kwargs: Any,
) -> str:
    """The prompt for `messages`; encode it with `add_special_tokens=False`, as the template wrote the BOS.

    Args:
        messages: dicts with `role` and `content`: a string, or a list of `{"type": "text", "text": ...}`
            parts, joined by newlines where the template does not read parts itself. `content` may be absent
            or None beside `tool_calls`.
        tools: JSON schemas of functions. The template named `tool_use` is taken if the model has one.
        add_generation_prompt: end with the header of an assistant turn.
        continue_final_message: leave the last message open, to be continued. Needs
            `add_generation_prompt=False`.
        documents: dicts for retrieval templates.
        chat_template: Jinja source, or the name of one of the model's templates, in place of the default.
        template_kwargs: variables of the template (`enable_thinking=False`); one it never reads is an error.

    The caller's objects are not changed. Raises RequestError naming the message index and field, the option,
    or the template's own complaint.
    """
    from octavo.text.template import compile_template

    for name, flag in (
        ("add_generation_prompt", add_generation_prompt),
        ("continue_final_message", continue_final_message),
    ):
        if not isinstance(flag, bool):
            raise RequestError(f"{name}: expected True or False, got {shown(flag)}")
    if not isinstance(chat_template, str | None):
        raise RequestError(
            f"chat_template: expected Jinja source or the name of a template, got {shown(chat_template)}"
        )
    template = compile_template(_choose_template(tokenizer, chat_template, tools is not None))
    if add_generation_prompt and continue_final_message:
        raise RequestError(
            "continue_final_message: cannot be combined with add_generation_prompt=True, which opens a new "
            "message; pass add_generation_prompt=False"
        )
    chat = _checked_messages(messages, join_parts=not template.reads_parts)
    _check_dicts("tools", tools)
    _check_dicts("documents", documents)
    given = {
        **template_kwargs,
        **{name: value for name, value in (("tools", tools), ("documents", documents)) if value is not None},
    }
    given = {name: _plain(name, value) for name, value in given.items()}
    readable = sorted(template.variables - {"messages", "add_generation_prompt"})
    for name, value in given.items():
        no_loss = value == [] and name in ("tools", "documents")
        if name not in readable and not no_loss:
            raise RequestError(
                f"{name}: this model's chat template does not read it{nearest(name, readable)}; "
                f"it reads {', '.join(readable) or 'none'}. Leave it out or pass another chat_template"
            )
    if continue_final_message:
        final_text = _open_final_message(chat)
    variables = {**tokenizer.special_tokens, "tools": None, "documents": None, **given}
    rendered = template.render(messages=chat, add_generation_prompt=add_generation_prompt, **variables)
    return _cut_at_tag(rendered, final_text) if continue_final_message else rendered


def template_variables(tokenizer: Tokenizer) -> frozenset[str]:
    """Names that the templates taken by default, without tools and with, read from outside."""
    from octavo.text.template import compile_template

    templates = tokenizer.chat_templates
    sources = [templates[name] for name in ("default", "tool_use") if name in templates]
    return frozenset().union(*(compile_template(source).variables for source in sources))


def _choose_template(tokenizer: Tokenizer, asked: str | None, has_tools: bool) -> str:
    templates = tokenizer.chat_templates
    if asked is not None:
        return templates.get(asked, asked)
    if has_tools and "tool_use" in templates:
        return templates["tool_use"]
    if "default" in templates:
        return templates["default"]
    if templates:
        raise RequestError(
            f"chat_template: the model has several and no default; name one of {', '.join(sorted(templates))}"
        )
    raise RequestError(
        f"messages: {tokenizer.origin} has no chat template (a base model, perhaps); pass chat_template=..., "
        "or send the text as a plain prompt"
    )


def _checked_messages(messages: Sequence[Mapping[str, Any]], *, join_parts: bool) -> list[dict[str, Any]]:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        way_out = "; put the one message in a list" if isinstance(messages, Mapping) else ""
        raise RequestError(f"messages: expected a list of dicts, got {type(messages).__name__}{way_out}")
    if not messages:
        raise RequestError("messages: the list is empty; expected at least one message with role and content")
    return [_checked_message(index, message, join_parts) for index, message in enumerate(messages)]


def _checked_message(index: int, message: Mapping[str, Any], join_parts: bool) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise RequestError(f"{where}: expected a dict with role and content, got {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}.role: expected a string such as 'user', got {shown(role)}")
    # Templates tell an absent key well and None badly (some print it).
    plain: dict[str, Any] = _plain(where, {key: value for key, value in message.items() if value is not None})
    content = plain.get("content")
    if content is None:
        if role != "assistant" or not plain.get("tool_calls"):
            raise RequestError(
                f"{where}.content: expected a string or a list of text parts, got None; "
                "only an assistant message with tool_calls may lack it"
            )
    elif isinstance(content, list | tuple):
        parts = [_checked_part(f"{where}.content[{i}]", part) for i, part in enumerate(content)]
        plain["content"] = "\n".join(part["text"] for part in parts) if join_parts else parts
    elif not isinstance(content, str):
        raise RequestError(
            f"{where}.content: expected a string or a list of text parts, got {type(content).__name__}"
        )
    reasoning = next((plain[name] for name in _REASONING_FIELDS if name in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _checked_part(where: str, part: Any) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise RequestError(f"{where}: expected {{'type': 'text', 'text': ...}}, got {type(part).__name__}")
    kind = part.get("type", "text")
    if kind != "text":
        raise RequestError(f"{where}.type: only 'text' parts are supported, got {shown(kind)}")
    if not isinstance(part.get("text"), str):
        raise RequestError(f"{where}.text: expected a string, got {type(part.get('text')).__name__}")
    return {"type": "text", **part}


def _plain(where: str, value: Any, depth: int = 0) -> Any:
    """A copy made of JSON types only: a template is code from outside and gets no object with methods."""
    if depth > _MAX_DEPTH:
        raise RequestError(f"{where:.200}: nested more than {_MAX_DEPTH} levels deep, or holds itself")
    match value:
        case None | bool():
            return value
        case str():
            return str.__str__(value)
        case int():
            return int.__int__(value)
        case float():
            return float.__float__(value)
        case Mapping():
            for key in value:
                if not isinstance(key, str):
                    raise RequestError(f"{where:.200}: expected keys that are strings, got {shown(key)}")
            return {
                str.__str__(key): _plain(f"{where}.{key}", item, depth + 1) for key, item in value.items()
            }
        case list() | tuple():
            return [_plain(f"{where}[{i}]", item, depth + 1) for i, item in enumerate(value)]
    raise RequestError(
        f"{where:.200}: expected JSON data (dict, list, str, number, bool, None), got {type(value).__name__}"
    )


def _check_dicts(name: str, values: Sequence[Mapping[str, Any]] | None) -> None:
    if values is None:
        return
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Sequence):
        raise RequestError(f"{name}: expected a list of dicts, got {type(values).__name__}")
    for index, value in enumerate(values):
        if not isinstance(value, Mapping):
            raise RequestError(
                f"{name}[{index}]: expected a dict (a JSON schema), got {type(value).__name__}"
            )


def _open_final_message(chat: list[dict[str, Any]]) -> str:
    """Mark the end of the last message's text, in place; returns that text."""
    holder, key = chat[-1], "content"
    if isinstance(holder.get(key), list) and holder[key]:
        holder, key = holder[key][-1], "text"
    text = holder.get(key)
    if not isinstance(text, str):
        raise RequestError(f"continue_final_message: messages[{len(chat) - 1}] has no text to continue")
    holder[key] = text + _CONTINUE_TAG
    return text


def _cut_at_tag(rendered: str, final_text: str) -> str:
    at = rendered.rfind(_CONTINUE_TAG.strip())
    if at < 0 or final_text.strip() not in rendered:
        raise RequestError(
            "continue_final_message: the chat template drops or rewrites the final message, so it cannot be "
            "continued; use add_generation_prompt=True"
        )
    # Where the template trimmed the tag's trailing space, it trims the message's as well.
    kept = rendered[at : at + len(_CONTINUE_TAG)] == _CONTINUE_TAG
    return rendered[:at] if kept else rendered[:at].rstrip()
