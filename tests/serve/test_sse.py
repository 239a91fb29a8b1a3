"""Streams of server-sent events, against clients that leave, do not read, or see an error."""

import asyncio
import json

import pytest
from helpers.serve import events_of, run

from octavo.errors import EngineError
from octavo.serve.sse import ClientGone, event_stream, while_connected


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
        return asyncio.create_task(response({"type": "http"}, self.receive, self.send))


class Aborts:
    """Stands in for a generation."""

    def __init__(self):
        self.num_aborts = 0

    def abort(self):
        self.num_aborts += 1


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


def test_each_form_of_event_on_the_wire():
    async def test():
        client = Client()
        await client.take(
            event_stream(events({"a": "é", "b": float("-inf")}, "text", b"event: x\ndata: y\n\n"))
        )
        assert client.started["status"] == 200
        assert dict(client.started["headers"])[b"content-type"] == b"text/event-stream; charset=utf-8"
        assert b"content-length" not in dict(client.started["headers"])
        expected = 'data: {"a":"é","b":null}\n\ndata: text\n\nevent: x\ndata: y\n\ndata: [DONE]\n\n'
        assert client.body.decode() == expected
        assert client.is_complete

    run(test())


def test_a_stream_without_a_last_word():
    async def test():
        client = Client()
        await client.take(event_stream(events("a"), done=None))
        assert client.body == b"data: a\n\n"
        assert client.is_complete

    run(test())


@pytest.mark.parametrize(
    ("error", "code"),
    [(EngineError("it died"), "service_unavailable"), (ZeroDivisionError("x"), "internal_error")],
)
def test_an_error_in_a_stream_is_one_event(error, code):
    async def test():
        client = Client()
        await client.take(event_stream(events("a", then=error)))
        first, told, done = events_of(client.body.decode())
        assert (first, done) == ("a", "[DONE]")
        assert json.loads(told)["error"]["code"] == code
        assert client.is_complete

    run(test())


def test_a_client_that_leaves_ends_the_stream_and_aborts():
    async def test():
        client, generation, closed = Client(), Aborts(), asyncio.Event()
        waits = asyncio.Event()
        serving = client.take(event_stream(events("a", then=waits, closed=closed), [generation]))
        while not client.body:
            await asyncio.sleep(0)
        assert generation.num_aborts == 0
        client.gone.set()
        await serving
        assert closed.is_set()
        assert generation.num_aborts == 1
        assert not client.is_complete

    run(test())


def test_a_client_that_left_before_the_stream_began_aborts_as_well():
    async def test():
        client, generation = Client(), Aborts()
        client.gone.set()
        await client.take(event_stream(events("a", then=asyncio.Event()), [generation]))
        assert generation.num_aborts == 1

    run(test())


def test_a_client_that_takes_nothing_is_given_up(caplog):
    async def test():
        client, generation, closed = Client(), Aborts(), asyncio.Event()
        client.reads.clear()
        await client.take(event_stream(events("a", closed=closed), [generation], slow_reader_s=0.05))
        assert not closed.is_set(), "it never began"
        client.reads.set()
        many = events(*"abcdefgh" * 1000, closed=closed)
        serving = client.take(event_stream(many, [generation], slow_reader_s=0.05))
        while not client.body:
            await asyncio.sleep(0)
        client.reads.clear()
        await serving
        assert closed.is_set()
        assert generation.num_aborts == 2
        assert not client.is_complete

    run(test())
    assert "took nothing for 0.05 s" in caplog.text


def test_a_stream_that_has_nothing_to_say_for_long_is_not_a_slow_reader():
    async def test():
        client, waits = Client(), asyncio.Event()
        serving = client.take(event_stream(events("a", then=waits), slow_reader_s=0.05))
        await asyncio.sleep(0.2)
        waits.set()
        await serving
        assert client.is_complete

    run(test())


class FakeRequest:
    def __init__(self, client):
        self.receive = client.receive


def test_work_for_a_client_is_cancelled_when_it_leaves():
    async def test():
        client, cancelled = Client(), asyncio.Event()

        async def work():
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        working = asyncio.create_task(while_connected(FakeRequest(client), work()))
        await asyncio.sleep(0.01)
        client.gone.set()
        with pytest.raises(ClientGone):
            await working
        assert cancelled.is_set()

    run(test())


def test_work_that_ends_gives_its_result_or_its_error():
    async def test():
        async def good():
            await asyncio.sleep(0)
            return 3

        async def bad():
            raise ZeroDivisionError

        assert await while_connected(FakeRequest(Client()), good()) == 3
        with pytest.raises(ZeroDivisionError):
            await while_connected(FakeRequest(Client()), bad())

    run(test())
