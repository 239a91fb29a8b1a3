"""`octavo generate MODEL PROMPT...`: answers prompts; one prompt is streamed."""

from __future__ import annotations

import json
import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from octavo.cli.options import EngineOptions, Model, SamplingOptions, expands
from octavo.cli.session import describe_timing, open_llm, output_as_json, read_stdin
from octavo.errors import RequestError, shown
from octavo.models.source import names_model

if TYPE_CHECKING:
    from octavo.llm import LLM
    from octavo.outputs import RequestOutput
    from octavo.sampling_params import SamplingParams

app = typer.Typer(add_completion=False)

_LONGEST = 80  # characters of a prompt that an example repeats


class _Generate(TyperCommand):
    """Says which of MODEL and PROMPT is missing: what stands first is taken for the model."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            rest = super().parse_args(ctx, args)
        except typer.BadParameter as error:
            is_missing = type(error).__name__ == "MissingParameter"
            if is_missing and getattr(error.param, "name", None) in ("model", "prompts"):
                ctx.fail(_what_is_missing(ctx.params.get("model") or ""))
            raise
        model = ctx.params["model"]
        if len(model.split()) > 1 and not names_model(model):
            ctx.fail(_what_is_missing(model))
        return rest


def _what_is_missing(model: str) -> str:
    question = "'What is the capital of France?'"
    if not model:
        return f"a model and a prompt are needed, for example: octavo generate smollm2-135m {question}"
    if names_model(model):
        return f"the prompt is missing, for example: octavo generate {shlex.quote(model)} {question}"
    prompt = shlex.quote(model) if len(model) <= _LONGEST else "'...'"
    return (
        f"the model is missing: it stands before the prompt, and {shown(model)} is none; for example: "
        f"octavo generate smollm2-135m {prompt}"
    )


@app.command(cls=_Generate)
@expands(sampling=SamplingOptions, engine=EngineOptions)
def generate(
    model: Model,
    prompts: Annotated[
        list[str],
        typer.Argument(
            help="One or more prompts, each in quotes; - reads one from standard input.", metavar="PROMPT"
        ),
    ],
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Use the chat template, or not. Default: when the model has one.",
            show_default=False,
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message in front of the prompt.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per prompt.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Timings of each prompt on standard error.")] = False,
    *,
    sampling: SamplingOptions,
    engine: EngineOptions,
) -> int:
    """Answer one or more prompts."""
    if system is not None and chat is False:
        raise typer.BadParameter("--system needs the chat template and --raw turns it off; give one of them")
    sampling.check()
    if prompts.count("-") > 1:
        raise typer.BadParameter(
            f"- stands for all of standard input and may be given once, got {prompts.count('-')}"
        )
    texts = [read_stdin(sys.stdin.read).rstrip("\n") if prompt == "-" else prompt for prompt in prompts]
    if "" in texts:
        raise RequestError("prompt is empty; give at least one word")
    with open_llm(model, engine) as llm:
        params = sampling.apply(llm.get_default_sampling_params())
        use_chat = chat if chat is not None else llm.tokenizer.chat_template is not None
        if system is not None and not use_chat:
            raise RequestError(
                f"--system needs a chat template and {model} has none; write it into the prompt instead"
            )
        conversations = [_conversation(text, system) for text in texts] if use_chat else None
        if len(texts) == 1 and params.n == 1 and not as_json:
            outputs = [_stream(llm, conversations[0] if conversations else texts[0], params)]
        else:
            if conversations:
                outputs = llm.chat(conversations, params, use_tqdm=sys.stderr.isatty())
            else:
                outputs = llm.generate(texts, params, use_tqdm=sys.stderr.isatty())
            _show(texts, outputs, as_json)
    failed = False
    for output in outputs:
        if output.error is not None:
            failed = True
            print(f"octavo: error: {' '.join(output.error.split())}", file=sys.stderr)
        elif stats:
            print(describe_timing(output), file=sys.stderr)
    return 1 if failed else 0


def _conversation(text: str, system: str | None) -> list[dict[str, str]]:
    messages = [{"role": "user", "content": text}]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def _stream(llm: LLM, prompt: str | list[dict[str, str]], params: SamplingParams) -> RequestOutput:
    """Prints the answer as it grows and returns the finished request."""
    stream = llm.stream(prompt, params) if isinstance(prompt, str) else llm.stream_chat(prompt, params)
    try:
        for chunk in stream:
            print(chunk.text, end="", flush=True)
    except KeyboardInterrupt:
        print(flush=True)  # what is said next starts on a line of its own
        raise
    print(flush=True)
    assert stream.output is not None, "a stream that ended has its output"
    return stream.output


def _show(texts: list[str], outputs: list[RequestOutput], as_json: bool) -> None:
    for text, output in zip(texts, outputs, strict=True):
        if as_json:
            print(json.dumps(output_as_json(output), ensure_ascii=False))
            continue
        for completion in output.outputs:
            if len(texts) > 1 or len(output.outputs) > 1:
                number = f" [{completion.index}]" if len(output.outputs) > 1 else ""
                print(f"### {text}{number}")
            print(completion.text)
