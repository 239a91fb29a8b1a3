"""`octavo bench throughput`, `latency` and `serve-sim`: the engine alone, in this process."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.options import EngineOptions, Model, expands, wrong_usage
from octavo.cli.result_files import JsonFile, PlotFile, check_files, write_rows
from octavo.cli.session import open_llm
from octavo.errors import ConfigError, nearest
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.bench.drive import Run
    from octavo.bench.latency import LatencyResult
    from octavo.llm import LLM

_WARM_UP_ROOM = 16  # tokens; the warm-up's request is short, but those of the run may be shorter


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
    num_prefixes: Annotated[
        int | None, typer.Option(help="shared-prefix: different prefixes. Default: 4.", show_default=False)
    ] = None,
    prefix_len: Annotated[
        int | None, typer.Option(help="shared-prefix: tokens of each. Default: 512.", show_default=False)
    ] = None,
    scale: Annotated[float, typer.Option(help="Multiplies the number of requests and all lengths.")] = 1.0,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 0.6,
    workload_seed: Annotated[int, typer.Option(help="Seed of the workload.")] = 0,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
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
    beginnings = {"num_prefixes": num_prefixes, "prefix_len": prefix_len}
    if workload == "random" and any(value is not None for value in beginnings.values()):
        raise typer.BadParameter("--num-prefixes and --prefix-len are for --workload shared-prefix; add that")
    check_files(json_file, plot_file)
    with wrong_usage():
        shape = WorkloadShape(
            num_seqs=num_seqs,
            min_input=min_input,
            max_input=max_input,
            min_output=min_output,
            max_output=max_output,
            **{name: value for name, value in beginnings.items() if value is not None},
        ).scaled(scale)
        SamplingParams(temperature=temperature)
    requests = WORKLOADS[workload](shape, workload_seed)
    way_out = "lower --max-input and --max-output, or --scale"
    with (
        _open_for(requests.max_model_len, model, engine, way_out) as llm,
        progress(len(requests.prompts)) as advance,
    ):
        result = measure_throughput(llm, requests, temperature=temperature, on_finished=advance)
    print(
        f"{len(requests.prompts)} requests, {result.num_input_tokens} prompt tokens "
        f"({100 * result.cached_share:.1f} % cached), {result.num_output_tokens} generated "
        f"in {result.elapsed_s:.2f} s\n"
        f"{result.output_tokens_per_s:.1f} output tokens/s, {result.total_tokens_per_s:.1f} with prompts\n"
        f"first token after {result.median_ttft_s:.2f} s (median), "
        f"then {1000 * result.median_tpot_s:.1f} ms a token (median)"
    )
    if plot_file is not None:
        from octavo.bench.timeline import plot_timeline

        plot_timeline(result.moments, plot_file, f"{model}, {workload} workload")
    write_rows(json_file, result.rows(f"{workload} workload"))


@expands(engine=EngineOptions)
def latency(
    model: Model = "smollm2-135m",
    batch_size: Annotated[
        list[int] | None, typer.Option(help="Requests at a time; repeatable. Default: 1.", min=1)
    ] = None,
    input_len: Annotated[int, typer.Option(help="Prompt tokens.", min=1)] = 128,
    output_len: Annotated[int, typer.Option(help="Generated tokens.", min=2)] = 256,
    repeats: Annotated[int, typer.Option(help="Timed runs of each batch.", min=1)] = 3,
    json_file: JsonFile = None,
    *,
    engine: EngineOptions,
) -> None:
    """Time to the first token and from token to token, for batches of equal requests."""
    from octavo.bench.latency import measure_latency

    check_files(json_file, None)
    sizes = batch_size or [1]

    def show(result: LatencyResult) -> None:
        print(
            f"batch {result.batch_size}: first token {1000 * result.ttft.p50:.1f} ms, then "
            f"{1000 * result.gap.p50:.2f} ms a token (99th percentile {1000 * result.gap.p99:.2f}), "
            f"{result.output_tokens_per_s:.1f} tokens/s"
        )

    way_out = "lower --input-len or --output-len"
    with _open_for(input_len + output_len, model, engine, way_out) as llm:
        results = measure_latency(
            llm, sizes, input_len=input_len, output_len=output_len, repeats=repeats, done=show
        )
    name = f"latency, {input_len} in, {output_len} out"
    write_rows(json_file, [row for result in results for row in result.rows(name)])


@expands(engine=EngineOptions)
def serve_sim(
    model: Model = "smollm2-135m",
    rate: Annotated[float, typer.Option(help="Requests a second (inf: all at once).")] = 1.0,
    burstiness: Annotated[
        float, typer.Option(help="Shape of the gamma law of gaps; 1 is Poisson, below is burstier.")
    ] = 1.0,
    num_requests: Annotated[int, typer.Option(help="Requests in all.", min=1)] = 64,
    input_lens: Annotated[
        str, typer.Option(help="Prompt tokens: a number, or a law such as uniform:LOW:HIGH.")
    ] = "uniform:100:1024",
    output_lens: Annotated[str, typer.Option(help="Generated tokens, likewise.")] = "uniform:100:1024",
    num_prefixes: Annotated[int, typer.Option(help="Prompts begin with one of so many beginnings.")] = 0,
    prefix_len: Annotated[int, typer.Option(help="Tokens of each beginning.")] = 0,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 0.0,
    workload_seed: Annotated[int, typer.Option(help="Seed of arrivals, lengths and prompts.")] = 0,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
    *,
    engine: EngineOptions,
) -> None:
    """Requests that arrive while others run, without HTTP: what the engine alone makes of such a load.

    `octavo bench serve` measures the same through a server.
    """
    from octavo.bench.serve_calls import Arrivals, Lengths, Mix
    from octavo.bench.serve_sim import calls_of, simulate

    check_files(json_file, plot_file)
    with wrong_usage():
        mix = Mix(
            Lengths.parse("input_lens", input_lens),
            Lengths.parse("output_lens", output_lens),
            Arrivals(rate, burstiness),
            as_text=False,
            num_prefixes=num_prefixes,
            prefix_len=prefix_len,
        )
        SamplingParams(temperature=temperature)
    calls = calls_of(mix, num_requests, workload_seed)
    longest = max(len(call.prompt) + call.output_len for call in calls)
    way_out = "shorten --input-lens or --output-lens"
    with _open_for(longest, model, engine, way_out) as llm, progress(num_requests) as advance:
        result = simulate(llm, calls, temperature=temperature, on_finished=advance)
    num_prompt_tokens = sum(len(call.prompt) for call in calls)
    print(
        f"{num_requests} requests, {num_prompt_tokens} prompt tokens "
        f"({100 * result.cached_share:.1f} % cached), {result.run.num_output_tokens} generated in "
        f"{result.run.elapsed_s:.2f} s: {result.output_tokens_per_s:.1f} output tokens/s"
    )
    for measure, spread in result.spreads().items():
        print(
            f"{measure:>15}: median {1000 * spread.p50:9.1f} ms   90 % {1000 * spread.p90:9.1f}   "
            f"99 % {1000 * spread.p99:9.1f}   longest {1000 * spread.max:9.1f}"
        )
    if plot_file is not None:
        from octavo.bench.timeline import plot_timeline

        plot_timeline(result.moments, plot_file, f"{model}: {num_requests} requests at {rate:g} a second")
    write_rows(json_file, result.rows(f"serve-sim, {rate:g} requests/s"))


def _open_for(longest: int, model: str, engine: EngineOptions, way_out: str) -> LLM:
    """The engine, with room for requests of `longest` tokens where `engine` says no length."""
    if engine.max_model_len is not None:
        return open_llm(model, engine)
    room = max(longest, _WARM_UP_ROOM)
    try:
        return open_llm(model, dataclasses.replace(engine, max_model_len=room))
    except ConfigError as error:
        if not str(error).startswith("max_model_len"):
            raise
        raise ConfigError(
            f"the longest request of this run has {longest} tokens, prompt and answer, and that is too many "
            f"for {model}; {way_out} ({error})"
        ) from error


@contextlib.contextmanager
def progress(num_requests: int) -> Iterator[Callable[[Run], None] | None]:
    """On a terminal a bar of finished requests; what it gives is for `drive`."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("answering", total=num_requests)

        def advance(run: Run) -> None:
            speed = run.num_output_tokens / run.elapsed_s
            bar.update(task, completed=len(run.outputs), description=f"{speed:.0f} tokens/s")

        yield advance
