"""What runs in the engine process: load the model, then take requests, step, and tell the front of it.

Nothing heavy is imported until `load` runs: the process must first be deaf to Ctrl-C, and ready to follow its
parent when that ends.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import fields
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, Final

from octavo.config import EngineConfig
from octavo.errors import CapacityError, EngineError, OctavoError, RequestError
from octavo.serve.channel import EngineChannel
from octavo.serve.messages import (
    Abort,
    Accepted,
    Died,
    Item,
    ModelCard,
    News,
    Observed,
    Ready,
    Refused,
    Stage,
    Stop,
    Submit,
    ToEngine,
    Watch,
)

if TYPE_CHECKING:
    from octavo.engine.core import Engine
    from octavo.engine.request import Request
    from octavo.serve.process import Build

logger = logging.getLogger("octavo.serve")

OBSERVED_PERIOD_S: Final = 0.1
"""The page is told at most this often."""
COMPILING_PERIOD_S: Final = 0.005
"""How often an idle loop looks whether a grammar is compiled."""


def main(sock: socket.socket, build: Build, config: EngineConfig) -> None:
    """The whole life of the process. However it ends, the other side sees the socket end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the front decides when to stop
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    _follow_parent()
    _log_to_stderr()
    channel = EngineChannel(sock)
    try:
        try:
            engine, card = build(config, channel.send)
            freeze_what_is_loaded()
            channel.send(Ready(card))
            EngineLoop(engine, channel).run()
        except OctavoError as error:
            channel.send(Died(str(error), type(error).__name__))
        except OSError:
            raise
        except Exception as error:
            logger.exception("the engine process fails")
            channel.send(Died(f"{type(error).__name__}: {error}"))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        logger.debug("the front has gone")
    finally:
        channel.close()


def load(config: EngineConfig, tell: Callable[[Stage], None]) -> tuple[Engine, ModelCard]:
    """The engine for `config`, as `LLM` builds it."""
    began = time.perf_counter()

    def stage_done(name: str) -> None:
        nonlocal began
        now = time.perf_counter()
        tell(Stage(name, now - began))
        began = now

    from octavo.llm import LLM

    stage_done("imports")

    def progress(stage: str, done: int, total: int) -> None:
        if done == total:
            stage_done("weights")

    options = {f.name: getattr(config, f.name) for f in fields(config) if f.name != "model"}
    llm = LLM(config.model, progress=progress, **options)
    stage_done("cache")
    engine, resolved = llm.engine, llm.config
    engine.grammars.prepare()
    assert resolved.max_model_len is not None
    card = ModelCard(
        name=config.model,
        max_model_len=resolved.max_model_len,
        vocab_size=engine.vocab_size,
        eos_token_ids=engine.eos_token_ids,
        defaults=llm.generation_config,
        num_blocks=engine.cache.num_blocks,
        block_size=resolved.block_size,
        kv_cache_dtype=resolved.kv_cache_dtype,
        device=resolved.device,
        dtype=resolved.dtype,
        max_num_seqs=engine.scheduler.max_num_rows,
        weights_nbytes=llm.weights_nbytes,
    )
    return engine, card


