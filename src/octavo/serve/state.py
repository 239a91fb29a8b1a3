"""What the engine is doing, for people and for the page: one snapshot, or a stream of changes.

The stream carries two kinds of server-sent events: `status` when the server's state changes, and messages
without a name, which are the observer's payloads (`octavo.serve.observer`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from fastapi import APIRouter, Request

from octavo import __version__
from octavo.errors import EngineError
from octavo.serve.api_errors import ERROR_RESPONSES, ApiError
from octavo.serve.models import model_names
from octavo.serve.sse import EventStream

if TYPE_CHECKING:
    from octavo.serve.async_engine import AsyncEngine
    from octavo.serve.settings import ServeSettings

router = APIRouter(tags=["engine"])

POLL_S: Final = 0.25
"""How soon a change of state is told when no step ends."""
PING_S: Final = 15.0
"""A stream without news says so this often, or proxies would close it."""
SNAPSHOT_S: Final = 10.0
"""A step that takes longer than this is in the way of a snapshot."""

_WATCHABLE = ("ready", "draining", "stuck")


@router.get("/v1/engine/state", responses={status: ERROR_RESPONSES[status] for status in (401, 503)})
async def engine_state(request: Request) -> dict[str, Any]:
    """The state of the server, every row, and who holds which block.

    `rows` lists running requests and the first waiting ones. `blocks.owners` maps each owned block to its
    number of owners, `blocks.cached` lists those whose contents can be found and that nobody holds; the
    others are free. While the engine is not there (loading, dead), only `state` and `model` are given.
    """
    engine: AsyncEngine = request.app.state.engine
    status = _status(engine, request.app.state.settings)
    if engine.state not in _WATCHABLE:
        return status
    try:
        async with asyncio.timeout(SNAPSHOT_S), engine.watch() as payloads:
            async for payload in payloads:
                message = json.loads(payload)
                if "full" in message:
                    return status | _snapshot(message)
    except TimeoutError:
        raise ApiError(503, f"no step ended within {SNAPSHOT_S:g} seconds; the engine is busy") from None
    raise EngineError("the engine ended")


# Not in the OpenAPI document, which has no words for a stream without end; docs/page.md has.
@router.get("/v1/engine/events", include_in_schema=False)
async def engine_events(request: Request) -> EventStream:
    """Server-sent events for the page: changes as they happen, at most ten a second. Ends with the engine."""
    engine, settings = request.app.state.engine, request.app.state.settings
    return EventStream(_events(engine, settings), settings.slow_reader_s)


async def _events(engine: AsyncEngine, settings: ServeSettings) -> AsyncIterator[bytes]:
    told: dict[str, Any] = {}
    while True:
        if (status := _status(engine, settings)) != told:
            told = status
            yield b"event: status\ndata: " + json.dumps(status).encode() + b"\n\n"
        if told["state"] == "dead":
            return
        if told["state"] in _WATCHABLE:
            with contextlib.suppress(EngineError):  # it may end at any moment; the next status says so
                async for event in _watched(engine, told["state"]):
                    yield event
        if told["state"] == "draining":
            return  # an open stream would keep the server from ending
        if engine.state == told["state"]:
            await asyncio.sleep(POLL_S)


async def _watched(engine: AsyncEngine, state: str) -> AsyncIterator[bytes]:
    """Payloads as events, until the engine's state is another one or, draining, until it is idle."""
    quiet_s = 0.0
    async with engine.watch() as payloads:
        coming = asyncio.ensure_future(anext(payloads))
        try:
            while engine.state == state:
                done, _ = await asyncio.wait({coming}, timeout=POLL_S)
                if not done:
                    quiet_s += POLL_S
                    if quiet_s >= PING_S:
                        quiet_s = 0.0
                        yield b": nothing new\n\n"
                    continue
                quiet_s = 0.0
                try:
                    payload = coming.result()
                except StopAsyncIteration:
                    return
                yield b"data: " + payload + b"\n\n"
                if state == "draining" and _is_idle(payload):
                    return
                coming = asyncio.ensure_future(anext(payloads))
        finally:
            coming.cancel()


def _is_idle(payload: bytes) -> bool:
    stats = json.loads(payload)["stats"]
    return not stats["num_running"] and not stats["num_waiting"]


def _status(engine: AsyncEngine, settings: ServeSettings) -> dict[str, Any]:
    status: dict[str, Any] = {"state": engine.state, "model": None, "version": __version__}
    if engine.state in _WATCHABLE:
        status["model"] = asdict(engine.model) | {"name": model_names(engine, settings)[0]}
    if engine.death is not None:
        status["reason"] = str(engine.death)
    return status


def _snapshot(message: dict[str, Any]) -> dict[str, Any]:
    """A full payload, spelled out."""
    facts = {
        seq_id: (num_tokens, num_computed, num_cached, is_running)
        for seq_id, num_tokens, num_computed, num_cached, is_running in _groups(message["rows"], 5)
    }
    tables = {seq_id: block_ids for seq_id, _, block_ids in message["tables"]}
    rows = []
    for seq_id, request_id, index, num_prompt_tokens, max_total_tokens in message["new"]:
        num_tokens, num_computed, num_cached, is_running = facts[seq_id]
        rows.append(
            {
                "request_id": request_id,
                "index": index,
                "status": "running" if is_running else "waiting",
                "num_prompt_tokens": num_prompt_tokens,
                "num_tokens": num_tokens,
                "num_computed_tokens": num_computed,
                "num_cached_tokens": num_cached,
                "max_total_tokens": max_total_tokens,
                "block_ids": tables.get(seq_id, []),
            }
        )
    blocks = _groups(message["blocks"], 2)
    return {
        "stats": message["stats"],
        "rows": rows,
        "blocks": {
            "total": message["full"]["num_blocks"],
            "block_size": message["full"]["block_size"],
            "owners": {block_id: owners for block_id, owners in blocks if owners > 0},
            "cached": [block_id for block_id, owners in blocks if owners < 0],
        },
    }


def _groups(numbers: list[int], size: int) -> list[list[int]]:
    return [numbers[i : i + size] for i in range(0, len(numbers), size)]
