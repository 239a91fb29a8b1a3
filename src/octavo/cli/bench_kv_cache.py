"""`octavo bench kv-cache`: what a KV cache buys, measured."""

from __future__ import annotations

import dataclasses
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cli.options import EngineOptions, Model, expands
from octavo.cli.result_files import JsonFile, check_writable
from octavo.errors import ConfigError, nearest

# Each part makes its own cache; a size or a kind given here would mean something else in every one.
_OF_THE_PARTS = (
    *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "num_blocks"),
    *("kv_cache_memory", "kv_cache_dtype"),
)


@expands(engine=EngineOptions)
def kv_cache(
    model: Model = "smollm2-135m",
    parts: Annotated[
        str, typer.Option(help="Which comparisons, with commas: growth, fit, padding, prefix, dtype.")
    ] = "growth,fit,padding,prefix,dtype",
    prompt_len: Annotated[int, typer.Option(help="growth: prompt tokens.", min=1)] = 64,
    output_len: Annotated[int, typer.Option(help="growth: generated tokens.", min=2)] = 128,
    rounds: Annotated[int, typer.Option(help="Runs of each variant; medians count.", min=1)] = 2,
    scale: Annotated[
        float,
        typer.Option(help="Multiplies all lengths and numbers of requests, of growth too.", min=0.01, max=64),
    ] = 1.0,
    peers: Annotated[str, typer.Option(help="transformers, or none.")] = "transformers",
    json_file: JsonFile = None,
    plot_folder: Annotated[
        Path | None,
        typer.Option("--plot", help="Draw a picture of each part into this folder.", metavar="FOLDER"),
    ] = None,
    from_file: Annotated[
        Path | None,
        typer.Option(
            "--from", help="Measure nothing: tables and pictures of this result file.", metavar="FILE"
        ),
    ] = None,
    *,
    engine: EngineOptions,
) -> None:
    """What a KV cache buys: answers with and without one, and what it is kept in.

    The same prompt answered with a cache and by computing everything anew for each token; blocks beside one
    piece of memory per request; packed beside padded; earlier turns found beside read anew; smaller dtypes.
    Peer: Transformers with use_cache=True and False. docs/what_a_kv_cache_buys.md explains the results.
    Begin with --parts growth --output-len 64 --peers none, a small part of the whole. Standard error tells of
    each measurement as it begins.
    """
    from octavo.bench.report import read_result, table

    if json_file is not None:
        check_writable(json_file)
    if plot_folder is not None:
        from octavo.bench.pictures import new_figure

        check_writable(plot_folder / "kv-cache-growth.png", "--plot")
        new_figure(1, 1)  # refuses now when there is nothing to draw with
    if from_file is not None:
        result = read_result(from_file)
    else:
        result = _measured(
            model, _parts(parts), _peers(peers), engine, json_file, prompt_len, output_len, rounds, scale
        )
    print(table({**result, "rows": [row for row in result["rows"] if _is_shown(row["name"])]}))
    if plot_folder is not None:
        from octavo.bench.kv_cache_pictures import draw

        for path in draw(result["rows"], plot_folder, result["hardware"]):
            print(f"drew {path}")


def _is_shown(name: str) -> bool:
    """Of a curve's many points those at powers of two."""
    length = name.rpartition("/")[2]
    return not length.isdecimal() or int(length) & (int(length) - 1) == 0


def _parts(text: str) -> list[str]:
    from octavo.bench.kv_cache import PARTS

    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in PARTS:
            raise typer.BadParameter(f"--parts takes {', '.join(PARTS)}; got {name!r}{nearest(name, PARTS)}")
    if not names:
        raise typer.BadParameter(f"--parts needs at least one of {', '.join(PARTS)}")
    return names


def _peers(text: str) -> bool:
    if text not in ("transformers", "none"):
        raise typer.BadParameter(f"--peers must be transformers or none, got {text!r}")
    return text == "transformers"


def _measured(
    model: str,
    parts: list[str],
    with_peer: bool,
    engine: EngineOptions,
    json_file: Path | None,
    prompt_len: int,
    output_len: int,
    rounds: int,
    scale: float,
) -> dict[str, Any]:
    """The result as its file holds it, `json_file` or one that is thrown away."""
    for name in _OF_THE_PARTS:
        if getattr(engine, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option}: the parts of kv-cache choose this themselves; leave it out")
    if engine.no_prefix_caching:
        raise ConfigError("--no-prefix-caching: the parts of kv-cache choose this themselves; leave it out")
    from octavo.bench.kv_cache import Sizes, measure
    from octavo.bench.kv_cache_engine import Models
    from octavo.bench.report import gpu_name, read_result, write_result

    sizes = dataclasses.replace(Sizes(), prompt_len=prompt_len, output_len=output_len, rounds=rounds)
    sizes = sizes.scaled(scale)
    options = {name: value for name, value in engine.llm_kwargs().items() if name != "trace"}
    models = Models(model, **options)

    started = time.monotonic()

    def report(line: str) -> None:
        print(f"{time.monotonic() - started:6.0f} s  {line}", file=sys.stderr, flush=True)

    rows = measure(models, sizes, parts, with_peer=with_peer, report=report)
    gpu = gpu_name() if models.device.type == "cuda" else ""
    with tempfile.TemporaryDirectory() as folder:
        path = json_file or Path(folder) / "kv_cache.json"
        write_result(path, rows, command=shlex.join(["octavo", *sys.argv[1:]]), gpu=gpu)
        return read_result(path)
