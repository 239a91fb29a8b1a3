"""`octavo bench`: the engine on a standard workload, the kernels on a GPU, and their launch parameters."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from octavo.cli.bench_serve import serve
from octavo.cli.options import EngineOptions, Model, expands
from octavo.cli.session import open_llm
from octavo.errors import ConfigError, nearest

app = typer.Typer(add_completion=False, no_args_is_help=True)
app.command()(serve)


@app.callback()
def bench() -> None:
    """Measure speed."""


@app.command()
@expands(engine=EngineOptions)
def throughput(
    model: Model = "smollm2-135m",
    workload: Annotated[
        str, typer.Option(help="random (that of nano-vllm's bench.py) or shared-prefix.")
    ] = "random",
    num_seqs: Annotated[int, typer.Option(help="Requests, all sent at once.")] = 256,
    min_input: Annotated[int, typer.Option(help="Fewest prompt tokens.")] = 100,
    max_input: Annotated[int, typer.Option(help="Most prompt tokens.")] = 1024,
    min_output: Annotated[int, typer.Option(help="Fewest generated tokens.")] = 100,
    max_output: Annotated[int, typer.Option(help="Most generated tokens.")] = 1024,
    num_prefixes: Annotated[int, typer.Option(help="shared-prefix: different prefixes.")] = 4,
    prefix_len: Annotated[int, typer.Option(help="shared-prefix: tokens of each.")] = 512,
    scale: Annotated[float, typer.Option(help="Multiplies the number of requests and all lengths.")] = 1.0,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 0.6,
    workload_seed: Annotated[int, typer.Option(help="Seed of the workload.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write a result file as in bench/results/.", metavar="FILE")
    ] = None,
    *,
    engine: EngineOptions,
) -> None:
    """Tokens a second on random prompts, or on prompts that share their beginnings.

    The defaults are the benchmark of nano-vllm: 256 requests of 100 to 1024 prompt tokens and as many
    generated ones, temperature 0.6, end-of-text ignored.
    """
    from octavo.bench.throughput import measure_throughput
    from octavo.bench.workloads import WORKLOADS, WorkloadShape

    if workload not in WORKLOADS:
        known = ", ".join(WORKLOADS)
        raise typer.BadParameter(
            f"--workload must be one of {known}; got {workload!r}{nearest(workload, WORKLOADS)}"
        )
    if json_file is not None:
        check_writable(json_file)
    shape = WorkloadShape(
        num_seqs=num_seqs,
        min_input=min_input,
        max_input=max_input,
        min_output=min_output,
        max_output=max_output,
        num_prefixes=num_prefixes,
        prefix_len=prefix_len,
    ).scaled(scale)
    requests = WORKLOADS[workload](shape, workload_seed)
    if engine.max_model_len is None:
        engine = dataclasses.replace(engine, max_model_len=requests.max_model_len)
    with open_llm(model, engine) as llm:
        result = measure_throughput(llm, requests, temperature=temperature, use_tqdm=sys.stderr.isatty())
    print(
        f"{len(requests.prompts)} requests, {result.num_input_tokens} prompt tokens "
        f"({100 * result.cached_share:.1f} % cached), {result.num_output_tokens} generated "
        f"in {result.elapsed_s:.2f} s\n"
        f"{result.output_tokens_per_s:.1f} output tokens/s, {result.total_tokens_per_s:.1f} with prompts\n"
        f"first token after {result.median_ttft_s:.2f} s (median), "
        f"then {1000 * result.median_tpot_s:.1f} ms a token (median)"
    )
    if json_file is not None:
        from octavo.bench.report import write_result

        command = shlex.join(["octavo", *sys.argv[1:]])
        write_result(json_file, result.rows(f"{workload} workload"), command=command)


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
    for option, path in (("--json", json_file), ("--plot", plot_file)):
        if path is not None:
            check_writable(path, option)
    from octavo.bench import kernels as bench_kernels

    chosen = bench_kernels.chosen(rows or [], quick)
    if list_rows:
        print("\n".join(case.name for case in chosen))
        return 0
    from octavo.cli.kernel_table import measure

    names: list[str] | None
    if peers in ("", "all"):
        names = [] if quick and not peers else None
    else:
        names = [] if peers == "none" else [name.strip() for name in peers.split(",")]
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


def check_writable(path: Path, option: str = "--json") -> None:
    """ConfigError now rather than after the run when no file can be written there."""
    if not path.parent.is_dir():
        raise ConfigError(f"{option}: there is no folder {str(path.parent)!r}; make it first")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{option}: {str(path)!r} cannot be written; name another file")
