"""POST /v1/completions: one prompt or several, as text or token ids, streamed and not."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from fastapi import APIRouter, Request
from pydantic_core import to_json
from starlette.responses import Response

from octavo.errors import RequestError, shown
from octavo.outputs import CompletionOutput, RequestOutput, StreamChunk
from octavo.serve.answer import check_end, ended_badly, finish_reason, new_id
from octavo.serve.api_errors import ApiError, answers_with, named_format
from octavo.serve.guard import body_size
from octavo.serve.models import check_model
from octavo.serve.protocol import CompletionRequest, format_place, to_sampling_params
from octavo.serve.respond import respond
from octavo.serve.response_parts import CompletionLogprobs, completion_logprobs, usage_of
from octavo.serve.sse import DONE, error_event, event

if TYPE_CHECKING:
    from octavo.serve.async_engine import AsyncEngine
    from octavo.serve.settings import ServeSettings
    from octavo.text.tokenizer import Tokenizer

router = APIRouter()

_RESPONSES: Final = answers_with("The text, or with `stream` its pieces as server-sent events.")


@router.post("/v1/completions", tags=["completions"], responses=_RESPONSES)
async def completions(request: Request, body: CompletionRequest) -> Response:
    """Continue a prompt, or several."""
    engine: AsyncEngine = request.app.state.engine
    settings: ServeSettings = request.app.state.settings
    model = check_model(request, body.model)
    try:
        return await _respond(body, model, engine, settings)
    except RequestError as error:
        raise named_format(error, *format_place(body)) from error


async def _respond(
    body: CompletionRequest, model: str, engine: AsyncEngine, settings: ServeSettings
) -> Response:
    prompts = await _encode(body, engine, settings)
    logprobs = body.logprobs
    if body.echo and logprobs is not None and body.stream:
        raise ApiError(400, "echo with logprobs cannot be streamed; leave out one of the three", param="echo")
    params = to_sampling_params(body, engine.model, prompt_logprobs=logprobs if body.echo else None)
    writer = _Writer(body, prompts, model, engine, params.n)
    submitting = (
        engine.submit(
            token_ids,
            params,
            request_id=f"{writer.id}-{i}",
            prompt=prompt,
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            stream=bool(body.stream),
        )
        for i, (prompt, token_ids) in enumerate(prompts)
    )
    return await respond(
        writer, submitting, is_stream=bool(body.stream), slow_reader_s=settings.slow_reader_s
    )


async def _encode(
    body: CompletionRequest, engine: AsyncEngine, settings: ServeSettings
) -> list[tuple[str | None, list[int]]]:
    """Each prompt's text, where it has one, and its ids."""
    prompts: list[Any] = [body.prompt] if _is_one(body.prompt) else list(body.prompt)
    num_rows = body.n or 1
    if len(prompts) > (most := engine.max_requests(num_rows)):
        each = "" if num_rows == 1 else f" with n={num_rows} each"
        raise ApiError(
            400,
            f"prompt holds {len(prompts)} prompts{each}; this server takes at most {most} at once "
            "(max_num_seqs and max_waiting_requests); send fewer a request",
            param="prompt",
        )
    if isinstance(prompts[0], str):
        all_ids = await engine.off_loop(
            body_size.get(),
            lambda: [engine.encode(text) for text in prompts],
            is_prompt=len(prompts) == 1,
        )
    else:
        all_ids = prompts
    for i, token_ids in enumerate(all_ids):
        where = "prompt" if _is_one(body.prompt) else f"prompt[{i}]"
        if not token_ids:
            raise ApiError(400, f"{where} is empty: there is no token to continue from", param="prompt")
        if all_ids is prompts:
            _check_ids(where, token_ids, engine.model.vocab_size)
    if len(prompts) > 1:
        for token_ids in all_ids:
            engine.check_length(len(token_ids))
        num_tokens = sum(map(len, all_ids))
        if num_tokens > settings.max_waiting_tokens:
            raise ApiError(
                400,
                f"prompt holds {num_tokens} tokens in {len(prompts)} prompts; this server takes at most "
                f"{settings.max_waiting_tokens} at once; send fewer prompts a request",
                param="prompt",
            )
        engine.check_room(len(prompts), num_tokens, num_rows=num_rows)  # all of them or none
    texts = prompts if isinstance(prompts[0], str) else [None] * len(prompts)
    return list(zip(texts, all_ids, strict=True))


def _is_one(prompt: str | Sequence[Any]) -> bool:
    return isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], int))


