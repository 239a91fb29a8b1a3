"""What Prometheus is told at GET /metrics: an `EngineListener` that counts, and the families it exposes.

Everything here runs on the event loop, so plain integers will do: a step with 256 streams costs a fraction of
a millisecond. Counts come from the engine (`EngineStats`), times of pieces from when the front heard of them.
"""

from __future__ import annotations

import platform
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    StateSetMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.responses import Response

from octavo.serve import access_log
from octavo.serve.models import model_names

if TYPE_CHECKING:
    from octavo.engine.stats import EngineStats
    from octavo.outputs import RequestOutput
    from octavo.serve.async_engine import AsyncEngine
    from octavo.serve.messages import ModelCard, News, Stage

STATES = ("loading", "ready", "draining", "stuck", "dead")
METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"})
FINISH_REASONS = ("stop", "length", "abort", "error")

TO_FIRST_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)
BETWEEN_TOKENS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)
WHOLE_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600, 1800)
STEP_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)


class _Histogram:
    """Counts of values up to each bound; `count` equal values can be observed at once."""

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        self.name, self.help, self.bounds = name, help, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float | None, count: int = 1) -> None:
        """Nothing where there is no value."""
        if value is not None:
            self._counts[bisect_left(self.bounds, value)] += count
            self._sum += value * count

    def family(self) -> HistogramMetricFamily:
        total, buckets = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append((_bound(bound), total))
        return HistogramMetricFamily(self.name, self.help, buckets=buckets, sum_value=self._sum)


class _Open:
    """A request under way. `last_s`: when its last piece came; None before the first."""

    __slots__ = ("last_s", "submitted_s")

    def __init__(self, now: float) -> None:
        self.submitted_s = now
        self.last_s: float | None = None


