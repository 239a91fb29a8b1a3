"""POST /v1/chat/completions, streamed and not."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from fastapi import APIRouter, Request
from pydantic_core import to_json
from starlette.responses import Response

from octavo.outputs import Logprob, RequestOutput, StreamChunk
from octavo.serve.answer import (
    Answer,
    AnswerReader,
    check_end,
    ended_badly,
    finish_reason,
    new_id,
    num_reasoning_tokens,
    read_answer,
)
from octavo.serve.api_errors import answers_with
from octavo.serve.chat_prompt import PreparedChat, prepare_chat
from octavo.serve.chat_protocol import ChatRequest
from octavo.serve.models import check_model
from octavo.serve.respond import respond_to_chat
from octavo.serve.response_parts import Usage, chat_logprobs, usage_of
from octavo.serve.sse import DONE, error_event
from octavo.serve.tools import Event

if TYPE_CHECKING:
    from octavo.serve.async_engine import AsyncEngine
    from octavo.serve.settings import ServeSettings
    from octavo.text.tokenizer import Tokenizer

router = APIRouter()

_RESPONSES: Final = answers_with("The answer, or with `stream` its pieces as server-sent events.")


@router.post("/v1/chat/completions", tags=["chat"], responses=_RESPONSES)
async def chat_completions(request: Request, body: ChatRequest) -> Response:
    """Answer a conversation."""
    engine: AsyncEngine = request.app.state.engine
    settings: ServeSettings = request.app.state.settings
    model = check_model(request, body.model)
    chat = await prepare_chat(body, engine, settings)
    writer = _Writer(body, chat, model, engine.tokenizer)
    return await respond_to_chat(writer, writer.id, chat, body, engine, settings)


_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_json_text = json.encoder.encode_basestring  # what `_json` does with a str


class _Writer:
    """Writes one request's answer, whole or in chunks."""

    def __init__(self, body: ChatRequest, chat: PreparedChat, model: str, tokenizer: Tokenizer) -> None:
        self.id = new_id("chatcmpl")
        self._created = int(time.time())
        self._model = model
        self._body = body
        self._format = chat.format
        self._tokenizer = tokenizer
        self._num_choices = chat.params.n
        self._num_logprobs = body.num_logprobs

    # Whole

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """The answer to a request without `stream`."""
        (output,) = outputs
        for choice in output.outputs:
            check_end(choice, output)
        answers = [read_answer(choice, self._format, self._tokenizer) for choice in output.outputs]
        num_reasoning = sum(answer.num_reasoning_tokens for answer in answers)
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._model,
            "choices": [
                {
                    "index": choice.index,
                    "message": _message(answer),
                    "logprobs": self._logprobs(choice.token_ids, choice.logprobs),
                    "finish_reason": answer.finish_reason,
                }
                for choice, answer in zip(output.outputs, answers, strict=True)
            ],
            "usage": self._usage(output, num_reasoning),
        }

    def _usage(self, output: RequestOutput, num_reasoning: int) -> Usage:
        return usage_of([output], None if self._format.reasons is None else num_reasoning)

    def _logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob]] | None
    ) -> dict[str, Any] | None:
        if self._num_logprobs is None:
            return None
        entries = chat_logprobs(token_ids, logprobs or (), self._num_logprobs, self._tokenizer)
        return {"content": entries, "refusal": None}

    # Streamed; see `sse.Writer`

    def begin(self) -> bytes:
        options = self._body.stream_options
        self._has_usage = options is not None and bool(options.include_usage)
        about = {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._model,
        }
        self._head = f'data: {to_json(about)[:-1].decode()},"choices":['
        # With usage asked for, every other chunk says that it is not the one.
        tail = '],"usage":null}\n\n' if self._has_usage else "]}\n\n"
        self._choices = [
            _ChoiceStream(i, self._format.reader(), f'{self._head}{{"index":{i},"delta":', tail)
            for i in range(self._num_choices)
        ]
        return b""

    def piece(self, place: int, chunk: StreamChunk) -> bytes:
        if chunk.finish_reason in ("error", "abort"):
            raise ended_badly(chunk.finish_reason, chunk.error)
        logprobs = None if self._num_logprobs is None else self._chunk_logprobs(chunk, self._num_logprobs)
        return self._choices[chunk.index].read(chunk, logprobs).encode()

    def text(self, place: int, text: str) -> bytes | None:
        return self._choices[0].further_text(text)

    def end(self, outputs: list[RequestOutput]) -> bytes:
        if not self._has_usage:
            return DONE
        (output,) = outputs
        num_reasoning = sum(
            num_reasoning_tokens(choice.token_ids, self._choices[choice.index].reader, self._tokenizer)
            for choice in output.outputs
        )
        return f'{self._head}],"usage":{_json(self._usage(output, num_reasoning))}}}\n\n'.encode() + DONE

    def failed(self, error: Exception) -> bytes:
        return error_event(error) + DONE

    def _chunk_logprobs(self, chunk: StreamChunk, num: int) -> list[Any]:
        return list(chat_logprobs(chunk.token_ids, chunk.logprobs or (), num, self._tokenizer))


