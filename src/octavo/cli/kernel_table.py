"""`octavo bench kernels`: runs the rows and prints each as soon as it is measured."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
import typer

from octavo.bench.kernel_cases import Case
from octavo.bench.kernels import Bench, Measured
from octavo.bench.peers import PEERS
from octavo.bench.report import gpu_name, number, write_result
from octavo.bench.roofline import plot
from octavo.errors import ConfigError, nearest


def check_peers(names: Sequence[str]) -> None:
    """typer.BadParameter when there is no such peer."""
    known = list(dict.fromkeys(peer.name for peer in PEERS))
    for name in names:
        if name not in known:
            raise typer.BadParameter(
                f"--peers: unknown library {name!r}, expected all, none or some of {', '.join(known)}"
                f"{nearest(name, known)}"
            )


def measure(
    chosen: Sequence[Case],
    peer_names: Sequence[str] | None,
    json_file: Path | None,
    plot_file: Path | None,
    command: str,
) -> int:
    """Measure the rows and print them; the exit status.

    Raises:
        ConfigError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise ConfigError(
            "bench kernels needs a GPU that torch can use, and there is none here. What runs on the CPU: "
            "octavo bench throughput (the engine), octavo doctor (every kernel checked)"
        )
    started = time.monotonic()
    device = torch.device("cuda", torch.cuda.current_device())
    bench = Bench.open(device, peer_names)
    width = max(len(case.name) for case in chosen)
    print(
        f"{gpu_name()}; " + ", ".join(f"{name} {value:g}" for name, value in bench.ceilings.as_dict().items())
    )
    for name, reason in bench.missing_peers.items():
        print(f"not compared with {name}: {reason}")
    bench.compile(chosen)
    print(f"{'':{width}}  {'Octavo':>9}  {'of bound':>8}  {'spread':>6}")
    measured = []
    for row in bench.run(chosen):
        measured.append(row)
        print(_line(row, width), flush=True)
    failed = [row for row in measured if row.failure]
    good = [row for row in measured if not row.failure]
    print(_verdict(good, failed, len(chosen), time.monotonic() - started))
    if not good:
        for path in filter(None, (json_file, plot_file)):
            print(f"{path} is not written: no row was measured")
        return 1
    if json_file is not None:
        _write(json_file, bench, good, failed, command)
    if plot_file is not None:
        points = [row.point for row in good if row.point is not None]
        plot(points, bench.ceilings, gpu_name(), plot_file)
    return 1 if failed or len(measured) < len(chosen) else 0


def _write(path: Path, bench: Bench, good: list[Measured], failed: list[Measured], command: str) -> None:
    used = {name for row in good for name in row.peers}
    packages = {peer.package: peer.version() for peer in bench.peers if peer.name in used}
    failures = {row.case.name: row.failure for row in failed}
    failures |= {
        f"{row.case.name} {peer}": reason for row in good for peer, reason in row.peer_failures.items()
    }
    write_result(
        path,
        [row.row() for row in good],
        command=command,
        extra_versions=packages,
        gpu=gpu_name(),
        ceilings=bench.ceilings.as_dict(),
        failed=failures,
    )


def _line(row: Measured, width: int) -> str:
    name = f"{row.case.name:{width}}"
    if row.time is None:
        return f"{name}  FAILED: {row.failure}"
    of_bound = row.floor / row.value if row.case.unit == "us" else row.value / row.floor
    spread = (row.time.slowest_us - row.time.fastest_us) / row.time.median_us
    line = f"{name}  {number(row.value):>6} {row.case.unit:2}  {of_bound:>7.0%}  {spread:>6.1%}"
    if row.bar is not None:
        line += f"  bar {number(row.bar)} {'met' if row.meets_bar else 'MISSED'}"
    for peer, value in row.peers.items():
        ratio = value / row.value if row.case.unit == "us" else row.value / value
        line += f"  {peer} {number(value)} ({ratio:.2f}x)"
    for peer, reason in row.peer_failures.items():
        line += f"  {peer} failed: {reason[:60]}"
    return line


def _verdict(good: list[Measured], failed: list[Measured], asked: int, seconds: float) -> str:
    with_bar = [row for row in good if row.bar is not None]
    met = sum(row.meets_bar for row in with_bar)
    text = f"{len(good)} rows in {seconds:.0f} s; {met} of {len(with_bar)} bars met"
    lost = asked - len(good) - len(failed)
    if failed:
        text += f"; {len(failed)} FAILED"
    return text + (f"; {lost} not run: the GPU needs a new process" if lost else "")
