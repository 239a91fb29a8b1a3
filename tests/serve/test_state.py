"""/v1/engine/state and /v1/engine/events, and how the page's files are served."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

import pytest
from helpers.observed import Observed
from helpers.page import idle_payload
from helpers.serve import CARD, Answer, ScriptedLink, eventually, run_timeless, scripted_client

import octavo
from octavo.serve import page, state
from octavo.serve.messages import Observed as ObservedMessage
from octavo.serve.messages import Stage
from octavo.serve.settings import ServeSettings


def observe(link: ScriptedLink, payload: bytes) -> None:
    link.engine.receive(ObservedMessage(payload, "full" in json.loads(payload)))


class Events:
    """What `state.engine_events` would send, one event at a time as (name, data); None for a sign of life."""

    def __init__(self, link: ScriptedLink) -> None:
        self._stream: AsyncIterator[bytes] = state._events(link.engine, ServeSettings())

    async def next(self) -> tuple[str, Any] | None:
        text = (await anext(self._stream)).decode()
        assert text.endswith("\n\n")
        if text.startswith(":"):
            return None
        lines = dict(line.split(": ", 1) for line in text.strip().split("\n"))
        return lines.get("event", "message"), json.loads(lines["data"])

    async def ended(self) -> bool:
        try:
            await anext(self._stream)
        except StopAsyncIteration:
            return True
        return False


def test_a_snapshot_spells_a_payload_out() -> None:
    observed = Observed(num_blocks=64, block_size=4)
    observed.add([1] * 9, max_tokens=9)
    observed.step()
    observed.add([1] * 9, max_tokens=9)
    observed.step()
    observed.add([2] * 5, max_tokens=1)
    observed.step()
    observed.add([3] * 5, max_tokens=1)
    observed.observer.start()

    async def test() -> None:
        async with scripted_client(Answer()) as (client, link):
            asking = asyncio.ensure_future(client.get("/v1/engine/state"))
            await eventually(lambda: link.watching)
            observe(link, observed.observer.payload())
            answer = await asking
            assert not link.watching
        assert answer.status_code == 200
        snapshot = answer.json()
        assert (snapshot["state"], snapshot["model"]["name"]) == ("ready", "scripted")
        assert snapshot["stats"]["num_running"] == 2
        assert snapshot["rows"] == [
            {
                "request_id": "r0",
                "index": 0,
                "status": "running",
                "num_prompt_tokens": 9,
                "num_tokens": 12,
                "num_computed_tokens": 11,
                "num_cached_tokens": 0,
                "max_total_tokens": 18,
                "block_ids": [0, 1, 2],
            },
            {
                "request_id": "r1",
                "index": 0,
                "status": "running",
                "num_prompt_tokens": 9,
                "num_tokens": 11,
                "num_computed_tokens": 10,
                "num_cached_tokens": 8,
                "max_total_tokens": 18,
                "block_ids": [0, 1, 3],
            },
            {
                "request_id": "r3",
                "index": 0,
                "status": "waiting",
                "num_prompt_tokens": 5,
                "num_tokens": 5,
                "num_computed_tokens": 0,
                "num_cached_tokens": 0,
                "max_total_tokens": 6,
                "block_ids": [],
            },
        ]
        assert snapshot["blocks"] == {
            "total": 64,
            "block_size": 4,
            "owners": {"0": 2, "1": 2, "2": 1, "3": 1},
            "cached": [4],
        }

    run_timeless(test())


def test_a_snapshot_of_what_cannot_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "SNAPSHOT_S", 0.01)

    async def test() -> None:
        async with scripted_client(Answer()) as (client, link):
            answer = await client.get("/v1/engine/state")
            assert answer.status_code == 503
            assert "the engine is busy" in answer.json()["error"]["message"]
            link.engine.lost("killed by a test")
            answer = await client.get("/v1/engine/state")
            assert answer.status_code == 200
            assert answer.json()["state"] == "dead"
            assert answer.json()["reason"] == "killed by a test"
            assert answer.json()["model"] is None
            assert "rows" not in answer.json()

    run_timeless(test())


def test_events_tell_states_and_payloads_and_end_with_the_engine() -> None:
    async def test() -> None:
        async with scripted_client(Answer()) as (_, link):
            events = Events(link)
            assert await events.next() == (
                "status",
                {
                    "state": "ready",
                    "model": json.loads(json.dumps(asdict(CARD))),
                    "version": octavo.__version__,
                },
            )
            coming = asyncio.ensure_future(events.next())
            await eventually(lambda: link.watching)
            observe(link, idle_payload())
            event = await coming
            assert event is not None
            assert event[0] == "message"
            assert event[1]["full"]["num_blocks"] == 64
            link.engine._set_state("stuck")
            event = await events.next()
            assert event is not None
            assert event[1]["state"] == "stuck"
            link.engine.lost("gone")
            event = await events.next()
            assert event is not None
            assert (event[1]["state"], event[1]["reason"]) == ("dead", "gone")
            assert await events.ended()
            assert not link.watching

    run_timeless(test())


def test_a_draining_engine_is_shown_until_it_is_idle() -> None:
    async def test() -> None:
        async with scripted_client(Answer()) as (_, link):
            events = Events(link)
            await events.next()
            link.engine._set_state("draining")
            event = await events.next()
            assert event is not None
            assert event[1]["state"] == "draining"
            busy = json.loads(idle_payload())
            busy["stats"]["num_running"] = 1
            idle = json.loads(idle_payload())
            del idle["full"]
            for payload in (json.dumps(busy).encode(), json.dumps(idle).encode()):
                coming = asyncio.ensure_future(events.next())
                await eventually(lambda: link.watching)
                observe(link, payload)
                event = await coming
                assert event is not None
                assert event[0] == "message"
            assert await events.ended()

    run_timeless(test())


def test_a_loading_engine_is_told_and_a_quiet_stream_shows_signs_of_life(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(state, "POLL_S", 0.01)
    monkeypatch.setattr(state, "PING_S", 0.02)

    async def test() -> None:
        async with scripted_client(Answer()) as (_, link):
            events = Events(link)
            link.engine._state = "loading"
            link.engine.receive(Stage("weights", 0.5))
            event = await events.next()
            assert event is not None
            assert (event[1]["state"], event[1]["model"]) == ("loading", None)
            link.engine._state = "ready"
            event = await events.next()
            assert event is not None
            assert event[1]["state"] == "ready"
            assert await events.next() is None

    run_timeless(test())


def test_the_page_and_its_files() -> None:
    async def test() -> None:
        settings = ServeSettings(api_keys=("secret",))
        async with scripted_client(Answer(), settings) as (client, _):
            index = await client.get("/")
            assert index.status_code == 200
            assert index.headers["content-type"] == "text/html; charset=utf-8"
            policy = index.headers["content-security-policy"]
            assert policy == page.CONTENT_SECURITY_POLICY
            assert "unsafe" not in policy
            assert "http" not in policy
            assert index.headers["x-content-type-options"] == "nosniff"
            again = await client.get("/", headers={"if-none-match": index.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
            script = await client.get("/page/main.js")
            assert script.headers["content-type"] == "text/javascript; charset=utf-8"
            assert (await client.get("/page/purify.mjs")).text.startswith("/*! @license DOMPurify")
            for name in ("nothing.js", "__init__.py", "..%2f__init__.py", "vendor", "README.md"):
                answer = await client.get(f"/page/{name}")
                assert answer.status_code == 404, name
                assert answer.json()["error"]["code"] == "not_found"
            assert (await client.get("/v1/engine/state")).status_code == 401
            assert (await client.get("/v1/engine/events")).status_code == 401

    run_timeless(test())


def test_no_file_of_the_page_names_another_host() -> None:
    for name, file in page._files().items():
        if name not in ("marked.js", "purify.mjs"):  # they name their own homes, in comments
            text = file.content.decode().replace("http://www.w3.org/2000/svg", "")
            assert "http://" not in text, name
            assert "https://" not in text, name
