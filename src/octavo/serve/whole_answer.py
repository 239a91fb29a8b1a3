"""A whole answer as JSON, made beside the event loop when it is large."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any, Final

from starlette.responses import JSONResponse, Response

from octavo.outputs import RequestOutput

MAX_INLINE_ENTRIES: Final = 1_000
"""Log probabilities that are put into JSON on the event loop; each takes some microseconds."""
_SLICE: Final = 100

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


async def whole_answer(outputs: Sequence[RequestOutput], shape: Callable[[], Any]) -> Response:
    """`shape()`, which makes the body of these outputs, as a response."""
    if _num_logprobs(outputs) <= MAX_INLINE_ENTRIES:
        return JSONResponse(shape())
    content = await asyncio.to_thread(lambda: encode_in_slices(shape()))
    return Response(content, media_type="application/json")


def encode_in_slices(value: Any) -> str:
    """As `JSONResponse` writes it. Encoding one long list is one call, during which no other thread runs; so
    long ones are encoded in slices."""
    if isinstance(value, dict):
        return f"{{{','.join(f'{_encode(key)}:{encode_in_slices(one)}' for key, one in value.items())}}}"
    if not isinstance(value, list):
        return _encode(value)
    if len(value) <= _SLICE:
        return f"[{','.join(map(encode_in_slices, value))}]"
    slices = (_encode(value[start : start + _SLICE])[1:-1] for start in range(0, len(value), _SLICE))
    return f"[{','.join(slices)}]"


def _num_logprobs(outputs: Sequence[RequestOutput]) -> int:
    lists = [one.logprobs for output in outputs for one in output.outputs]
    lists += [output.prompt_logprobs for output in outputs]  # type: ignore[misc]  # None as the first entry
    return sum(len(entries or ()) for one in lists for entries in one or ())
