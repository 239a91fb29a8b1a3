"""POST /v1/responses, streamed and not: the text subset of OpenAI's newer endpoint. Nothing is stored."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Final

from fastapi import APIRouter, Request
from pydantic_core import to_json
from starlette.responses import JSONResponse, Response

from octavo.errors import RequestError
from octavo.outputs import Logprob, RequestOutput
from octavo.serve.answer import AnswerReader, new_id, num_reasoning_tokens
from octavo.serve.api_errors import ERROR_RESPONSES, as_api_error
from octavo.serve.chat import check_end, ended_badly
from octavo.serve.chat_prompt import PreparedChat, prepare_chat
from octavo.serve.chat_protocol import ChatRequest
from octavo.serve.models import check_model
from octavo.serve.response_parts import chat_logprobs
from octavo.serve.responses_output import OutputBuilder
from octavo.serve.responses_protocol import ResponsesRequest
from octavo.serve.sse import event_stream, while_connected

if TYPE_CHECKING:
    from octavo.serve.async_engine import AsyncEngine
    from octavo.serve.generation import Generation
    from octavo.serve.settings import ServeSettings
    from octavo.text.tokenizer import Tokenizer

router = APIRouter()

_RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    **ERROR_RESPONSES,
    200: {
        "description": "The response, or with `stream` its events.",
        "content": {"application/json": {}, "text/event-stream": {}},
    },
}


@router.post("/v1/responses", tags=["responses"], responses=_RESPONSES)
async def create_response(request: Request, body: ResponsesRequest) -> Response:
    """Answer an input."""
    engine: AsyncEngine = request.app.state.engine
    settings: ServeSettings = request.app.state.settings
    model = check_model(request, body.model)
    return await while_connected(request, _respond(body, model, engine, settings))


async def _respond(
    body: ResponsesRequest, model: str, engine: AsyncEngine, settings: ServeSettings
) -> Response:
    as_chat = body.as_chat()
    chat = await prepare_chat(as_chat, engine, settings, format_field="text.format")
    writer = _Writer(body, as_chat, chat, model, engine.tokenizer)
    generation = engine.submit(
        chat.prompt_token_ids,
        chat.params,
        request_id=writer.id,
        prompt=chat.prompt,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        stream=bool(body.stream),
    )
    try:
        if not body.stream:
            return JSONResponse(writer.whole(await generation.result()))
        await generation.accepted()
    except RequestError as error:
        raise chat.named(error) from error
    except BaseException:  # being cancelled included: the client has gone
        generation.abort()
        raise
    return event_stream(
        writer.stream(generation), [generation], done=None, slow_reader_s=settings.slow_reader_s
    )


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
        self._sequence_number = -1

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """The response to a request without `stream`."""
        choice = output.outputs[0]
        check_end(choice, output)
        reader = self._chat.format.reader()
        is_cut = choice.finish_reason == "length"
        logprobs = self._logprobs(choice.token_ids, choice.logprobs)
        for event in reader.push(choice.text) + reader.finish(is_cut=is_cut):
            taken = logprobs if event.kind == "content" else []
            self._output.add(event, taken)
            logprobs = logprobs if taken is not logprobs else []
        self._output.finish(is_cut=is_cut)
        return self._ended(output, reader)

    async def stream(self, generation: Generation) -> AsyncIterator[bytes]:
        """The response as events, from `response.created` to the one that says how it ended."""
        reader = self._chat.format.reader()
        output: RequestOutput | None = None
        logprobs: list[Any] = []
        try:
            for name in ("response.created", "response.in_progress"):
                yield self._event({"type": name, "response": self._response("in_progress")})
            async for chunk in generation:
                output = chunk.output or output
                if chunk.finish_reason in ("error", "abort"):
                    raise ended_badly(chunk.finish_reason, output)
                logprobs += self._logprobs(chunk.token_ids, chunk.logprobs)
                events = reader.push(chunk.text)
                is_cut = chunk.finish_reason == "length"
                if chunk.finish_reason is not None:
                    events += reader.finish(is_cut=is_cut)
                for event in events:
                    for told in self._output.add(event, logprobs if event.kind == "content" else ()):
                        yield self._event(told)
                    logprobs = []
                if chunk.finish_reason is not None:
                    for told in self._output.finish(is_cut=is_cut):
                        yield self._event(told)
        except Exception as error:
            known = as_api_error(error)
            failed = self._response("failed")
            failed["error"] = {"code": "server_error", "message": known.message}
            yield self._event({"type": "response.failed", "response": failed})
            raise known from error
        if output is not None:
            response = self._ended(output, reader)
            yield self._event({"type": f"response.{response['status']}", "response": response})

    def _event(self, body: dict[str, Any]) -> bytes:
        self._sequence_number += 1
        data = to_json({**body, "sequence_number": self._sequence_number}, inf_nan_mode="null")
        return b"event: %b\ndata: %b\n\n" % (body["type"].encode(), data)

    def _logprobs(self, token_ids: list[int], logprobs: list[dict[int, Logprob]] | None) -> list[Any]:
        if self._num_logprobs is None:
            return []
        return list(chat_logprobs(token_ids, logprobs or (), self._num_logprobs, self._tokenizer))

    def _ended(self, output: RequestOutput, reader: AnswerReader) -> dict[str, Any]:
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
                "reasoning_tokens": num_reasoning_tokens(choice.token_ids, reader, self._tokenizer)
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
