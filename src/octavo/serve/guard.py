"""Who may ask, and how much at once: API keys, CORS, a limit on bodies. Plain ASGI, so that streams pass
untouched.

From the outside in: `RequestLog` (ids, log line) and tracing, CORS, keys, body limit, the application.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import math
import os
import re
import sys
from collections.abc import Awaitable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware

from octavo.errors import ConfigError
from octavo.serve import access_log, tracing
from octavo.serve.api_errors import ApiError, as_api_error
from octavo.serve.begun import Begun

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from octavo.serve.settings import ServeSettings

logger = logging.getLogger("octavo.serve")

API_KEY_ENV = "OCTAVO_API_KEY"
OPEN_PATHS = frozenset({"/", "/health", "/ping", "/favicon.ico"})
OPEN_PREFIXES = ("/page/",)
"""What needs no key: whether the server lives, and the files of its page, which then asks for a key itself.
"""

body_size: ContextVar[int] = ContextVar("octavo_body_size", default=sys.maxsize)
"""How many bytes the body of the request at hand has: what the work on it goes by."""

MAX_KEY_FILE_CHARS = 2**20
BODY_TIMEOUT_S = 60.0
"""What a whole body may take; it is over sooner when nothing of it comes for `idle_connection_s`."""
SMALL_BODY_BYTES = 64 * 2**10
NUM_LARGE_BODIES = 16
"""As many bodies of the largest size may be arriving at once; small ones are always taken."""
MAX_DISCARDED_BYTES = 64 * 2**20
DISCARD_TIMEOUT_S = 5.0


def read_api_keys(
    given: Sequence[str] = (), file: Path | None = None, environ: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """All keys that count: those `given`, those in OCTAVO_API_KEY (commas between), and those in `file` (one
    a line; empty lines and lines that begin with ``#`` do not count).

    ConfigError when one has a space or a character that is not ASCII in it, when the file cannot be read, and
    when it or the variable is there and holds no key: a server that was to have keys must not stand open. No
    message shows a key.
    """
    keys = [(key, "api_keys") for key in given]
    from_environ = (os.environ if environ is None else environ).get(API_KEY_ENV)
    if from_environ is not None:
        found = [key.strip() for key in from_environ.split(",") if key.strip()]
        if not found:
            raise ConfigError(f"{API_KEY_ENV} is set and holds no key; put one in, or unset it")
        keys += [(key, API_KEY_ENV) for key in found]
    if file is not None:
        try:
            with file.open(encoding="utf-8") as opened:
                text = opened.read(MAX_KEY_FILE_CHARS + 1)
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8"
            raise ConfigError(f"api_key_file: {str(file)!r} cannot be read: {reason}") from None
        if len(text) > MAX_KEY_FILE_CHARS:
            raise ConfigError(
                f"api_key_file: {str(file)!r} has more than {MAX_KEY_FILE_CHARS:,} characters; "
                "it should hold one key a line"
            )
        found = [
            line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")
        ]
        if not found:
            raise ConfigError(f"api_key_file: {str(file)!r} holds no key; put one on each line")
        keys += [(key, f"api_key_file {str(file)!r}") for key in found]
    for key, source in keys:
        if not re.fullmatch(r"[\x21-\x7e]+", key):
            raise ConfigError(
                f"{source}: a key is empty, or has a space or a character that is not ASCII in it"
            )
    return tuple(dict.fromkeys(key for key, _ in keys))


class ApiKeys:
    """Lets requests in that bring one of `keys` as a bearer token; the others get status 401."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        # Digests have one length, so that comparing them tells nothing of a key's.
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_open(scope["path"]) or self._is_known(scope):
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).getlist("authorization")
        if len(given) == 1 and given[0].lower().startswith("bearer "):
            message = "this API key is not known here; check the one your client sends"
        else:
            message = "this server needs an API key: send the header 'Authorization: Bearer KEY'"
            if given:
                message += ", once" if len(given) > 1 else "; the one that came has another form"
        error = ApiError(401, message, headers={"WWW-Authenticate": "Bearer"})
        await error.response()(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, token = given[0].partition(b" ")
        digest = _digest(token.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # all, whichever matches
        return scheme.lower() == b"bearer" and any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(OPEN_PREFIXES)


class Failures:
    """Answers for what nobody below caught; inside CORS, so that a browser's script may read it, too."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        def send_on(message: Message) -> Awaitable[None]:
            nonlocal has_begun
            has_begun = True
            return send(message)

        try:
            await self.app(scope, receive, send_on)
        except Exception as error:
            if has_begun or scope["type"] != "http":
                raise
            await as_api_error(error).response()(scope, receive, send)


class BodyLimit:
    """Status 413 for a body above `max_bytes`, whether its length was announced or it comes in chunks.

    The body is read here in full before the application runs (it is JSON, of which a part is of no use); one
    of which nothing comes for `idle_s`, or that is not here within a minute, is status 408, one too many
    status 429. `body_size` says its size to the application.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, idle_s: float) -> None:
        self.app = app
        self._max_bytes = max_bytes
        self._idle_s = idle_s
        self._num_arriving_bytes = 0
        # When each large body that is arriving is given up unless more of it comes.
        self._deadlines: dict[object, float] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        length = headers.get("content-length", "")
        # Python turns no more than 4300 digits into a number, and "²" is a digit to it.
        if re.fullmatch("[0-9]+", length) and (len(length) > 18 or int(length) > self._max_bytes):
            # A client that is still sending would not read the answer, so its body is taken first, unless it
            # waits for a word before it sends.
            if "expect" not in headers:
                await _discard(receive)
            await self._too_large().response()(scope, receive, send)
            return
        parts: list[bytes] = []
        size = 0
        is_crowded = False
        has_more = True
        body = object()
        now = asyncio.get_running_loop().time
        end_s = now() + BODY_TIMEOUT_S
        try:
            while has_more and size <= self._max_bytes and not is_crowded:
                receiving = Begun(receive())
                if receiving.is_done:  # as nearly always: it came with its head
                    message = receiving.value
                else:
                    deadline_s = min(end_s, now() + self._idle_s)
                    if size > SMALL_BODY_BYTES:
                        self._deadlines[body] = deadline_s
                    async with asyncio.timeout_at(deadline_s):
                        message = await receiving
                if message["type"] != "http.request":
                    return  # the client has gone
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                self._num_arriving_bytes += len(parts[-1])
                has_more = message.get("more_body", False)
                is_full = self._num_arriving_bytes > NUM_LARGE_BODIES * self._max_bytes
                is_crowded = has_more and is_full and size > SMALL_BODY_BYTES
        except TimeoutError:
            problem = f"did not arrive within {BODY_TIMEOUT_S:g} s"
            if now() < end_s:
                problem = f"stopped arriving for {self._idle_s:g} s (--idle-connection)"
            error = ApiError(408, f"the body {problem}", param="body", headers={"Connection": "close"})
            await error.response()(scope, receive, send)
            return
        finally:
            self._num_arriving_bytes -= size
            self._deadlines.pop(body, None)
        if size <= self._max_bytes and not is_crowded:
            token = body_size.set(size)
            try:
                await self.app(scope, _replay(b"".join(parts), receive), send)
            finally:
                body_size.reset(token)
            return
        parts.clear()
        if has_more:
            await _discard(receive)
        error = self._crowded() if is_crowded else self._too_large()
        await error.response()(scope, receive, send)

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body is larger than {self._max_bytes:,} bytes; send less, or start the server with "
            "a larger --max-body-bytes",
            headers={"Connection": "close"},
        )

    def _crowded(self) -> ApiError:
        # A body that goes on arriving is here in a moment; where all have stopped, it is the first that ends.
        first_s = min(self._deadlines.values(), default=0.0) - asyncio.get_running_loop().time()
        seconds = max(1, math.ceil(first_s))
        return ApiError(
            429,
            f"too many large bodies are arriving at once; try again in {seconds} s",
            headers={"Retry-After": str(seconds), "Connection": "close"},
        )


