"""Engines to put into a real engine process, which imports this: faults on demand, and no torch."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from octavo.config import EngineConfig
from octavo.engine.stats import EngineStats
from octavo.errors import ModelError
from octavo.outputs import CompletionOutput, RequestMetrics, RequestOutput, StreamChunk
from octavo.sampling_params import SamplingParams
from octavo.serve.messages import ModelCard, Stage

if TYPE_CHECKING:
    from octavo.engine.core import Engine

CARD = ModelCard(
    name="scripted",
    max_model_len=2000,
    vocab_size=50,
    eos_token_ids=(),
    defaults={},
    num_blocks=64,
    block_size=16,
    kv_cache_dtype="float32",
    device="cpu",
    dtype="float32",
    max_num_seqs=8,
)


class _Request:
    def __init__(self, request_id: str, params: SamplingParams) -> None:
        self.request_id = request_id
        self.stream = True
        self.first_scheduled_s: float | None = None
        self.chunks: deque[StreamChunk] = deque()
        self.choice = CompletionOutput(0, "", [], None)
        self.output: RequestOutput | None = None
        self.max_tokens = params.max_tokens or 16

    def grow(self) -> None:
        self.first_scheduled_s = 0.0
        self.choice.text += "a"
        self.choice.token_ids.append(0)
        if len(self.choice.token_ids) == self.max_tokens:
            self.end("length")
        self.chunks.append(StreamChunk(0, "a", [0], self.choice.finish_reason))

    def end(self, reason: Any) -> None:
        self.choice.finish_reason = reason
        metrics = RequestMetrics(0.0, 0.0, 0.0, 0.0, 0)
        self.output = RequestOutput(self.request_id, None, [], [self.choice], 0, metrics)


class FaultyEngine:
    """As much of an engine as the engine process uses; every request gets one letter a millisecond.

    While `folder` holds a file ``hang`` its steps hang; with a file ``exit`` the process ends.
    """

    def __init__(self, folder: Path | None) -> None:
        self.requests: dict[str, _Request] = {}
        self.scheduler = SimpleNamespace(cache=None)
        self._folder = folder

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def add_request(self, token_ids: list[int], params: SamplingParams, **options: Any) -> _Request:
        request = self.requests[options["request_id"]] = _Request(options["request_id"], params)
        return request

    def abort(self, request_id: str) -> None:
        self.requests.pop(request_id).end("abort")

    def step(self) -> list[_Request]:
        time.sleep(0.001)
        while self._folder is not None and (self._folder / "hang").exists():
            time.sleep(0.005)
        if self._folder is not None and (self._folder / "exit").exists():
            os._exit(3)
        running = list(self.requests.values())
        for request in running:
            request.grow()
            if request.output is not None:
                del self.requests[request.request_id]
        return running

    def stats(self) -> EngineStats:
        return EngineStats(0, len(self.requests), 64, 0, 0, 0, 0, 0, 0, 0, 0)

    def close(self) -> None:
        self.requests.clear()


def scripted(
    config: EngineConfig, tell: Callable[[Stage], None], *, folder: Path | None = None
) -> tuple[Engine, ModelCard]:
    """An engine that works, until `folder` says otherwise."""
    tell(Stage("weights", 0.5))
    return cast("Engine", FaultyEngine(folder)), CARD


def unloadable(config: EngineConfig, tell: Callable[[Stage], None]) -> tuple[Engine, ModelCard]:
    raise ModelError("model: there is none")


def crashing(config: EngineConfig, tell: Callable[[Stage], None]) -> tuple[Engine, ModelCard]:
    raise ZeroDivisionError("oh")


def endless(config: EngineConfig, tell: Callable[[Stage], None]) -> tuple[Engine, ModelCard]:
    """Loads for ever."""
    tell(Stage("imports", 0.1))
    while True:
        time.sleep(0.05)
