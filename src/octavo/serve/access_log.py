"""Request ids, and one log line per request: what was asked where, how it ended, how long it took; no
content.

An id comes with the request (``x-request-id``) or is made here, goes back in the answer's header, and is in
every line and trace about the request. Generations are tied to it by the context that submits them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import sys
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers

from octavo.serve.api_errors import as_api_error
from octavo.serve.direct import DirectWriter

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from octavo.outputs import RequestOutput

logger = logging.getLogger("octavo.serve.requests")

HEADER = "x-request-id"
QUIET_PATHS = frozenset({"/health", "/ping", "/metrics"})
"""Asked every few seconds by machines; logged at DEBUG."""

_SAFE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:+/=-]{0,127}")
_MAX_SHOWN_PATH = 200


class RequestRecord:
    """What is known of one HTTP request while it runs; `generations` are those it submitted that have ended.

    `on_generation` is called with each as it ends, also after the request.
    """

    __slots__ = ("generations", "has_ended", "on_generation", "request_id")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.generations: list[RequestOutput] = []
        self.has_ended = False
        self.on_generation: Callable[[RequestOutput], None] | None = None


current: ContextVar[RequestRecord | None] = ContextVar("octavo_request", default=None)


class GenerationLog:
    """Knows which HTTP request submitted which generation, so that its end can be told with it."""

    def __init__(self) -> None:
        self._requests: dict[str, RequestRecord] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def submitted(self, generation_id: str) -> None:
        """A generation begins in the current context."""
        record = current.get()
        if record is not None:
            self._requests[generation_id] = record

    def refused(self, generation_id: str) -> None:
        """The engine will tell no end of it."""
        self._requests.pop(generation_id, None)

    def clear(self) -> None:
        """The engine died, and will tell no end of any."""
        self._requests.clear()

    def finished(self, output: RequestOutput) -> None:
        """One ended; after its HTTP request (whose client has gone), it gets a line of its own."""
        record = self._requests.pop(output.request_id, None)
        if record is None:
            return
        if record.on_generation is not None:
            record.on_generation(output)
        if record.has_ended:
            _log_soon({"request_id": record.request_id}, [output], "generation")
        else:
            record.generations.append(output)


def engine_state(state: str, reason: str | None = None) -> None:
    """The engine's state changed, for this reason."""
    level = logging.ERROR if state in ("stuck", "dead") else logging.INFO
    _log(level, "engine", {"state": state, "reason": reason})


def _facts(outputs: list[RequestOutput]) -> dict[str, Any]:
    """Counts are sums and times are maxima over `outputs`."""

    def longest(name: str) -> float | None:
        known = [value for one in outputs if (value := getattr(one.metrics, name)) is not None]
        return round(max(known), 5) if known else None

    answers = [one for output in outputs for one in output.outputs]
    return {
        "finish_reason": ",".join(sorted({one.finish_reason or "" for one in answers})),
        "prompt_tokens": sum(len(output.prompt_token_ids) for output in outputs),
        "cached_tokens": sum(output.num_cached_tokens for output in outputs),
        "output_tokens": sum(len(one.token_ids) for one in answers),
        "queue_s": longest("queue_s"),
        "ttft_s": longest("ttft_s"),
        "tpot_s": longest("tpot_s"),
        "e2e_s": longest("e2e_s"),
        "preemptions": sum(output.metrics.num_preemptions for output in outputs),
    }


