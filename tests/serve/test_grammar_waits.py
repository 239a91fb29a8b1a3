"""A request whose grammar is being compiled waits beside the loop, and everybody else is served."""

import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest
from helpers.grammar import make_grammar_engine, structured

from octavo.engine import grammar
from octavo.engine.core import Engine
from octavo.sampling_params import SamplingParams
from octavo.serve import engine_process
from octavo.serve.engine_process import EngineLoop
from octavo.serve.messages import Abort, Accepted, News, Refused, Stop, Submit
from octavo.structured_output import StructuredOutput

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
            seen.append(self.outbox.get(timeout=120))
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
        assert let_go.wait(120)
        return compile_now(output)

    library.compile = compile_later  # type: ignore[method-assign]
    channel = Channel()
    thread = threading.Thread(target=EngineLoop(engine, channel).run)  # type: ignore[arg-type]
    thread.start()
    yield engine, channel, let_go
    let_go.set()
    channel.inbox.put(Stop())
    thread.join(120)
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
    output = channel.until(ends("gone"))[-1].items[0].output
    assert [(one.index, one.text, one.finish_reason) for one in output.outputs] == [(0, "", "abort")]
    assert output.metrics.e2e_s > 0
    let_go.set()
    channel.inbox.put(Submit("next", [1], structured(YES_OR_NO)))
    seen = channel.until(ends("next"))
    told = {item.request_id for message in seen if isinstance(message, News) for item in message.items}
    assert told == {"next"}
    assert engine.stats().num_steps == sum(
        message.step_s > 0 for message in seen if isinstance(message, News)
    )


def test_a_grammar_is_given_up_when_the_last_who_waits_for_it_leaves(held: Held):
    engine, channel, let_go = held
    other = StructuredOutput(regex="left|right")
    channel.inbox.put(Submit("under way", [1], structured(YES_OR_NO)))
    channel.inbox.put(Submit("first", [1], structured(other)))
    channel.inbox.put(Submit("second", [1], structured(other)))
    channel.inbox.put(Abort("first"))
    channel.until(ends("first"))
    assert other in engine.grammars._compiled
    channel.inbox.put(Abort("second"))
    channel.until(ends("second"))
    assert other not in engine.grammars._compiled
    let_go.set()
    output = channel.until(ends("under way"))[-1].items[0].output
    assert output.outputs[0].text in ("yes", "no")


def test_while_a_grammar_is_compiled_the_loop_says_that_it_turns(held: Held, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine_process, "HEARTBEAT_S", 0.01)
    _, channel, let_go = held
    channel.inbox.put(Submit("waits", [1], structured(YES_OR_NO)))
    for _ in range(3):
        beat = channel.outbox.get(timeout=120)
        assert isinstance(beat, News)
        assert (beat.items, beat.step_s, beat.num_tokens) == ([], 0.0, 0)
    let_go.set()
    channel.until(ends("waits"))


def test_a_grammar_that_was_forgotten_before_its_owner_took_it_is_not_compiled_again(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(grammar, "MAX_KEPT", 0)
    engine, channel = make_grammar_engine(), Channel()
    loop = EngineLoop(engine, channel)  # type: ignore[arg-type]
    loop._take([Submit("waits", [1], structured(YES_OR_NO))])
    engine.grammars._compiled[YES_OR_NO].result(120)
    engine.grammars.start(StructuredOutput(regex="another")).result(120)
    assert YES_OR_NO not in engine.grammars._compiled
    loop._take([])
    assert channel.outbox.get_nowait() == Accepted(("waits",))
    engine.close()


def test_more_grammars_than_may_wait_are_refused_for_now(held: Held, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grammar, "MAX_PENDING", 1)
    _, channel, let_go = held
    channel.inbox.put(Submit("waits", [1], structured(YES_OR_NO)))
    channel.inbox.put(Submit("too many", [1], structured(StructuredOutput(regex="a"))))
    refused = channel.until(lambda message: isinstance(message, Refused))[-1]
    assert (refused.request_id, refused.kind) == ("too many", "OverloadedError")
    let_go.set()
    channel.until(ends("waits"))
