"""A request and its sequences: plain data the scheduler moves about. No torch, no clock."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from octavo.outputs import FinishReason, Logprob, RequestOutput, StreamChunk
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.engine.grammar import Grammar


class Status(enum.Enum):
    """WAITING (new, or preempted: no blocks) -> RUNNING (has a row and blocks) -> FINISHED (neither)."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Sequence:
    """One sampled continuation of a prompt: the unit that is scheduled, preempted and finished.

    token_ids: prompt then output, as far as the host knows it. num_pending: tokens after these that steps
        under way are drawing; until they are collected only the device knows their ids. num_tokens: all.
    num_computed_tokens: the K/V of that many tokens is in the cache, or will be before the device does
        anything that is launched from now on.
    max_total_tokens: length at which it ends with "length".
    num_covered_tokens: tokens its block table has room for, so that most steps need not ask the cache.
    row: its index in the runner's per-row arrays while running. num_synced_blocks: how many entries of its
        block table those arrays already hold; back to 0 whenever earlier entries changed.
    num_bypassed: how often another was admitted while it stood first in the queue. blocked_at: the
        scheduler's count of releases when it last did not fit; until the next it need not be tried again.
    is_tail_shared: its last, partly filled block may be shared with a sibling, so the next write may copy.
    forks: it leads an n > 1 request whose prompt is not computed yet.
    grammar: what its output must be, having accepted the tokens so far; None leaves it free.
    needs_last_token: what its next token may be depends on the ids before it, in a way that only the host
        works out (a grammar, penalties): its next step waits until they are known.
    """

    __slots__ = (
        "blocked_at",
        "error",
        "finish_reason",
        "forks",
        "grammar",
        "index",
        "is_tail_shared",
        "key",
        "logprobs",
        "max_total_tokens",
        "needs_last_token",
        "num_bypassed",
        "num_computed_tokens",
        "num_covered_tokens",
        "num_pending",
        "num_prompt_tokens",
        "num_synced_blocks",
        "params",
        "request",
        "row",
        "seed",
        "seq_id",
        "status",
        "stop_ids",
        "stop_reason",
        "token_ids",
    )

    def __init__(self, request: Request, index: int, seq_id: int, seed: int, token_ids: list[int]) -> None:
        self.request = request
        self.index = index
        self.seq_id = seq_id
        self.seed = seed
        self.params = request.params
        self.stop_ids = request.stop_ids
        self.grammar = request.grammar.fork() if request.grammar is not None else None
        self.token_ids = token_ids
        self.num_pending = 0
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.max_total_tokens = 0
        self.key = (request.priority, request.arrival, index)
        self.status = Status.WAITING
        self.num_computed_tokens = 0
        self.num_covered_tokens = 0
        self.num_synced_blocks = 0
        self.row = -1
        self.is_tail_shared = False
        self.needs_last_token = request.needs_last_token
        self.forks = index == 0 and not request.is_forked
        self.num_bypassed = 0
        self.blocked_at = -1
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.error: str | None = None
        self.logprobs: list[dict[int, Logprob]] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request.request_id}/{self.index} {self.status.name.lower()} "
            f"{self.num_computed_tokens}/{self.num_tokens})"
        )


class Request:
    """One prompt with its sampling parameters, and the `params.n` sequences that continue it.

    `sequences[0]` leads: it computes the prompt alone; the others fork from its blocks when the prompt's
    last token has been computed. `arrival` orders requests of equal `priority` (lower runs first).
    """

    __slots__ = (
        "arrival",
        "arrival_s",
        "cache_salt",
        "chunks",
        "finished_s",
        "first_scheduled_s",
        "first_token_s",
        "grammar",
        "is_forked",
        "needs_last_token",
        "num_cached_tokens",
        "num_preemptions",
        "output",
        "params",
        "priority",
        "prompt",
        "prompt_logprobs",
        "prompt_token_ids",
        "request_id",
        "sequences",
        "stop_ids",
        "stream",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        seeds: Iterable[int],
        first_seq_id: int,
        arrival: int,
        prompt: str | None = None,
        eos_token_ids: Iterable[int] = (),
        priority: int = 0,
        cache_salt: str = "",
        stream: bool = False,
        arrival_s: float = 0.0,
        grammar: Grammar | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.priority = priority
        self.arrival = arrival
        self.cache_salt = cache_salt
        self.stream = stream
        self.stop_ids = frozenset(params.stop_token_ids).union(() if params.ignore_eos else eos_token_ids)
        self.grammar = grammar
        self.is_forked = params.n == 1
        self.needs_last_token = (
            params.repetition_penalty != 1
            or params.presence_penalty != 0
            or params.frequency_penalty != 0
            or grammar is not None
        )
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self.chunks: deque[StreamChunk] = deque()
        self.output: RequestOutput | None = None
        self.arrival_s = arrival_s
        self.first_scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.finished_s: float | None = None
        self.sequences = [
            Sequence(self, i, first_seq_id + i, seed, list(prompt_token_ids))
            for i, seed in zip(range(params.n), seeds, strict=True)
        ]

    @property
    def num_waiting_rows(self) -> int:
        """Rows it will occupy once running: all n before the fork, one per sequence after it."""
        return 1 if self.is_forked else self.params.n

    @property
    def is_finished(self) -> bool:
        return all(seq.status is Status.FINISHED for seq in self.sequences)
