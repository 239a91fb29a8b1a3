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
from typing import TYPE_CHECKING, Final, NamedTuple

from octavo.config import EngineConfig
from octavo.errors import EngineError, OctavoError
from octavo.outputs import CompletionOutput, RequestMetrics, RequestOutput
from octavo.serve.channel import EngineChannel, FrontGone
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
    Tokens,
    Watch,
)

if TYPE_CHECKING:
    from octavo.engine.core import Engine
    from octavo.engine.grammar import Grammar
    from octavo.engine.request import Request
    from octavo.engine.stats import EngineStats
    from octavo.outputs import StreamChunk
    from octavo.serve.process import Build

logger = logging.getLogger("octavo.serve")

OBSERVED_PERIOD_S: Final = 0.1
"""The page is told at most this often, ..."""
OBSERVED_SHARE: Final = 0.1
"""... and telling it takes at most about this share of the time."""
COMPILING_PERIOD_S: Final = 0.005
"""How often an idle loop looks whether a grammar is compiled."""
HEARTBEAT_S: Final = 0.25
"""How often the front hears that the loop turns while it has nothing else to tell."""
LONGEST_WAIT_S: Final = 3600.0
"""An idle loop looks up after that, whatever it waits for: epoll takes no more than 24 days at a time."""


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
        except FrontGone:
            raise
        except Exception as error:  # files that cannot be read or end too early are among these
            logger.exception("the engine process fails")
            channel.send(Died(f"{type(error).__name__}: {error}"))
    except FrontGone:
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

    from octavo import LLM

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


