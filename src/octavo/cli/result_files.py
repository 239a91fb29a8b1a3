"""The files that a benchmark leaves behind: checked before it runs, written after it."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.options import wrong_usage

if TYPE_CHECKING:
    from octavo.bench.report import Row

JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write a result file as in bench/results/.", metavar="FILE")
]
PlotFile = Annotated[
    Path | None,
    typer.Option(
        "--plot", help="Draw tokens a second and KV use over time (.png, .svg, .pdf).", metavar="FILE"
    ),
]


def check_files(json_file: Path | None, plot_file: Path | None) -> None:
    """Before the run, for what could not be written after it: typer.BadParameter, or ConfigError when
    there is nothing to draw with.
    """
    for option, path in (("--json", json_file), ("--plot", plot_file)):
        if path is not None:
            check_writable(path, option)
    if plot_file is not None:
        from octavo.bench.pictures import check_plot, new_figure

        with wrong_usage():
            check_plot(plot_file)
        new_figure(1, 1)


def check_writable(path: Path, option: str = "--json") -> None:
    """typer.BadParameter now rather than after the run when no file can be written there."""
    if not path.parent.is_dir():
        raise typer.BadParameter(f"{option}: there is no folder {str(path.parent)!r}; make it first")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise typer.BadParameter(f"{option}: {str(path)!r} cannot be written; name another file")


def write_rows(json_file: Path | None, rows: list[Row]) -> None:
    """The result file, if one was asked for, under this process's own command."""
    if json_file is not None:
        from octavo.bench.report import write_result

        write_result(json_file, rows, command=shlex.join(["octavo", *sys.argv[1:]]))
