"""The whole server, from its first line to its last.

::

    listen -> start the engine process -> answer (/health: 503) -> engine ready: say so -> serve
    SIGTERM, SIGINT -> drain: nothing new, what runs may end -> close connections -> stop the engine
    a second signal -> what runs fails at once
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import logging
import math
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.protocols.http.flow_control import FlowControl

from octavo.config import EngineConfig
from octavo.errors import ConfigError, EngineDeadError
from octavo.models.source import may_be_repository, resolve_model
from octavo.serve import access_log
from octavo.serve.app import create_app
from octavo.serve.async_engine import AsyncEngine
from octavo.serve.direct import DirectWriter
from octavo.serve.engine_process import freeze_what_is_loaded
from octavo.serve.messages import ModelCard
from octavo.serve.metrics import Metrics
from octavo.serve.models import model_names
from octavo.serve.settings import ServeSettings

logger = logging.getLogger("octavo.serve")

_BACKLOG: Final = 2048
_LAST_WORDS_S: Final = 5.0
"""What answers that have ended may take to reach their clients."""
COLLECT_AFTER: Final = (50_000, 20, 100)
"""Objects made between two looks for garbage. By default a body of many objects is gone over again and again
while it is read, which takes four times as long as reading it.
"""
_MAX_EARLY_BYTES: Final = 2**16
"""What may come while a request is being answered, and how long the head of one may be."""
_MAX_READ_BYTES: Final = 2**16
"""What is read of a connection at once. asyncio makes room for 256 KiB, and gives back what was not filled:
what stays a while lands there, and the next room must be found elsewhere, so that the heap grows for long.
"""


def serve(config: EngineConfig, settings: ServeSettings, say: Callable[[str], None] = print) -> None:
    """Serve until a signal. `say` gets the lines for the one who started it; the log goes to standard error.

    An engine that died does not end the server, but then it ends with EngineDeadError, for whoever would
    start it again. Before anything listens it raises ModelError for a name under which there can be no model,
    and ConfigError when the address cannot be had; later whatever the model cannot be loaded for.
    """
    _allow_many_connections()
    gc.set_threshold(*COLLECT_AFTER)
    _check_name(config)
    access_log.configure(settings.log_format)
    listener = listen(settings)
    with contextlib.closing(listener):
        asyncio.run(_Server(config, settings, listener, say).run())


def _check_name(config: EngineConfig) -> None:
    """ModelError for a model that cannot be there. Only loading can tell that of a repository."""
    if os.path.exists(config.model) or not may_be_repository(config.model):
        resolve_model(config.model, config.revision, files="config")


def listen(settings: ServeSettings) -> socket.socket:
    """A socket that listens at the settings' address. Raises ConfigError naming what is wrong with it."""
    where = f"{settings.host}:{settings.port}"
    try:
        found = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, _, _, _, address = found[0]
        sock = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"host, port: cannot listen at {where}: {reason}; choose another --port or --host"
        ) from error
    # Inherited by every connection: find out that a client's machine has gone, or takes nothing.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        milliseconds = min(int(settings.slow_reader_s * 1000), 2**31 - 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
    return sock


