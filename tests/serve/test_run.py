"""Listening: addresses that cannot be had, and connections that are opened and never used."""

import asyncio

import pytest
from helpers.serve import run

from octavo.errors import ConfigError
from octavo.serve.run import _is_local, _Uvicorn, _uvicorn_config, listen
from octavo.serve.settings import ServeSettings


@pytest.mark.parametrize(
    ("host", "port"), [("no.such.host.invalid", 0), ("203.0.113.7", 0), ("a" * 300, 0), ("\ud800", 0)]
)
def test_an_address_that_cannot_be_had_is_named(host, port):
    with pytest.raises(ConfigError, match=r"host, port: cannot listen at .*; choose another --port"):
        listen(ServeSettings(host=host, port=port))


def test_what_other_machines_can_reach_is_told_apart():
    for host, is_local in (("127.0.0.1", True), ("localhost", True), ("0.0.0.0", False)):
        with listen(ServeSettings(host=host, port=0)) as listener:
            assert _is_local(listener) is is_local


async def hello(scope, receive, send):
    await asyncio.sleep(0.3)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


def test_a_connection_that_asks_nothing_is_closed_and_a_slow_answer_is_not():
    async def test():
        settings = ServeSettings(port=0, idle_connection_s=0.1)
        with listen(settings) as listener:
            server = _Uvicorn(_uvicorn_config(hello, settings))
            serving = asyncio.create_task(server.serve([listener]))
            address = listener.getsockname()
            silent, silent_writer = await asyncio.open_connection(*address)
            asking, asking_writer = await asyncio.open_connection(*address)
            asking_writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert (await asking.read()).endswith(b"hello\r\n0\r\n\r\n")
            assert await silent.read() == b""
            for writer in (silent_writer, asking_writer):
                writer.close()
            server.should_exit = True
            await serving

    run(test())
