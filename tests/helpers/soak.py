"""Thousands of random requests through a real engine, some aborted; every one is looked at as it ends.

They come in waves, with a moment without work behind each, when nothing may be left of them.
"""

from __future__ import annotations

import gc
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from helpers.models import saved, tiny_hf_model

from octavo.engine.core import Engine
from octavo.engine.request import Request
from octavo.outputs import CompletionOutput, RequestOutput
from octavo.sampling_params import SamplingParams

VOCAB_SIZE = 256
EOS = 3
CHECK_EVERY = 64
"""Steps between two scans of the scheduler and the cache."""

PLAIN: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05},
    {"n": 2, "temperature": 1.0},
    {"stop_token_ids": list(range(0, VOCAB_SIZE, 16))},
    {"temperature": 1.3, "ignore_eos": False, "stop_token_ids": list(range(5, VOCAB_SIZE, 32))},
]
"""What a CUDA graph can draw."""
OTHERS: list[dict[str, Any]] = [
    {"logprobs": 2},
    {"temperature": 1.0, "logprobs": 0, "n": 2},
    {"prompt_logprobs": 1},
    {"repetition_penalty": 1.2},
    {"temperature": 0.7, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"min_tokens": 3, "stop_token_ids": list(range(0, VOCAB_SIZE, 4)), "temperature": 1.0},
    {"logit_bias": {EOS: 8.0}, "temperature": 1.0, "ignore_eos": False},
    {"allowed_token_ids": list(range(40, 80)), "temperature": 1.0},
]
WAVES = (PLAIN, PLAIN + OTHERS)


def model_folder(folder: Path, *, head_dim: int, max_model_len: int) -> str:
    """A Qwen3 of two layers, with weights large enough for every token to matter to those that follow."""
    model = tiny_hf_model(
        "qwen3",
        hidden_size=128,
        intermediate_size=192,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        num_hidden_layers=2,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=max_model_len,
        eos_token_id=EOS,
    )
    return saved(model, folder)


@dataclass(frozen=True)
class Answer:
    """What became of a request that another run must answer alike."""

    prompt: list[int]
    params: SamplingParams
    output: RequestOutput
    num_preemptions: int


