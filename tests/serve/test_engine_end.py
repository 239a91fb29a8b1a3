"""How an engine process ends, and what the front hears of it."""

import asyncio
import signal
import socket
import threading
from typing import Any

import pytest
from helpers.serve import run

from octavo.config import EngineConfig
from octavo.errors import ModelError
from octavo.serve import engine_process, process
from octavo.serve.channel import EngineChannel, FrontGone, _Frames
from octavo.serve.messages import Died
from octavo.serve.process import EngineProcess

CONFIG = EngineConfig(model="none")


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """`main` can run in this process: it leaves signals, parent and logging alone."""
    for name in ("_follow_parent", "_log_to_stderr", "freeze_what_is_loaded"):
        monkeypatch.setattr(engine_process, name, lambda: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(signal, "pthread_sigmask", lambda *_: set())


def heard(build: Any) -> list[Any]:
    """What the front hears of a process that loads so."""
    ours, theirs = socket.socketpair()
    engine_process.main(theirs, build, CONFIG)
    with ours:
        return _Frames().feed(ours.recv(1 << 16))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            PermissionError(13, "Permission denied", "/models/a/model.safetensors"),
            Died("PermissionError: [Errno 13] Permission denied: '/models/a/model.safetensors'"),
        ),
        (OSError(28, "No space left on device"), Died("OSError: [Errno 28] No space left on device")),
        (EOFError("Ran out of input"), Died("EOFError: Ran out of input")),
        (BrokenPipeError(32, "Broken pipe"), Died("BrokenPipeError: [Errno 32] Broken pipe")),
        (ModelError("model: there is none"), Died("model: there is none", "ModelError")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_whatever_loading_fails_with_is_told(quiet: None, error: Exception, told: Died) -> None:
    def build(config: Any, tell: Any) -> Any:
        raise error

    assert heard(build) == [told]


def test_a_front_that_has_gone_is_no_failure(quiet: None, caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = socket.socketpair()
    ours.close()

    def build(config: Any, tell: Any) -> Any:
        tell("more than nobody reads")

    engine_process.main(theirs, build, CONFIG)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_an_error_of_the_socket_is_the_front_going() -> None:
    ours, theirs = socket.socketpair()
    channel = EngineChannel(theirs)
    ours.close()
    with pytest.raises(FrontGone):
        channel.send(Died("x"))
    with pytest.raises(FrontGone):
        channel.receive(None)
    theirs.close()


def hangs_at_exit(config: Any, tell: Any) -> Any:
    """A thread that nobody ends keeps the interpreter from exiting."""
    threading.Thread(target=threading.Event().wait).start()
    raise ModelError("told, and then it hangs")


def test_a_process_that_hangs_while_it_exits_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "EXIT_S", 0.2)

    async def test() -> None:
        gone = asyncio.Event()
        messages: list[Any] = []
        lost: list[str] = []

        def on_lost(why: str) -> None:
            lost.append(why)
            gone.set()

        one = EngineProcess(hangs_at_exit, CONFIG, messages.append, on_lost)
        await gone.wait()
        assert messages == [Died("told, and then it hangs", "ModelError")]
        assert lost == ["the engine process ended"], "its socket has closed, and it runs on"
        await one.close(is_patient=True)
        assert one._process.exitcode == -signal.SIGKILL

    run(test())
