"""POST /v1/responses, streamed and not: the text subset of OpenAI's newer endpoint. Nothing is stored."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from fastapi import APIRouter, Request
from pydantic_core import to_json
from starlette.responses import Response

from octavo.outputs import CompletionOutput, RequestOutput, StreamChunk
from octavo.serve import tools
from octavo.serve.answer import check_end, ended_badly, new_id, num_reasoning_tokens, place_of
from octavo.serve.api_errors import answers_with, as_api_error
from octavo.serve.chat_prompt import PreparedChat, prepare_chat
from octavo.serve.chat_protocol import ChatRequest
from octavo.serve.models import check_model
from octavo.serve.respond import respond_to_chat
from octavo.serve.response_parts import chat_logprobs
from octavo.serve.responses_output import EventBody, OutputBuilder
from octavo.serve.responses_protocol import ResponsesRequest
from octavo.serve.sse import error_event

if TYPE_CHECKING:
    from octavo.serve.async_engine import AsyncEngine
    from octavo.serve.settings import ServeSettings
    from octavo.text.tokenizer import Tokenizer

router = APIRouter()

_RESPONSES: Final = answers_with("The response, or with `stream` its events.")


@router.post("/v1/responses", tags=["responses"], responses=_RESPONSES)
async def create_response(request: Request, body: ResponsesRequest) -> Response:
    """Answer an input."""
    engine: AsyncEngine = request.app.state.engine
    settings: ServeSettings = request.app.state.settings
    model = check_model(request, body.model)
    as_chat = body.as_chat()
    chat = await prepare_chat(as_chat, engine, settings, format_field="text.format")
    writer = _Writer(body, as_chat, chat, model, engine.tokenizer)
    return await respond_to_chat(writer, writer.id, chat, body, engine, settings)


class _Writer:
    """Writes one response, whole or as events."""

    def __init__(
        self,
        body: ResponsesRequest,
        as_chat: ChatRequest,
        chat: PreparedChat,
        model: str,
        tokenizer: Tokenizer,
    ) -> None:
        self.id = new_id("resp")
        self._created = time.time()
        self._body = body
        self._num_logprobs = as_chat.num_logprobs
        self._chat = chat
        self._model = model
        self._tokenizer = tokenizer
        self._output = OutputBuilder()
        self._reader = chat.format.reader()
        self._token_ids: list[int] = []
        self._logprobs: list[Any] = []
        self._num_told = 0
        self._sequence_number = -1

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """The response to a request without `stream`."""
        (output,) = outputs
        choice = output.outputs[0]
        check_end(choice, output)
        self._read(choice, choice.finish_reason)
        return self._ended(output)

    # Streamed; see `sse.Writer`

    def begin(self) -> bytes:
        names = ("response.created", "response.in_progress")
        return b"".join(
            self._event({"type": name, "response": self._response("in_progress")}) for name in names
        )

    def piece(self, place: int, chunk: StreamChunk) -> bytes:
        if chunk.finish_reason in ("error", "abort"):
            raise ended_badly(chunk.finish_reason, chunk.error)
        return b"".join(map(self._event, self._read(chunk, chunk.finish_reason)))

    def end(self, outputs: list[RequestOutput]) -> bytes:
        response = self._ended(outputs[0])
        return self._event({"type": f"response.{response['status']}", "response": response})

    def failed(self, error: Exception) -> bytes:
        failed = self._response("failed")
        failed["error"] = {"code": "server_error", "message": as_api_error(error).message}
        return self._event({"type": "response.failed", "response": failed}) + error_event(error)

    def _read(self, piece: CompletionOutput | StreamChunk, end: str | None) -> list[EventBody]:
        """Takes in a piece of the answer, or all of it; what there is to tell of it."""
        if self._num_logprobs is not None:
            self._token_ids += piece.token_ids
            self._logprobs += chat_logprobs(
                piece.token_ids, piece.logprobs or (), self._num_logprobs, self._tokenizer
            )
        events = self._reader.push(piece.text)
        is_cut = end == "length"
        if end is not None:
            events += self._reader.finish(is_cut=is_cut)
        told: list[EventBody] = []
        for event in events:
            if event.kind == "tool_name":
                self._output.add_logprobs(self._take_logprobs())
            told += self._output.add(event, self._take_logprobs() if event.kind == "content" else ())
        if end is not None:
            self._output.add_logprobs(self._take_logprobs())
            told += self._output.finish(is_cut=is_cut)
        return told

    def _take_logprobs(self) -> list[Any]:
        """Those of the message's tokens that were not told yet: what is between reasoning and calls."""
        if not self._logprobs:
            return []
        first = self._num_told or num_reasoning_tokens(self._token_ids, self._reader, self._tokenizer)
        last = len(self._logprobs)
        if self._reader.num_calls:
            last = first + place_of(tools.OPEN, self._token_ids[first:], self._tokenizer)[0]
        self._num_told = max(first, last)
        return self._logprobs[first:last]

    def _event(self, body: dict[str, Any]) -> bytes:
        self._sequence_number += 1
        data = to_json({**body, "sequence_number": self._sequence_number}, inf_nan_mode="null")
        return b"event: %b\ndata: %b\n\n" % (body["type"].encode(), data)

    def _ended(self, output: RequestOutput) -> dict[str, Any]:
        choice = output.outputs[0]
        is_cut = choice.finish_reason == "length"
        response = self._response("incomplete" if is_cut else "completed")
        num_prompt, num_new = len(output.prompt_token_ids), len(choice.token_ids)
        response["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
        response["completed_at"] = None if is_cut else time.time()
        response["usage"] = {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": output.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": num_new,
            "output_tokens_details": {
                "reasoning_tokens": num_reasoning_tokens(choice.token_ids, self._reader, self._tokenizer)
            },
            "total_tokens": num_prompt + num_new,
        }
        return response

    def _response(self, status: str) -> dict[str, Any]:
        body, params = self._body, self._chat.params
        given = body.model_dump(
            include={"metadata", "user", "tools", "text", "reasoning", "tool_choice"}, by_alias=True
        )
        reasoning = given["reasoning"] or {}
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": given["metadata"] or {},
            "model": self._model,
            "output": self._output.items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": reasoning.get("effort"), "summary": None},
            "store": False,
            "temperature": params.temperature,
            "text": {"format": (given["text"] or {}).get("format") or {"type": "text"}},
            "tool_choice": given["tool_choice"] or "auto",
            "tools": given["tools"] or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": given["user"],
        }
