"""The real server around an engine that costs nothing: what HTTP, the pipe and the front add to a token.

One process serves as `octavo serve` does; the engine process gives every running request one token at each
tick, and the token's text is the time at which it was made (`time.perf_counter()`). `bench/serve_front.py`
starts it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import gc
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from serve_process import end, line_of

from octavo.config import EngineConfig
from octavo.engine.stats import EngineStats
from octavo.outputs import CompletionOutput, RequestMetrics, RequestOutput, StreamChunk
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.engine.core import Engine
    from octavo.serve.messages import ModelCard, Stage

NUM_BLOCKS = 1024
START_S = 60.0


class _Request:
    def __init__(self, request_id: str, params: SamplingParams, stream: bool) -> None:
        self.request_id = request_id
        self.num_left = params.max_tokens or 16
        self.stream = stream
        self.arrival_s = time.perf_counter()
        self.first_scheduled_s: float | None = None
        self.chunks: list[StreamChunk] = []
        self.completion = CompletionOutput(0, "", [], None)
        self.output: RequestOutput | None = None

    def advance(self) -> None:
        """One more token."""
        now = time.perf_counter()
        text = f"{now:.7f} "
        self.first_scheduled_s = self.first_scheduled_s or now
        self.num_left -= 1
        self.completion.text += text
        self.completion.token_ids.append(0)
        reason = "length" if self.num_left <= 0 else None
        if self.stream:
            self.chunks.append(StreamChunk(0, text, [0], "length" if reason else None))
        if reason:
            self.end("length")

    def end(self, reason: Any) -> None:
        self.completion.finish_reason = reason
        lived_s = time.perf_counter() - self.arrival_s
        metrics = RequestMetrics(0.0, lived_s, 0.0, lived_s, 0)
        self.output = RequestOutput(self.request_id, None, [], [self.completion], 0, metrics)


class ScriptedEngine:
    """As much of `octavo.engine.core.Engine` as the engine process uses; a step lasts to the next tick.

    Every running request gets a token each `interval_s`, one of `num_groups` after the other.
    """

    def __init__(self, config: EngineConfig, interval_s: float, num_groups: int = 1) -> None:
        self.config = config
        self._num_groups = num_groups
        self.requests: dict[str, _Request] = {}
        self.scheduler = SimpleNamespace(cache=None, waiting=(), running=())
        self._interval_s = interval_s
        self._due_s = 0.0
        self._num_steps = self._num_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def add_request(self, prompt_token_ids: list[int], params: SamplingParams, **options: Any) -> _Request:
        request = _Request(options["request_id"], params, options["stream"])
        self.requests[request.request_id] = request
        return request

    def abort(self, request_id: str) -> None:
        self.requests.pop(request_id).end("abort")

    def step(self) -> list[_Request]:
        now = time.perf_counter()
        self._due_s = max(self._due_s + self._interval_s / self._num_groups, now)
        time.sleep(self._due_s - now)
        running = list(self.requests.values())[self._num_steps % self._num_groups :: self._num_groups]
        for request in running:
            request.advance()
            if request.output is not None:
                del self.requests[request.request_id]
        self._num_steps += 1
        self._num_tokens += len(running)
        return running

    def stats(self) -> EngineStats:
        steps, tokens = self._num_steps, self._num_tokens
        return EngineStats(0, len(self.requests), NUM_BLOCKS, 0, 0, steps, 0, tokens, 0, 0, 0)

    def close(self) -> None:
        self.requests.clear()


def build(
    interval_s: float, num_groups: int, config: EngineConfig, tell: Callable[[Stage], None]
) -> tuple[Engine, ModelCard]:
    """What the engine process builds in place of an engine."""
    from octavo.serve.messages import ModelCard

    card = ModelCard(
        name=config.model,
        max_model_len=4096,
        vocab_size=1_000_000,
        eos_token_ids=(),
        defaults={},
        num_blocks=NUM_BLOCKS,
        block_size=16,
        kv_cache_dtype="none",
        device="none",
        dtype="none",
        max_num_seqs=4096,
    )
    return cast("Engine", ScriptedEngine(config, interval_s, num_groups)), card


async def serve(model: str, interval_s: float, num_groups: int = 1) -> None:
    """Serves at a free port of 127.0.0.1 and prints it when ready; runs until it is cancelled."""
    import uvicorn

    from octavo.models.source import resolve_model
    from octavo.serve.app import create_app
    from octavo.serve.async_engine import AsyncEngine
    from octavo.serve.engine_process import freeze_what_is_loaded
    from octavo.serve.metrics import Metrics
    from octavo.serve.process import EngineProcess
    from octavo.serve.run import COLLECT_AFTER, listen
    from octavo.serve.run import _uvicorn_config as uvicorn_config
    from octavo.serve.settings import ServeSettings
    from octavo.text.tokenizer import load_tokenizer

    gc.set_threshold(*COLLECT_AFTER)  # as `octavo serve` does
    settings = ServeSettings(port=0)
    metrics = Metrics()
    engine = AsyncEngine(settings, metrics)
    make = functools.partial(build, interval_s, num_groups)
    process = EngineProcess(make, EngineConfig.from_options(model), engine.receive, engine.lost)
    engine.start(process, lambda: load_tokenizer(resolve_model(model, files="config")))
    listener = listen(settings)
    http = uvicorn.Server(uvicorn_config(create_app(engine, settings, metrics), settings))
    serving = asyncio.create_task(http.serve([listener]))
    try:
        await engine.until_ready()
        freeze_what_is_loaded()
        print(listener.getsockname()[1], flush=True)
        await serving
    finally:
        await engine.close()


class Running(NamedTuple):
    """Its base URL, and the process id of its front, whose child the engine process is."""

    url: str
    pid: int


@contextlib.contextmanager
def running(interval_s: float, num_groups: int = 1, model: str = "smollm2-135m") -> Iterator[Running]:
    """Such a server in processes of its own. SystemExit with what it had to say when it does not start."""
    options = ("--interval", str(interval_s), "--groups", str(num_groups), "--model", model)
    command = (sys.executable, __file__, *options)
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            port = int(line_of(process, START_S, log))
            yield Running(f"http://127.0.0.1:{port}/v1", process.pid)
        finally:
            end(process)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="its tokenizer and chat template are used")
    parser.add_argument("--interval", type=float, default=0.05, help="seconds between tokens")
    parser.add_argument("--groups", type=int, default=1, help="spread the streams' tokens over the interval")
    options = parser.parse_args()
    asyncio.run(serve(options.model, options.interval, options.groups))


if __name__ == "__main__":
    main()