class Metrics(Collector):
    """Counts what the engine's news say; `registry` exposes it. Implements `listener.EngineListener`.

    `engine` is whose queue and model are shown; `create_app` puts it there.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        self.engine: AsyncEngine | None = None
        self._build = {"version": version("octavo"), "python_version": platform.python_version()}
        self._log = access_log.GenerationLog()
        self._state = "loading"
        self._is_loaded = False
        self._stats: EngineStats | None = None
        self._open: dict[str, _Open] = {}
        self._stages: dict[str, float] = {}
        self._finished: Counter[str] = Counter(dict.fromkeys(FINISH_REASONS, 0))
        self._refused: Counter[str] = Counter()
        self._responses: Counter[tuple[str, str, str]] = Counter()
        self._to_first = _Histogram(
            "octavo_time_to_first_token_seconds",
            "Time from the arrival of a request to its first token; of whole answers known when they end.",
            TO_FIRST_TOKEN_S,
        )
        self._between = _Histogram(
            "octavo_inter_token_latency_seconds",
            "Time between the pieces of a streamed answer, each of one token or of several.",
            BETWEEN_TOKENS_S,
        )
        self._per_token = _Histogram(
            "octavo_time_per_output_token_seconds",
            "Mean time per token after the first, of each request that ended by itself.",
            BETWEEN_TOKENS_S,
        )
        self._queued = _Histogram(
            "octavo_request_queue_seconds",
            "Time from the arrival of a request to the step that first ran it.",
            TO_FIRST_TOKEN_S,
        )
        self._whole = _Histogram(
            "octavo_request_duration_seconds",
            "Time from the arrival of a request to its end, of each that ended by itself.",
            WHOLE_S,
        )
        self._prompt_len = _Histogram(
            "octavo_request_prompt_tokens", "Prompt tokens of each request that was taken.", TOKENS
        )
        self._output_len = _Histogram(
            "octavo_request_output_tokens", "Generated tokens of each request, of all its answers.", TOKENS
        )
        self._step = _Histogram("octavo_step_seconds", "Wall time of an engine step.", STEP_S)
        self._step_tokens = _Histogram(
            "octavo_step_tokens", "Tokens computed in an engine step, prompt and output together.", TOKENS
        )
        self._histograms = (
            self._to_first,
            self._between,
            self._per_token,
            self._queued,
            self._whole,
            self._prompt_len,
            self._output_len,
            self._step,
            self._step_tokens,
        )

    def stage(self, stage: Stage) -> None:
        self._stages[stage.name] = stage.seconds

    def state(self, state: str, reason: str | None = None) -> None:
        self._state = state
        self._is_loaded = self._is_loaded or state == "ready"
        if state == "dead":  # nothing under way will be told to end
            self._open.clear()
            self._log.clear()
        access_log.engine_state(state, reason)

    def submitted(self, request_id: str, num_prompt_tokens: int) -> None:
        self._open[request_id] = _Open(time.perf_counter())
        self._prompt_len.observe(num_prompt_tokens)
        self._log.submitted(request_id)

    def refused(self, reason: str, request_id: str | None = None) -> None:
        """`request_id` where it was submitted before."""
        self._refused[reason] += 1
        if request_id is not None:
            self._open.pop(request_id, None)
            self._log.refused(request_id)

    def told(self, request_ids: Collection[str]) -> None:
        now = time.perf_counter()
        # Streams that run together have the same time since their last piece: count first, observe once.
        last: dict[float, int] = {}
        for request_id in request_ids:
            request = self._open.get(request_id)
            if request is None:
                continue
            last_s = request.last_s
            if last_s is not None:
                last[last_s] = last.get(last_s, 0) + 1
            else:
                self._to_first.observe(now - request.submitted_s)
            request.last_s = now
        for last_s, count in last.items():
            self._between.observe(now - last_s, count)

    def step(self, news: News) -> None:
        self._stats = news.stats
        if news.num_tokens:
            self._step.observe(news.step_s)
            self._step_tokens.observe(news.num_tokens)

    def finished(self, output: RequestOutput) -> None:
        request = self._open.pop(output.request_id, None)
        reason = "error" if output.error else output.finish_reason or "error"
        self._finished[reason] += 1
        metrics = output.metrics
        if request is None or request.last_s is None:
            self._to_first.observe(metrics.ttft_s)
        self._queued.observe(metrics.queue_s)
        self._output_len.observe(sum(len(one.token_ids) for one in output.outputs))
        if reason in ("stop", "length"):
            self._per_token.observe(metrics.tpot_s)
            self._whole.observe(metrics.e2e_s)
        self._log.finished(output)

    def responded(self, method: str, route: str, status: int) -> None:
        """An HTTP answer ended. `route` is a path of ours or ``other``."""
        if method not in METHODS:  # clients may make any up, and labels must stay few
            method = "other"
        self._responses[method, route, str(status)] += 1

    @property
    def _card(self) -> ModelCard | None:
        return self.engine.model if self.engine is not None and self._is_loaded else None

    def collect(self) -> Iterable[Metric]:
        yield from self._infos()
        yield from self._gauges()
        yield from self._counters()
        for histogram in self._histograms:
            yield histogram.family()

    def _infos(self) -> Iterable[Metric]:
        yield _labelled(GaugeMetricFamily, "octavo_build_info", "The running Octavo; always 1.", self._build)
        card = self._card
        if card is not None and self.engine is not None:
            about = {
                "model": model_names(self.engine, self.engine.settings)[0],
                "device": card.device,
                "dtype": card.dtype,
                "kv_cache_dtype": card.kv_cache_dtype,
                "block_size": str(card.block_size),
                "max_model_len": str(card.max_model_len),
            }
            yield _labelled(GaugeMetricFamily, "octavo_model_info", "The served model; always 1.", about)
        state = {name: name == self._state for name in STATES}
        yield StateSetMetricFamily("octavo_engine_state", "The engine's state; 1 at the one it is in.", state)

    def _gauges(self) -> Iterable[Metric]:
        num_waiting = self.engine.num_waiting if self.engine else 0
        num_active = self.engine.num_active if self.engine else 0
        yield GaugeMetricFamily("octavo_requests_waiting", "Requests that no step has run yet.", num_waiting)
        yield GaugeMetricFamily(
            "octavo_requests_running",
            "Requests begun and not ended, preempted ones included.",
            num_active - num_waiting,
        )
        stages = GaugeMetricFamily(
            "octavo_load_seconds", "How long each stage of loading took.", labels=["stage"]
        )
        for name, seconds in self._stages.items():
            stages.add_metric([name], seconds)
        yield stages
        stats = self._stats
        blocks = GaugeMetricFamily(
            "octavo_kv_cache_blocks",
            "Blocks of the KV cache: free, cached (kept for prefix hits, can be taken) or owned by requests.",
            labels=["state"],
        )
        sequences = GaugeMetricFamily(
            "octavo_engine_sequences", "Sequences in the engine after its last step.", labels=["state"]
        )
        num_free = self._card.num_blocks if self._card else 0  # nothing has run yet
        for state, count in (
            ("free", stats.num_free_blocks if stats else num_free),
            ("cached", stats.num_cached_blocks if stats else 0),
            ("owned", stats.num_owned_blocks if stats else 0),
        ):
            blocks.add_metric([state], count)
        yield blocks
        sequences.add_metric(["waiting"], stats.num_waiting if stats else 0)
        sequences.add_metric(["running"], stats.num_running if stats else 0)
        yield sequences

    def _counters(self) -> Iterable[Metric]:
        stats = self._stats
        for name, help, attribute in (
            ("octavo_steps", "Engine steps.", "num_steps"),
            (
                "octavo_prompt_tokens",
                "Prompt tokens computed, recomputed ones too.",
                "num_prompt_tokens",
            ),
            ("octavo_prefix_hit_tokens", "Prompt tokens that the prefix cache supplied.", "num_hit_tokens"),
            ("octavo_output_tokens", "Tokens sampled.", "num_output_tokens"),
            ("octavo_preemptions", "Sequences that lost their blocks to others.", "num_preemptions"),
            ("octavo_evictions", "Cached blocks that were taken for new tokens.", "num_evictions"),
        ):
            yield CounterMetricFamily(name, help, getattr(stats, attribute) if stats else 0)
        finished = CounterMetricFamily(
            "octavo_requests", "Requests that ended, by how.", labels=["finish_reason"]
        )
        for reason, count in self._finished.items():
            finished.add_metric([reason], count)
        yield finished
        refused = CounterMetricFamily(
            "octavo_requests_refused", "Requests that were not taken, by why.", labels=["reason"]
        )
        for reason, count in self._refused.items():
            refused.add_metric([reason], count)
        yield refused
        responses = CounterMetricFamily(
            "octavo_http_responses",
            "HTTP answers by route and status.",
            labels=["method", "route", "status"],
        )
        for labels, count in self._responses.items():
            responses.add_metric(labels, count)
        yield responses


def _bound(value: float) -> str:
    return "+Inf" if value == float("inf") else str(float(value))


def _labelled(
    family: type[GaugeMetricFamily], name: str, help: str, labels: dict[str, str]
) -> GaugeMetricFamily:
    metric = family(name, help, labels=list(labels))
    metric.add_metric(list(labels.values()), 1)
    return metric


router = APIRouter()


@router.get("/metrics", include_in_schema=False)
async def metrics(request: Request) -> Response:
    """The counts in Prometheus' text form, or in OpenMetrics' where the Accept header asks for it."""
    own: Metrics = request.app.state.metrics
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(own.registry), headers={"Content-Type": content_type})
