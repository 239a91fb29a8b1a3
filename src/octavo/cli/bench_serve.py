"""`octavo bench serve`: load for any OpenAI-compatible server, and what its clients see."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.options import expands, wrong_usage
from octavo.errors import ConfigError, shown

if TYPE_CHECKING:
    from octavo.bench.serve import LoadGenerator, Target
    from octavo.bench.serve_calls import Call

INTERRUPTED = 130
_KEYS = ("--api-key", "--header")
_load: Any = {"rich_help_panel": "Load"}
_calls: Any = {"rich_help_panel": "What is asked"}


_BASE_URL = "http://127.0.0.1:8000/v1"
_NULL_INTERVAL_S = 0.02
_NEEDS = {
    "burstiness": "rate",
    "trace_speed": "trace",
    "num_prefixes": "prefix_len",
    "prefix_len": "num_prefixes",
}
_DRAWN = (
    "burstiness", "drop_share", "input_len", "output_len", "num_prefixes", "prefix_len", "max_token_id"
)  # fmt: skip


@dataclass(frozen=True)
class LoadOptions:
    """What is sent and when; on the command line, see `octavo.cli.options.expands`."""

    concurrency: Annotated[
        int | None,
        typer.Option(help="Clients that ask again once answered (8); with --rate: most open calls.", **_load),
    ] = None
    rate: Annotated[
        float | None,
        typer.Option(help="Calls a second, whatever becomes of them (inf: all at once).", **_load),
    ] = None
    burstiness: Annotated[
        float | None,
        typer.Option(help="Shape of the gamma law of gaps; 1 (default) is Poisson, below burstier.", **_load),
    ] = None
    trace: Annotated[
        Path | None,
        typer.Option(help="Replay a .jsonl or .csv trace: times and lengths.", metavar="FILE", **_load),
    ] = None
    trace_speed: Annotated[float | None, typer.Option(help="Replay so many times faster.", **_load)] = None
    num_requests: Annotated[
        int | None,
        typer.Option(
            help="Calls to send; default: 200 (more with over 100 clients: two each), or all of the trace.",
            **_load,
        ),
    ] = None
    duration: Annotated[float | None, typer.Option(help="Send no more after so many seconds.", **_load)] = (
        None
    )
    num_warmups: Annotated[
        int, typer.Option(help="Calls before the run, one by one, that do not count.", **_load)
    ] = 1
    drop_share: Annotated[
        float | None,
        typer.Option(
            help="Share of clients, from 0 to 1, that hang up in mid-answer: after a drawn number of pieces "
            "of text, each of one token or more.",
            **_load,
        ),
    ] = None
    timeout: Annotated[float, typer.Option(help="Seconds until a call counts as failed.", **_load)] = 600.0
    input_len: Annotated[
        str | None,
        typer.Option(
            help="Prompt tokens (256): N, uniform:LOW:HIGH, normal:MEAN:STD[:MAX], "
            "lognormal:MEDIAN:SIGMA[:MAX] or exponential:MEAN[:MAX].",
            **_calls,
        ),
    ] = None
    output_len: Annotated[str | None, typer.Option(help="Answer tokens (128), likewise.", **_calls)] = None
    num_prefixes: Annotated[
        int | None, typer.Option(help="Different beginnings that prompts share.", **_calls)
    ] = None
    prefix_len: Annotated[int | None, typer.Option(help="Tokens of each beginning.", **_calls)] = None
    prompts: Annotated[
        str | None,
        typer.Option(help="words or ids (exact lengths, completions only); default: ids there.", **_calls),
    ] = None
    max_token_id: Annotated[
        int | None, typer.Option(help="Ids are drawn from 0 to this; default 10000.", **_calls)
    ] = None
    temperature: Annotated[float, typer.Option(help="Sampling temperature.", **_calls)] = 0.0
    no_ignore_eos: Annotated[
        bool,
        typer.Option(
            "--no-ignore-eos",
            help="Let answers end early; for servers that do not know ignore_eos.",
            **_calls,
        ),
    ] = False
    no_stream: Annotated[
        bool, typer.Option("--no-stream", help="Ask for whole answers; only E2E is timed.", **_calls)
    ] = False
    extra_body: Annotated[
        str | None, typer.Option(help="JSON object of further request fields.", metavar="JSON", **_calls)
    ] = None
    seed: Annotated[int, typer.Option(help="Of times, lengths and prompts.", **_calls)] = 0

    @property
    def is_open_loop(self) -> bool:
        return self.rate is not None or self.trace is not None

    def check(self) -> None:
        """Raises typer.BadParameter for what is wrong by itself."""
        for name in ("concurrency", "num_requests"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise typer.BadParameter(f"{_option(name)} must be at least 1, got {value}")
        if self.num_warmups < 0:
            raise typer.BadParameter(f"--num-warmups must be at least 0, got {self.num_warmups}")
        for name, other in _NEEDS.items():
            if getattr(self, name) is not None and getattr(self, other) is None:
                raise typer.BadParameter(
                    f"{_option(name)} does nothing without {_option(other)}; give both or neither"
                )
        for name in ("duration", "timeout"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise typer.BadParameter(f"{_option(name)} must be above 0 seconds, got {value}")
        if not 0 <= self.temperature < math.inf:
            raise typer.BadParameter(f"--temperature must be at least 0, got {self.temperature}")
        if self.drop_share and self.no_stream:
            raise typer.BadParameter(
                "--drop-share needs streams: clients hang up in mid-answer; drop --no-stream"
            )
        if self.trace is not None and self.rate is not None:
            raise typer.BadParameter(
                "--rate and --trace exclude each other: a trace has its times; see --trace-speed"
            )
        for name in _DRAWN if self.trace is not None else ():
            if getattr(self, name) is not None:
                raise typer.BadParameter(f"{_option(name)} is for drawn calls; leave it out with --trace")
        if self.rate is not None and math.isinf(self.rate) and self.duration and not self.num_requests:
            raise typer.BadParameter("--rate inf: all calls leave at once; say how many with --num-requests")

    def calls(self, as_words: bool) -> Iterable[Call]:
        """The calls of the run; a list where they can be made before it. ConfigError for what cannot be."""
        from octavo.bench.serve_calls import Arrivals, Lengths, Mix, read_trace
        from octavo.bench.workloads import MAX_TOKEN_ID

        if self.trace is not None:
            speed = 1.0 if self.trace_speed is None else self.trace_speed
            calls = read_trace(self.trace, speed=speed, as_text=as_words, seed=self.seed)
            return calls[: self.num_requests]
        mix = Mix(
            Lengths.parse("input_len", "256" if self.input_len is None else self.input_len),
            Lengths.parse("output_len", "128" if self.output_len is None else self.output_len),
            Arrivals(self.rate, 1.0 if self.burstiness is None else self.burstiness),
            as_text=as_words,
            num_prefixes=self.num_prefixes or 0,
            prefix_len=self.prefix_len or 0,
            drop_share=self.drop_share or 0.0,
            max_token_id=MAX_TOKEN_ID if self.max_token_id is None else self.max_token_id,
        )
        drawn = mix.calls(self.seed)
        if self.duration is None:
            # With fewer calls than clients some clients would never ask.
            least = 2 * (self.concurrency or 0) if self.rate is None else 0
            return list(itertools.islice(drawn, self.num_requests or max(200, least)))
        drawn = itertools.islice(drawn, self.num_requests)
        if self.rate is None:
            return drawn
        until = self.duration
        return list(itertools.takewhile(lambda call: (call.at_s or 0.0) < until, drawn))


@expands(load=LoadOptions)
def serve(
    base_url: Annotated[
        str | None,
        typer.Option(help="The server, as OpenAI's clients take it; default: http://127.0.0.1:8000/v1."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model to ask for; default: the first that the server lists.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(help="Its API key; default: the environment's OPENAI_API_KEY.", show_default=False),
    ] = None,
    header: Annotated[
        list[str] | None, typer.Option(help="Another header, 'Name: value'; repeatable.", metavar="HEADER")
    ] = None,
    api: Annotated[str, typer.Option(help="chat or completions.")] = "chat",
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            help="Bound in ms for a good answer, ttft:500, tpot:50, itl:200, e2e:9000; repeatable.",
            metavar="MEASURE:MS",
        ),
    ] = None,
    null_server: Annotated[
        bool,
        typer.Option(
            "--null-server", help="Measure this generator itself: against a server that costs nothing."
        ),
    ] = False,
    null_interval: Annotated[
        float | None, typer.Option(help="Seconds between the tokens of that server (0.02).")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write a result file as in bench/results/.", metavar="FILE")
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Draw the run (.png, .svg, .pdf).", metavar="FILE")
    ] = None,
    requests_file: Annotated[
        Path | None,
        typer.Option("--requests", help="Write every call and its times, a JSON line each.", metavar="FILE"),
    ] = None,
    *,
    load: LoadOptions,
) -> int:
    """Load a server and report what its clients see: TTFT, ITL, TPOT, E2E, goodput, errors.

    With --rate or --trace calls leave when they are due, and all times count from then. Otherwise
    --concurrency clients ask again as soon as they are answered. The exit status is 1 when a call failed.
    """
    from octavo.bench import serve_null
    from octavo.bench.serve import Target, only_model, run_load
    from octavo.bench.serve_http import Endpoint
    from octavo.bench.serve_report import Slo, as_rows, as_text, draw, summarise, write_answers
    from octavo.cli.result_files import check_files, check_writable

    check_files(json_file, plot_file)
    if requests_file is not None:
        check_writable(requests_file, "--requests")
    if api not in ("chat", "completions"):
        raise typer.BadParameter(f"--api must be chat or completions; got {api!r}")
    load.check()
    as_words = _is_words(load.prompts, api)
    if as_words and load.max_token_id is not None:
        raise typer.BadParameter("--max-token-id is for prompts of ids; use --prompts ids --api completions")
    interval_s = _NULL_INTERVAL_S if null_interval is None else null_interval
    if null_interval is not None and not null_server:
        raise typer.BadParameter("--null-interval does nothing without --null-server; give both or neither")
    if not 0 <= interval_s < math.inf:
        raise typer.BadParameter(f"--null-interval must be at least 0 seconds, got {interval_s}")
    if null_server and base_url is not None:
        raise typer.BadParameter("--null-server and --base-url exclude each other; leave one out")
    with wrong_usage():
        slo = Slo.parse(goodput or [])
        calls = load.calls(as_words)
        endpoint = Endpoint.parse(_BASE_URL if base_url is None else base_url)
        headers = _headers(header or [])
        extra_body = _extra_body(load.extra_body)
    with contextlib.ExitStack() as stack:
        if null_server:
            endpoint = Endpoint.parse(stack.enter_context(serve_null.running(interval_s)))
        target = Target(
            endpoint,
            model or "",
            api_key=api_key or ("" if null_server else os.environ.get("OPENAI_API_KEY", "")),
            is_chat=api == "chat",
            is_stream=not load.no_stream,
            temperature=load.temperature,
            ignore_eos=not load.no_ignore_eos,
            extra_body=extra_body,
            headers=headers,
            timeout_s=load.timeout,
            reads_stamps=null_server,
        )
        target = _with_model(target, only_model)
        _warm_up(target, as_words, load.num_warmups)
        done = run_load(
            target,
            calls,
            concurrency=load.concurrency or (None if load.is_open_loop else 8),
            duration_s=load.duration,
            watch=_progress if sys.stderr.isatty() else None,
        )
    summary = summarise(done, slo)
    print(as_text(summary))
    command = shlex.join(["octavo", *_without_keys(sys.argv[1:])])
    if json_file is not None:
        from octavo.bench.report import write_result

        write_result(json_file, as_rows(summary), command=command)
    if requests_file is not None:
        write_answers(requests_file, done.answers)
    if plot_file is not None:
        draw(plot_file, done, f"{target.model} at {target.endpoint.url}")
    if done.is_cut:
        return INTERRUPTED
    return 1 if summary.num_failed else 0


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _is_words(prompts: str | None, api: str) -> bool:
    if prompts not in (None, "words", "ids"):
        raise typer.BadParameter(f"--prompts must be words or ids; got {prompts!r}")
    if prompts == "ids" and api == "chat":
        raise typer.BadParameter(
            "--prompts: a chat takes no token ids; leave --prompts out or use --api completions"
        )
    return prompts == "words" or api == "chat"


def _extra_body(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        body = json.loads(text)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise ConfigError(f"extra_body must be a JSON object such as '{{\"top_p\": 0.9}}'; got {shown(text)}")
    return body


def _headers(lines: list[str]) -> dict[str, str]:
    headers = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name.strip() or not line.isprintable() or not line.isascii():
            raise ConfigError("header must look like 'Name: value', in ASCII")
        headers[name.strip()] = value.strip()
    return headers


def _with_model(target: Target, only_model: Any) -> Target:
    import asyncio
    import dataclasses

    if target.model:
        return target
    return dataclasses.replace(target, model=asyncio.run(only_model(target)))


def _warm_up(target: Target, as_words: bool, num_calls: int) -> None:
    """Short calls, so that a wrong address, key or model is told in one line before the run."""
    from octavo.bench.serve import run_load
    from octavo.bench.serve_calls import Call
    from octavo.bench.serve_http import ServerError

    if num_calls < 1:
        return
    call = Call(None, "hello" if as_words else [1, 2, 3], 4)
    for answer in run_load(target, [call] * num_calls, concurrency=1).answers:
        if answer.error:
            why = f"{answer.error}: {' '.join(answer.detail.split())}"
            raise ServerError(f"the first call to {target.endpoint.url} failed: {why}")


def _without_keys(arguments: list[str]) -> list[str]:
    """The command line as it may be shown: without keys."""
    shown_arguments = []
    is_secret = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if is_secret:
            argument = "..."
        elif name in _KEYS and equals:
            argument = f"{name}=..."
        is_secret = argument in _KEYS
        shown_arguments.append(argument)
    return shown_arguments


def _progress(generator: LoadGenerator) -> None:
    num_failed = sum(bool(answer.error) for answer in generator.answers)
    failed = f", {num_failed} failed" if num_failed else ""
    print(
        f"\r{len(generator.answers)} answered, {generator.num_open} open{failed}  ", end="", file=sys.stderr
    )
