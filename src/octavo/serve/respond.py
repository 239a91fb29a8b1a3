"""How each route that generates ends: with a stream, with a whole answer, or with its generations aborted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from octavo.serve.sse import GenerationStream, Writer
from octavo.serve.whole_answer import whole_answer

if TYPE_CHECKING:
    from starlette.responses import Response

    from octavo.outputs import RequestOutput
    from octavo.serve.generation import Generation


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
