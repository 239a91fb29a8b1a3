"""Errors as OpenAI's clients read them: a status and ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import logging
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from octavo.errors import (
    CapacityError,
    EngineDeadError,
    EngineError,
    ModelError,
    OctavoError,
    OverloadedError,
    RequestError,
    RequestTimeoutError,
    UnsupportedKernelConfig,
    shown,
)
from octavo.sampling_params import SamplingParams
from octavo.serve.expected import problem

logger = logging.getLogger("octavo.serve")

_TYPES = {
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_CODES = {
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    429: "rate_limit_exceeded",
    500: "internal_error",
    503: "service_unavailable",
}


class ErrorObject(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """What every answer with a status of 400 or more holds."""

    error: ErrorObject


_MEANINGS: Final = {
    400: "A field is unknown, of a wrong type or out of range, or the prompt is too long; `param` names it.",
    401: "No API key, or one that is not known.",
    404: "No such model, or nothing at this path.",
    408: "The request took longer than the server allows.",
    413: "The body is larger than the server takes.",
    429: "The queue is full; `Retry-After` says when to try again.",
    500: "The engine failed at this request.",
    503: "The engine is loading, shutting down, stuck or dead.",
}
ERROR_RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    status: {"model": ErrorBody, "description": meaning} for status, meaning in _MEANINGS.items()
}


def answers_with(what: str) -> dict[int | str, dict[str, Any]]:
    """`responses=` of a route that generates; `what` says what it answers."""
    content: dict[str, Any] = {"application/json": {}, "text/event-stream": {}}
    return {**ERROR_RESPONSES, 200: {"description": what, "content": content}}


class ApiError(Exception):
    """An answer that is an error. `type` and `code` follow from `status` unless given; `param` is the field.

    Raise it anywhere below a route; inside a stream it becomes one `data: {"error": ...}` event.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type or _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.param = param
        self.code = code or _CODES.get(status)
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The error object, ready for JSON."""
        return {
            "error": {
                "message": _as_utf8(self.message),
                "type": self.type,
                "param": None if self.param is None else _as_utf8(self.param),
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


def _as_utf8(text: str) -> str:
    """Errors may quote what the client sent, lone surrogates included, and those have no UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def as_api_error(error: BaseException) -> ApiError:
    """What the client is told about any exception. Those we did not expect are logged, and told as 500."""
    match error:
        case ApiError():
            return error
        case OverloadedError():
            seconds = str(max(1, math.ceil(error.retry_after_s)))
            return ApiError(429, str(error), headers={"Retry-After": seconds})
        case RequestError() | CapacityError() | UnsupportedKernelConfig() | ModelError():
            return ApiError(400, str(error), param=_named_field(str(error)), code=_limit_code(str(error)))
        case RequestTimeoutError():
            # A client that tried again by itself would make the same long request once more.
            return ApiError(408, str(error), headers={"x-should-retry": "false"})
        case EngineDeadError():
            return ApiError(503, str(error))
        case EngineError():
            return ApiError(503, str(error), headers={"Retry-After": "5"})
        case OctavoError():
            return ApiError(500, str(error))
    logger.error("a request failed with %s", type(error).__name__, exc_info=error)
    return ApiError(500, "the server failed at this request; its log says more")


_FIELDS = frozenset(f.name for f in fields(SamplingParams)) | {
    "prompt",
    "tokens",
    "messages",
    "tools",
    "tool_choice",
    "priority",
    "cache_salt",
    "chat_template_kwargs",
    "documents",
    "response_format",
    "continue_final_message",
    "add_generation_prompt",
}


def _named_field(message: str) -> str | None:
    """Our messages begin with the argument they are about."""
    match = re.match(r"(?:each (?:id|key) (?:in|of) )?(\w+)", message)
    name = match[1] if match else None
    return "prompt" if name == "prompt_token_ids" else name if name in _FIELDS else None


