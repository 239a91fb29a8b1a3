"""`octavo bench`: the engine on a standard workload, the kernels on a GPU, and their launch parameters."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from octavo.cli.bench_engine import latency, serve_sim, throughput
from octavo.cli.bench_kv_cache import kv_cache
from octavo.cli.bench_serve import serve
from octavo.cli.options import wrong_usage
from octavo.cli.result_files import check_files, check_writable

app = typer.Typer(add_completion=False, no_args_is_help=True)
for command in (throughput, latency, serve_sim, serve, kv_cache):
    app.command()(command)


@app.callback()
def bench() -> None:
    """Measure the speed of the engine, of a server, of the kernels."""


@app.command()
def kernels(
    rows: Annotated[
        list[str] | None,
        typer.Option(help="Only rows whose name matches, such as 'decode/*'; repeatable.", metavar="PATTERN"),
    ] = None,
    peers: Annotated[
        str,
        typer.Option(help="Libraries to compare with: all that are installed, none, or names with commas."),
    ] = "",
    quick: Annotated[
        bool, typer.Option("--quick", help="The rows that tell the most, and no peers unless asked for.")
    ] = False,
    list_rows: Annotated[bool, typer.Option("--list", help="Print the names of the rows and stop.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write a result file as in bench/results/.", metavar="FILE")
    ] = None,
    plot_file: Annotated[
        Path | None,
        typer.Option("--plot", help="Draw the roofline picture (.png, .svg, .pdf).", metavar="FILE"),
    ] = None,
) -> int:
    """Check Octavo's kernels on this GPU, then time them beside their floor and other libraries.

    From a cold cache, in CUDA graphs. The exit status is 1 when a kernel is wrong or does not run.
    """
    check_files(json_file, plot_file)
    from octavo.bench import kernels as bench_kernels

    with wrong_usage():
        chosen = bench_kernels.chosen(rows or [], quick)
    from octavo.cli.kernel_table import check_peers, measure

    names: list[str] | None
    if peers in ("", "all"):
        names = [] if quick and not peers else None
    else:
        names = [] if peers == "none" else [name.strip() for name in peers.split(",")]
    check_peers(names or [])
    if list_rows:
        print("\n".join(case.name for case in chosen))
        return 0
    return measure(chosen, names, json_file, plot_file, shlex.join(["octavo", *sys.argv[1:]]))


@app.command()
def tune(
    kernel: Annotated[
        list[str] | None, typer.Option(help="Only this kernel; repeatable.", metavar="NAME")
    ] = None,
    key: Annotated[
        list[str] | None,
        typer.Option(help="Only shape classes that match, such as '*bs16'; repeatable.", metavar="PATTERN"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Where the table goes; default: where the kernels look for it.", metavar="FILE"),
    ] = None,
) -> None:
    """Find the best launch parameters of every kernel on this GPU and keep them in a table.

    Tries each variant of each kernel on its own cases. Takes minutes; nothing else should run on the GPU.
    """
    if out is not None:
        check_writable(out, "--out")
    from octavo.bench.tune import tune as run

    run(kernel or [], out, print, key or [])
