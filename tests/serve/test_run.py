"""Listening: addresses that cannot be had, and connections that are opened and never used."""

import asyncio
import contextlib
import socket

import pytest
from helpers.serve import PATIENCE_S, run
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from octavo.config import EngineConfig
from octavo.errors import ConfigError, ModelError
from octavo.serve import run as serving
from octavo.serve.run import _check_name, _is_local, _Uvicorn, _uvicorn_config, listen
from octavo.serve.settings import ServeSettings


@pytest.mark.parametrize(
    ("host", "port"), [("no.such.host.invalid", 0), ("203.0.113.7", 0), ("a" * 300, 0), ("\ud800", 0)]
)
def test_an_address_that_cannot_be_had_is_named(host, port):
    with pytest.raises(ConfigError, match=r"host, port: cannot listen at .*; choose another --port"):
        listen(ServeSettings(host=host, port=port))


@pytest.mark.parametrize("model", ["foo bar/baz", "_a/b", "a/b/c", "a/b.gguf", "nothing"])
def test_a_name_under_which_there_can_be_no_model_is_told_before_anything_listens(model):
    with pytest.raises(ModelError, match="expected a folder with config"):
        _check_name(EngineConfig(model=model))


def test_only_loading_tells_whether_there_is_a_repository():
    _check_name(EngineConfig(model="some-owner/some.name"))


def test_what_other_machines_can_reach_is_told_apart():
    for host, is_local in (("127.0.0.1", True), ("localhost", True), ("0.0.0.0", False)):
        with listen(ServeSettings(host=host, port=0)) as listener:
            assert _is_local(listener) is is_local


async def hello(scope, receive, send):
    await asyncio.sleep(0.05)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


@contextlib.asynccontextmanager
async def listening(app, protocol, monkeypatch, **options):
    """Where the application is served, over one of the two protocols that uvicorn has."""
    monkeypatch.setattr(serving, "AutoHTTPProtocol", protocol)
    settings = ServeSettings(port=0, **options)
    with listen(settings) as listener:
        server = _Uvicorn(_uvicorn_config(app, settings))
        running = asyncio.create_task(server.serve([listener]))
        try:
            yield listener.getsockname()
        finally:
            server.should_exit = True
            await running


GET = b"GET / HTTP/1.1\r\nHost: x\r\n"
both_protocols = pytest.mark.parametrize("protocol", [H11Protocol, HttpToolsProtocol])


@both_protocols
def test_a_connection_that_asks_nothing_is_closed_and_a_slow_answer_is_not(protocol, monkeypatch):
    async def test():
        is_closed = asyncio.Event()

        async def slow(scope, receive, send):
            await is_closed.wait()
            await hello(scope, receive, send)

        async with listening(slow, protocol, monkeypatch, idle_connection_s=0.5) as address:
            asking, asking_writer = await asyncio.open_connection(*address)
            asking_writer.write(GET + b"Connection: close\r\n\r\n")
            silent, silent_writer = await asyncio.open_connection(*address)
            assert await silent.read() == b""
            is_closed.set()
            assert (await asking.read()).endswith(b"hello\r\n0\r\n\r\n")
            for writer in (silent_writer, asking_writer):
                writer.close()

    run(test())


@both_protocols
@pytest.mark.parametrize("more", [b"", b"G", GET])
def test_a_connection_that_asks_only_half_of_its_next_question_is_closed(protocol, more, monkeypatch):
    async def test():
        async with listening(hello, protocol, monkeypatch, idle_connection_s=0.5) as address:
            reader, writer = await asyncio.open_connection(*address)
            for _ in range(2):
                writer.write(GET + b"\r\n")
                assert await reader.readuntil(b"0\r\n\r\n")
            writer.write(more)
            async with asyncio.timeout(PATIENCE_S):
                assert await reader.read() == b""
            writer.close()

    run(test())


