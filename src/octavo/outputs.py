"""What a caller gets back: finished requests, streamed pieces, log probabilities, timings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

OPTIONS_AT_FAULT = "the options "
"""How errors begin that a request brought upon itself."""

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural log of a token's probability under the raw logits, and its rank (1 = most likely)."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Where a request's time went, in seconds.

    `queue_s`: arrival to first schedule. `ttft_s`: arrival to first token. `tpot_s`: mean time per
    token after the first. `e2e_s`: arrival to the end. None where that point was never reached.
    """

    queue_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float
    num_preemptions: int


@dataclass(slots=True)
class CompletionOutput:
    """One sampled continuation of a prompt.

    `stop_reason` is the stop string or stop token id that ended it, None for EOS and for other ends.
    `logprobs[i]` maps token ids to `Logprob` for `token_ids[i]`, the chosen token first.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """A finished request. `text`, `token_ids`, `finish_reason` and `logprobs` are those of `outputs[0]`.

    `num_cached_tokens` counts the prompt tokens whose K/V came from the prefix cache. `error` is set
    exactly when a continuation ended with `finish_reason == "error"`. `prompt_logprobs[0]` is None: the
    first token has nothing before it.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: str | None = None

    @property
    def blames_options(self) -> bool:
        """Whether `error` is about options that cannot be met, and not about the model or the engine."""
        return self.error is not None and self.error.startswith(OPTIONS_AT_FAULT)

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        return self.outputs[0].logprobs


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """A piece of one continuation as it grows: `text` and `token_ids` are what is new.

    The pieces of one `index` join to exactly `CompletionOutput.text`. `finish_reason` is set on the
    last piece of each index, with `error` where that is ``error``; `output` on the very last piece of the
    request.
    """

    index: int
    text: str
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    output: RequestOutput | None = None
    error: str | None = None
