"""OpenTelemetry traces, where `otlp_endpoint` asks for them: a span per request, its generations and their
phases.

Needs ``pip install octavo[otel]``. A ``traceparent`` header is honoured. Spans tell counts and times, no
content.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable
from importlib.metadata import version
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from octavo.errors import ConfigError
from octavo.serve import access_log

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from octavo.outputs import RequestOutput


class Tracer:
    """Makes spans of `provider`, which sends them from a thread of its own, the last ones at exit."""

    def __init__(self, provider: Any) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = provider.get_tracer("octavo", version("octavo"))
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def create(cls, endpoint: str) -> Tracer:
        """Sends to an OTLP/HTTP collector, such as ``http://localhost:4318``.

        ConfigError when OpenTelemetry is not installed.
        """
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(
                f"otlp_endpoint needs OpenTelemetry, and {error.name} is missing; pip install 'octavo[otel]'"
            ) from None
        if urlsplit(endpoint).path in ("", "/"):
            endpoint = f"{endpoint.rstrip('/')}/v1/traces"
        resource = Resource.create({"service.name": "octavo", "service.version": version("octavo")})
        provider = TracerProvider(resource=resource)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        return cls(provider)

    def begin(self, scope: Scope, request_id: str) -> Any:
        """The span of an HTTP request."""
        from opentelemetry.trace import SpanKind

        parent = self._propagator.extract(dict(Headers(scope=scope).items()))
        return self._tracer.start_span(
            scope["method"],
            context=parent,
            kind=SpanKind.SERVER,
            attributes={
                "http.request.method": scope["method"],
                "url.path": scope["path"],
                "octavo.request_id": request_id,
            },
        )

    def end(self, span: Any, scope: Scope, status: int, error: BaseException | None) -> None:
        from opentelemetry.trace import Status, StatusCode

        route = access_log.route_of(scope)
        span.update_name(f"{scope['method']} {route}")
        span.set_attribute("http.route", route)
        if status:
            span.set_attribute("http.response.status_code", status)
        if status >= 500 or error is not None:
            span.set_status(Status(StatusCode.ERROR, type(error).__name__ if error else ""))
        span.end()

    def generation(self, parent: Any, output: RequestOutput) -> None:
        """A generation that has just ended, with its phases, below the span of its HTTP request."""
        from opentelemetry.trace import set_span_in_context

        metrics = output.metrics
        end_ns = time.time_ns()
        start_ns = end_ns - _ns(metrics.e2e_s)
        span = self._tracer.start_span(
            "generation",
            context=set_span_in_context(parent),
            start_time=start_ns,
            attributes={
                "gen_ai.response.id": output.request_id,
                "gen_ai.response.finish_reasons": [one.finish_reason or "" for one in output.outputs],
                "gen_ai.usage.input_tokens": len(output.prompt_token_ids),
                "gen_ai.usage.output_tokens": sum(len(one.token_ids) for one in output.outputs),
                "octavo.cached_tokens": output.num_cached_tokens,
                "octavo.preemptions": metrics.num_preemptions,
            },
        )
        below = set_span_in_context(span)
        marks = [("queue", 0.0, metrics.queue_s)]
        if metrics.queue_s is not None:
            marks.append(("prefill", metrics.queue_s, metrics.ttft_s))
        if metrics.ttft_s is not None:
            marks.append(("decode", metrics.ttft_s, metrics.e2e_s))
        for name, begin_s, until_s in marks:
            until_s = metrics.e2e_s if until_s is None else until_s
            phase = self._tracer.start_span(name, context=below, start_time=start_ns + _ns(begin_s))
            phase.end(start_ns + _ns(until_s))
        span.end(end_ns)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


class Tracing:
    """Middleware inside `RequestLog`: spans for everything but what machines ask every few seconds."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self.app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = access_log.current.get()
        if scope["type"] != "http" or record is None or scope["path"] in access_log.QUIET_PATHS:
            await self.app(scope, receive, send)
            return
        span = self._tracer.begin(scope, record.request_id)
        record.on_generation = lambda output: self._tracer.generation(span, output)
        status = 0
        failure: BaseException | None = None

        def send_on(message: Message) -> Awaitable[None]:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            return send(message)

        try:
            await self.app(scope, receive, send_on)
        except BaseException as error:
            failure = error
            raise
        finally:
            self._tracer.end(span, scope, status, failure)