def named_format(error: RequestError, field: str, place: str) -> Exception:
    """The error; where it is about a grammar, as `format_error` says it."""
    head, _, problem = str(error).partition("structured_output: ")
    return error if head or not problem else format_error(problem, field, place)


def format_error(problem: str, field: str, place: str) -> ApiError:
    """What is wrong with a StructuredOutput, under the client's own field and place in it, such as
    `structured_outputs` and `structured_outputs.grammar`, in place of what it is called there.
    """
    found = re.match(r"(?:json_schema|json_object|regex|lark)(?= )", problem)
    message = f"{field}: {problem}" if found is None else f"{place}{problem[found.end() :]}"
    return ApiError(400, message, param=field)


def named_prompt(error: RequestError, field: str) -> Exception:
    """The error; where it is about a prompt that was made of the client's `field`, naming that."""
    message = str(error)
    if message.startswith("prompt has "):
        return ApiError(400, message, param=field, code=_limit_code(message))
    if message.startswith("prompt: "):
        return ApiError(400, f"{field}: {message.removeprefix('prompt: ')}", param=field)
    place = re.match(rf"{field}\[\d+\][\w.\[\]]*", message)
    if place is not None:
        return ApiError(
            400, message.replace("got None", "got null").replace("NoneType", "null"), param=place[0]
        )
    return error


def named_text(error: RequestError, sent: BaseModel, field: str) -> Exception:
    """`named_prompt` for the prompt of a chat; a text in `sent`, the request, that is no valid Unicode is
    named by its place. `messages` are the client's `field`.
    """
    place = None
    if str(error).startswith(_NO_UNICODE):
        place = _lone_surrogate(sent.model_dump(include=_IN_PROMPT))
    if place is None:
        return named_prompt(error, field)
    place = place[1:200]
    if field != "messages" and place.startswith("messages["):
        place = field
    return ApiError(400, f"{place}: {str(error).removeprefix('prompt: ')}", param=place)


_NO_UNICODE: Final = "prompt: not valid Unicode"
_IN_PROMPT: Final = {"messages", "tools", "documents", "chat_template_kwargs"}
"""The fields that a chat template writes out."""


def _lone_surrogate(value: object) -> str | None:
    """Where in JSON data the first text is that has no UTF-8 form: ``.tools[0].name``."""
    if isinstance(value, str):
        return None if _as_utf8(value) == value else ""
    if isinstance(value, Mapping):
        for key, item in value.items():
            place = _lone_surrogate(item) if _lone_surrogate(key) is None else ""
            if place is not None:
                return f".{key}{place}"
    elif isinstance(value, list):
        for i, item in enumerate(value):
            place = _lone_surrogate(item)
            if place is not None:
                return f"[{i}]{place}"
    return None


def _limit_code(message: str) -> str | None:
    return "context_length_exceeded" if message.startswith("prompt has ") else None


def describe_validation(
    errors: Sequence[Any], content_type: str | None = None, body: object = None
) -> ApiError:
    """The 400 for a body that pydantic refused: what is wrong with which field, for all of them.

    `body`: as it was read; its text, where it is no JSON.
    """
    problems: dict[str, None] = {}  # branches of a union may complain alike
    param = None
    for error in errors[:_MAX_ERRORS]:
        where = _place(error["loc"])
        if error["type"] == "json_invalid":
            why = error.get("ctx", {}).get("error", error["msg"]).removesuffix(" at")
            at = _line_and_column(body, error["loc"][-1])
            return ApiError(400, f"the body is not valid JSON: {why}{at}", code="invalid_json")
        if error["type"] == "missing" and not where:
            return ApiError(400, "the body is empty; expected a JSON object")
        if isinstance(error.get("input"), bytes) and not where:
            return ApiError(
                400, f"the Content-Type of the body must be application/json, got {content_type or 'none'}"
            )
        if error["type"] == "extra_forbidden":
            where = _place((*error["loc"][:-1], _Named(error["loc"][-1])))
        elif error["type"] == "string_unicode" and isinstance(_value_at(error["loc"], body), dict):
            # A name that is no Unicode, which no field has.
            where = _place((*error["loc"], _Named(error["input"])))
            error = {"type": "extra_forbidden"}
        param = param or where or None
        problems[f"{where or 'the body'}: {problem(error)}"] = None
    # A union tells of every branch; a few say enough.
    more = f" (and {len(problems) - 4} more)" if len(problems) > 4 else ""
    return ApiError(400, "; ".join(list(problems)[:4]) + more, param=param)