class EngineLoop:
    """Takes messages between steps, steps while there is work, sends one `News` a step."""

    def __init__(self, engine: Engine, channel: EngineChannel) -> None:
        from octavo.serve.observer import Observer

        self._engine = engine
        self._channel = channel
        self._observer = Observer(engine)
        self._next_observed_s = 0.0
        self._is_full_due = False
        self._is_observation_due = False
        self._unstarted: dict[str, Request] = {}
        # Submissions whose grammar is being compiled, beside the loop.
        self._compiling: dict[str, tuple[Submit, Future[Any]]] = {}
        self._num_tokens = 0
        self._is_stopping = False

    def run(self) -> None:
        """Until `Stop`. Raises EOFError when the front has gone."""
        engine = self._engine
        while not self._is_stopping:
            messages = self._channel.receive(self._patience_s())
            ended = self._take(self._compiled() + messages)
            if engine.has_work:
                began = time.perf_counter()
                changed = engine.step()
                self._tell(ended + changed, time.perf_counter() - began)
                if any(request.output is not None and request.output.error for request in changed):
                    _check_device(engine.config.device)
            elif ended:
                self._tell(ended, 0.0)
            self._observe()
        engine.close()

    def _patience_s(self) -> float | None:
        """How long to wait for a message."""
        if self._engine.has_work:
            return 0.0
        if self._compiling:
            return COMPILING_PERIOD_S
        if self._is_observation_due:
            return max(0.0, self._next_observed_s - time.perf_counter())
        return None

    def _take(self, messages: list[ToEngine]) -> list[Request]:
        """Carries the messages out; returns the requests that an abort ended."""
        accepted: list[str] = []
        ended: list[Request] = []
        for message in messages:
            match message:
                case Submit():
                    if self._submit(message):
                        accepted.append(message.request_id)
                case Abort():
                    if self._compiling.pop(message.request_id, None) is not None:
                        self._channel.send(Refused(message.request_id, "EngineError", "it was aborted"))
                    request = self._engine.requests.get(message.request_id)
                    if request is not None:
                        self._engine.abort(message.request_id)
                        ended.append(request)
                case Watch():
                    if message.is_on:
                        self._observer.start()
                        self._is_full_due = self._is_observation_due = True
                        self._next_observed_s = 0.0
                    else:
                        self._observer.stop()
                        self._is_observation_due = False
                case Stop():
                    self._is_stopping = True
        if accepted:
            self._channel.send(Accepted(tuple(accepted)))
        return ended

    def _compiled(self) -> list[ToEngine]:
        """The submissions that waited for a grammar and need not any longer."""
        done = [request_id for request_id, (_, future) in self._compiling.items() if future.done()]
        return [self._compiling.pop(request_id)[0] for request_id in done]

    def _submit(self, message: Submit) -> bool:
        """Whether the engine has taken it; if not, it was refused, or its grammar is being compiled."""
        try:
            if (wanted := message.params.structured_output) is not None:
                future = self._engine.grammars.start(wanted)
                if not future.done():
                    self._compiling[message.request_id] = (message, future)
                    return False
            request = self._engine.add_request(
                message.prompt_token_ids,
                message.params,
                request_id=message.request_id,
                priority=message.priority,
                cache_salt=message.cache_salt,
                stream=message.stream,
            )
        except (RequestError, CapacityError) as error:
            self._channel.send(Refused(message.request_id, type(error).__name__, str(error)))
            return False
        except Exception as error:
            # One request is never worth the others: what we did not think of refuses it alone.
            logger.exception("a request could not be added")
            why = f"the engine could not take the request: {type(error).__name__}: {error}"
            self._channel.send(Refused(message.request_id, "EngineError", why))
            return False
        self._unstarted[message.request_id] = request
        return True

    def _tell(self, changed: list[Request], step_s: float) -> None:
        items = []
        for request in changed:
            chunks = list(request.chunks)
            request.chunks.clear()
            output = request.output
            if output is not None:
                self._unstarted.pop(request.request_id, None)
                output.prompt_token_ids = []  # the front has them
            items.append(Item(request.request_id, chunks, output))
        started = tuple(
            request_id
            for request_id, request in self._unstarted.items()
            if request.first_scheduled_s is not None
        )
        for request_id in started:
            del self._unstarted[request_id]
        stats = self._engine.stats()
        num_tokens = stats.num_prompt_tokens + stats.num_output_tokens
        self._channel.send(News(items, stats, step_s, num_tokens - self._num_tokens, started))
        if self._observer.is_on:
            self._observer.note_step(stats, step_s, num_tokens - self._num_tokens)
            self._is_observation_due = True
        self._num_tokens = num_tokens

    def _observe(self) -> None:
        now = time.perf_counter()
        if self._is_observation_due and now >= self._next_observed_s:
            self._channel.send(Observed(self._observer.payload(), self._is_full_due))
            self._is_full_due = self._is_observation_due = False
            self._next_observed_s = now + OBSERVED_PERIOD_S


def freeze_what_is_loaded() -> None:
    """Modules, weights and tokenizers are here to stay: the garbage collector, which took a tenth of a second
    over them every now and then, need not look at them again.
    """
    gc.collect()
    gc.freeze()


def _check_device(device: str) -> None:
    """Raises EngineError when the GPU is lost to this process: after an illegal access every call fails."""
    if device != "cuda":
        return
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise EngineError(f"the GPU is lost to this process: {error}") from error


def _follow_parent() -> None:
    """Exit when the parent does, also in the middle of loading or of a step that hangs."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def follow() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, name="octavo-follow-parent", daemon=True).start()


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("octavo: engine: %(levelname)s: %(message)s"))
    logging.getLogger("octavo").addHandler(handler)
