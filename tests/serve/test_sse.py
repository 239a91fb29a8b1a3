"""Streams of server-sent events, against clients that leave, do not read, or see an error."""

import asyncio
import contextlib
import json

import pytest
from helpers.serve import events_of, eventually, run_timeless

from octavo.errors import EngineError
from octavo.outputs import RequestMetrics, RequestOutput, StreamChunk
from octavo.serve.connected import ClientGone, Connected
from octavo.serve.generation import Generation
from octavo.serve.sse import EventStream, GenerationStream, event


class Client:
    """The ASGI side of a connection. Set `gone` when the client leaves; it takes nothing while `reads` is
    not set.
    """

    def __init__(self):
        self.gone = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()
        self.started = None
        self.body = b""
        self.is_complete = False

    async def receive(self):
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        await asyncio.sleep(0)
        await self.reads.wait()
        if message["type"] == "http.response.start":
            self.started = message
        else:
            self.body += message["body"]
            self.is_complete = not message["more_body"]

    def take(self, response):
        async def serve():
            with contextlib.suppress(ClientGone), Connected(self.receive):
                await response({"type": "http"}, self.receive, self.send)

        return asyncio.create_task(serve())


class Spelling:
    """A writer that tells a piece as its text; ``!`` in it is an error."""

    def begin(self):
        return b"<"

    def piece(self, place, chunk):
        if "!" in chunk.text:
            raise ZeroDivisionError(chunk.text)
        return f"{place}{chunk.text} ".encode()

    def end(self, outputs):
        return f"{len(outputs)}>".encode()

    def failed(self, error):
        return b"failed: " + str(error).encode()


OUTPUT = RequestOutput("r", None, [], [], 0, RequestMetrics(None, None, None, 0.0, 0))


class Streamed:
    """A stream of generations to a client."""

    def __init__(self, client, *, num=1, slow_reader_s=60.0):
        self.num_aborts = 0
        self.generations = [Generation(f"r{i}", None, [1], self._abort) for i in range(num)]
        stream = GenerationStream(Spelling(), self.generations, slow_reader_s)
        self.serving = client.take(stream)

    def _abort(self, generation):
        self.num_aborts += 1
        generation.fail(EngineError("aborted"))

    def put(self, *texts, output=None, place=0):
        self.generations[place].put([StreamChunk(0, text, [1]) for text in texts], output)
        self.generations[place].wake()


class QuickClient(Client):
    """Takes what is sent at once, while `reads` is set."""

    async def send(self, message):
        if not self.reads.is_set():
            await self.reads.wait()
        self.started = self.started or message
        self.body += message.get("body", b"")
        self.is_complete = message.get("more_body") is False


async def events(*items, then=None, closed=None):
    try:
        for item in items:
            yield item
        if isinstance(then, Exception):
            raise then
        if then is not None:
            await then.wait()
    finally:
        if closed is not None:
            closed.set()


def test_events_on_the_wire():
    async def test():
        client = Client()
        told = (event({"a": "é", "b": float("-inf")}), b"event: x\ndata: y\n\n")
        await client.take(EventStream(events(*told)))
        assert client.started["status"] == 200
        assert dict(client.started["headers"])[b"content-type"] == b"text/event-stream; charset=utf-8"
        assert b"content-length" not in dict(client.started["headers"])
        assert client.body.decode() == 'data: {"a":"é","b":null}\n\nevent: x\ndata: y\n\n'
        assert client.is_complete

    run_timeless(test())


@pytest.mark.parametrize(
    ("error", "code"),
    [(EngineError("it died"), "service_unavailable"), (ZeroDivisionError("x"), "internal_error")],
)
def test_an_error_in_a_stream_is_one_event(error, code):
    async def test():
        client = Client()
        await client.take(EventStream(events(b"data: a\n\n", then=error)))
        first, told = events_of(client.body.decode())
        assert first == "a"
        assert json.loads(told)["error"]["code"] == code
        assert client.is_complete

    run_timeless(test())


def test_a_client_that_leaves_ends_the_events():
    async def test():
        client, closed = Client(), asyncio.Event()
        serving = client.take(EventStream(events(b"a", then=asyncio.Event(), closed=closed)))
        await eventually(lambda: client.body)
        client.gone.set()
        await serving
        assert closed.is_set()
        assert not client.is_complete

    run_timeless(test())


def test_a_client_that_takes_no_events_is_given_up(caplog):
    async def test():
        client, closed = Client(), asyncio.Event()
        client.reads.clear()
        await client.take(EventStream(events(b"a", closed=closed), 0.05))
        assert not closed.is_set(), "it never began"
        client.reads.set()
        serving = client.take(EventStream(events(*[b"a"] * 8000, closed=closed), 0.05))
        while not client.body:
            await asyncio.sleep(0)
        client.reads.clear()
        await serving
        assert closed.is_set()
        assert not client.is_complete

    run_timeless(test())
    assert "took nothing for 0.05 s" in caplog.text