@both_protocols
@pytest.mark.parametrize("more", [b"", b"\r\n", b"G", GET + b"\r\n", 3 * (GET + b"\r\n")])
@pytest.mark.parametrize("is_at_once", [True, False])
def test_who_leaves_after_sending_more_than_its_request_is_noticed(protocol, more, is_at_once, monkeypatch):
    async def test():
        begun, gone = asyncio.Event(), asyncio.Event()

        async def app(scope, receive, send):
            begun.set()
            while (await receive())["type"] != "http.disconnect":
                pass
            gone.set()

        async with listening(app, protocol, monkeypatch) as address:
            _, writer = await asyncio.open_connection(*address)
            writer.write(GET + b"\r\n" + (more if is_at_once else b""))
            await begun.wait()
            if not is_at_once:
                writer.write(more)
            await asyncio.sleep(0.05)
            writer.close()
            async with asyncio.timeout(PATIENCE_S):
                await gone.wait()

    run(test())


@both_protocols
def test_requests_sent_one_after_the_other_are_all_answered(protocol, monkeypatch):
    async def test():
        async with listening(hello, protocol, monkeypatch) as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(GET + b"\r\n" + GET + b"\r\n")
            await asyncio.sleep(0.1)
            writer.write(GET + b"Connection: close\r\n\r\n")
            async with asyncio.timeout(PATIENCE_S):
                assert (await reader.read()).count(b"hello") == 3
            writer.close()

    run(test())


@both_protocols
@pytest.mark.parametrize("before", [b"", GET + b"\r\n"], ids=["head", "pipelined"])
def test_what_comes_without_end_is_cut_off(protocol, before, monkeypatch):
    async def test():
        async with listening(hello, protocol, monkeypatch) as address:
            _, writer = await asyncio.open_connection(*address)
            writer.write(before)
            await asyncio.sleep(0.05)
            writer.write(GET)
            async with asyncio.timeout(PATIENCE_S):
                with contextlib.suppress(ConnectionError):
                    for _ in range(100):
                        writer.write(b"X: " + b"x" * 10_000 + b"\r\n")
                        await writer.drain()
                        await asyncio.sleep(0.002)
                    pytest.fail("a megabyte was taken")
            writer.transport.abort()

    run(test())


@both_protocols
def test_a_large_body_is_no_more_than_its_request(protocol, monkeypatch):
    async def app(scope, receive, send):
        await asyncio.sleep(0.1)
        size, has_more = 0, True
        while has_more:
            message = await receive()
            size, has_more = size + len(message["body"]), message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": str(size).encode()})

    async def test():
        async with listening(app, protocol, monkeypatch) as address:
            reader, writer = await asyncio.open_connection(*address)
            for _ in range(2):
                writer.write(
                    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n" + b"x" * 1_000_000
                )
                async with asyncio.timeout(PATIENCE_S):
                    assert (await reader.readuntil(b"\r\n0\r\n\r\n")).endswith(b"1000000\r\n0\r\n\r\n")
            writer.close()

    run(test())


@both_protocols
def test_room_is_made_for_no_more_than_64_kib_of_a_connection_at_once(protocol, monkeypatch):
    rooms = []
    received = socket.socket.recv

    def noting(self, size, *flags):
        rooms.append((self.getsockname(), size))
        return received(self, size, *flags)

    async def app(scope, receive, send):
        num_bytes, is_more = 0, True
        while is_more:
            message = await receive()
            num_bytes, is_more = num_bytes + len(message["body"]), message["more_body"]
        assert num_bytes == 2**20
        await hello(scope, receive, send)

    async def test():
        async with listening(app, protocol, monkeypatch) as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(GET + b"Content-Length: 1048576\r\n\r\n" + bytes(2**20))
            assert (await reader.readuntil(b"0\r\n\r\n")).endswith(b"hello\r\n0\r\n\r\n")
            writer.close()
        assert {size for at, size in rooms if at == address} == {2**16}

    monkeypatch.setattr(socket.socket, "recv", noting)
    run(test())
