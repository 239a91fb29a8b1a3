"""The engine: takes token ids, gives finished requests. One `step` is schedule, run, sample, commit, emit.

    prompt ids -> add_request -> Scheduler -> ModelRunner -> Sampler -> Scheduler.commit -> OutputProcessor

With `overlap` the device has its next step before the tokens of this one are read::

    host    | schedule 1, launch | schedule 2, launch | read 1, emit | schedule 3, launch | read 2, emit | ...
    device                       | step 1 ------------------ | step 2 ------------------ | step 3 --- ...

and runs ahead by a few more when nothing but their own tokens can change what the next steps are. What was
computed for a sequence past its end is thrown away.

Single threaded: callers add, abort and step from one thread. It holds the model, the cache and every request.
"""

from __future__ import annotations

import itertools
import logging
import operator
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from octavo.cache.manager import KVCacheManager
from octavo.config import EngineConfig
from octavo.engine.grammar import Grammar, GrammarCompiler
from octavo.engine.output import OutputProcessor
from octavo.engine.profile import Span, StepProfile, no_span
from octavo.engine.request import Request
from octavo.engine.runner import ModelRunner, PendingStep
from octavo.engine.schedule import Schedule
from octavo.engine.scheduler import Scheduler
from octavo.engine.stats import EngineStats as EngineStats
from octavo.engine.trace import StepTrace
from octavo.errors import EngineError, RequestError, shown
from octavo.sampling_params import SamplingParams
from octavo.text.tokenizer import Tokenizer

logger = logging.getLogger("octavo")

MAX_LOGPROBS_PER_REQUEST = 2_000_000
"""Most log probabilities one request may bring together; each takes some 400 bytes."""


@dataclass(slots=True)
class _StepUnderWay:
    """A launched step. `record` is what the trace will say of it."""

    plan: Schedule
    pending: PendingStep
    record: dict[str, Any] | None