def test_events_that_have_nothing_to_say_for_long_have_no_slow_reader():
    async def test():
        client, waits = Client(), asyncio.Event()
        serving = client.take(EventStream(events(b"a", then=waits), 0.05))
        await asyncio.sleep(0.2)
        waits.set()
        await serving
        assert client.is_complete

    run_timeless(test())


def test_a_piece_is_written_by_the_call_that_brings_it():
    async def test():
        client = QuickClient()
        stream = Streamed(client)
        await eventually(lambda: client.body == b"<")
        stream.put("a")
        assert client.body == b"<0a "
        stream.put("b", "c")
        assert client.body == b"<0a 0bc "
        stream.put("d", output=OUTPUT)
        assert client.body == b"<0a 0bc ", "the last one goes with the end, in one message"
        await stream.serving
        assert client.body == b"<0a 0bc 0d 1>"
        assert client.is_complete
        assert stream.num_aborts == 0

    run_timeless(test())


@pytest.mark.parametrize("kind", [Client, QuickClient])
def test_what_comes_while_the_client_takes_nothing_is_joined_and_in_order(kind):
    async def test():
        client = kind()
        stream = Streamed(client, num=2)
        await eventually(lambda: client.body == b"<")
        client.reads.clear()
        stream.put("a", place=1)
        for text in "bcd":
            stream.put(text)
            stream.put(text.upper(), place=1)
            await asyncio.sleep(0)
        assert client.body == b"<"
        client.reads.set()
        await eventually(lambda: b"D" in client.body)
        assert client.body in (b"<1a 0bcd 1BCD ", b"<1a 1BCD 0bcd ")
        stream.put("e", output=OUTPUT)
        stream.put("E", output=OUTPUT, place=1)
        await stream.serving
        assert client.body.endswith(b" 0e 1E 2>")
        assert client.is_complete

    run_timeless(test())


@pytest.mark.parametrize("kind", [Client, QuickClient])
def test_a_client_that_leaves_aborts_its_generations(kind):
    async def test():
        client = kind()
        stream = Streamed(client, num=2)
        await eventually(lambda: client.body == b"<")
        stream.put("a", output=OUTPUT)
        client.gone.set()
        await stream.serving
        assert stream.num_aborts == 1, "the other had ended"
        assert not client.is_complete
        assert all(one.on_news is None for one in stream.generations)

    run_timeless(test())


def test_a_client_that_left_before_the_stream_began_aborts_as_well():
    async def test():
        client = Client()
        client.gone.set()
        stream = Streamed(client)
        await stream.serving
        assert stream.num_aborts == 1

    run_timeless(test())


def test_a_client_that_takes_no_pieces_is_given_up(caplog):
    async def test():
        client = QuickClient()
        stream = Streamed(client, slow_reader_s=0.05)
        await eventually(lambda: client.body == b"<")
        client.reads.clear()
        stream.put("a")
        await stream.serving
        assert stream.num_aborts == 1
        assert client.body == b"<"

    run_timeless(test())
    assert "took nothing for 0.05 s" in caplog.text


def test_a_generation_without_news_for_long_has_no_slow_reader():
    async def test():
        client = QuickClient()
        stream = Streamed(client, slow_reader_s=0.05)
        await asyncio.sleep(0.2)
        stream.put("a", output=OUTPUT)
        await stream.serving
        assert client.body == b"<0a 1>"

    run_timeless(test())


def test_a_generation_that_fails_is_told_after_its_pieces():
    async def test():
        client = Client()
        stream = Streamed(client)
        stream.put("a")
        stream.generations[0].fail(EngineError("it died"))
        await stream.serving
        assert client.body == b"<0a failed: it died"
        assert client.is_complete

    run_timeless(test())


def test_a_piece_that_cannot_be_told_ends_the_stream_and_hurts_nobody_else():
    async def test():
        client = QuickClient()
        stream = Streamed(client)
        await eventually(lambda: client.body == b"<")
        stream.put("a")
        stream.put("b!")
        await stream.serving
        assert client.body == b"<0a failed: b!"
        assert stream.num_aborts == 1

    run_timeless(test())


def test_a_connection_that_breaks_ends_the_stream_and_hurts_nobody_else():
    class Broken(QuickClient):
        async def send(self, message):
            if b"a" in message.get("body", b""):
                raise OSError("broken")
            await super().send(message)

    async def test():
        client = Broken()
        stream = Streamed(client)
        await eventually(lambda: client.body == b"<")
        stream.put("a")
        with pytest.raises(OSError, match="broken"):
            await stream.serving
        assert stream.num_aborts == 1

    run_timeless(test())
