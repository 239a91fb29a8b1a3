"""`octavo chat MODEL`: a conversation on the terminal, or through a pipe (one message per line)."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.options import EngineOptions, Model, SamplingOptions, expands
from octavo.cli.session import describe_timing, open_llm, read_stdin
from octavo.errors import OctavoError, RequestError, nearest

if TYPE_CHECKING:
    from rich.console import Console

    from octavo.llm import LLM
    from octavo.outputs import RequestOutput
    from octavo.sampling_params import SamplingParams

app = typer.Typer(add_completion=False)

HELP = {
    "/help": "this list",
    "/reset": "forget the conversation",
    "/stats": "numbers of the last answer and of the engine",
    "/exit": "leave (Ctrl-D does, too)",
}


@app.command()
@expands(sampling=SamplingOptions, engine=EngineOptions)
def chat(
    model: Model = "smollm2-135m",
    system: Annotated[str | None, typer.Option(help="System message the conversation starts with.")] = None,
    *,
    sampling: SamplingOptions,
    engine: EngineOptions,
) -> int:
    """Talk with a model. Ctrl-C stops an answer, /help lists the commands."""
    sampling.check()
    console = _console()
    with open_llm(model, engine) as llm:
        if llm.tokenizer.chat_template is None:
            raise RequestError(f"{model} has no chat template; use `octavo generate {model} PROMPT` instead")
        params = sampling.apply(llm.get_default_sampling_params())
        if params.n != 1:
            raise RequestError(f"a chat shows one answer at a time, got n={params.n}; use `octavo generate`")
        if sys.stdin.isatty():
            console.print(model, style="bold", markup=False, end="")
            console.print(" – /help lists the commands, Ctrl-C stops an answer")
        conversation = Conversation(llm, params, system, console)
        with _line_history():
            conversation.run()
    # Who types has seen what failed; a script only sees the status.
    return 1 if conversation.failed and not sys.stdin.isatty() else 0


def _console(stderr: bool = False) -> Console:
    """Standard output or error; no escape codes under NO_COLOR, not even for bold."""
    from rich.console import Console

    color_system: Any = None if os.environ.get("NO_COLOR") else "auto"
    return Console(stderr=stderr, highlight=False, color_system=color_system)


class Conversation:
    """The messages so far, and what a typed line does to them."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None, console: Console) -> None:
        self.llm = llm
        self.params = params
        self.console = console
        self.errors = _console(stderr=True)
        self.failed = False
        self.opening = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self.opening)
        self.last: RequestOutput | None = None

    def run(self) -> None:
        """Reads lines until the end of input or /exit."""
        while True:
            try:
                line = self._read()
            except EOFError:
                return
            except KeyboardInterrupt:
                self.console.print()
                continue
            if not line:
                continue
            if not line.startswith("/"):
                self.answer(line)
            elif line == "/exit":
                return
            else:
                self.command(line)

    def _read(self) -> str:
        if not sys.stdin.isatty():
            return read_stdin(input).strip()
        # The escape codes are bracketed so that readline does not count them as columns.
        prompt = "\001\033[1;36m\002you>\001\033[0m\002 " if self.console.color_system else "you> "
        return read_stdin(lambda: input(prompt)).strip()

    def command(self, line: str) -> None:
        """Carries out a line that starts with a slash."""
        if line == "/help":
            for name, meaning in HELP.items():
                self.console.print(f"  {name:8} {meaning}", style="dim")
        elif line == "/reset":
            self.messages = list(self.opening)
            self.last = None
            self.console.print("the conversation is forgotten", style="dim")
        elif line == "/stats":
            if self.last is not None:
                self.console.print(describe_timing(self.last), style="dim")
            for name, value in dataclasses.asdict(self.llm.stats()).items():
                self.console.print(f"  {name}: {value}", style="dim", markup=False)
        else:
            known = nearest(line, HELP) or "; /help lists what there is"
            self._fail(f"no command {line}{known}")

    def answer(self, text: str) -> None:
        """Streams the answer to `text`; an interrupted answer stays in the conversation as far as it came,
        a failed one leaves no trace in it.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        said = ""
        try:
            # Leaving the stream before its end aborts the request and frees its blocks.
            with _interrupt_flag() as interrupted, self.llm.stream_chat(messages, self.params) as stream:
                for chunk in stream:
                    said += chunk.text
                    self._print_piece(chunk.text)
                    if interrupted:
                        break
        except OctavoError as error:
            can_make_room = isinstance(error, RequestError) and self.messages != self.opening
            hint = "; /reset forgets the conversation and makes room" if can_make_room else ""
            self._fail(f"{error}{hint}")
            return
        self.console.print(" [dim](stopped)[/dim]" if interrupted else "")
        self.last = stream.output or self.last
        if stream.output is not None and stream.output.error is not None:
            self._fail(stream.output.error)
            return
        self.messages = [*messages, {"role": "assistant", "content": said}]

    def _fail(self, message: str) -> None:
        """Tells on standard error, in one line, that a line came to nothing."""
        self.failed = True
        line = f"octavo: error: {' '.join(message.split())}"
        self.errors.print(line, style="red", markup=False, soft_wrap=True)

    def _print_piece(self, piece: str) -> None:
        self.console.print(piece, end="", style="green", markup=False, soft_wrap=True)
        self.console.file.flush()


@contextlib.contextmanager
def _interrupt_flag() -> Iterator[list[bool]]:
    """While inside, Ctrl-C fills the list instead of raising in the middle of an engine step.

    The second Ctrl-C raises as usual, should the first not be noticed.
    """
    pressed: list[bool] = []

    def note(signum: int, frame: Any) -> None:
        pressed.append(True)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _line_history() -> Iterator[None]:
    """Arrow keys recall earlier lines, across runs where the home folder can be written."""
    if not sys.stdin.isatty():
        yield
        return
    try:
        import readline
    except ImportError:  # not part of Python on Windows
        yield
        return
    path = Path.home() / ".octavo_history"
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    try:
        yield
    finally:
        readline.set_history_length(1000)
        with contextlib.suppress(OSError):
            readline.write_history_file(path)