class _ChoiceStream:
    """The chunks of one choice: its role when its text begins, what comes, and one that says how it ended."""

    def __init__(self, index: int, reader: AnswerReader, head: str, tail: str) -> None:
        self.reader = reader
        self._index = index
        self._head = head
        self._tail = tail
        self._content_head = head + '{"content":'
        self._content_tail = '},"logprobs":null,"finish_reason":null}' + tail
        self._around_content = self._content_head.encode(), self._content_tail.encode()
        self._is_begun = False
        self._num_calls = 0
        self._logprobs: list[Any] = []

    def read(self, chunk: StreamChunk, logprobs: list[Any] | None) -> str:
        """The chunks that this piece gives; `logprobs` of its tokens, when they are asked for."""
        # Text may be held back while its tokens are not: those wait for the next chunk that has text.
        if logprobs is not None:
            self._logprobs += logprobs
        events = self.reader.push(chunk.text)
        if chunk.finish_reason is not None:
            events += self.reader.finish(is_cut=chunk.finish_reason == "length")
        told = ""
        if not self._is_begun and (events or chunk.finish_reason is not None):
            self._is_begun = True
            begins_with_text = not events or events[0].kind == "content"
            told = self._chunk({"role": "assistant", "content": "" if begins_with_text else None})
        for event in events:
            if logprobs is None and event.kind == "content":  # nearly all there is
                told += f"{self._content_head}{_json(event.text)}{self._content_tail}"
            else:
                told += self._chunk(self._delta(event), self._take(logprobs))
        if chunk.finish_reason is not None:
            reason = finish_reason(chunk.finish_reason, self.reader.num_calls > 0)
            told += self._chunk({}, self._take(logprobs) if self._logprobs else None, reason)
        return told

    def further_text(self, text: str) -> bytes | None:
        """`read` of a piece that is this text alone; None where that is not all content."""
        if not self._is_begun or not self.reader.is_plain:
            return None
        head, tail = self._around_content
        return b"%b%b%b" % (head, _json_text(text).encode(), tail) if text else b""

    def _take(self, logprobs: list[Any] | None) -> list[Any] | None:
        if logprobs is None:
            return None
        taken, self._logprobs = self._logprobs, []
        return taken

    def _delta(self, event: Event) -> dict[str, Any]:
        match event.kind:
            case "content":
                return {"content": event.text}
            case "reasoning":
                return {"reasoning_content": event.text}
            case "tool_name":
                self._num_calls += 1
                call = {
                    "index": self._num_calls - 1,
                    "id": new_id("call"),
                    "type": "function",
                    "function": {"name": event.text, "arguments": ""},
                }
                return {"tool_calls": [call]}
            case "tool_arguments":
                call = {"index": self._num_calls - 1, "function": {"arguments": event.text}}
                return {"tool_calls": [call]}

    def _chunk(
        self, delta: dict[str, Any], logprobs: list[Any] | None = None, reason: str | None = None
    ) -> str:
        content = "null" if logprobs is None else _json({"content": logprobs, "refusal": None})
        end = "null" if reason is None else f'"{reason}"'
        return f'{self._head}{_json(delta)},"logprobs":{content},"finish_reason":{end}}}{self._tail}'


def _message(answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.reasoning is not None:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in answer.calls
        ]
    return message
