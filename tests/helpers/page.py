"""The whole application on a real port in a thread, over a scripted engine, for a browser to look at."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any, TypeVar

import uvicorn
from helpers.chat import CHATML, tokenizer_with
from helpers.live import BIG_CARD
from helpers.observed import Observed
from helpers.serve import STATS, Answer, Script, scripted_engine, wait_until
from playwright.sync_api import Page

from octavo.serve.app import create_app
from octavo.serve.messages import Observed as ObservedMessage
from octavo.serve.messages import ToEngine, Watch
from octavo.serve.metrics import Metrics
from octavo.serve.observer import Observer
from octavo.serve.settings import ServeSettings

T = TypeVar("T")


class PageServer:
    """`call` runs a function on the server's event loop; `engine` and `link` are to be used only there."""

    def __init__(
        self,
        script: Script | Answer,
        settings: ServeSettings,
        *,
        payload: Callable[[bool], bytes | None],
        period_s: float,
        port: int,
    ) -> None:
        self._script = script
        self._settings = settings
        self._payload = payload
        self._port = port
        self._period_s = period_s
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="page-server")
        self._thread.start()
        self._started.result(60)

    async def _run(self) -> None:
        try:
            self._loop = asyncio.get_running_loop()
            self._stopped = asyncio.Event()
            metrics = Metrics()
            self.engine, self.link = await scripted_engine(
                self._script,
                self._settings,
                listener=metrics,
                card=BIG_CARD,
                tokenizer=tokenizer_with(default=CHATML),
            )
            send = self.link.send
            self.link.send = lambda message: self._send(message, send)  # type: ignore[method-assign]
            self._is_full_due = False
            app = create_app(self.engine, self._settings, metrics)
            config = uvicorn.Config(
                app, port=self._port, log_level="error", lifespan="off", timeout_graceful_shutdown=1
            )
            server = uvicorn.Server(config)
            serving = asyncio.create_task(server.serve())
            while not server.started:
                await asyncio.sleep(0.01)
            self.port = server.servers[0].sockets[0].getsockname()[1]
            self.url = f"http://127.0.0.1:{self.port}/"
        except BaseException as error:
            self._started.set_exception(error)
            raise
        self._started.set_result(None)
        observing = asyncio.create_task(self._observe())
        await self._stopped.wait()
        observing.cancel()
        await self.engine.close()
        server.should_exit = True
        await serving

    def _send(self, message: ToEngine, send: Callable[[ToEngine], None]) -> None:
        send(message)
        if isinstance(message, Watch) and message.is_on:
            self._is_full_due = True

    async def _observe(self) -> None:
        while True:
            if self.link.watching:
                is_full, self._is_full_due = self._is_full_due, False
                if (payload := self._payload(is_full)) is not None:
                    self.engine.receive(ObservedMessage(payload, "full" in json.loads(payload)))
            await asyncio.sleep(self._period_s)

    def call(self, work: Callable[[], T]) -> T:
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)

        self._loop.call_soon_threadsafe(run)
        return done.result(60)

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join(60)


@contextlib.contextmanager
def page_server(
    script: Script | Answer | None = None,
    settings: ServeSettings | None = None,
    *,
    payload: Callable[[bool], bytes | None] = lambda is_full: idle_payload() if is_full else None,
    period_s: float = 0.1,
    port: int = 0,
) -> Iterator[PageServer]:
    """A model that reads and writes bytes, with a ChatML template.

    payload(is_full): what the observer says, called every `period_s` while somebody watches; None: nothing.
    """
    server = PageServer(
        script or Answer(["Hello."]),
        settings or ServeSettings(),
        payload=payload,
        period_s=period_s,
        port=port,
    )
    try:
        yield server
    finally:
        server.stop()


def idle_payload() -> bytes:
    """A cache without any block in use."""
    message: dict[str, Any] = {
        "seq": 0,
        "time_s": 0,
        "stats": asdict(STATS),
        "full": {
            "num_blocks": BIG_CARD.num_blocks,
            "block_size": BIG_CARD.block_size,
            "max_num_rows": 8,
            "max_model_len": 200,
            "max_num_batched_tokens": 64,
        },
    }
    lists = ("blocks", "new", "rows", "tables", "gone", "preempted", "steps")
    return json.dumps(message | {name: [] for name in lists}).encode()


def next_payload(observer: Observer, is_full: bool) -> bytes:
    """For one page at a time: whoever else watches misses what `is_full` leaves out."""
    if is_full:
        observer.start()
        if not observer.is_first:
            observer.payload()
            return observer.snapshot()
    return observer.payload()


class Feed:
    """Payloads of a scheduler that steps only when told to: `step`, then `seen` by the page."""

    def __init__(self, engine: Observed) -> None:
        self.engine = engine
        self.num_sent = 0

    def payload(self, is_full: bool) -> bytes:
        self.num_sent += 1
        return next_payload(self.engine.observer, is_full)

    def seen(self, page: Page) -> None:
        """Wait until the page shows what the engine holds now."""
        sent = self.num_sent
        wait_until(lambda: self.num_sent >= sent + 2)
        latest = self.engine.observer._num_payloads - 1
        shown = "async () => (await import('/page/main.js')).engine.seq"
        wait_until(lambda: page.evaluate(shown) >= latest)
        page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