class Engine:
    """Every unfinished request, and the loop that moves them on. `octavo.engine.build` puts one together."""

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        runner: ModelRunner,
        *,
        vocab_size: int,
        eos_token_ids: Seq[int] = (),
        tokenizer: Tokenizer | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config = config
        self.scheduler = scheduler
        self.runner = runner
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self.requests: dict[str, Request] = {}
        self.output = OutputProcessor(scheduler, tokenizer)
        self.grammars = GrammarCompiler(tokenizer, vocab_size, self.eos_token_ids)
        self.trace = StepTrace(config.trace, self.cache) if config.trace else None
        self.profile = StepProfile(config.profile) if config.profile else None
        self._span: Span = no_span
        if self.profile is not None:
            self._span = self.profile.span
            runner.profile(self.profile)
        self._clock = clock
        self._arrivals = itertools.count()
        self._next_seq_id = 0
        self._dropped: deque[str] = deque()
        self._num_steps = self._num_prompt_tokens = self._num_output_tokens = self._num_hit_tokens = 0
        self._is_closed = False
        self._is_stepping = False
        self._max_under_way = (1 + config.run_ahead) if config.overlap else 1
        self._under_way: deque[_StepUnderWay] = deque()
        # Whether the step launched last is a decode of all that runs: the next one is then known, too.
        self._is_steady = False
        # What a step is at: the plans whose requests it takes along if it breaks there; in neither, all do.
        self._launching: Schedule | None = None
        self._collecting: list[Schedule] | None = None

    @property
    def cache(self) -> KVCacheManager:
        return self.scheduler.cache

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add_request(
        self,
        prompt_token_ids: Seq[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        prompt: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        stream: bool = False,
        grammar: Grammar | None = None,
    ) -> Request:
        """Queue a prompt. Its output appears on the returned request when `step` has finished it.

        priority: lower runs first. cache_salt: prompts share cached K/V only under the same salt.
        stream: also fill `request.chunks` as text appears. grammar: that of `params.structured_output`, for
        who had it compiled before; left as it is.

        Raises RequestError or CapacityError when it can never be served; nothing is queued then.
        """
        if self._is_closed:
            raise EngineError("the engine is closed; make a new LLM")
        self._check_one_thread()
        self._abort_dropped()
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise RequestError(f"priority must be an int (lower runs first), got {priority!r}")
        if not isinstance(cache_salt, str):
            raise RequestError(f"cache_salt must be a string, got {cache_salt!r}")
        token_ids = self._checked_prompt(prompt_token_ids)
        params.validate_for(self.vocab_size, self.scheduler.max_model_len)
        # Before the sequences are made: there may be a billion of them.
        self.scheduler.check_fits(len(token_ids), params.n)
        self._check_num_logprobs(len(token_ids), params)
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer and this model has none; use stop_token_ids")
        if grammar is None and params.structured_output is not None:
            grammar = self.grammars.compile(params.structured_output)  # waits; a bad one is refused
        arrival = next(self._arrivals)
        request_id = request_id or f"request-{arrival}"
        if request_id in self.requests:
            raise RequestError(f"request_id {request_id!r} is already running; choose another")
        base = params.seed if params.seed is not None else _mix(self.config.seed, arrival)
        request = Request(
            request_id,
            token_ids,
            params,
            seeds=[base if i == 0 else _mix(base, i) for i in range(params.n)],
            first_seq_id=self._next_seq_id,
            arrival=arrival,
            prompt=prompt,
            eos_token_ids=self.eos_token_ids,
            priority=priority,
            cache_salt=cache_salt,
            stream=stream,
            arrival_s=self._clock(),
            grammar=grammar,
        )
        self.scheduler.add(request)
        self._next_seq_id += params.n
        self.requests[request_id] = request
        return request

    def step(self) -> list[Request]:
        """Launch what can be launched and take in the oldest step; returns the requests that have news (a
        chunk, or their output). Empty when idle.

        A step that raises ends the requests that ran in it with an error; the others, and the engine, go on.
        So does one that Ctrl-C interrupts, which is raised again afterwards: half a step is not kept.
        """
        self._check_one_thread()
        self._abort_dropped()
        began = self._clock()
        record: dict[str, Any] | None = None
        self._is_stepping = True
        try:
            self._launch_steps(began)
            if not self._under_way:
                return []
            record = self._under_way[0].record
            changed = self._collect()
            self._forget_finished(changed)
        except BaseException as error:
            changed = self._fail(error)
            self._forget_finished(changed)
            if not isinstance(error, Exception):
                raise
        finally:
            self._is_stepping = False
            self._launching = self._collecting = None
        self._num_steps += 1
        if self.trace and record is not None:
            waiting, running = self.scheduler.waiting, self.scheduler.running
            self.trace.end(record, self._clock() - began, len(waiting), len(running))
        return changed

    def _launch_steps(self, began: float) -> None:
        scheduler, under_way = self.scheduler, self._under_way
        while True:
            # Two suffice while arrivals wait or prompts are computed: what comes next gets its turn soon.
            is_steady = self._is_steady and not scheduler.waiting
            if len(under_way) >= (self._max_under_way if is_steady else min(2, self._max_under_way)):
                return
            if under_way and (
                scheduler.may_preempt() or 2 * scheduler.num_needing_ids >= len(scheduler.running) > 0
            ):
                return
            with self._span("schedule"):
                plan = scheduler.schedule()
            if plan is None:
                return
            self._launch(plan, began)

    def _launch(self, plan: Schedule, began: float) -> None:
        for seq in plan.admitted:
            if seq.request.first_scheduled_s is None:
                seq.request.first_scheduled_s = began
        record = self.trace.begin(plan) if self.trace else None
        self._launching = plan
        with self._span("launch"):
            pending = self.runner.launch(plan)
        self._launching = None
        self._num_prompt_tokens += plan.num_prompt_tokens
        self._num_hit_tokens += plan.num_hit_tokens
        with self._span("advance"):
            self.scheduler.advance(plan)
        self._under_way.append(_StepUnderWay(plan, pending, record))
        self._is_steady = plan.num_decode_rows == plan.num_tokens == len(self.scheduler.running)

    def _collect(self) -> list[Request]:
        """Take in the oldest step under way."""
        self._collecting = [step.plan for step in self._under_way]
        step = self._under_way.popleft()
        with self._span("wait for tokens"):
            sampled = step.pending.collect()
        self._collecting = None
        with self._span("commit"):
            counting = self.scheduler.commit(step.plan, sampled.token_ids)
        with self._span("output"):
            changed = self.output.process(step.plan, sampled, counting, self._clock())
        self._num_output_tokens += len(counting) - sum(j in sampled.errors for j in counting)
        if not self.scheduler.has_work:
            self._under_way.clear()  # steps that ran ahead, past the end of all
        return changed

    def _fail(self, error: BaseException) -> list[Request]:
        """End the requests of a step that broke in the model; if it broke elsewhere, all requests.

        The scheduler's lists may then be half changed, so they are not unwound but emptied.
        """
        news: list[Request] = []
        if self._launching is not None:
            plans = [self._launching]
            try:
                while self._under_way:  # launched before this one, and whole
                    news += self._collect()
            except BaseException as another:
                ended = self._end_all(another)
                if not isinstance(another, Exception):
                    raise
                return ended
        elif self._collecting is not None:
            # What was launched later has read what this step was to write, and so may have prefix hits.
            plans = self._collecting
            self._under_way.clear()
            self.cache.reset_prefix_cache()
        else:
            return self._end_all(error)
        requests = {seq.request.request_id: seq.request for plan in plans for seq in plan.sequences}
        unfinished = [request for request in requests.values() if request.output is None]
        self._end(unfinished, error)
        return list({request.request_id: request for request in [*news, *unfinished]}.values())

    def _end_all(self, error: BaseException) -> list[Request]:
        self._under_way.clear()
        requests = list(self.requests.values())
        self.scheduler.reset(requests)
        self._end(requests, error, even_finished=True)
        return requests

    def _end(self, requests: list[Request], error: BaseException, *, even_finished: bool = False) -> None:
        unfinished = [request for request in requests if request.output is None]
        what = f"the step failed: {type(error).__name__}: {error}"
        logger.error("%s; %d requests end with it", what, len(unfinished))
        logger.debug("the failed step", exc_info=error)
        for request in unfinished:
            self.output.fail(request, what, self._clock(), even_finished=even_finished)
        self._forget_finished(requests)

    def abort(self, request_id: str) -> None:
        """End a request now, wherever it stands. Unknown or finished ids are ignored.

        In the middle of a step (from another thread) it ends at the step's end.
        """
        if self._is_stepping:
            self.drop(request_id)
            return
        request = self.requests.get(request_id)
        if request is not None:
            self.output.abort(request, self._clock())
            self._forget_finished([request])
            if not self.scheduler.has_work:
                self._under_way.clear()

    def drop(self, request_id: str) -> None:
        """Abort a request at the next chance. For `__del__`, which may run in the middle of a step."""
        self._dropped.append(request_id)

    def _check_one_thread(self) -> None:
        if self._is_stepping:
            raise EngineError(
                "the engine is in the middle of a step that another thread runs; use an LLM from one "
                "thread at a time, or make one for each"
            )

    def _abort_dropped(self) -> None:
        while self._dropped and not self._is_stepping:
            self.abort(self._dropped.popleft())

    def stats(self) -> EngineStats:
        self._abort_dropped()
        return EngineStats(
            num_waiting=len(self.scheduler.waiting),
            num_running=len(self.scheduler.running),
            num_free_blocks=self.cache.num_free,
            num_cached_blocks=self.cache.num_cached,
            num_owned_blocks=self.cache.num_owned,
            num_steps=self._num_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            num_hit_tokens=self._num_hit_tokens,
            num_preemptions=self.scheduler.num_preemptions,
            num_evictions=self.cache.num_evictions,
        )

    def close(self) -> None:
        """Abort what is left, give the memory of model and cache back, refuse what comes. Closing twice is a
        no-op."""
        if self._is_closed:
            return
        self._check_one_thread()
        for request_id in list(self.requests):
            self.abort(request_id)
        self.grammars.close()
        if self.trace:
            self.trace.close()
        if self.profile:
            self.profile.close()
        self.runner.close()
        self._is_closed = True

    def _checked_prompt(self, prompt_token_ids: Seq[int]) -> list[int]:
        if not len(prompt_token_ids):
            raise RequestError("prompt is empty: there is no token to continue from; give at least one token")
        token_ids: list[int] = list(prompt_token_ids)
        if set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < self.vocab_size:
            return token_ids  # nearly always; one by one they would take ten times as long
        token_ids = []
        for i, item in enumerate(prompt_token_ids):
            try:
                if isinstance(item, bool):
                    raise TypeError
                token_id = operator.index(item)  # NumPy's integers are welcome
            except TypeError:
                got = f"{shown(item)} ({type(item).__name__})"
                raise RequestError(f"prompt_token_ids[{i}] must be an int, got {got}") from None
            if not 0 <= token_id < self.vocab_size:
                raise RequestError(
                    f"prompt_token_ids[{i}] is {token_id}, outside the vocabulary "
                    f"(0 to {self.vocab_size - 1})"
                )
            token_ids.append(token_id)
        return token_ids

    def _check_num_logprobs(self, num_prompt_tokens: int, params: SamplingParams) -> None:
        longest = self.scheduler.max_model_len - num_prompt_tokens
        num_new = longest if params.max_tokens is None else min(params.max_tokens, longest)
        for name, num_tokens in (("prompt_logprobs", num_prompt_tokens), ("logprobs", num_new * params.n)):
            width = getattr(params, name)
            if width is None:
                continue
            width = self.vocab_size if width < 0 else width
            if num_tokens * width > MAX_LOGPROBS_PER_REQUEST:
                raise RequestError(
                    f"{name}={getattr(params, name)} for {num_tokens} tokens is {num_tokens * width:,} log "
                    f"probabilities; the limit is {MAX_LOGPROBS_PER_REQUEST:,}; lower {name} or the tokens"
                )

    def _forget_finished(self, requests: list[Request]) -> None:
        for request in requests:
            if request.output is not None:
                self.requests.pop(request.request_id, None)


def _mix(seed: int, index: int) -> int:
    """A 63-bit seed for the index-th stream of `seed` (the finaliser of splitmix64, Steele et al. 2014)."""
    mask = (1 << 64) - 1
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 1
