"""Everything `octavo serve` takes that is no engine option: one frozen object, checked when it is made."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, Never

from octavo.errors import ConfigError, nearest, shown

LOG_FORMATS: Final = ("text", "json")
TOOL_PARSERS: Final = ("auto", "hermes", "none")
REASONING_PARSERS: Final = ("auto", "think", "none")
MAX_SECONDS: Final = 10 * 365 * 86_400.0

_ORIGIN: Final = r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[^\s/:?#@A-Z]+)(:[0-9]{1,5})?"
"""As browsers write an origin: in small letters, without a slash at its end."""
_Strings = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Options of the server.

    Address:
        host, port: where it listens; only this machine by default. Port 0 takes a free one.
        served_model_names: names clients may ask for; the first is the one in answers. Empty: the model's.
    Who may ask:
        api_keys: any of these as a bearer token; empty: everybody. They are never shown.
        cors_origins: origins a browser may ask from (``*`` for all); empty: only the server's own page.
        max_body_bytes: larger bodies are status 413. A million tokens are about 4 MiB of text.
    How much at once:
        max_waiting_requests, max_waiting_tokens: bounds of the queue, by requests that no free row of
            `max_num_seqs` is left for, and by prompt tokens of all that wait; beyond them status 429 with
            Retry-After. A prompt that is longer by itself is status 400.
        request_timeout_s: a request that takes longer ends with status 408; None: no limit.
        slow_reader_s: a client that takes nothing for this long is cut off.
        idle_connection_s: a connection that asks nothing for this long is closed.
    Life and death:
        drain_s: how long running requests may go on after SIGTERM.
        stuck_s: when there is work and no step ends for this long, what runs fails and /health is 503.
    Answers:
        tool_parser, reasoning_parser: how calls and reasoning are marked, see docs/openai_api.md. ``auto``
            looks at the chat template; ``hermes`` and ``think`` insist; ``none`` leaves the text alone.
    What is told:
        log_format: ``text`` or ``json``, one line per request, on standard error.
        otlp_endpoint: where OpenTelemetry traces go; None: nowhere.

    Raises ConfigError naming the option.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: _Strings = ()
    api_keys: _Strings = field(default=(), repr=False)
    cors_origins: _Strings = ()
    max_body_bytes: int = 8 * 2**20
    max_waiting_requests: int = 1024
    max_waiting_tokens: int = 2**20
    request_timeout_s: float | None = None
    slow_reader_s: float = 60.0
    idle_connection_s: float = 30.0
    drain_s: float = 30.0
    stuck_s: float = 120.0
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    log_format: str = "text"
    otlp_endpoint: str | None = None

    @classmethod
    def from_options(cls, **options: Any) -> ServeSettings:
        """Build from keyword arguments; an unknown name is a ConfigError that suggests the nearest one."""
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                raise ConfigError(f"unknown server option {name!r}{nearest(name, known)}")
        return cls(**options)

    def __post_init__(self) -> None:
        if not isinstance(self.host, str) or not self.host:
            _refuse("host", "a name or an address to listen on", self.host)
        self._int("port", 0, 65_535)
        self._int("max_body_bytes", 1, 2**40)
        self._int("max_waiting_requests", 1, 2**31)
        self._int("max_waiting_tokens", 1, 2**40)
        for name in ("request_timeout_s", "slow_reader_s", "idle_connection_s", "stuck_s"):
            if name != "request_timeout_s" or self.request_timeout_s is not None:
                self._seconds(name, above=True)
        self._seconds("drain_s", above=False)
        for name in ("served_model_names", "api_keys", "cors_origins"):
            self._strings(name)
        for key in self.api_keys:
            if not re.fullmatch(r"[\x21-\x7e]+", key):
                raise ConfigError("api_keys: a key has a space or a character that is not ASCII in it")
        for origin in self.cors_origins:
            if origin != "*" and not re.fullmatch(_ORIGIN, origin):
                _refuse("cors_origins", "* or origins such as 'https://chat.example:8443', no path", origin)
        if self.log_format not in LOG_FORMATS:
            _refuse("log_format", f"one of {', '.join(map(repr, LOG_FORMATS))}", self.log_format)
        for name, known in (("tool_parser", TOOL_PARSERS), ("reasoning_parser", REASONING_PARSERS)):
            if getattr(self, name) not in known:
                _refuse(name, f"one of {', '.join(map(repr, known))}", getattr(self, name))
        endpoint = self.otlp_endpoint
        if endpoint is not None and not (
            isinstance(endpoint, str) and re.match(r"https?://[^/\s]", endpoint)
        ):
            _refuse("otlp_endpoint", "an http:// or https:// URL", endpoint)

    def _int(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            _refuse(name, f"an int from {low} to {high}", value)

    def _seconds(self, name: str, *, above: bool) -> None:
        value = getattr(self, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or not (value > 0 if above else value >= 0) or value > MAX_SECONDS:
            _refuse(name, f"seconds, {'above' if above else 'at least'} 0", value)

    def _strings(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, str) or not isinstance(value, Sequence):
            _refuse(name, "a list of strings", value if name != "api_keys" else type(value).__name__)
        for item in value:
            if not isinstance(item, str) or not item.strip():
                _refuse(
                    name, "strings that are not empty", item if name != "api_keys" else type(item).__name__
                )
        object.__setattr__(self, name, tuple(value))


def _refuse(name: str, expected: str, value: object) -> Never:
    raise ConfigError(f"{name} must be {expected}; got {shown(value)}")