class _Compiling(NamedTuple):
    """A submission whose grammar is being compiled, beside the loop."""

    submit: Submit
    grammar: Future[Grammar]
    began_s: float


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
        self._compiling: dict[str, _Compiling] = {}
        self._told_s = 0.0
        self._num_tokens = 0
        self._is_stopping = False

    def run(self) -> None:
        """Until `Stop`. Raises FrontGone when the front has gone."""
        engine = self._engine
        while not self._is_stopping:
            messages = self._channel.receive(self._patience_s())
            ended = self._take(messages)
            if engine.has_work:
                began = time.perf_counter()
                changed = engine.step()
                self._tell(ended + changed, time.perf_counter() - began)
                if any(request.output is not None and request.output.error for request in changed):
                    _check_device(engine.config.device)
            elif ended:
                self._tell(ended, 0.0)
            elif self._compiling and time.perf_counter() - self._told_s >= HEARTBEAT_S:
                self._send_news([])
            self._observe()
        engine.close()

    def _patience_s(self) -> float | None:
        """How long to wait for a message."""
        if self._engine.has_work:
            return 0.0
        if self._compiling:
            return COMPILING_PERIOD_S
        if self._is_observation_due:
            return min(max(0.0, self._next_observed_s - time.perf_counter()), LONGEST_WAIT_S)
        return None

    def _take(self, messages: list[ToEngine]) -> list[Request]:
        """Carries the messages out; returns the requests that an abort ended."""
        accepted: list[str] = []
        ended: list[Request] = []
        for request_id in [one for one, waiting in self._compiling.items() if waiting.grammar.done()]:
            waiting = self._compiling.pop(request_id)
            if self._submit(waiting.submit, waiting.grammar):
                accepted.append(request_id)
        for message in messages:
            match message:
                case Submit():
                    if self._submit(message):
                        accepted.append(message.request_id)
                case Abort():
                    self._abort_compiling(message.request_id)
                    request = self._engine.requests.get(message.request_id)
                    if request is not None:
                        self._engine.abort(message.request_id)
                        ended.append(request)
                case Watch():
                    self._is_full_due = self._is_observation_due = message.is_on
                    if message.is_on:
                        self._observer.start()
                    else:
                        self._observer.stop()
                case Stop():
                    self._is_stopping = True
        if accepted:
            self._channel.send(Accepted(tuple(accepted)))
        return ended

    def _abort_compiling(self, request_id: str) -> None:
        waiting = self._compiling.pop(request_id, None)
        if waiting is None:
            return
        if all(other.grammar is not waiting.grammar for other in self._compiling.values()):
            assert waiting.submit.params.structured_output is not None
            self._engine.grammars.give_up(waiting.submit.params.structured_output)
        choices = [CompletionOutput(i, "", [], "abort") for i in range(waiting.submit.params.n)]
        metrics = RequestMetrics(None, None, None, time.perf_counter() - waiting.began_s, 0)
        self._send_news([Item(request_id, [], RequestOutput(request_id, None, [], choices, 0, metrics))])

    def _submit(self, message: Submit, grammar: Future[Grammar] | None = None) -> bool:
        """Whether the engine has taken it; if not, it was refused, or its grammar is being compiled.

        grammar: it was compiled in the meantime.
        """
        try:
            wanted = message.params.structured_output
            if wanted is not None and grammar is None:
                grammar = self._engine.grammars.start(wanted)
                if not grammar.done():
                    now = time.perf_counter()
                    self._compiling[message.request_id] = _Compiling(message, grammar, now)
                    return False
            request = self._engine.add_request(
                message.prompt_token_ids,
                message.params,
                request_id=message.request_id,
                priority=message.priority,
                cache_salt=message.cache_salt,
                stream=message.stream,
                grammar=None if grammar is None else grammar.result(),
            )
        except OctavoError as error:
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
        tokens = Tokens()
        for request in changed:
            output = request.output
            if len(request.chunks) == 1 and output is None and _is_token(chunk := request.chunks[0]):
                request.chunks.clear()
                tokens.request_ids.append(request.request_id)
                tokens.texts.append(chunk.text)
                tokens.token_ids.append(chunk.token_ids[0])
                continue
            chunks = list(request.chunks)
            request.chunks.clear()
            if output is not None:
                self._unstarted.pop(request.request_id, None)
                output.prompt_token_ids = []  # the front has them
                if request.stream:
                    for one in output.outputs:
                        one.logprobs = None  # the pieces held them
            if chunks or output is not None:
                items.append(Item(request.request_id, chunks, output))
        started = tuple(
            request_id
            for request_id, request in self._unstarted.items()
            if request.first_scheduled_s is not None
        )
        for request_id in started:
            del self._unstarted[request_id]
        before = self._num_tokens
        stats = self._send_news(items, step_s, started, tokens)
        if self._observer.is_on:
            self._observer.note_step(stats, step_s, self._num_tokens - before)
            self._is_observation_due = True

    def _send_news(
        self,
        items: list[Item],
        step_s: float = 0.0,
        started: tuple[str, ...] = (),
        tokens: Tokens | None = None,
    ) -> EngineStats:
        stats = self._engine.stats()
        before, self._num_tokens = self._num_tokens, stats.num_prompt_tokens + stats.num_output_tokens
        num_new = self._num_tokens - before
        self._channel.send(News(items, stats, step_s, num_new, started, tokens or Tokens()))
        self._told_s = time.perf_counter()
        return stats

    def _observe(self) -> None:
        """A change for those who watched already, and for who has just begun (or lags) all there is."""
        now = time.perf_counter()
        if not self._is_observation_due or now < self._next_observed_s:
            return
        is_first = self._observer.is_first
        self._channel.send(Observed(self._observer.payload(), is_first))
        if self._is_full_due and not is_first:
            self._channel.send(Observed(self._observer.snapshot(), True))
        self._is_full_due = self._is_observation_due = False
        took_s = time.perf_counter() - now
        self._next_observed_s = now + max(OBSERVED_PERIOD_S, took_s / OBSERVED_SHARE)


def _is_token(chunk: StreamChunk) -> bool:
    """Whether `Tokens` can hold it."""
    return (
        chunk.finish_reason is None
        and chunk.index == 0
        and chunk.logprobs is None
        and len(chunk.token_ids) == 1
    )


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