class _Server:
    def __init__(
        self,
        config: EngineConfig,
        settings: ServeSettings,
        listener: socket.socket,
        say: Callable[[str], None],
    ) -> None:
        self._config = config
        self._settings = settings
        self._listener = listener
        self._say = say
        self._is_asked_to_stop = asyncio.Event()
        self._is_urgent = asyncio.Event()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        metrics = Metrics()
        engine = AsyncEngine.create(self._config, self._settings, metrics)
        app = create_app(engine, self._settings, metrics)
        http = _Uvicorn(_uvicorn_config(app, self._settings))
        serving = asyncio.create_task(http.serve([self._listener]))
        try:
            await self._until_stopped(engine)
        finally:
            http.should_exit = True
            await serving
            await engine.close()
        self._say("octavo: stopped")

    async def _until_stopped(self, engine: AsyncEngine) -> None:
        if not self._settings.api_keys and not _is_local(self._listener):
            logger.warning("no API key is set, and other machines can reach %s; see --api-key", self._url())
        stopping = asyncio.create_task(self._is_asked_to_stop.wait())
        loading = asyncio.create_task(engine.until_ready())
        self._say(f"octavo: loading {self._config.model}; listening at {self._url()}")
        await asyncio.wait((stopping, loading), return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            loading.cancel()
            return
        loading.result()
        freeze_what_is_loaded()
        self._say(_ready_line(engine.model, model_names(engine, self._settings)[0], self._url()))
        await stopping
        if engine.num_active:
            limit_s = self._settings.drain_s
            self._say(f"octavo: finishing {engine.num_active} requests, for at most {limit_s:g} s")
        draining = asyncio.create_task(engine.drain(self._settings.drain_s))
        urgent = asyncio.create_task(self._is_urgent.wait())
        await asyncio.wait((draining, urgent), return_when=asyncio.FIRST_COMPLETED)
        if not draining.done():
            draining.cancel()
            await engine.drain(0)
        urgent.cancel()
        if engine.death is not None:
            raise EngineDeadError(f"the engine died: {engine.death}")

    def _on_signal(self) -> None:
        if self._is_asked_to_stop.is_set():
            self._is_urgent.set()
        self._is_asked_to_stop.set()

    def _url(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _is_local(listener: socket.socket) -> bool:
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


def _ready_line(card: ModelCard, name: str, url: str) -> str:
    cache = f"{card.num_blocks} blocks of {card.block_size} tokens"
    return f"octavo: ready: {name} on {card.device} in {card.dtype}, {cache}, at {url}"


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are ours: uvicorn would close connections before their answers have ended."""
        yield


class _Listening(asyncio.Protocol):
    """What is changed in either of uvicorn's protocols: a connection that sends no whole head of a request in
    time is closed, and while it is answered it is listened to.

    uvicorn itself counts the time only from an answer to the next byte. When more than one request was sent,
    it stops to read and so to notice that the client has gone, or tells only the last request of it.
    """

    idle_connection_s = 30.0
    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    flow: FlowControl
    cycle: Any
    _answered: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if hasattr(transport, "max_size"):  # another event loop's may read into a buffer of its own
            transport.max_size = _MAX_READ_BYTES
        self._num_early_bytes = 0
        self._silence = self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        was_answering = self._is_answering()
        if not was_answering or self._has_whole_request():
            self._num_early_bytes += len(data)
        super().data_received(data)
        if not was_answering and self._is_answering():
            self._num_early_bytes = 0
        self._listen_on()

    def on_response_complete(self) -> None:
        super().on_response_complete()  # type: ignore[misc]
        if not self.transport.is_closing():
            self._silence.cancel()
            self._silence = self._wait_for_head()
            if not self._is_answering():
                self._num_early_bytes = 0
        self._listen_on()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:  # of the protocol with httptools only
        self._answered = cycle
        DirectWriter.offer(cycle)
        super()._start_asgi_task(cycle, app)  # type: ignore[misc]

    def connection_lost(self, error: Exception | None) -> None:
        self._silence.cancel()
        super().connection_lost(error)
        if self._answered is not None and self._answered is not self.cycle:
            self._answered.disconnected = True
            self._answered.message_event.set()

    def _wait_for_head(self) -> asyncio.TimerHandle:
        return self.loop.call_later(self.idle_connection_s, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if not self._is_answering():
            self.transport.close()

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _has_whole_request(self) -> bool:
        """A request is being answered, and all of its body is here."""
        return self._is_answering() and (not self.cycle.more_body or bool(getattr(self, "pipeline", ())))

    def _listen_on(self) -> None:
        if self.transport.is_closing():
            return
        if self._num_early_bytes > _MAX_EARLY_BYTES:
            self.transport.abort()
        elif self._has_whole_request():
            self.flow.resume_reading()


def _uvicorn_config(app: Any, settings: ServeSettings) -> uvicorn.Config:
    protocol = type(
        "_Protocol", (_Listening, AutoHTTPProtocol), {"idle_connection_s": settings.idle_connection_s}
    )
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        backlog=_BACKLOG,
        server_header=False,
        timeout_keep_alive=math.ceil(settings.idle_connection_s) + 1,  # ours comes first
        timeout_graceful_shutdown=max(1, int(_LAST_WORDS_S)),
    )


def _allow_many_connections() -> None:
    """The soft limit on open files is often 1024, the hard one far above."""
    if sys.platform != "win32":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
