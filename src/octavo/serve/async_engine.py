"""The front's handle on the engine process: submit, stream, abort, watch; and what state the engine is in.

States::

    loading --> ready --> draining          drain() was called: what runs may end, nothing new is taken
                  ^  |
                  |  +--> stuck             there is work and silence for `stuck_s`; what ran has failed
                  +---------+               ... until it is heard of after all
    any state --> dead                      the process has gone; it is not started again

Everything here runs on the event loop's thread and returns at once; nothing imports torch.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Literal, TypeVar

from octavo import errors
from octavo.config import EngineConfig
from octavo.errors import (
    EngineDeadError,
    EngineError,
    ModelError,
    OverloadedError,
    RequestError,
    RequestTimeoutError,
)
from octavo.outputs import Logprob, RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.serve.front_text import front_tokenizer, loading
from octavo.serve.generation import Generation, aborted
from octavo.serve.listener import EngineListener, Link
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
    Submit,
    ToEngine,
    ToFront,
    Tokens,
    Watch,
)
from octavo.serve.process import EngineProcess
from octavo.serve.settings import ServeSettings
from octavo.serve.waiting_room import WaitingRoom
from octavo.serve.watcher import Watcher
from octavo.text.tokenizer import Tokenizer

T = TypeVar("T")
State = Literal["loading", "ready", "draining", "stuck", "dead"]

INLINE_CHARACTERS: Final = 2_000
"""Work on texts up to this length (about a millisecond) is done on the event loop, the rest in threads."""
_CHARACTERS_PER_TOKEN: Final = 4
_MAX_THREADS: Final = 2
MAX_PROMPT_LOGPROBS: Final = 100_000
"""Log probabilities of a prompt come in one message, made between two steps."""
_REASONS: Final = {"RequestError": "invalid", "CapacityError": "capacity", "OverloadedError": "overloaded"}
"""What a refusal counts as; what is not here is no fault of the request."""


class AsyncEngine:
    """An engine in a process of its own, for one event loop. `create` starts one."""

    def __init__(self, settings: ServeSettings, listener: EngineListener) -> None:
        self.settings = settings
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._state: State = "loading"
        self._model: ModelCard | None = None
        self._tokenizer: Tokenizer | None = None
        self._has_text = False
        """Whether the tokenizer is loaded, or known not to exist."""
        self._death: Exception | None = None
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._ready.add_done_callback(
            lambda future: future.exception()
        )  # asked for or not, it is not a fault
        self._generations: dict[str, Generation] = {}
        # Of answers that are not streamed: those of each continuation so far.
        self._logprobs: dict[str, dict[int, list[dict[int, Logprob]]]] = {}
        self._num_active = 0
        self._num_rows_held = 0
        """Rows of the engine that running requests hold, one for each continuation."""
        self._room = WaitingRoom(settings)
        self._heard_s = 0.0
        self._is_deaf = True
        """Whether the process would not read what it is told: it loads or hangs."""
        self._idle: asyncio.Event = asyncio.Event()
        self._idle.set()
        self._watchers: list[Watcher] = []
        self._threads = ThreadPoolExecutor(_MAX_THREADS, "octavo-text")
        self._link: Link | None = None
        self._check_period_s = min(1.0, settings.stuck_s / 4)
        self._checking = self._loop.call_later(self._check_period_s, self._check_progress)

    @classmethod
    def create(cls, config: EngineConfig, settings: ServeSettings, listener: EngineListener) -> AsyncEngine:
        """Start the process and load the tokenizer; returns at once, `until_ready` waits."""
        from octavo.serve.engine_process import load

        engine = cls(settings, listener)
        process = EngineProcess(load, config, engine.receive, engine.lost)
        engine.start(process, lambda: front_tokenizer(config))
        return engine

    def start(self, link: Link, load_text: Callable[[], Tokenizer | None]) -> None:
        """Use this link (`receive` and `lost` are its callbacks), and load the tokenizer in a thread."""
        self._link = link
        loading(load_text, self._loop).add_done_callback(self._got_tokenizer)

    # What everybody may ask

    @property
    def state(self) -> State:
        return self._state

    @property
    def death(self) -> Exception | None:
        """Why the engine is dead; None while it is not."""
        return self._death

    @property
    def model(self) -> ModelCard:
        """The loaded model. Raises EngineError while it is loading."""
        if self._model is None:
            raise self._not_ready()
        return self._model

    @property
    def tokenizer(self) -> Tokenizer:
        """The front's own tokenizer. Raises EngineError while loading, ModelError when the model has none."""
        if self._tokenizer is None:
            if self._model is None:
                raise self._not_ready()
            raise ModelError(
                f"model {self._model.name!r} has no tokenizer; give prompts as token ids, or add "
                "tokenizer.json"
            )
        return self._tokenizer

    @property
    def num_waiting(self) -> int:
        """Requests that have not left the engine's queue yet."""
        return self._room.num_requests

    @property
    def num_active(self) -> int:
        """Requests that have not ended."""
        return self._num_active

    async def until_ready(self) -> None:
        """Returns when requests are taken; raises what the loading failed with."""
        await asyncio.shield(self._ready)

    # Text

    async def off_loop(self, size: int, work: Callable[[], T], *, is_prompt: bool = False) -> T:
        """`work()` on something of `size` characters or bytes: in a thread above `INLINE_CHARACTERS`.

        What waits for a thread or is in one counts like a request that waits for the engine: OverloadedError
        when the queue is full. is_prompt: it is one prompt, which counts for no more tokens than one may
        have, so that one that is too long hears so and not that it should try again.
        """
        if size <= INLINE_CHARACTERS:
            return work()
        num_tokens = size // _CHARACTERS_PER_TOKEN
        if is_prompt:
            num_tokens = min(num_tokens, self.model.max_model_len)
        self.check_room(1, num_tokens)
        with self._room.text(num_tokens):
            return await self._loop.run_in_executor(self._threads, work)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a prompt; for threads as well. What shows that it is too long before it is tokenised
        never is: RequestError as from `check_length`, and those of `Tokenizer.encode`.
        """
        tokenizer = self.tokenizer
        if len(text) > min(self.model.max_model_len - 1, self.settings.max_waiting_tokens):
            fewest = tokenizer.fewest_tokens(text)
            if (problem := self._length_problem(fewest)) is not None:
                self._loop.call_soon_threadsafe(self._listener.refused, "invalid")
                raise RequestError(f"prompt has at least {fewest} tokens; {problem}")
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    # Requests

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        prompt: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        stream: bool = False,
    ) -> Generation:
        """Send a request to the engine; returns at once.

        `request_id` must be new. `prompt` is only handed back, in the output. stream: pieces are wanted.

        Raises:
            RequestError, CapacityError: it can never be served, at whatever load. The engine itself may find
                so later, which `Generation.accepted` raises.
            OverloadedError: the queue is full by count or by tokens.
            EngineError: the engine is not ready: loading, draining, stuck or dead.
        """
        if self._state != "ready":
            self._listener.refused(self._state)
            raise self._not_ready()
        num_tokens = len(prompt_token_ids)
        self.check_length(num_tokens)
        if (width := params.prompt_logprobs) and num_tokens * width > MAX_PROMPT_LOGPROBS:
            self._listener.refused("invalid")
            raise RequestError(
                f"prompt_logprobs={width} for {num_tokens} tokens is {num_tokens * width:,} log "
                f"probabilities; the limit of a server is {MAX_PROMPT_LOGPROBS:,}; lower it or shorten the "
                "prompt"
            )
        if request_id in self._generations:
            raise RequestError(f"request_id {request_id!r} is already running; choose another")
        self.check_room(1, num_tokens, num_rows=params.n)
        generation = Generation(request_id, prompt, prompt_token_ids, self._abort, num_rows=params.n)
        if self._num_active == 0:
            self._heard_s = self._loop.time()
        # Log probabilities come piece by piece: those of a whole answer at once would hold all steps up.
        comes_in_pieces = stream or params.logprobs is not None
        self._send(Submit(request_id, list(prompt_token_ids), params, priority, cache_salt, comes_in_pieces))
        if comes_in_pieces and not stream:
            self._logprobs[request_id] = {}
        self._generations[request_id] = generation
        self._num_active += 1
        self._idle.clear()
        self._room.enter(request_id, num_tokens, self._rows_taken(params.n))
        if self.settings.request_timeout_s is not None:
            generation.timer = self._loop.call_later(
                self.settings.request_timeout_s, self._time_out, generation
            )
        self._listener.submitted(request_id, num_tokens)
        return generation

    def max_requests(self, num_rows: int) -> int:
        """Most requests of so many rows that are taken at one moment: those that run, and a full queue."""
        return self.model.max_num_seqs // self._rows_taken(num_rows) + self.settings.max_waiting_requests

    def check_length(self, num_tokens: int) -> None:
        """RequestError when no prompt of so many tokens is ever taken.

        Said here, so that a million ids need not travel to hear it, and before any `check_room`.
        """
        if (problem := self._length_problem(num_tokens)) is not None:
            self._listener.refused("invalid")
            raise RequestError(f"prompt has {num_tokens} tokens; {problem}")

    def _length_problem(self, num_tokens: int) -> str | None:
        """Why no prompt of so many tokens is ever taken; None when one may be."""
        if num_tokens > (longest := self.model.max_model_len - 1):
            return (
                f"max_model_len={self.model.max_model_len} leaves room for at most {longest} and one new "
                "token; shorten it, or raise max_model_len where the model allows more"
            )
        if num_tokens > (limit := self.settings.max_waiting_tokens):
            return (
                f"this server queues at most {limit}; shorten it, or start the server with a larger "
                "--max-waiting-tokens"
            )
        return None

    def check_room(self, num_requests: int, num_tokens: int, *, num_rows: int = 1) -> None:
        """OverloadedError when the queue cannot take so many requests with so many prompt tokens now.

        num_rows: rows of the engine that each of them needs.
        """
        num_free = 0 if self._model is None else max(0, self._model.max_num_seqs - self._num_rows_held)
        try:
            self._room.check(num_requests, num_tokens, num_free, num_rows=self._rows_taken(num_rows))
        except OverloadedError:
            self._listener.refused("overloaded")
            raise

    def _rows_taken(self, num_rows: int) -> int:
        """One that wants more than there are takes them all until the engine refuses it."""
        return num_rows if self._model is None else min(num_rows, self._model.max_num_seqs)

    # The page

    @contextlib.asynccontextmanager
    async def watch(self) -> AsyncIterator[AsyncIterator[bytes]]:
        """The observer's payloads, beginning with a full one, until the block is left or the engine dies.

        A watcher that lags misses some and then gets a full one.
        """
        watcher = Watcher(lambda: self._send(Watch(True)))
        self._watchers.append(watcher)
        if self._state == "dead":
            watcher.end()
        try:
            self._send(Watch(True))
            yield watcher
        finally:
            self._watchers.remove(watcher)
            if not self._watchers:
                self._send(Watch(False))

    # The end

    async def drain(self, seconds: float) -> None:
        """Take nothing new, let what runs go on for so long, then fail what is left."""
        if self._state not in ("dead", "draining"):
            self._set_state("draining")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)
        self._fail_all(EngineError("the server is shutting down"))

    async def close(self) -> None:
        """Fail what is left, end the process and wait for its end. Closing twice is a no-op."""
        self._checking.cancel()
        self._fail_all(EngineError("the server is shutting down"))
        if self._link is not None:
            link, self._link = self._link, None
            self._die(EngineError("the engine is closed"), is_told=False)
            await link.close(is_patient=not self._is_deaf)
        self._threads.shutdown(wait=False, cancel_futures=True)

    # From the engine process

    def receive(self, *messages: ToFront) -> None:
        """Messages of the engine process that came together: what they bring one stream is one piece of it.

        There are several only when the front lags. Writing to a stream is most of what a piece costs, so
        that this is how it catches up.
        """
        steps: list[News] = []
        ended: list[RequestOutput] = []
        has_tokens: dict[Generation, bool] = {}
        told: list[str] = []
        is_alone = len(messages) == 1
        for message in messages:
            if isinstance(message, News):
                self._heard()
                self._got_tokens(message.tokens, has_tokens, told if is_alone else None)
                ended += self._got_news(message, has_tokens)
                steps.append(message)
            else:
                self._got_word(message)
        for generation in has_tokens:
            generation.wake()
        told += [one.request_id for one, has_any in has_tokens.items() if has_any]
        self._listener.told(told)
        for output in ended:
            self._listener.finished(output)
        for news in steps:
            self._listener.step(news)

    def _got_word(self, message: ToFront) -> None:
        match message:
            case Accepted():
                self._heard()
                for request_id in message.request_ids:
                    if (generation := self._generations.get(request_id)) is not None:
                        generation.accept()
            case Refused():
                self._heard()
                self._got_refusal(message)
            case Observed():
                for watcher in self._watchers:
                    watcher.put(message)
            case Stage():
                self._listener.stage(message)
            case Ready():
                self._model = message.model
                self._is_deaf = False
                self._become_ready()
            case Died():
                self._die(_error(message.kind, message.message))

    def lost(self, why: str) -> None:
        """The engine process has gone."""
        self._die(EngineError(why))

    def _heard(self) -> None:
        """The process turns its loop: it speaks between its steps, and while there is none to make."""
        self._heard_s = self._loop.time()
        self._is_deaf = False
        if self._state == "stuck":
            self._set_state("ready")

    def _got_tokens(self, tokens: Tokens, has_tokens: dict[Generation, bool], told: list[str] | None) -> None:
        """`told` gets those whose readers have it already; None is to tell none, as more may come for them.
        `has_tokens` gets the others.
        """
        generations = self._generations
        for request_id, text, token_id in zip(
            tokens.request_ids, tokens.texts, tokens.token_ids, strict=True
        ):
            generation = generations.get(request_id)
            if generation is None or generation.error is not None:
                continue
            if told is not None and (offer := generation.on_text) is not None and offer(text):
                told.append(request_id)
            else:
                generation.put_token(text, token_id)
                has_tokens[generation] = True

    def _got_news(self, news: News, has_tokens: dict[Generation, bool]) -> list[RequestOutput]:
        """Returns what ended. `has_tokens` gets those to be woken, and whether there is a token for them."""
        ended = []
        for request_id in news.started:
            if (generation := self._generations.get(request_id)) is not None:
                if not generation.is_started:
                    self._num_rows_held += generation.num_rows
                self._leave_queue(generation)
                self._room.last_wait_s = self._heard_s - generation.submitted_s
        generations = self._generations
        for item in news.items:
            generation = generations.get(item.request_id)
            if generation is None:
                continue
            if (kept := self._logprobs.get(item.request_id)) is not None:
                _keep_logprobs(kept, item)
            if item.output is not None:
                item.output.prompt = generation.prompt
                item.output.prompt_token_ids = list(generation.prompt_token_ids)
                del generations[item.request_id]
                ended.append(item.output)
                self._end(generation)
            # One that was aborted or timed out here tells its reader nothing more, but its end is counted.
            if generation.error is None and (item.chunks or item.output is not None):
                generation.put(item.chunks, item.output)
                has_any = any(chunk.token_ids for chunk in item.chunks)
                has_tokens[generation] = has_any or has_tokens.get(generation, False)
        return ended

    def _got_refusal(self, message: Refused) -> None:
        generation = self._generations.pop(message.request_id, None)
        if generation is not None:
            self._end(generation)
            self._listener.refused(_REASONS.get(message.kind, "error"), message.request_id)
            generation.fail(_error(message.kind, message.message))

    def _got_tokenizer(self, loaded: asyncio.Future[Tokenizer | None]) -> None:
        if loaded.cancelled():
            return
        if (error := loaded.exception()) is not None:
            self._die(error if isinstance(error, Exception) else EngineError(str(error)))
            return
        self._tokenizer, self._has_text = loaded.result(), True
        self._become_ready()

    def _become_ready(self) -> None:
        if self._state == "loading" and self._model is not None and self._has_text:
            self._set_state("ready")
            self._ready.set_result(None)

    # Requests, inside

    def _leave_queue(self, generation: Generation) -> None:
        if not generation.is_started:
            generation.is_started = True
            self._room.leave(generation.request_id, len(generation.prompt_token_ids))

    def _end(self, generation: Generation) -> None:
        """It no longer counts, whatever the engine still has to say about it. Ending it twice is a no-op."""
        has_rows = generation.is_started
        self._leave_queue(generation)
        self._logprobs.pop(generation.request_id, None)
        if generation.timer is not None:
            generation.timer.cancel()
        if not generation.is_over:
            self._num_active -= 1
            self._num_rows_held -= generation.num_rows if has_rows else 0
            if self._num_active == 0:
                self._idle.set()

    def _abort(self, generation: Generation) -> None:
        self._cut(generation, aborted(generation.request_id))

    def _time_out(self, generation: Generation) -> None:
        if not generation.is_over:
            self._listener.refused("timeout")
            self._cut(
                generation,
                RequestTimeoutError(
                    f"the request took longer than {self.settings.request_timeout_s:g} s, the server's "
                    "limit; ask for fewer tokens"
                ),
            )

    def _cut(self, generation: Generation, error: Exception) -> None:
        if not generation.is_over:
            self._end(generation)
            generation.fail(error)
            self._send(Abort(generation.request_id))

    def _fail_all(self, error: Exception) -> None:
        for generation in list(self._generations.values()):
            self._cut(generation, error)

    # State

    def _set_state(self, state: State) -> None:
        if state != self._state:
            self._state = state
            self._listener.state(state)

    def _not_ready(self) -> EngineError:
        match self._state:
            case "loading":
                return EngineError("the model is still loading; try again soon")
            case "draining":
                return EngineError("the server is shutting down")
            case "stuck":
                return EngineError(f"the engine has made no step for {self.settings.stuck_s:g} s")
        return EngineDeadError(f"the engine is dead: {self._death}; the server must be started again")

    def _check_progress(self) -> None:
        self._checking = self._loop.call_later(self._check_period_s, self._check_progress)
        if self._num_active and self._state in ("ready", "draining"):
            silent_s = self._loop.time() - self._heard_s
            if silent_s > self.settings.stuck_s:
                self._is_deaf = True
                if self._state == "ready":
                    self._set_state("stuck")
                self._fail_all(EngineError(f"the engine has made no step for {silent_s:.0f} s"))

    def _die(self, error: Exception, *, is_told: bool = True) -> None:
        if self._state == "dead":
            return
        self._death = error
        self._state = "dead"
        if is_told:
            self._listener.state("dead", str(error))
        for generation in self._generations.values():
            self._end(generation)
            generation.fail(EngineDeadError(f"the engine died: {error}"))
        self._generations.clear()
        for watcher in self._watchers:
            watcher.end()
        if not self._ready.done():
            self._ready.set_exception(error)

    def _send(self, message: ToEngine) -> None:
        if self._link is not None and self._state != "dead":
            self._link.send(message)


def _keep_logprobs(kept: dict[int, list[dict[int, Logprob]]], item: Item) -> None:
    """Take them out of the item's pieces; its output, when it has one, gets all."""
    for chunk in item.chunks:
        kept.setdefault(chunk.index, []).extend(chunk.logprobs or ())
    item.chunks.clear()  # nobody reads them
    for one in item.output.outputs if item.output is not None else ():
        one.logprobs = kept.get(one.index) or None


def _error(kind: str, message: str) -> Exception:
    """The exception of `octavo.errors` by that name."""
    known = getattr(errors, kind, EngineError)
    error = known(message)
    assert isinstance(error, Exception)
    return error
