"""The engine process as the front holds it: started, spoken to, waited for."""

from __future__ import annotations

import asyncio
import atexit
import multiprocessing
import signal
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from octavo.serve.channel import FrontChannel
from octavo.serve.messages import ModelCard, Stage, Stop, ToEngine, ToFront

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.engine.core import Engine

Build = Callable[["EngineConfig", Callable[[Stage], None]], "tuple[Engine, ModelCard]"]
"""Builds the engine, in its process, and tells of each stage; must be importable by name."""

EXIT_S: Final = 10.0
"""How long the process may take to exit by itself once it was asked to."""


class EngineProcess:
    """Starts the process at once; `on_messages` gets its messages, `on_lost` is told when it has gone."""

    def __init__(
        self,
        build: Build,
        config: EngineConfig,
        on_messages: Callable[[*tuple[ToFront, ...]], None],
        on_lost: Callable[[str], None],
    ) -> None:
        from octavo.serve.engine_process import main

        self._on_lost = on_lost
        ours, theirs = socket.socketpair()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(
            target=main, args=(theirs, build, config), name="octavo-engine", daemon=True
        )
        # Ctrl-C goes to the whole group. The child ignores it, and is spared it until it can say so.
        held = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
        # At exit multiprocessing asks its children to end in a way that this one is deaf to, and waits.
        atexit.register(self._process.kill)
        theirs.close()  # or its end would never be seen
        self._channel = FrontChannel(on_messages, self._lost)
        self._connecting = asyncio.get_running_loop().create_task(self._channel.connect(ours))
        self._gone = asyncio.Event()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def send(self, message: ToEngine) -> None:
        self._channel.send(message)

    async def close(self, *, is_patient: bool) -> None:
        """Asks it to stop, and kills it when it does not in time; without patience at once."""
        await self._connecting
        self._channel.send(Stop())
        try:
            await asyncio.wait_for(self._gone.wait(), EXIT_S if is_patient else 0.0)
        except TimeoutError:
            self._process.kill()
        self._channel.close()
        # It may hang while it exits, too: in its GPU's library, or in a thread of its own.
        await asyncio.to_thread(self._process.join, EXIT_S)
        self._process.kill()
        await asyncio.to_thread(self._process.join)
        atexit.unregister(self._process.kill)

    def _lost(self) -> None:
        self._gone.set()
        self._burying = asyncio.get_running_loop().create_task(self._bury())

    async def _bury(self) -> None:
        # Its end of the socket closes a moment before it can be waited for.
        await asyncio.to_thread(self._process.join, 1.0)
        code = self._process.exitcode
        how = "" if code is None else f" ({_ended_by(code)})"
        self._on_lost(f"the engine process ended{how}")


def _ended_by(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
