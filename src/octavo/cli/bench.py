"""`octavo bench throughput`: tokens a second on a standard workload."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from octavo.cli.options import EngineOptions, Model, expands
from octavo.cli.session import open_llm
from octavo.errors import ConfigError, nearest

app = typer.Typer(add_completion=False, no_args_is_help=True)


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
        _check_writable(json_file)
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


def _check_writable(path: Path) -> None:
    """ConfigError now rather than after the run when no file can be written there."""
    if not path.parent.is_dir():
        raise ConfigError(f"--json: there is no folder {str(path.parent)!r}; make it first")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"--json: {str(path)!r} cannot be written; name another file")