def _check_ids(where: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if min(token_ids) >= 0 and max(token_ids) < vocab_size:
        return
    i, token_id = next((i, one) for i, one in enumerate(token_ids) if not 0 <= one < vocab_size)
    raise ApiError(
        400,
        f"{where}[{i}] is {shown(token_id)}, outside the vocabulary (0 to {vocab_size - 1})",
        param="prompt",
    )


class _Writer:
    """Writes one answer, whole or in chunks. Choice `j` of prompt `i` has index ``i * n + j``."""

    def __init__(
        self,
        body: CompletionRequest,
        prompts: list[tuple[str | None, list[int]]],
        model: str,
        engine: AsyncEngine,
        n: int,
    ) -> None:
        self.id = new_id("cmpl")
        self._head = {
            "id": self.id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._body = body
        self._prompts = prompts
        self._engine = engine
        self._n = n

    @property
    def _tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        choices = []
        for i, output in enumerate(outputs):
            for choice in output.outputs:
                check_end(choice, output)
                choices.append(
                    {
                        "index": i * self._n + choice.index,
                        "text": self._echo(output.prompt, output.prompt_token_ids) + choice.text,
                        "logprobs": self._logprobs(output, choice),
                        "finish_reason": finish_reason(choice.finish_reason, False),
                    }
                )
        return {**self._head, "choices": choices, "usage": usage_of(outputs)}

    def _echo(self, prompt: str | None, token_ids: Sequence[int]) -> str:
        if not self._body.echo:
            return ""
        return self._tokenizer.decode(token_ids) if prompt is None else prompt

    def _logprobs(self, output: RequestOutput, choice: CompletionOutput) -> CompletionLogprobs | None:
        if self._body.logprobs is None:
            return None
        token_ids, logprobs = choice.token_ids, list(choice.logprobs or ())
        if self._body.echo:
            token_ids = [*output.prompt_token_ids, *token_ids]
            return completion_logprobs(
                token_ids, [*(output.prompt_logprobs or ()), *logprobs], self._body.logprobs, self._tokenizer
            )
        return completion_logprobs(token_ids, logprobs, self._body.logprobs, self._tokenizer)

    # Streamed; see `sse.Writer`

    def begin(self) -> bytes:
        options = self._body.stream_options
        self._has_usage = options is not None and bool(options.include_usage)
        head = {**self._head, "usage": None} if self._has_usage else self._head
        self._chunk_head = f'data: {to_json(head)[:-1].decode()},"choices":['
        self._offsets: dict[int, int] = {}
        self._around_text: dict[int, tuple[bytes, bytes]] = {}
        told = [
            self._chunk(i * self._n + j, echo)
            for i, (text, token_ids) in enumerate(self._prompts)
            if (echo := self._echo(text, token_ids))
            for j in range(self._n)
        ]
        return "".join(told).encode()

    def piece(self, place: int, chunk: StreamChunk) -> bytes:
        if chunk.finish_reason in ("error", "abort"):
            raise ended_badly(chunk.finish_reason, chunk.error)
        index = place * self._n + chunk.index
        logprobs = self._chunk_logprobs(chunk, self._offsets.get(index, 0))
        if logprobs is not None and logprobs["tokens"]:
            self._offsets[index] = logprobs["text_offset"][-1] + len(logprobs["tokens"][-1])
        if not chunk.text and chunk.finish_reason is None and logprobs is None:
            return b""
        reason = chunk.finish_reason and finish_reason(chunk.finish_reason, False)
        return self._chunk(index, chunk.text, logprobs, reason).encode()

    def text(self, place: int, text: str) -> bytes:
        # Nearly all there is, so that what `_chunk` writes around it is made once.
        around = self._around_text.get(place)
        if around is None:
            head, _, tail = self._chunk(place * self._n, "").rpartition('""')
            around = self._around_text[place] = head.encode(), tail.encode()
        return b"%b%b%b" % (around[0], _json_text(text).encode(), around[1]) if text else b""

    def end(self, outputs: list[RequestOutput]) -> bytes:
        if not self._has_usage:
            return DONE
        return event({**self._head, "choices": [], "usage": usage_of(outputs)}) + DONE

    def failed(self, error: Exception) -> bytes:
        return error_event(error) + DONE

    def _chunk(
        self, index: int, text: str, logprobs: CompletionLogprobs | None = None, reason: str | None = None
    ) -> str:
        numbers = "null" if logprobs is None else _json(logprobs)
        end = "null" if reason is None else f'"{reason}"'
        return (
            f'{self._chunk_head}{{"index":{index},"text":{_json(text)},'
            f'"logprobs":{numbers},"finish_reason":{end}}}]}}\n\n'
        )

    def _chunk_logprobs(self, chunk: StreamChunk, text_offset: int) -> CompletionLogprobs | None:
        if self._body.logprobs is None:
            return None
        return completion_logprobs(
            chunk.token_ids,
            chunk.logprobs or (),
            self._body.logprobs,
            self._tokenizer,
            text_offset=text_offset,
        )


_json_text = json.encoder.encode_basestring  # what `_json` does with a str
_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
