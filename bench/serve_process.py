"""`octavo serve` as a subprocess, for the programs here."""

from __future__ import annotations

import re
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.request
from pathlib import Path
from typing import IO

from octavo.bench.report import gpu_name

READY = re.compile(r"ready: .* on (\w+) in .* (http://\S+)")
START_S = 300.0
END_S = 20.0
_MOST_LINES = 100


def exit_on_sigterm() -> None:
    """SIGTERM unwinds this program, so that the servers it started end with it."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


class Server:
    """`octavo serve` as a subprocess: once it is ready its `url`, and the `gpu` it runs on, if it does."""

    def __init__(self, model: str, options: list[str]) -> None:
        command = (sys.executable, "-m", "octavo", "serve", model, "--port", "0", *options)
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the server
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._log, text=True)
        self.url = self.gpu = ""
        stop_waiting = threading.Timer(START_S, self.process.kill)
        stop_waiting.start()
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := READY.search(line):
                self.url = found[2]
                self.gpu = gpu_name() if found[1] == "cuda" else ""
                break
        stop_waiting.cancel()
        if not self.url:
            raise SystemExit(f"the server did not start: {shlex.join(command)}\n{''.join(self.log())}")

    def log(self) -> list[str]:
        self._log.seek(0)
        return self._log.readlines()

    def pids(self) -> dict[str, int]:
        """The front's process id, and the engine's: its child that holds the most memory."""
        front = self.process.pid
        children: list[int] = []
        for task in Path(f"/proc/{front}/task").iterdir():
            children += map(int, (task / "children").read_text().split())
        return {"front": front, "engine": max(children, key=rss_mib)}

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return str(answer.read().decode())

    def blocks(self) -> dict[str, float]:
        """Blocks by state, requests under way, aborts and evictions so far, as /metrics tells them."""
        text = self.get("/metrics")
        found = dict(re.findall(r'^octavo_kv_cache_blocks\{state="(\w+)"\} (\S+)$', text, re.MULTILINE))
        for name, series in (
            ("running", "octavo_requests_running"),
            ("aborts", 'octavo_requests_total{finish_reason="abort"}'),
            ("evictions", "octavo_evictions_total"),
        ):
            (found[name],) = re.findall(rf"^{re.escape(series)} (\S+)$", text, re.MULTILINE)
        return {name: float(count) for name, count in found.items()}

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def line_of(process: subprocess.Popen[str], seconds: float, log: IO[str] | None = None) -> str:
    """The next line of its standard output. When it says none for so long, or ends, it is killed, and
    SystemExit has the end of `log`, where its standard error goes.
    """
    assert process.stdout is not None
    is_heard = select.select([process.stdout], [], [], seconds)[0]
    if is_heard and (line := process.stdout.readline()):
        return line
    process.kill()
    how = f"ended with status {process.wait()}" if is_heard else f"said nothing for {seconds:g} s"
    said = ""
    if log is not None:
        log.seek(0)
        said = "".join(log.readlines()[-_MOST_LINES:])
    raise SystemExit(f"a process {how}: {shlex.join(map(str, process.args))[:500]}\n{said}")  # type: ignore[arg-type]


def end(process: subprocess.Popen[str]) -> None:
    """Asks it to end, and kills it when it does not in time."""
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def rss_mib(pid: int) -> float:
    """Resident memory; 0 for a process that has gone."""
    try:
        found = re.search(r"^VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return 0.0
    return int(found[1]) / 1024 if found else 0.0
