"""The engine: takes token ids, gives finished requests. One `step` is schedule, run, sample, commit, emit.

    prompt ids -> add_request -> Scheduler -> ModelRunner -> Sampler -> Scheduler.commit -> OutputProcessor

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

from octavo.cache.manager import KVCacheManager
from octavo.config import EngineConfig
from octavo.engine.output import OutputProcessor
from octavo.engine.request import Request
from octavo.engine.runner import ModelRunner
from octavo.engine.schedule import Schedule
from octavo.engine.scheduler import Scheduler
from octavo.engine.stats import EngineStats as EngineStats
from octavo.engine.trace import StepTrace
from octavo.errors import EngineError, RequestError
from octavo.sampling_params import SamplingParams
from octavo.text.tokenizer import Tokenizer

logger = logging.getLogger("octavo")

MAX_LOGPROBS_PER_REQUEST = 2_000_000
"""Most log probabilities one request may bring together; each takes some 400 bytes."""


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
        self.trace = StepTrace(config.trace, self.cache) if config.trace else None
        self._clock = clock
        self._arrivals = itertools.count()
        self._next_seq_id = 0
        self._dropped: deque[str] = deque()
        self._num_steps = self._num_prompt_tokens = self._num_output_tokens = self._num_hit_tokens = 0
        self._is_closed = False
        self._is_stepping = False
        self._running_plan: Schedule | None = None

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
    ) -> Request:
        """Queue a prompt. Its output appears on the returned request when `step` has finished it.

        priority: lower runs first. cache_salt: prompts share cached K/V only under the same salt.
        stream: also fill `request.chunks` as text appears.

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
        )
        self.scheduler.add(request)
        self._next_seq_id += params.n
        self.requests[request_id] = request
        return request

    def step(self) -> list[Request]:
        """Run one step; returns the requests that have news (a chunk, or their output). Empty when idle.

        A step that raises ends the requests that ran in it with an error; the others, and the engine, go on.
        So does one that Ctrl-C interrupts, which is raised again afterwards: half a step is not kept.
        """
        self._check_one_thread()
        self._abort_dropped()
        began = self._clock()
        self._is_stepping = True
        try:
            plan = self.scheduler.schedule()
            if plan is None:
                return []
            changed = self._run(plan, began)
        except BaseException as error:
            changed = self._fail(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._is_stepping = False
            self._running_plan = None
        self._num_steps += 1
        if self.trace:
            self.trace.end(self._clock() - began, len(self.scheduler.waiting), len(self.scheduler.running))
        self._forget_finished(changed)
        return changed

    def _run(self, plan: Schedule, began: float) -> list[Request]:
        for seq in plan.admitted:
            if seq.request.first_scheduled_s is None:
                seq.request.first_scheduled_s = began
        if self.trace:
            self.trace.begin(plan)
        self._running_plan = plan
        sampled = self.runner.execute(plan)
        self._running_plan = None
        self._num_prompt_tokens += plan.num_prompt_tokens
        self._num_hit_tokens += plan.num_hit_tokens
        self._num_output_tokens += len(sampled.token_ids) - len(sampled.errors)
        self.scheduler.commit(plan, sampled.token_ids)
        return self.output.process(plan, sampled, self._clock())

    def _fail(self, error: BaseException) -> list[Request]:
        """End the requests of a step that broke in the model; if it broke elsewhere, all requests.

        The scheduler's lists may then be half changed, so they are not unwound but emptied.
        """
        if self._running_plan is not None:
            sequences = self._running_plan.sequences
            requests = list({seq.request.request_id: seq.request for seq in sequences}.values())
        else:
            requests = list(self.requests.values())
            self.scheduler.reset()
        what = f"the step failed: {type(error).__name__}: {error}"
        logger.error("%s; %d requests end with it", what, len(requests))
        logger.debug("the failed step", exc_info=error)
        for request in requests:
            self.output.fail(request, what, self._clock(), even_finished=self._running_plan is None)
        self._forget_finished(requests)
        return requests

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
        if self.trace:
            self.trace.close()
        self.runner.close()
        self._is_closed = True

    def _checked_prompt(self, prompt_token_ids: Seq[int]) -> list[int]:
        if not len(prompt_token_ids):
            raise RequestError("prompt is empty: there is no token to continue from; give at least one token")
        token_ids: list[int] = []
        for i, item in enumerate(prompt_token_ids):
            if isinstance(item, bool) or not hasattr(item, "__index__"):
                raise RequestError(f"prompt_token_ids[{i}] must be an int, got {item!r}")
            token_id = operator.index(item)  # NumPy's integers are welcome
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