class RequestLog:
    """Outermost middleware: gives each request its id, answers for what nobody caught, logs the end."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        record = RequestRecord(_id_for(Headers(scope=scope).getlist(HEADER)))
        scope.setdefault("state", {})["request_id"] = record.request_id
        token = current.set(record)
        started = time.perf_counter()
        status = 0
        num_bytes = 0
        first_byte_s: float | None = None
        is_complete = False

        def send_on(message: Message) -> Awaitable[None]:  # called for every piece: no coroutine of its own
            nonlocal status, num_bytes, first_byte_s, is_complete
            if message["type"] == "http.response.body":
                body = message.get("body", b"")
                if first_byte_s is None and body:
                    first_byte_s = time.perf_counter() - started
                num_bytes += len(body)
                is_complete = not message.get("more_body", False)
            elif message["type"] == "http.response.start":
                status = message["status"]
                id_header = (HEADER.encode(), record.request_id.encode())
                message = {**message, "headers": [*message["headers"], id_header]}
            return send(message)

        # For pieces of a stream once its head is on its way: all between here and the route look at the head
        # alone, and would be a good part of what a piece costs.
        scope["state"]["send_piece"] = send_on
        direct = DirectWriter.find(scope)
        try:
            await self.app(scope, receive, send_on)
        except Exception as error:
            if status:
                raise
            await as_api_error(error).response()(scope, receive, send_on)
        finally:
            # Both hold the scope, which holds them: every request would be left to the garbage collector.
            scope["state"].pop("send_piece", None)
            DirectWriter.withdraw(scope)
            record.has_ended = True
            current.reset(token)
            route = route_of(scope)
            metrics = getattr(scope["app"].state, "metrics", None) if "app" in scope else None
            if metrics is not None:
                metrics.responded(scope["method"], route, status if is_complete else 499)
            path = scope["path"]
            facts = {
                "request_id": record.request_id,
                "method": scope["method"],
                "path": path if len(path) <= _MAX_SHOWN_PATH else path[:_MAX_SHOWN_PATH] + "...",
                "status": status,
                "duration_s": round(time.perf_counter() - started, 5),
                "first_byte_s": None if first_byte_s is None else round(first_byte_s, 5),
                "response_bytes": num_bytes + (0 if direct is None else direct.num_bytes),
                "client": scope["client"][0] if scope.get("client") else None,
                "incomplete": None if is_complete else True,
            }
            _log_soon(facts, record.generations, "request")


def _log_soon(facts: dict[str, Any], outputs: list[RequestOutput], event: str) -> None:
    """A line costs about what the end of a stream costs: the others that end in the same step go first."""

    def log() -> None:
        level = logging.DEBUG if facts.get("path") in QUIET_PATHS else logging.INFO
        _log(level, event, facts | _facts(outputs) if outputs else facts)

    asyncio.get_running_loop().call_soon(log)


def _id_for(given: list[str]) -> str:
    """The client's own id when it gave one that is safe in logs and headers, else a new one."""
    if len(given) == 1 and _SAFE_ID.fullmatch(given[0]):
        return given[0]
    return secrets.token_hex(16)


def route_of(scope: Scope) -> str:
    """The path as it was declared, such as ``/v1/models/{model}``; ``other`` where there is no such route."""
    route = scope.get("route")
    return str(getattr(route, "path", "other"))


def _log(level: int, event: str, facts: dict[str, Any]) -> None:
    if logger.isEnabledFor(level):
        logger.log(level, event, extra={"facts": {k: v for k, v in facts.items() if v is not None}})


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and the facts of the event."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        request = current.get()
        if request is not None:
            line.setdefault("request_id", request.request_id)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextLines(logging.Formatter):
    """``time level message key=value ...``; values with anything but plain characters are quoted."""

    def format(self, record: logging.LogRecord) -> str:
        facts = dict(getattr(record, "facts", {}))
        request = current.get()
        if request is not None:
            facts.setdefault("request_id", request.request_id)
        parts = [_time(record), record.levelname.lower(), _one_line(record.getMessage())]
        parts += [f"{name}={_plain(value)}" for name, value in facts.items()]
        text = " ".join(parts)
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
    return moment.replace("+00:00", "Z")


def _one_line(text: str) -> str:
    return text if text.isprintable() else json.dumps(text)


def _plain(value: object) -> str:
    text = str(value)
    return text if isinstance(value, int | float) or _PLAIN.fullmatch(text) else json.dumps(text)


_PLAIN = re.compile(r"[\w./:+,{}*-]+", re.ASCII)


def configure(log_format: str) -> None:
    """Send what the server and uvicorn log to standard error in `log_format`, ``text`` or ``json``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if log_format == "json" else TextLines())
    for name in ("octavo", "uvicorn"):
        one = logging.getLogger(name)
        one.handlers[:] = [handler]
        one.propagate = False
        one.setLevel(min(one.getEffectiveLevel(), logging.INFO))
    # Its own access lines say less than ours, and show query strings.
    logging.getLogger("uvicorn.access").disabled = True