class Soak:
    """Random requests for `engine`, which must be idle: it is stepped, and left idle again.

    short_prompt, longest_prompt: most prompts have up to so many tokens, one in twelve up to so many.
    most_tokens: of an output. wave: requests between two moments without work. keep: remember the answers
    that do not depend on the order of arrival.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        short_prompt: int,
        longest_prompt: int,
        most_tokens: int,
        wave: int,
        keep: bool = False,
    ) -> None:
        assert engine.scheduler.num_cacheable_tokens >= engine.scheduler.max_model_len
        self.engine = engine
        self.answers: list[Answer] = []
        self.num_added = self.num_aborted_waiting = self.num_aborted_running = 0
        self.num_graph_steps = self.most_under_way = self.num_cut_by_context = 0
        self.num_ended: dict[str, int] = defaultdict(int)
        # The last of these is cut short by the context.
        self._ranges = [(1, short_prompt)] * 22 + [(1, longest_prompt), (longest_prompt - 3, longest_prompt)]
        self._most_tokens = most_tokens
        self._wave_size = wave
        self._keep = keep
        self._rng = random.Random(0)
        self._shared = [self._random_ids(longest_prompt) for _ in range(4)]
        self._live: dict[str, Request] = {}
        self._aborted: set[str] = set()
        self._to_abort: dict[int, list[str]] = defaultdict(list)
        self._num_steps = 0
        self._num_strange_requests = _num_requests_alive()

    def run(self, num_requests: int, on_idle: Callable[[int], None] = lambda num_done: None) -> None:
        """Serve so many; `on_idle(number of requests so far)` is called whenever none is left."""
        with self._counting_graph_steps():
            self._run(num_requests, on_idle)

    def _run(self, num_requests: int, on_idle: Callable[[int], None]) -> None:
        # One row fewer in every step: each bucket of the graphs gets its turn, without filters and with.
        for top_k in (0, 20):
            for i in range(self.engine.scheduler.max_num_rows):
                params = SamplingParams(max_tokens=i + 1, temperature=1.0, top_k=top_k, ignore_eos=True)
                self._add(self._random_ids(1), params)
            self._drain()
            on_idle(self.num_added)
        num_waves = 0
        while self.num_added < num_requests:
            self._wave(min(self._wave_size, num_requests - self.num_added), WAVES[num_waves % 2])
            num_waves += 1
            on_idle(self.num_added)

    def _wave(self, size: int, kinds: list[dict[str, Any]]) -> None:
        rng, engine = self._rng, self.engine
        num_rows = engine.scheduler.max_num_rows
        last = self.num_added + size
        while self.num_added < last:
            if len(engine.scheduler.waiting) < num_rows:
                for _ in range(min(rng.choice((0, 0, 1, 4, num_rows // 2)), last - self.num_added)):
                    self._arrive(rng.choice(kinds))
            self._step()
        self._drain()

    def _drain(self) -> None:
        while self.engine.has_work:
            self._step()
        self._check_idle()

    def _arrive(self, kind: dict[str, Any]) -> None:
        rng = self._rng
        shortest, longest = rng.choice(self._ranges)
        length = rng.randint(shortest, longest)
        num_shared = rng.randrange(length) if rng.random() < 0.5 else 0
        prompt = rng.choice(self._shared)[:num_shared] + self._random_ids(length - num_shared)
        options = {"ignore_eos": True, "seed": rng.choice((None, rng.randrange(1000)))} | kind
        max_tokens = rng.randint(options.get("min_tokens", 1), self._most_tokens)
        request = self._add(
            prompt,
            SamplingParams(max_tokens=max_tokens, **options),
            priority=rng.choice((0, 0, 0, 1)),
            cache_salt=rng.choice(("", "", "", "other")),
            stream=rng.random() < 0.2,
        )
        if rng.random() < 0.08:
            delay = rng.choice((0, rng.randint(1, 40)))
            if delay:
                self._to_abort[self._num_steps + delay].append(request.request_id)
            else:
                self._abort(request.request_id)

    def _add(self, prompt: list[int], params: SamplingParams, **kwargs: Any) -> Request:
        request = self.engine.add_request(prompt, params, **kwargs)
        self._live[request.request_id] = request
        self.num_added += 1
        return request

    def _step(self) -> None:
        dropped = []
        for request_id in self._to_abort.pop(self._num_steps, ()):
            if self._rng.random() < 0.3:
                self.engine.drop(request_id)  # takes effect as the step begins
                dropped.append(request_id)
            else:
                self._abort(request_id)
        for request_id in dropped:
            self._note_abort(request_id)
        if self.engine.scheduler.running and self._rng.random() < 0.08:
            self._abort(self._rng.choice(self.engine.scheduler.running).request.request_id)
        self._num_steps += 1
        for request in self.engine.step():
            if request.output is not None:
                self._end(request)
        for request_id in dropped:
            if request_id in self._live:
                self._end(self._live[request_id])
        self.most_under_way = max(self.most_under_way, len(self.engine._under_way) + 1)
        if self._num_steps % CHECK_EVERY == 0:
            self.engine.scheduler.check()

    def _abort(self, request_id: str) -> None:
        self._note_abort(request_id)
        self.engine.abort(request_id)
        if request_id in self._live:
            self._end(self._live[request_id])

    def _note_abort(self, request_id: str) -> None:
        request = self._live.get(request_id)
        if request is None:
            return  # it has ended; to abort it changes nothing
        self._aborted.add(request_id)
        if any(seq.row >= 0 for seq in request.sequences):
            self.num_aborted_running += 1
        else:
            self.num_aborted_waiting += 1

    # What must be true

    def _end(self, request: Request) -> None:
        """Look at a request that has just ended, and let go of it."""
        del self._live[request.request_id]
        assert request.request_id not in self.engine.requests
        output, params = request.output, request.params
        assert output is not None
        assert output.error is None, output.error
        assert [completion.index for completion in output.outputs] == list(range(params.n))
        for completion in output.outputs:
            self._check_completion(request, completion)
        is_aborted = request.request_id in self._aborted
        assert is_aborted == any(each.finish_reason == "abort" for each in output.outputs), output
        if params.prompt_logprobs is not None and not is_aborted:
            assert output.prompt_logprobs is not None
            assert len(output.prompt_logprobs) == len(request.prompt_token_ids)
        for completion in output.outputs if request.stream else ():
            chunks = [chunk for chunk in request.chunks if chunk.index == completion.index]
            assert [token for chunk in chunks for token in chunk.token_ids] == completion.token_ids
            assert [chunk.finish_reason for chunk in chunks][-1] == completion.finish_reason
        self._aborted.discard(request.request_id)
        if self._keep and not is_aborted and (params.is_greedy or params.seed is not None):
            self.answers.append(Answer(request.prompt_token_ids, params, output, request.num_preemptions))

    def _check_completion(self, request: Request, completion: CompletionOutput) -> None:
        params, token_ids, reason = request.params, completion.token_ids, completion.finish_reason
        assert reason is not None
        self.num_ended[reason] += 1
        assert params.max_tokens is not None
        room = self.engine.scheduler.max_model_len - len(request.prompt_token_ids)
        limit = min(params.max_tokens, room)
        stops = {*params.stop_token_ids} | (set() if params.ignore_eos else {EOS})
        where = [i for i, token in enumerate(token_ids) if token in stops]
        assert all(0 <= token < VOCAB_SIZE for token in token_ids), token_ids
        if reason == "length":
            assert (len(token_ids), where) == (limit, []), completion
            self.num_cut_by_context += room < params.max_tokens
        elif reason == "stop":
            assert where == [len(token_ids) - 1], completion
            assert params.min_tokens < len(token_ids) <= limit, completion
            assert completion.stop_reason == (
                token_ids[-1] if token_ids[-1] in params.stop_token_ids else None
            )
        else:
            assert reason == "abort", completion
            assert request.request_id in self._aborted
            assert len(token_ids) < limit
            assert where == []
        if params.allowed_token_ids is not None:
            assert set(token_ids) <= set(params.allowed_token_ids)
        if params.logprobs is not None and token_ids:
            assert completion.logprobs is not None
            assert len(completion.logprobs) == len(token_ids)
            for token, entries in zip(token_ids, completion.logprobs, strict=True):
                assert next(iter(entries)) == token
                assert len(entries) in (params.logprobs, params.logprobs + 1)

    def _check_idle(self) -> None:
        """Nothing is left of those that have ended: no block, row, step, text, or object."""
        engine = self.engine
        engine.scheduler.check()
        stats = engine.stats()
        assert not self._live, f"never ended: {list(self._live)}"
        assert not self._aborted
        assert not engine.requests
        assert not engine._under_way
        assert not engine.output._texts
        assert (stats.num_owned_blocks, stats.num_waiting, stats.num_running) == (0, 0, 0)
        assert stats.num_free_blocks + stats.num_cached_blocks == engine.cache.num_blocks
        # The sampler keeps the sequences of its last batch.
        gc.collect()
        num_left = _num_requests_alive() - self._num_strange_requests
        assert num_left <= engine.scheduler.max_num_rows, f"{num_left} requests are still in memory"

    # Afterwards

    def sample(self, num: int) -> list[Answer]:
        """So many of the kept answers, first those of requests that were preempted, up to half."""
        self._rng.shuffle(self.answers)
        preempted = [answer for answer in self.answers if answer.num_preemptions][: num // 2]
        others = [answer for answer in self.answers if not answer.num_preemptions]
        assert len(preempted) >= num // 8
        return preempted + others[: num - len(preempted)]

    def _random_ids(self, num: int) -> list[int]:
        return [self._rng.randrange(VOCAB_SIZE) for _ in range(num)]

    @contextmanager
    def _counting_graph_steps(self) -> Iterator[None]:
        graphs = self.engine.runner._graphs
        assert graphs is not None
        launch = graphs.launch

        def launching(plan: Any) -> Any:
            pending = launch(plan)
            self.num_graph_steps += pending is not None
            return pending

        vars(graphs)["launch"] = launching
        try:
            yield
        finally:
            del vars(graphs)["launch"]  # it would keep the graphs, and their memory, alive


def assert_answers_alone(engine: Engine, answers: Sequence[Answer]) -> None:
    """Each request, with nobody beside it and nothing cached, has the bits it had in the crowd."""
    for answer in answers:
        engine.cache.reset_prefix_cache()
        request = engine.add_request(answer.prompt, answer.params)
        while engine.has_work:
            engine.step()
        assert request.output is not None
        assert request.output.outputs == answer.output.outputs, answer
        assert request.output.prompt_logprobs == answer.output.prompt_logprobs, answer


def device_memory() -> tuple[int, int]:
    """Bytes of the GPU that tensors take, and that torch holds for them; of an idle engine."""
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def _num_requests_alive() -> int:
    return sum(type(thing) is Request for thing in gc.get_objects())
