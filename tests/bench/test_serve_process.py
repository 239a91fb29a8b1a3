"""Servers and other processes of the serving benchmarks: how they are waited for."""

import importlib
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from octavo.serve.messages import ModelCard
from octavo.serve.run import _ready_line

BENCH = Path(__file__).parents[2] / "bench"
COMPLAINS = "import sys; print('oh', file=sys.stderr, flush=True); print(1, flush=True); "


@pytest.fixture
def bench(monkeypatch):
    """Imports a module of the folder `bench`."""
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module
    for name in ("serve_scripted", "serve_process"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("code", "seconds", "how"),
    [
        (COMPLAINS + "sys.stdin.read()", 0.05, "said nothing for 0.05 s"),
        (COMPLAINS + "sys.exit(3)", 60.0, "ended with status 3"),
    ],
)
def test_a_process_without_a_further_line(code, seconds, how, bench):
    serve_process = bench("serve_process")
    command = (sys.executable, "-c", code)
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        ) as process,
    ):
        assert serve_process.line_of(process, 60.0, log) == "1\n"
        with pytest.raises(SystemExit) as caught:
            serve_process.line_of(process, seconds, log)
        first, *_, last = str(caught.value).splitlines()
        assert first.startswith(f"a process {how}: ")
        assert last == "oh"
        assert process.wait(60) == (3 if seconds == 60.0 else -9)


def test_a_process_that_does_not_want_to_end_is_killed(monkeypatch, bench):
    serve_process = bench("serve_process")
    monkeypatch.setattr(serve_process, "END_S", 0.1)
    code = (
        "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); "
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        (sys.executable, "-c", code), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        serve_process.line_of(process, 60.0)
        serve_process.end(process)
        assert process.returncode == -9


def test_a_scripted_server_that_does_not_start_says_why(tmp_path, bench):
    serve_scripted = bench("serve_scripted")
    starting = serve_scripted.running(0.1, 1, f"{tmp_path}/nothing")
    with pytest.raises(SystemExit, match="no file or folder at"), starting:
        pass


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_ready_line_tells_address_and_device(device, bench):
    card = ModelCard("m", 64, 100, (), {}, 8, 16, "bfloat16", device, "bfloat16", 4)
    line = _ready_line(card, "a model on paper", "http://127.0.0.1:8000")
    assert bench("serve_process").READY.search(line).groups() == (device, "http://127.0.0.1:8000")
