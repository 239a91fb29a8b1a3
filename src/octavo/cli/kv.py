"""`octavo kv MODEL`: what the KV cache of a model costs, and how many requests a memory holds. No torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cache.sizing import RequestSizing, format_bytes, num_blocks_for_bytes, parse_memory, size_requests
from octavo.cache.spec import DTYPE_BYTES, KVCacheSpec
from octavo.cli.kv_plot import write_plot
from octavo.cli.options import wrong_usage
from octavo.cli.result_files import check_writable
from octavo.errors import CapacityError, ConfigError, ModelError, shown
from octavo.models.config import load_json
from octavo.models.shapes import KNOWN_SHAPES, known_shape, max_positions, spec_from_config, suggest_shape
from octavo.models.source import resolve_model

app = typer.Typer(add_completion=False)

MAX_CONTEXT = 2**40
PLOT_FORMATS = (".png", ".svg")


@dataclass(frozen=True)
class Estimate:
    """Everything `octavo kv` says about one model; sizes in bytes."""

    model: str
    source: str
    spec: KVCacheSpec
    sizing: RequestSizing
    num_requests: int
    memory_bytes: int | None
    is_checkpoint_dtype: bool

    def as_json(self) -> dict[str, Any]:
        """The documented keys of `--json` (docs/kv_sizing.md)."""
        spec, sizing = self.spec, self.sizing
        memory = self.memory_bytes
        return {
            "model": self.model,
            "source": self.source,
            "num_layers": spec.num_layers,
            "num_kv_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim,
            "value_head_dim": spec.value_width,
            "windows": None if spec.windows is None else list(spec.windows),
            "kv_dtype": spec.dtype,
            "kv_scales": spec.scales,
            "block_size": spec.block_size,
            "bytes_per_token": spec.bytes_per_token,
            "bytes_per_block": spec.bytes_per_block,
            "context": sizing.num_tokens,
            "max_len": sizing.max_len,
            "blocks_per_request": sizing.num_blocks,
            "bytes_per_request": sizing.request_bytes,
            "waste_tokens": sizing.waste_tokens,
            "waste_bytes": sizing.waste_bytes,
            "windowed_bytes_per_request": sizing.windowed_request_bytes,
            "contiguous_bytes_per_request": sizing.contiguous_bytes,
            "requests": self.num_requests,
            "total_bytes": self.num_requests * sizing.request_bytes,
            "contiguous_total_bytes": self.num_requests * sizing.contiguous_bytes,
            "memory_bytes": memory,
            "num_blocks": None if memory is None else num_blocks_for_bytes(spec, memory),
            "requests_fit": sizing.requests_fit,
            "windowed_requests_fit": sizing.windowed_requests_fit,
            "contiguous_requests_fit": sizing.contiguous_requests_fit,
        }


@app.command()
def kv(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            help="A known shape (see --list), a folder, config.json, .gguf file, or Hugging Face repo id.",
            metavar="MODEL",
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a request, prompt and answer. Default: the model's maximum.", show_default=False
        ),
    ] = None,
    max_len: Annotated[
        int | None,
        typer.Option(
            help="Length an engine without blocks reserves for. Default: the model's maximum.",
            show_default=False,
        ),
    ] = None,
    requests: Annotated[int, typer.Option(help="Number of such requests at once.")] = 1,
    kv_dtype: Annotated[
        str,
        typer.Option(
            "--kv-cache-dtype",
            "--kv-dtype",
            help="auto (the checkpoint's), float32, float16, bfloat16, fp8 or int8.",
        ),
    ] = "auto",
    kv_scales: Annotated[
        str | None,
        typer.Option(
            help="Scales of an fp8 or int8 cache: token_head or tensor. Default: token_head, as the engine.",
            show_default=False,
        ),
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens per block, a power of two.")] = 16,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Memory for the cache, such as 24GiB; says how many requests fit.", show_default=False
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Write a plot to this .png or .svg file.", show_default=False)
    ] = None,
    list_shapes: Annotated[bool, typer.Option("--list", help="List the known shapes.")] = False,
) -> None:
    """Size the KV cache of a model: per token, per request, and how many requests fit."""
    if list_shapes:
        if model is not None:
            raise typer.BadParameter(f"--list lists every known shape; leave it out to size {shown(model)}")
        if others := _given_options(ctx) - {"--list"}:
            raise typer.BadParameter(f"--list takes no other option; leave out {', '.join(sorted(others))}")
        _print_shapes()
        return
    if model is None:
        raise typer.BadParameter(
            "name a model, for example: octavo kv qwen3-0.6b; --list shows the known shapes"
        )
    if plot is not None:
        if plot.suffix.lower() not in PLOT_FORMATS:
            raise typer.BadParameter(
                f"--plot must name a {' or '.join(PLOT_FORMATS)} file, got {str(plot)!r}"
            )
        check_writable(plot, "--plot")
    with wrong_usage():
        memory_bytes = None if memory is None else parse_memory(memory)
    estimate = estimate_model(
        model,
        context=context,
        max_len=max_len,
        num_requests=requests,
        kv_dtype=kv_dtype,
        kv_scales=kv_scales,
        block_size=block_size,
        memory_bytes=memory_bytes,
    )
    if plot is not None:
        write_plot(
            plot,
            _title(estimate),
            estimate.spec,
            longest=estimate.sizing.max_len,
            memory_bytes=estimate.memory_bytes,
        )
    if as_json:
        print(json.dumps(estimate.as_json(), indent=2))
    else:
        _print_table(estimate)
        if plot is not None:
            print(f"plot written to {plot}")


def _given_options(ctx: typer.Context) -> set[str]:
    sources = {param.opts[0]: ctx.get_parameter_source(str(param.name)) for param in ctx.command.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def estimate_model(
    model: str,
    *,
    context: int | None = None,
    max_len: int | None = None,
    num_requests: int = 1,
    kv_dtype: str = "auto",
    kv_scales: str | None = None,
    block_size: int = 16,
    memory_bytes: int | None = None,
) -> Estimate:
    """The figures for `model`: those of the engine's own cache unless `kv_scales` says otherwise.

    ModelError when it is unknown, ConfigError when a number makes no sense, CapacityError when the memory
    does not hold one block.
    """
    with wrong_usage():
        for name, value in (("--context", context), ("--max-len", max_len), ("--requests", num_requests)):
            if value is not None and not 1 <= value <= MAX_CONTEXT:
                raise ConfigError(f"{name} must be between 1 and {MAX_CONTEXT:,}, got {value:,}")
    source, config = find_config(model)
    spec = spec_from_config(
        config, dtype=None if kv_dtype == "auto" else kv_dtype, block_size=block_size, scales=kv_scales
    )
    longest = max_len or max_positions(config) or context
    if longest is None:
        raise ConfigError(f"{source} states no maximum length; give --context")
    context = context or longest
    if context > longest:
        limit = "--max-len is" if max_len else f"the limit of {model} is"
        raise ConfigError(
            f"--context {context:,} does not fit: {limit} {longest:,} tokens; "
            "lower --context, or raise --max-len to size for it anyway"
        )
    sizing = size_requests(spec, context, max_len=longest, memory_bytes=memory_bytes)
    if memory_bytes is not None and memory_bytes < spec.bytes_per_block:
        raise CapacityError(
            f"--memory is {memory_bytes:,} bytes, too small for one KV cache block: {block_size} tokens take "
            f"{spec.bytes_per_block:,} bytes, a request of {context:,} tokens {sizing.request_bytes:,} bytes"
        )
    return Estimate(model, source, spec, sizing, num_requests, memory_bytes, kv_dtype == "auto")


def find_config(model: str) -> tuple[str, Mapping[str, Any]]:
    """Where the config of `model` was found, and the config. What is on the disk wins over a known shape."""
    # The functions of os.path take any name; those of Path raise for a home or a length that cannot be.
    path = Path(os.path.expanduser(model))
    if os.path.isfile(path) and path.suffix == ".json":
        return str(path), load_json(path)
    if not os.path.exists(path):
        shape = known_shape(model)
        if shape is not None:
            return "known shape", shape
    try:
        source = resolve_model(model, files="config")
    except ModelError as error:
        if os.path.exists(path):
            raise
        hint = suggest_shape(model)
        if not hint:
            raise ModelError(f"{error}; `octavo kv --list` shows the known shapes") from error
        raise ModelError(
            f"nothing is known under the name {model!r}{hint}; `octavo kv --list` shows the known shapes; a "
            "folder, config.json, .gguf file or Hugging Face repository id does as well"
        ) from error
    if source.kind == "gguf":
        return str(source.path), _config_from_gguf(source.path)
    return str(source.path / "config.json"), load_json(source.path / "config.json")


def _config_from_gguf(path: Path) -> Mapping[str, Any]:
    """GGUF metadata under the names of a config.json; the dtype is float16, the default of llama.cpp."""
    from octavo.gguf_file import GGUFFile

    with GGUFFile(path) as file:
        arch = file.metadata.get("general.architecture")
        metadata = file.values(f"{arch}.")

    def value(key: str) -> Any:
        return metadata.get(f"{arch}.{key}")

    num_layers, num_kv_heads = value("block_count"), value("attention.head_count_kv")
    if isinstance(num_kv_heads, list):
        # One entry per layer; 0 marks a layer without keys and values.
        kinds = set(num_kv_heads) - {0}
        if len(kinds) != 1:
            raise ModelError(
                f"{path}: layers with different numbers of KV heads {num_kv_heads} cannot be sized"
            )
        num_layers, num_kv_heads = sum(heads > 0 for heads in num_kv_heads), kinds.pop()
    num_heads = value("attention.head_count")
    if isinstance(num_heads, list):
        num_heads = max(num_heads)
    head_dim, hidden_size = value("attention.key_length"), value("embedding_length")
    if not head_dim and isinstance(hidden_size, int) and isinstance(num_heads, int) and num_heads:
        head_dim = hidden_size // num_heads  # whatever a config.json of this architecture may leave out
    window = value("attention.sliding_window") or None
    return {
        # Mistral's GGUF files say llama; the window is what tells them apart.
        "model_type": "mistral" if window and arch == "llama" else arch,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "hidden_size": hidden_size,
        "head_dim": head_dim,
        "value_head_dim": value("attention.value_length"),
        "sliding_window": window,
        "max_position_embeddings": value("context_length"),
        "kv_lora_rank": value("attention.kv_lora_rank"),
        "qk_rope_head_dim": value("rope.dimension_count"),
        "dtype": "float16",
    }


def _print_shapes() -> None:
    for name, config in KNOWN_SHAPES.items():
        spec = spec_from_config(config)
        print(f"{name:<16} {format_bytes(spec.bytes_per_token):>14} a token in {spec.dtype}")


def _print_table(estimate: Estimate) -> None:
    from rich.console import Console
    from rich.table import Table

    spec, sizing = estimate.spec, estimate.sizing
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(overflow="fold")

    def row(name: str, amount: str, note: str = "") -> None:
        table.add_row(name, amount, f"[dim]{note}[/dim]" if note else "")

    row("per token", format_bytes(spec.bytes_per_token), f"{spec.bytes_per_token:,} bytes")
    row("per block", format_bytes(spec.bytes_per_block), f"{spec.block_size} tokens")
    share = sizing.waste_bytes / sizing.request_bytes
    row(
        f"request of {sizing.num_tokens:,} tokens",
        format_bytes(sizing.request_bytes),
        f"{sizing.num_blocks:,} blocks, {share:.1%} wasted",
    )
    row(
        "the same in one piece",
        format_bytes(sizing.contiguous_bytes),
        f"reserved for {sizing.max_len:,} tokens",
    )
    if spec.windows is not None:
        row(
            "with windows applied",
            format_bytes(sizing.windowed_request_bytes),
            "Octavo itself keeps all tokens",
        )
    if estimate.num_requests > 1:
        row(
            f"{estimate.num_requests:,} requests",
            format_bytes(estimate.num_requests * sizing.request_bytes),
            f"in one piece each {format_bytes(estimate.num_requests * sizing.contiguous_bytes)}",
        )
    if estimate.memory_bytes is not None:
        table.add_section()
        num_blocks = num_blocks_for_bytes(spec, estimate.memory_bytes)
        row(
            f"{format_bytes(estimate.memory_bytes)} hold",
            f"{num_blocks:,} blocks",
            f"{num_blocks * spec.block_size:,} tokens",
        )
        row("fit in blocks", f"{sizing.requests_fit:,}", f"requests of {sizing.num_tokens:,} tokens")
        row(
            "fit in one piece",
            f"{sizing.contiguous_requests_fit:,}",
            f"requests reserving {sizing.max_len:,} tokens",
        )
        if spec.windows is not None:
            row("fit with windows applied", f"{sizing.windowed_requests_fit:,}")
    print(_title(estimate))
    Console().print(table)
    if DTYPE_BYTES[spec.dtype] == 1:
        print(_describe_scales(spec))
    elif estimate.is_checkpoint_dtype and spec.dtype != "float32":
        print(
            f"These are {spec.dtype} figures; on a CPU the engine takes float32 (--kv-cache-dtype float32)."
        )


def _describe_scales(spec: KVCacheSpec) -> str:
    if not spec.has_token_scales:
        return "Scales are not counted; without --kv-scales these are the engine's figures, which keeps them."
    name = "fp8" if spec.dtype == "float8_e4m3" else spec.dtype
    return (
        f"With the scales that the engine keeps: on a GPU it allocates this for --kv-cache-dtype {name}. "
        "--kv-scales tensor leaves them out."
    )


def _title(estimate: Estimate) -> str:
    return f"KV cache of {estimate.model}: {_describe_layout(estimate.spec)}"


def _describe_layout(spec: KVCacheSpec) -> str:
    if spec.value_width == 0:
        heads = f"one latent of {spec.head_dim}"
    elif spec.value_width != spec.head_dim:
        heads = f"{spec.num_kv_heads} KV heads of {spec.head_dim} + {spec.value_width}"
    else:
        heads = f"{spec.num_kv_heads} KV heads of {spec.head_dim}"
    scales = ", fp32 scales per token and head" if spec.has_token_scales else ""
    return f"{spec.num_layers} layers, {heads}, {spec.dtype}{scales}"
