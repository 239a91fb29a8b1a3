"""Options that several subcommands share, and how they become engine and sampling arguments.

Every default is None, "not said": the defaults themselves are written once, in `EngineConfig`,
in `SamplingParams` and in the model's own generation_config.json.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Final, get_type_hints

import typer

from octavo import config
from octavo.errors import ConfigError, RequestError


def _option(help: str, *names: str, panel: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, show_default=False)


Model = Annotated[
    str,
    typer.Argument(
        help="Folder, .gguf file, Hugging Face repo id, or the built-in smollm2-135m.", metavar="MODEL"
    ),
]

_engine = functools.partial(_option, panel="Engine")
_sampling = functools.partial(
    _option, panel="Sampling (defaults: generation_config.json of the model, else as told here)"
)

_BATCHED_TOKENS = (
    f"Most tokens computed in one step. Default: {config.DEFAULT_MAX_NUM_BATCHED_TOKENS} on a CPU, "
    f"up to {config.DEFAULT_MAX_NUM_BATCHED_TOKENS_ON_GPU} on a GPU."
)


@dataclass(frozen=True)
class EngineOptions:
    """What `LLM(...)` is given; names as in `octavo.config.EngineConfig`."""

    dtype: Annotated[
        str | None,
        _engine(
            "auto (float32 on a CPU, the checkpoint's on a GPU), float32, bfloat16 or float16. Default: auto."
        ),
    ] = None
    quantization: Annotated[
        str | None, _engine("Weights kept smaller on a CPU: float16 or int8. Default: as --dtype.")
    ] = None
    device: Annotated[str | None, _engine("auto (cuda where there is one), cpu or cuda. Default: auto.")] = (
        None
    )
    load_format: Annotated[
        str | None, _engine("auto, safetensors, gguf, or dummy (random weights). Default: auto.")
    ] = None
    revision: Annotated[
        str | None, _engine("Branch, tag or commit of a Hugging Face repo id. Default: main.")
    ] = None
    max_model_len: Annotated[
        int | None, _engine("Most tokens a request may have, prompt and answer. Default: the model's.")
    ] = None
    max_num_seqs: Annotated[
        int | None, _engine(f"Most requests running at once. Default: {config.DEFAULT_MAX_NUM_SEQS}.")
    ] = None
    max_num_batched_tokens: Annotated[int | None, _engine(_BATCHED_TOKENS)] = None
    block_size: Annotated[int | None, _engine("Tokens per cache block, a power of two. Default: 16.")] = None
    num_blocks: Annotated[int | None, _engine("Cache size in blocks, instead of a memory budget.")] = None
    kv_cache_memory: Annotated[
        str | None, _engine("Cache size, such as 2GiB. Default: a part of the free memory.")
    ] = None
    gpu_memory: Annotated[
        str | None, _engine("Most GPU memory to take, weights and all: a share (0.9) or a size (40GiB).")
    ] = None
    kv_cache_dtype: Annotated[
        str | None,
        _engine(
            "Cached keys and values: auto (as --dtype), a dtype, or fp8 or int8 on a GPU. Default: auto."
        ),
    ] = None
    no_prefix_caching: Annotated[bool, _engine("Compute every prompt in full.", "--no-prefix-caching")] = (
        False
    )
    no_overlap: Annotated[
        bool, _engine("Read the tokens of a step before the next one is launched.", "--no-overlap")
    ] = False
    run_ahead: Annotated[
        int | None,
        _engine(f"Most steps launched ahead while nothing else waits. Default: {config.DEFAULT_RUN_AHEAD}."),
    ] = None
    eager: Annotated[bool, _engine("No CUDA graphs on a GPU.", "--eager")] = False
    cascade_attention: Annotated[
        bool | None,
        _engine(
            "Read keys that requests have in common once for eight, in graphs on a GPU. Default: on there.",
            "--cascade-attention/--no-cascade-attention",
        ),
    ] = None
    deterministic: Annotated[
        bool, _engine("The same bits whatever else is in the batch; slower on a GPU.", "--deterministic")
    ] = False
    num_threads: Annotated[int | None, _engine("CPU threads. Default: all cores.")] = None
    trace: Annotated[str | None, _engine("Write one JSON line per engine step to this file.")] = None
    profile: Annotated[str | None, _engine("Write a Chrome trace of every step to this file.")] = None

    def config(self, model: str) -> config.EngineConfig:
        """The whole of it, checked; typer.BadParameter for a value that no model takes."""
        from octavo.cache.sizing import parse_memory

        with wrong_usage():
            if self.kv_cache_memory is not None:
                parse_memory(self.kv_cache_memory, "kv_cache_memory")
            return config.EngineConfig.from_options(model, **self.llm_kwargs())

    def llm_kwargs(self) -> dict[str, Any]:
        """The arguments for `LLM(model, **kwargs)`: only what was said."""
        said = {name: value for name, value in vars(self).items() if value is not None}
        for option, name, value in (
            ("no_prefix_caching", "enable_prefix_caching", False),
            ("no_overlap", "overlap", False),
            ("eager", "enforce_eager", True),
            ("deterministic", "deterministic", True),
        ):
            if said.pop(option):
                said[name] = value
        return said


@dataclass(frozen=True)
class SamplingOptions:
    """Fields of `SamplingParams` on the command line."""

    max_tokens: Annotated[int | None, _sampling("Most tokens to generate. Default: 256.")] = None
    temperature: Annotated[float | None, _sampling("0 always takes the likeliest token. Default: 0.")] = None
    top_p: Annotated[
        float | None, _sampling("Sample from the likeliest tokens that hold this mass, up to 1. Default: 1.")
    ] = None
    top_k: Annotated[int | None, _sampling("Sample from this many likeliest tokens; 0: all. Default: 0.")] = (
        None
    )
    min_p: Annotated[
        float | None, _sampling("Drop tokens less likely than this share of the likeliest. Default: 0.")
    ] = None
    repetition_penalty: Annotated[
        float | None, _sampling("Above 1 discourages tokens seen before. Default: 1.")
    ] = None
    presence_penalty: Annotated[
        float | None, _sampling("Subtracted once for generated tokens, -2 to 2. Default: 0.")
    ] = None
    frequency_penalty: Annotated[
        float | None, _sampling("Subtracted for each time a token was generated, -2 to 2. Default: 0.")
    ] = None
    seed: Annotated[
        int | None, _sampling("Makes sampling repeatable, whatever else runs. Default: none.")
    ] = None
    n: Annotated[int | None, _sampling("Answers per prompt. Default: 1.", "--n", "-n")] = None
    stop: Annotated[list[str] | None, _sampling("End at this text; may be given several times.")] = None
    min_tokens: Annotated[int | None, _sampling("Fewest tokens before an end is allowed. Default: 0.")] = None
    ignore_eos: Annotated[bool, _sampling("Go on past the end-of-text token.", "--ignore-eos")] = False

    def check(self) -> None:
        """typer.BadParameter for a value that no model takes, before one is loaded."""
        from octavo.sampling_params import SamplingParams

        with wrong_usage():
            SamplingParams(**{"max_tokens": None, **self._said()})

    def apply(self, defaults: Any) -> Any:
        """`defaults` (a `SamplingParams`) with what was said put in."""
        return dataclasses.replace(defaults, **self._said())

    def _said(self) -> dict[str, Any]:
        said = {k: v for k, v in vars(self).items() if v is not None and v is not False and v != []}
        if "stop" in said:
            said["stop"] = tuple(said["stop"])
        return said


@contextlib.contextmanager
def wrong_usage() -> Iterator[None]:
    """What is refused inside is wrong by itself, whatever the model: typer.BadParameter (exit status 2), and
    what the message begins with is the option's name.
    """
    try:
        yield
    except (ConfigError, RequestError) as error:
        raise typer.BadParameter(_named_as_option(str(error))) from error


_OPTIONS: Final = {"served_model_names": "served_model_name", "cors_origins": "cors_origin"}
"""What may be given several times, one at a time."""


def _named_as_option(message: str) -> str:
    name = re.match(r"[a-z_]+", message)
    if name is None:
        return message
    if name[0] == "model":  # no option, but the first argument
        return f"MODEL{message[name.end() :]}"
    option = _OPTIONS.get(name[0], name[0].removesuffix("_s")).replace("_", "-")
    return f"{'-' if len(option) == 1 else '--'}{option}{message[name.end() :]}"


def expands(**groups: type) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Lets a command take whole option dataclasses: ``@expands(engine=EngineOptions)``.

    typer sees each field of the dataclass as an option of the command; the command gets the
    dataclass as the keyword argument of that name.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        own_hints = get_type_hints(command, include_extras=True)
        parameters = [
            parameter.replace(annotation=own_hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
            for name, parameter in inspect.signature(command).parameters.items()
            if name not in groups
        ]
        for group in groups.values():
            hints = get_type_hints(group, include_extras=True)
            parameters += [
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=field.default,
                    annotation=hints[field.name],
                )
                for field in dataclasses.fields(group)
            ]

        @functools.wraps(command)
        def expanded(**values: Any) -> Any:
            grouped = {
                name: group(**{field.name: values.pop(field.name) for field in dataclasses.fields(group)})
                for name, group in groups.items()
            }
            return command(**values, **grouped)

        expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # read by typer
        expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return expanded

    return decorate
