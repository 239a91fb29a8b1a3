"""The whole application on a real socket, over a scripted engine: for clients that are not ours."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import uvicorn
from helpers.serve import CARD, Answer, Script, ScriptedLink, scripted_engine

from octavo.serve.app import create_app
from octavo.serve.messages import Submit
from octavo.serve.metrics import Metrics
from octavo.serve.settings import ServeSettings
from octavo.text.tokenizer import Tokenizer

BIG_CARD = replace(CARD, max_model_len=4000, vocab_size=260, max_num_seqs=64)
"""For prompts of bytes, through a chat template."""


@dataclass
class LiveServer:
    """`answer` is what the engine says, until it is changed; `link` saw the requests."""

    answer: Answer | Script
    url: str = ""
    link: ScriptedLink | None = None
    _failure: list[BaseException] = field(default_factory=list)

    @property
    def submitted(self) -> list[Submit]:
        assert self.link is not None
        return self.link.submitted

    def script(self, submit: Submit) -> Answer:
        return self.answer(submit) if callable(self.answer) else self.answer


@contextlib.contextmanager
def live_server(
    tokenizer: Tokenizer, settings: ServeSettings | None = None, **options: Any
) -> Iterator[LiveServer]:
    """A server in a thread, until the block is left."""
    server = LiveServer(Answer(["Hello"]))
    listening = socket.create_server(("127.0.0.1", 0))
    server.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    settings = settings or ServeSettings()
    is_ready = threading.Event()
    stop: list[Any] = []

    async def serve() -> None:
        metrics = Metrics()
        engine, server.link = await scripted_engine(
            server.script, settings, listener=metrics, tokenizer=tokenizer, **{"card": BIG_CARD, **options}
        )
        config = uvicorn.Config(
            create_app(engine, settings, metrics), log_level="warning", lifespan="off", access_log=False
        )
        running = uvicorn.Server(config)
        stop.append(running)
        is_ready.set()
        try:
            await running.serve(sockets=[listening])
        finally:
            await engine.close()

    def in_thread() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            server._failure.append(error)
        finally:
            is_ready.set()

    thread = threading.Thread(target=in_thread, daemon=True)
    thread.start()
    try:
        assert is_ready.wait(60)
        assert stop, server._failure
        yield server
    finally:
        for running in stop:
            running.should_exit = True
        thread.join(60)
        listening.close()
    assert not server._failure, server._failure
