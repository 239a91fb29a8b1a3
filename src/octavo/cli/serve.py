"""`octavo serve MODEL`: the OpenAI API over HTTP, with a page."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cli.main import discard_output
from octavo.cli.options import EngineOptions, Model, expands, wrong_usage
from octavo.errors import ConfigError

logger = logging.getLogger("octavo.serve")

app = typer.Typer(add_completion=False)


def _option(help: str, *names: str, panel: str = "Server") -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, show_default=False)


_access = functools.partial(_option, panel="Access")
_limit = functools.partial(_option, panel="Limits")


@dataclass(frozen=True)
class ServeOptions:
    """Fields of `octavo.serve.settings.ServeSettings`, whose defaults hold for what is not said."""

    host: Annotated[str | None, _option("Address to listen at. Default: 127.0.0.1, this machine only.")] = (
        None
    )
    port: Annotated[int | None, _option("Port; 0 takes a free one. Default: 8000.")] = None
    served_model_name: Annotated[
        list[str] | None, _option("Name that clients ask for; may be given several times. Default: MODEL.")
    ] = None
    tool_parser: Annotated[
        str | None, _option("How tool calls are written: auto, hermes or none. Default: auto.")
    ] = None
    reasoning_parser: Annotated[
        str | None, _option("How thinking is marked: auto, think or none. Default: auto.")
    ] = None
    log_format: Annotated[str | None, _option("text or json, on standard error. Default: text.")] = None
    otlp_endpoint: Annotated[str | None, _option("Send OpenTelemetry traces to this URL.")] = None
    api_key: Annotated[
        list[str] | None,
        _access("Key that requests must bring; may be given several times, or in OCTAVO_API_KEY."),
    ] = None
    api_key_file: Annotated[Path | None, _access("File with one key a line.")] = None
    cors_origin: Annotated[
        list[str] | None, _access("Web origin that may ask, * for all; may be given several times.")
    ] = None
    max_body_bytes: Annotated[int | None, _limit("Largest request body, in bytes. Default: 8388608.")] = None
    max_waiting_requests: Annotated[
        int | None,
        _limit("Most requests waiting for a row of --max-num-seqs; beyond, status 429. Default: 1024."),
    ] = None
    max_waiting_tokens: Annotated[
        int | None, _limit("Most prompt tokens waiting; likewise. Default: 1048576.")
    ] = None
    request_timeout: Annotated[float | None, _limit("Seconds a request may take. Default: no limit.")] = None
    slow_reader: Annotated[float | None, _limit("Seconds a client may take nothing. Default: 60.")] = None
    idle_connection: Annotated[float | None, _limit("Seconds a connection may ask nothing. Default: 30.")] = (
        None
    )
    drain: Annotated[
        float | None, _limit("Seconds that running requests get when it stops. Default: 30.")
    ] = None
    stuck: Annotated[
        float | None, _limit("Seconds without a step after which /health is 503. Default: 120.")
    ] = None

    def settings(self) -> dict[str, Any]:
        """The arguments for `ServeSettings`: only what was said."""
        said = {name: value for name, value in vars(self).items() if value is not None and value != []}
        for option, name in _NAMES.items():
            if option in said:
                said[name] = said.pop(option)
        return said


_NAMES = {
    "served_model_name": "served_model_names",
    "api_key": "api_keys",
    "cors_origin": "cors_origins",
    "request_timeout": "request_timeout_s",
    "slow_reader": "slow_reader_s",
    "idle_connection": "idle_connection_s",
    "drain": "drain_s",
    "stuck": "stuck_s",
}


@app.command()
@expands(options=ServeOptions, engine=EngineOptions)
def serve(model: Model, *, options: ServeOptions, engine: EngineOptions) -> int:
    """Serve a model over HTTP, as the OpenAI API and as a page."""
    said = options.settings()
    key_file = said.pop("api_key_file", None)
    config = engine.config(model)
    try:
        from octavo.serve.guard import read_api_keys
        from octavo.serve.run import serve as run
        from octavo.serve.settings import ServeSettings
    except ModuleNotFoundError as error:
        is_tracing = "otlp_endpoint" in said and (error.name or "").startswith("opentelemetry")
        what, extra = ("otlp_endpoint", "otel") if is_tracing else ("serving", "serve")
        raise ConfigError(
            f"{what} needs the package {error.name}; install what it takes with: "
            f"pip install 'octavo[{extra}]'"
        ) from error
    said["api_keys"] = read_api_keys(said.get("api_keys", ()), key_file)
    with wrong_usage():
        settings = ServeSettings.from_options(**said)
    run(config, settings, say=_say)
    return 0


def _say(line: str) -> None:
    """A line for whoever started the server, who may read a pipe, and close it (`| grep -m1 ready`)."""
    try:
        print(line, flush=True)
    except OSError as error:
        discard_output()
        logger.warning("standard output gets no more lines: %s", error.strerror)
