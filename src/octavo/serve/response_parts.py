"""What answers of the OpenAI API share: usage, and log probabilities in both of their forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NotRequired

from typing_extensions import TypedDict

from octavo.outputs import Logprob, RequestOutput

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0
"""What a probability of 0 is reported as: JSON has no infinity (OpenAI's own value)."""


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    reasoning_tokens: int


class Usage(TypedDict):
    """Tokens of a request: `prompt_tokens` counts the prompt once, `completion_tokens` all n choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: NotRequired[CompletionTokensDetails]


def usage_of(outputs: Sequence[RequestOutput], num_reasoning_tokens: int | None = None) -> Usage:
    """The usage of one response, which may answer several prompts."""
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_new = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    usage: Usage = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
    }
    if num_reasoning_tokens is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": num_reasoning_tokens}
    return usage


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


TokenLogprobs = Mapping[int, Logprob]


def chat_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], num_top: int, tokenizer: Tokenizer
) -> list[ChatLogprob]:
    """One entry per generated token, end-of-sequence included; `top_logprobs` most likely first."""

    def shape(token_id: int, entry: Logprob) -> TopLogprob:
        raw = tokenizer.token_bytes(token_id)
        return {"token": raw.decode(errors="replace"), "logprob": finite(entry.logprob), "bytes": list(raw)}

    return [
        {
            **shape(token_id, entries[token_id]),
            "top_logprobs": [shape(other, entry) for other, entry in top_entries(entries, num_top)],
        }
        for token_id, entries in zip(token_ids, logprobs, strict=True)
    ]


def completion_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    num_top: int,
    tokenizer: Tokenizer,
    *,
    text_offset: int = 0,
) -> CompletionLogprobs:
    """The older form, of /v1/completions; None stands where a token has nothing before it (a prompt's first).

    `text_offset` is where the first token begins in the choice's text.
    """
    tokens = [tokenizer.token_text(token_id) for token_id in token_ids]
    offsets: list[int] = []
    for token in tokens:
        offsets.append(text_offset)
        text_offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [
            None if entries is None else finite(entries[token_id].logprob)
            for token_id, entries in zip(token_ids, logprobs, strict=True)
        ],
        "top_logprobs": [_top_by_text(entries, num_top, tokenizer) for entries in logprobs]
        if num_top
        else None,
        "text_offset": offsets,
    }


def _top_by_text(
    entries: TokenLogprobs | None, num_top: int, tokenizer: Tokenizer
) -> dict[str, float] | None:
    if entries is None:
        return None
    by_text: dict[str, float] = {}
    for token_id, entry in top_entries(entries, num_top):
        # Two tokens may look alike (halves of characters); the likelier one keeps the name.
        by_text.setdefault(tokenizer.token_text(token_id), finite(entry.logprob))
    return by_text


def top_entries(entries: TokenLogprobs, num_top: int) -> list[tuple[int, Logprob]]:
    """The `num_top` most likely tokens in order; the chosen one is among them only if it is that likely."""
    ranked = sorted(entries.items(), key=lambda item: item[1].rank)
    return [item for item in ranked if item[1].rank <= num_top]


def finite(logprob: float) -> float:
    """A number JSON can carry."""
    return max(logprob, LOWEST_LOGPROB)