def _replay(body: bytes, receive: Receive) -> Receive:
    """Gives the body once, and then what `receive` says (that the client has gone)."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return messages.pop() if messages else await receive()

    return replayed


async def _discard(receive: Receive) -> None:
    """Take in the rest of a body, within bounds."""
    size = 0
    try:
        async with asyncio.timeout(DISCARD_TIMEOUT_S):
            while size <= MAX_DISCARDED_BYTES:
                message = await receive()
                size += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
    except TimeoutError:
        return


def around(app: ASGIApp, settings: ServeSettings) -> ASGIApp:
    """`app` with everything on this page, request ids, the request log and (with `otlp_endpoint`) tracing
    around it.

    ConfigError when tracing is asked for and OpenTelemetry is not installed.
    """
    app = BodyLimit(app, max_bytes=settings.max_body_bytes, idle_s=settings.idle_connection_s)
    if settings.api_keys:
        app = ApiKeys(app, keys=settings.api_keys)
    if settings.cors_origins:
        app = CORSMiddleware(
            Failures(app),
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST", "OPTIONS"],
            allow_headers=["*"],
            expose_headers=[access_log.HEADER, "retry-after"],
            max_age=600,
        )
    if settings.otlp_endpoint:
        app = tracing.Tracing(app, tracer=tracing.Tracer.create(settings.otlp_endpoint))
    return access_log.RequestLog(app)
