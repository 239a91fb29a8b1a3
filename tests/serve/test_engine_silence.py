"""What the front makes of an engine process that says little, or nothing."""

import asyncio
from typing import Any

import pytest
from helpers.serve import CARD, STATS, Answer, NullListener, eventually, run_timeless, scripted_engine

from octavo.errors import EngineError, ModelError, OverloadedError, RequestError
from octavo.sampling_params import SamplingParams
from octavo.serve.async_engine import AsyncEngine
from octavo.serve.messages import Abort, Accepted, News, Ready, Refused, ToEngine, ToFront
from octavo.serve.settings import ServeSettings
from octavo.text.tokenizer import Tokenizer

PARAMS = SamplingParams(max_tokens=5)


class Link:
    """Remembers what was sent and how it was closed; answers nothing."""

    def __init__(self) -> None:
        self.sent: list[ToEngine] = []
        self.was_patient: bool | None = None

    def send(self, message: ToEngine) -> None:
        self.sent.append(message)

    async def close(self, *, is_patient: bool) -> None:
        self.was_patient = is_patient


async def quiet_engine(listener: Any = None, **settings: Any) -> tuple[AsyncEngine, Link]:
    engine, link = AsyncEngine(ServeSettings(**settings), listener or NullListener()), Link()
    engine.start(link, lambda: None)
    engine.receive(Ready(CARD))
    await engine.until_ready()
    return engine, link


@pytest.mark.parametrize(
    "word", [Accepted(("a",)), Refused("a", "RequestError", "no"), News([], STATS, 0.0, 0)], ids=type
)
def test_whatever_the_loop_says_leads_out_of_stuck(word: ToFront) -> None:
    async def test() -> None:
        engine, link = await quiet_engine(stuck_s=0.05)
        engine.submit([1], PARAMS, request_id="a")
        await eventually(lambda: engine.state == "stuck")
        assert any(isinstance(message, Abort) for message in link.sent)
        engine.receive(word)
        assert engine.state == "ready"
        engine.submit([1], PARAMS, request_id="b")
        await engine.close()

    run_timeless(test())


def test_a_sign_of_life_while_a_grammar_is_compiled_keeps_a_request_from_failing() -> None:
    async def test() -> None:
        engine, _ = await quiet_engine(stuck_s=0.4)
        generation = engine.submit([1], PARAMS, request_id="a")
        for _ in range(14):
            await asyncio.sleep(0.05)
            engine.receive(News([], STATS, 0.0, 0))
        assert (engine.state, generation.is_over) == ("ready", False)
        await engine.close()

    run_timeless(test())


@pytest.mark.parametrize("comes_back", [False, True])
def test_only_a_process_that_listens_is_given_time_to_end(comes_back: bool) -> None:
    async def test() -> None:
        engine, link = await quiet_engine(stuck_s=0.05)
        engine.submit([1], PARAMS, request_id="a")
        await eventually(lambda: engine.state == "stuck")
        if comes_back:
            engine.receive(News([], STATS, 0.001, 1))
        await engine.drain(0.01)
        assert engine.state == "draining"
        await engine.close()
        assert link.was_patient is comes_back

    run_timeless(test())


def test_one_that_hangs_while_draining_is_not_waited_for() -> None:
    async def test() -> None:
        engine, link = await quiet_engine(stuck_s=0.05)
        engine.submit([1], PARAMS, request_id="a")
        await engine.drain(5.0)
        await engine.close()
        assert link.was_patient is False

    run_timeless(test())


@pytest.mark.parametrize(
    ("kind", "reason", "error"),
    [
        ("RequestError", "invalid", RequestError),
        ("OverloadedError", "overloaded", OverloadedError),
        ("EngineError", "error", EngineError),
    ],
)
def test_only_what_the_request_is_to_blame_for_counts_as_invalid(
    kind: str, reason: str, error: type[Exception]
) -> None:
    async def test() -> None:
        listener = NullListener()
        engine, _ = await scripted_engine(Answer(refuse=(kind, "not now")), listener=listener)
        with pytest.raises(error, match="not now"):
            await engine.submit([1], PARAMS, request_id="a").accepted()
        assert [reason for name, reason in listener.heard if name == "refused"] == [reason]
        await engine.close()

    run_timeless(test())


def test_a_tokenizer_that_fails_as_the_model_is_loaded_fails_the_loading() -> None:
    async def test() -> None:
        listener = NullListener()
        engine = AsyncEngine(ServeSettings(), listener)
        engine._loop = loop = _Loop(engine._loop)  # type: ignore[assignment]

        def load_text() -> Tokenizer:
            raise ModelError("tokenizer.json is broken")

        engine.start(Link(), load_text)
        await eventually(lambda: loop.calls)
        # Both in one turn of the event loop, before anybody has looked at the first.
        call, *arguments = loop.calls.pop()
        call(*arguments)
        engine.receive(Ready(CARD))
        with pytest.raises(ModelError, match=r"tokenizer\.json is broken"):
            await engine.until_ready()
        assert ("state", "ready") not in listener.heard
        assert engine.state == "dead"
        await engine.close()

    run_timeless(test())


class _Loop:
    """An event loop that keeps what threads would have it call."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.calls: list[tuple[Any, ...]] = []

    def call_soon_threadsafe(self, *call: Any) -> None:
        self.calls.append(call)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)
