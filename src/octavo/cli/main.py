"""Entry point: finds the subcommand, and turns every expected failure into one line on stderr.

Exit status: 0 done; 1 an `OctavoError` or another failure; 2 wrong usage; 130 interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from octavo.errors import OctavoError, nearest, shown

# typer exports few of the errors of the click it carries; the others lie beside its BadParameter.
_click_errors: Any = importlib.import_module(typer.BadParameter.__module__)

INTERRUPTED = 130
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
COMMANDS = ("generate", "chat", "serve", "bench", "kv", "doctor")


class _LazyCommands(TyperGroup):
    """Loads `octavo.cli.<name>`, whose `app` is the subcommand, at the moment its name is used."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        command = typer.main.get_command(importlib.import_module(f"octavo.cli.{cmd_name}").app)
        command.name = cmd_name
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if not args[0].startswith("-") and args[0] not in COMMANDS:
            ctx.fail(f"No such command {args[0]!r}{nearest(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)


FIRST_STEPS = """First steps:

octavo generate smollm2-135m "What is the capital of France?"

octavo chat smollm2-135m

octavo serve smollm2-135m

octavo doctor   (when something does not work)
"""

app = typer.Typer(
    cls=_LazyCommands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog=FIRST_STEPS,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"octavo {version('octavo')}")
        raise typer.Exit


@app.callback()
def octavo(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", help="Print the log and the traceback of a failure; may also stand last."),
    ] = False,
) -> None:
    """Octavo: an LLM inference engine around a paged KV cache."""


def main(argv: list[str] | None = None) -> None:
    """Runs the command line `argv` (default: the process's own) and exits."""
    argv = sys.argv[1:] if argv is None else list(argv)
    options = argv[: argv.index("--")] if "--" in argv else argv
    debug = "--debug" in options
    for _ in range(options.count("--debug")):
        argv.remove("--debug")
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # what a terminal of ASCII has no character for
    if not os.environ.get("COLUMNS", "unset").strip("0"):
        del os.environ["COLUMNS"]  # a width of 0 means that it is not known; rich would print nothing
    with _log_on_stderr(debug):
        status = _run(argv, debug)
    sys.exit(status)


def _open_closed_streams() -> None:
    """Opens what the caller closed (`<&-`, `2>&-`; None in Python), so that it can be read and written."""
    if sys.stdin is None:
        sys.stdin = os.fdopen(os.open(os.devnull, os.O_RDONLY))
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


class _Lines(logging.Handler):
    """Prints the library's warnings, one line each; under --debug all it logs, with tracebacks.

    Errors are left out otherwise: the command itself says what failed.
    """

    def __init__(self, debug: bool) -> None:
        super().__init__()
        self._debug = debug

    def emit(self, record: logging.LogRecord) -> None:
        if self._debug or record.levelno == logging.WARNING:
            text = self.format(record)
            print(
                f"octavo: {record.levelname.lower()}: {text if self._debug else _folded(text)}",
                file=sys.stderr,
            )


@contextlib.contextmanager
def _log_on_stderr(debug: bool) -> Iterator[None]:
    logger = logging.getLogger("octavo")
    handler, level = _Lines(debug), logger.level
    hook = sys.unraisablehook

    def show_warning(message: Warning | str, *where: Any) -> None:
        text = str(message).partition("Traceback (most recent call last)")[0]
        print(f"octavo: warning: {_folded(text)}", file=sys.stderr)

    logger.addHandler(handler)
    if debug:
        logger.setLevel(logging.DEBUG)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = show_warning  # type: ignore[assignment]  # takes any further arguments
            yield
    finally:
        sys.unraisablehook = hook
        logger.removeHandler(handler)
        logger.setLevel(level)


def _folded(text: str) -> str:
    return " ".join(text.split())


def _run(argv: list[str], debug: bool) -> int:
    if sys.stdout is None:
        return _fail("standard output is closed, and the answer goes there", 1)
    try:
        status = app(argv, prog_name="octavo", standalone_mode=False)
        sys.stdout.flush()
    except _click_errors.UsageError as error:
        return _fail(_describe_usage_error(error, argv), 2)
    except OctavoError as error:
        if debug:
            traceback.print_exc()
        return _fail(str(error), 1)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:  # the reader (`| head`) went away
        discard_output()
        return 1
    except Exception as error:
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            discard_output()
            return _fail(f"cannot write the output: {error.strerror}", 1)
        if debug:
            raise
        return _fail(f"{type(error).__name__}: {error} (this is a fault in Octavo; --debug shows where)", 1)
    if status == INTERRUPTED:  # typer turns the exception into a status
        return _fail("interrupted", INTERRUPTED)
    return status if isinstance(status, int) else 0


def discard_output() -> None:
    """Sends what is still unwritten nowhere; Python would complain again while flushing at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, status: int) -> int:
    """Prints the one line; a message of several lines is folded."""
    if message:
        print(f"octavo: error: {_folded(message)}", file=sys.stderr)
    return status


def _describe_usage_error(error: Any, argv: list[str]) -> str:
    if isinstance(error, _click_errors.NoArgsIsHelpError):
        if error.message:  # with rich the help is on the screen already
            print(error.message)
        return ""
    possibilities = getattr(error, "possibilities", None)
    if possibilities:
        message = f"{error.message.rstrip('.')}{nearest(error.option_name, possibilities)}"
    else:
        message = _describe_bad_value(error) or error.format_message().rstrip(".")
    context = getattr(error, "ctx", None)
    where = context.command_path if context is not None else _command_path(argv)
    if isinstance(error, _click_errors.MissingParameter) and error.param.name == "model":
        message += f", for example: {where} smollm2-135m"
    return f"{message}; see `{where} --help`"


def _command_path(argv: list[str]) -> str:
    """Whose parser raised, which it does not tell: `octavo` and the subcommands that are named first."""
    path = "octavo"
    command: Any = typer.main.get_command(app)
    for word in argv:
        command = command.get_command(None, word) if hasattr(command, "get_command") else None
        if command is None:
            break
        path += f" {word}"
    return path


_KINDS = {
    "int_parsing": "a whole number",
    "float_parsing": "a number",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
}


def _describe_bad_value(error: Any) -> str | None:
    """A wrong value with what was expected and what came, which typer's own words leave out."""
    if not isinstance(error, typer.BadParameter):
        return None
    if error.param is None:  # a command's own refusal, which says it all
        return error.message
    # typer reads values with pydantic, whose exception has them
    findings: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()
    if not findings or not isinstance(findings[0].get("input"), str):
        return None
    expected = _KINDS.get(findings[0]["type"], "").format(**findings[0].get("ctx", {}))
    if not expected:
        return f"{error.format_message().rstrip('.')}, got {shown(findings[0]['input'])}"
    return f"{error.param.opts[0]} must be {expected}, got {shown(findings[0]['input'])}"