def _line_and_column(text: object, place: object) -> str:
    if not isinstance(text, str) or not isinstance(place, int):
        return ""
    line, column = text.count("\n", 0, place) + 1, place - text.rfind("\n", 0, place)
    return f" at line {line}, column {column}"


_MAX_ERRORS: Final = 20


def _value_at(loc: Sequence[Any], body: object) -> object:
    """What stands in `body` where pydantic found something wrong."""
    value = body
    for part in loc:
        if (isinstance(value, dict) and part in value) or (isinstance(value, list) and isinstance(part, int)):
            value = value[part]
    return value


def _place(loc: Sequence[Any]) -> str:
    """`messages[0].content` for ("body", "messages", 0, "content")."""
    place = ""
    parts = loc[1:] if loc and loc[0] in ("body", "path", "query", "header") else loc
    for i, part in enumerate(parts):
        if isinstance(part, int):
            place += f"[{part}]"
        elif part in _ITEM_KINDS and i + 1 < len(parts) and place.endswith("]"):
            pass
        elif isinstance(part, _Named) or not _BRANCH.search(str(part)):
            place += f".{part}" if place else str(part)
    return place[:200]


_ITEM_KINDS: Final = frozenset(
    [
        "text",
        "refusal",
        "input_text",
        "output_text",
        "message",
        "function_call",
        "function_call_output",
        "reasoning",
    ]
)
"""The `type`s of items in lists, which pydantic puts after an item's index."""


class _Named(str):
    """A part of a place that is a field's name, whatever it looks like."""


_BRANCH: Final = re.compile(r"^(str|int|float|bool|dict|list|none|any)$|[\[\]()-]|^[A-Z]")
"""What pydantic calls the branches of a union; they are no fields."""


def install(app: FastAPI) -> None:
    """Have every error that leaves a route, and those of routing itself, answered as an error object."""

    async def on_any(request: Request, error: Exception) -> Response:
        return as_api_error(error).response()

    async def on_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        content_type = shown(request.headers["content-type"]) if "content-type" in request.headers else None
        return describe_validation(error.errors(), content_type, error.body).response()

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _from_http(request, error).response()

    app.add_exception_handler(ApiError, on_any)
    app.add_exception_handler(OctavoError, on_any)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(Exception, on_any)


def _from_http(request: Request, error: HTTPException) -> ApiError:
    message = str(error.detail)
    cause = error.__cause__ or error.__context__
    path = request.url.path if len(request.url.path) <= 200 else f"{request.url.path[:200]}..."
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if error.status_code == 404:
        message = f"there is nothing at {request.method} {path}; the API is at /v1, see /docs"
    elif error.status_code == 405:
        message = f"{path} does not take {request.method}"
    elif cause is not None and encoding != "identity":
        message = f"the body cannot be read with Content-Encoding {shown(encoding)}; send it as plain JSON"
    elif isinstance(cause, UnicodeError):
        message = f"the body is not UTF-8: {cause.reason if hasattr(cause, 'reason') else cause}"
    elif isinstance(cause, RecursionError):
        message = "the body is nested too deeply"
    elif isinstance(cause, ValueError) and "digits" in str(cause):
        message = f"the body holds a number of more than {sys.get_int_max_str_digits()} digits; send fewer"
    elif error.status_code == 400 and cause is not None:
        message = "the body is not valid JSON"
    return ApiError(error.status_code, message, headers=error.headers)
