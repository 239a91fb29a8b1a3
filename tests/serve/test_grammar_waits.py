"""A request whose grammar is being compiled waits beside the loop, and everybody else is served."""

import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest
from helpers.grammar import make_grammar_engine, structured

from octavo.engine.core import Engine
from octavo.sampling_params import SamplingParams, StructuredOutput
from octavo.serve.engine_process import EngineLoop
from octavo.serve.messages import Abort, Accepted, News, Refused, Stop, Submit

YES_OR_NO = StructuredOutput(regex="yes|no")
FREE = SamplingParams(max_tokens=5)


class Channel:
    """The loop's channel, without a wire."""

    def __init__(self) -> None:
        self.inbox: queue.Queue[Any] = queue.Queue()
        self.outbox: queue.Queue[Any] = queue.Queue()

    def receive(self, timeout_s: float | None) -> list[Any]:
        try:
            return [self.inbox.get(timeout=timeout_s) if timeout_s != 0 else self.inbox.get_nowait()]
        except queue.Empty:
            return []

    def send(self, message: Any) -> None:
        self.outbox.put(message)

    def until(self, is_wanted: Callable[[Any], bool]) -> list[Any]:
        """What was sent up to the first message that is wanted."""
        seen: list[Any] = []
        while not seen or not is_wanted(seen[-1]):
            seen.append(self.outbox.get(timeout=30))
        return seen


@pytest.fixture
def held():
    """A running loop whose compiler waits for `let_go`; then (engine, channel, let_go)."""
    engine = make_grammar_engine()
    let_go = threading.Event()
    engine.grammars.prepare()
    assert engine.grammars._library is not None
    library = engine.grammars._library.result()
    compile_now = library.compile

    def compile_later(output: StructuredOutput) -> Any:
        assert let_go.wait(30)
        return compile_now(output)

    library.compile = compile_later  # type: ignore[method-assign]
    channel = Channel()
    thread = threading.Thread(target=EngineLoop(engine, channel).run)  # type: ignore[arg-type]
    thread.start()
    yield engine, channel, let_go
    let_go.set()
    channel.inbox.put(Stop())
    thread.join(30)
    assert not thread.is_alive()


Held = tuple[Engine, Channel, threading.Event]


def ends(request_id: str) -> Callable[[Any], bool]:
    return lambda message: (
        isinstance(message, News)
        and any(item.request_id == request_id and item.output is not None for item in message.items)
    )


def test_a_neighbour_is_served_while_a_grammar_is_compiled(held: Held):
    _, channel, let_go = held
    channel.inbox.put(Submit("waits", [1], structured(YES_OR_NO)))
    channel.inbox.put(Submit("goes on", [1], FREE))
    seen = channel.until(ends("goes on"))
    assert Accepted(("goes on",)) in seen
    assert not any(isinstance(message, Accepted) and "waits" in message.request_ids for message in seen)
    let_go.set()
    seen = channel.until(ends("waits"))
    assert Accepted(("waits",)) in seen
    output = next(item.output for item in seen[-1].items if item.request_id == "waits")
    assert output.outputs[0].text in ("yes", "no")


def test_a_refused_grammar_refuses_its_request_alone(held: Held):
    _, channel, let_go = held
    channel.inbox.put(Submit("bad", [1], structured(StructuredOutput(regex="a{"))))
    channel.inbox.put(Submit("good", [1], structured(YES_OR_NO)))
    let_go.set()
    seen = channel.until(ends("good"))
    [refused] = [message for message in seen if isinstance(message, Refused)]
    assert (refused.request_id, refused.kind) == ("bad", "RequestError")
    assert refused.message.startswith("structured_output: regex cannot be used: ")


def test_one_that_is_aborted_while_it_waits_never_begins(held: Held):
    engine, channel, let_go = held
    channel.inbox.put(Submit("gone", [1], structured(YES_OR_NO)))
    channel.inbox.put(Abort("gone"))
    [refused] = channel.until(lambda message: True)
    assert refused == Refused("gone", "EngineError", "it was aborted")
    let_go.set()
    channel.inbox.put(Submit("next", [1], structured(YES_OR_NO)))
    seen = channel.until(ends("next"))
    assert {item.request_id for message in seen if isinstance(message, News) for item in message.items} == {
        "next"
    }
    assert engine.stats().num_steps == sum(isinstance(message, News) for message in seen)
