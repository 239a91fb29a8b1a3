"""How each route that generates ends: with a stream, with a whole answer, or with its generations aborted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from octavo.errors import RequestError
from octavo.serve.sse import GenerationStream, Writer
from octavo.serve.whole_answer import whole_answer

if TYPE_CHECKING:
    from starlette.responses import Response

    from octavo.outputs import RequestOutput
    from octavo.serve.async_engine import AsyncEngine
    from octavo.serve.chat_prompt import PreparedChat
    from octavo.serve.chat_protocol import ChatRequest
    from octavo.serve.generation import Generation
    from octavo.serve.responses_protocol import ResponsesRequest
    from octavo.serve.settings import ServeSettings


class AnswerWriter(Writer, Protocol):
    """Writes one answer, in pieces or whole."""

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """The body of an answer that is not streamed; it may raise."""


async def respond(
    writer: AnswerWriter, submitting: Iterable[Generation], *, is_stream: bool, slow_reader_s: float
) -> Response:
    """The response, once the generations are accepted (a stream) or over.

    `submitting` submits each generation as it is taken from it. All are aborted when anything fails, being
    cancelled included: then the client has gone.
    """
    generations: list[Generation] = []
    try:
        for generation in submitting:
            generations.append(generation)
        if is_stream:
            for generation in generations:
                await generation.accepted()
            return GenerationStream(writer, generations, slow_reader_s)
        outputs = [await generation.result() for generation in generations]
        return await whole_answer(outputs, lambda: writer.whole(outputs))
    except BaseException:
        for generation in generations:
            generation.abort()
        raise


async def respond_to_chat(
    writer: AnswerWriter,
    request_id: str,
    chat: PreparedChat,
    body: ChatRequest | ResponsesRequest,
    engine: AsyncEngine,
    settings: ServeSettings,
) -> Response:
    """Submit a prepared conversation and respond. What the engine refuses names the client's own field."""
    is_stream = bool(body.stream)
    try:
        generation = engine.submit(
            chat.prompt_token_ids,
            chat.params,
            request_id=request_id,
            prompt=chat.prompt,
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            stream=is_stream,
        )
        return await respond(writer, [generation], is_stream=is_stream, slow_reader_s=settings.slow_reader_s)
    except RequestError as error:
        raise chat.named(error) from error
