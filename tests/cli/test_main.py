import contextlib
import importlib.metadata
import logging
import os
import resource
import signal
import subprocess
import sys
import warnings

import pytest
import typer

from octavo.cli import main as cli
from octavo.cli.session import interrupted_for_sure
from octavo.errors import ModelError


def test_help_names_every_command(octavo):
    status, out, err = octavo("--help")
    assert (status, err) == (0, "")
    for name in ("generate", "chat", "bench", "kv", "doctor"):
        assert name in out


def test_help_shows_the_first_steps(octavo):
    _, out, _ = octavo("--help")
    for line in cli.FIRST_STEPS.split("\n\n"):
        assert line.strip() in out


def test_help_is_quick():
    def processor_s():
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before = processor_s()
    subprocess.run((sys.executable, "-m", "octavo", "--help"), check=True, capture_output=True)
    # Processor time, because the wall clock would measure what else the machine does.
    assert processor_s() - before < 0.3


def test_version(octavo):
    assert octavo("--version") == (0, f"octavo {importlib.metadata.version('octavo')}\n", "")


def test_no_arguments_show_the_help(octavo):
    status, out, err = octavo()
    assert status == 2
    assert "generate" in out
    assert err == ""


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["generat"], "No such command 'generat' (did you mean 'generate'?); see `octavo --help`"),
        (["xyz"], "No such command 'xyz'; see `octavo --help`"),
        (
            ["generate", "m", "p", "--max-tokns", "3"],
            "No such option: --max-tokns (did you mean '--max-tokens'?); see `octavo generate --help`",
        ),
        (
            ["generate", "m", "--temperature"],
            "Option '--temperature' requires an argument; see `octavo generate --help`",
        ),
        (
            ["bench", "serve", "--concurrency"],
            "Option '--concurrency' requires an argument; see `octavo bench serve --help`",
        ),
        (["chat", "--zzzzzz"], "No such option: --zzzzzz; see `octavo chat --help`"),
        (
            ["serve"],
            "Missing argument 'MODEL', for example: octavo serve smollm2-135m; see `octavo serve --help`",
        ),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(octavo, arguments, line):
    assert octavo(*arguments) == (2, "", f"octavo: error: {line}\n")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["generate", "m", "p", "--max-tokens", "1.5"], "--max-tokens must be a whole number, got '1.5'"),
        (["chat", "--max-tokens", ""], "--max-tokens must be a whole number, got ''"),
        (["generate", "m", "p", "--temperature", "hot"], "--temperature must be a number, got 'hot'"),
        (["kv", "gpt2", "--context=1e3"], "--context must be a whole number, got '1e3'"),
        (["serve", "m", "--port", "８０x"], "--port must be a whole number, got '８０x'"),
        (["serve", ""], "MODEL must be a non-empty path or name, got ''"),
        (["serve", "m", "--drain", "soon"], "--drain must be a number, got 'soon'"),
        (
            ["bench", "latency", "--batch-size", "1", "--batch-size", "0"],
            "--batch-size must be at least 1, got '0'",
        ),
        (["bench", "throughput", "--workload", "rand"], "--workload must be one of random, shared-prefix; "
         "got 'rand' (did you mean 'random'?)"),
        (["kv"], "name a model, for example: octavo kv qwen3-0.6b; --list shows the known shapes"),
        (["kv", "gpt2", "--list"], "--list lists every known shape; leave it out to size 'gpt2'"),
        (
            ["kv", "--list", "--json", "--memory", "1GiB", "--kv-dtype", "fp8", "--plot", "x.png"],
            "--list takes no other option; leave out --json, --kv-cache-dtype, --memory, --plot",
        ),
        (["doctor", "--json", "--verbose"], "--json holds every check already; leave out --verbose"),
        (["bench", "throughput", "--num-prefixes", "3"], "--num-prefixes and --prefix-len are for --workload "
         "shared-prefix; add that"),
    ],
)  # fmt: skip
def test_a_bad_value_is_told_with_its_option_and_what_came(octavo, arguments, line):
    depth = 2 if arguments[0] == "bench" else 1
    command = " ".join(["octavo", *arguments[:depth]])
    assert octavo(*arguments) == (2, "", f"octavo: error: {line}; see `{command} --help`\n")


@pytest.fixture
def failing(monkeypatch):
    """Makes `octavo doctor` raise what the test wants."""

    def install(error):
        app = typer.Typer()

        @app.command()
        def doctor():
            raise error

        monkeypatch.setattr("octavo.cli.doctor.app", app)

    return install


def test_an_expected_failure_is_one_line_and_status_1(octavo, failing):
    failing(ModelError("no model at\n  'x'"))
    assert octavo("doctor") == (1, "", "octavo: error: no model at 'x'\n")


@pytest.mark.parametrize("arguments", [["--debug", "doctor"], ["doctor", "--debug"]])
def test_debug_shows_where(octavo, failing, arguments):
    failing(ModelError("no model"))
    status, _, err = octavo(*arguments)
    assert status == 1
    assert err.startswith("Traceback")
    assert err.endswith("octavo: error: no model\n")


def test_an_unexpected_failure_says_that_it_is_our_fault(octavo, failing):
    failing(ZeroDivisionError("division by zero"))
    status, out, err = octavo("doctor")
    assert (status, out) == (1, "")
    assert err == (
        "octavo: error: ZeroDivisionError: division by zero "
        "(this is a fault in Octavo; --debug shows where)\n"
    )


@pytest.fixture
def talking(monkeypatch):
    """`octavo doctor` logs and warns instead of examining."""
    app = typer.Typer()

    @app.command()
    def doctor():
        logger = logging.getLogger("octavo.kernels")
        logger.debug("a detail")
        logger.warning("compiled kernels are not\nkept")
        logger.error("a step failed")
        warnings.warn("a key is not used", stacklevel=1)

    monkeypatch.setattr("octavo.cli.doctor.app", app)
    # Outside of tests a warning is shown by default.
    monkeypatch.setattr(warnings, "filters", [("always", None, UserWarning, None, 0)])


@pytest.mark.usefixtures("talking")
def test_a_warning_is_one_line_and_what_is_logged_beside_it_is_not_shown(octavo):
    status, out, err = octavo("doctor")
    assert (status, out) == (0, "")
    assert err == ("octavo: warning: compiled kernels are not kept\noctavo: warning: a key is not used\n")


@pytest.mark.usefixtures("talking")
def test_debug_shows_everything_that_is_logged(octavo):
    _, _, err = octavo("doctor", "--debug")
    assert err == (
        "octavo: debug: a detail\noctavo: warning: compiled kernels are not\nkept\n"
        "octavo: error: a step failed\noctavo: warning: a key is not used\n"
    )
    assert logging.getLogger("octavo").level == logging.NOTSET


def test_an_interrupt_is_status_130(octavo, failing):
    failing(KeyboardInterrupt())
    assert octavo("doctor") == (130, "", "octavo: error: interrupted\n")


def test_an_interrupt_during_the_imports_is_one_line():
    program = """
import sys
class Interrupt:
    def find_spec(self, name, path, target=None):
        if name == "typer":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
from octavo.__main__ import main
main()
"""
    done = subprocess.run((sys.executable, "-c", program), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "octavo: error: interrupted\n")


def test_debug_behind_two_dashes_is_a_prompt(monkeypatch):
    seen = []
    monkeypatch.setattr(cli, "_run", lambda argv, debug: seen.append((argv, debug)) or 0)
    with pytest.raises(SystemExit):
        cli.main(["generate", "m", "--", "--debug"])
    assert seen == [(["generate", "m", "--", "--debug"], False)]


def test_a_closed_pipe_ends_quietly():
    command = f"{sys.executable} -m octavo generate --help | true"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.stderr == ""


def in_shell(redirection, command="kv --list"):
    line = f"{sys.executable} -m octavo {command} {redirection}"
    done = subprocess.run(line, shell=True, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("redirection", "message"),
    [
        (">&-", "standard output is closed, and the answer goes there"),
        (">/dev/full", "cannot write the output: No space left on device"),
    ],
)
def test_an_output_that_cannot_be_written_is_a_failure(redirection, message):
    assert in_shell(redirection) == (1, "", f"octavo: error: {message}\n")


def test_a_closed_standard_error_leaves_standard_output_clean():
    assert in_shell("2>&-", "kv nosuch") == (1, "", "")


def test_a_closed_standard_input_is_an_empty_one():
    status, _, err = in_shell("<&-", "generate m -")
    assert (status, err) == (1, "octavo: error: prompt is empty; give at least one word\n")


def test_columns_of_0_means_that_the_width_is_not_known(octavo, monkeypatch):
    expected = octavo("kv", "gpt2")
    monkeypatch.setenv("COLUMNS", "0")
    assert octavo("kv", "gpt2") == expected


def test_a_terminal_of_ascii_gets_escapes():
    done = subprocess.run(
        (
            sys.executable,
            "-c",
            "from octavo.cli import main; main.app = lambda *a, **k: print('é'); main.main()",
        ),
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"\\xe9\n", b"")


def test_a_traceback_in_a_warning_is_left_out(octavo, monkeypatch):
    app = typer.Typer()

    @app.command()
    def doctor():
        warnings.warn(
            "NUMBA_NUM_THREADS is no number:\nTraceback (most recent call last):\n...", stacklevel=1
        )

    monkeypatch.setattr("octavo.cli.doctor.app", app)
    monkeypatch.setattr(warnings, "filters", [("always", None, UserWarning, None, 0)])
    assert octavo("doctor") == (0, "", "octavo: warning: NUMBA_NUM_THREADS is no number:\n")


class HalfMade:
    def __del__(self):
        raise AttributeError("half made")


@pytest.fixture
def interruptible():
    """As in a terminal: a shell that starts a program behind its back has it ignore interruptions."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("interrupted", [False, True])
def test_only_after_an_interruption_nobody_sees_what_is_thrown_away_half_made(
    octavo, monkeypatch, interrupted
):
    app = typer.Typer()
    seen = []

    @app.command()
    def doctor():
        with interrupted_for_sure():
            if interrupted:
                with contextlib.suppress(KeyboardInterrupt):
                    signal.raise_signal(signal.SIGINT)
            HalfMade()

    def note(unraisable):
        seen.append(unraisable.exc_type)

    monkeypatch.setattr("octavo.cli.doctor.app", app)
    monkeypatch.setattr(sys, "unraisablehook", note)
    expected = (130, "", "octavo: error: interrupted\n") if interrupted else (0, "", "")
    assert octavo("doctor") == expected
    assert seen == ([] if interrupted else [AttributeError])
    assert sys.unraisablehook is note, "whose it was before"


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_that_a_library_swallows_is_one_all_the_same(monkeypatch):
    """numpy, interrupted while it is imported, ends in a RecursionError when it is used."""

    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # which is put back at the end

    def fail(*, interrupted):
        with contextlib.suppress(KeyboardInterrupt):
            if interrupted:
                signal.raise_signal(signal.SIGINT)
        raise RecursionError

    with pytest.raises(KeyboardInterrupt), interrupted_for_sure():
        fail(interrupted=True)
    with pytest.raises(RecursionError), interrupted_for_sure():
        fail(interrupted=False)
    with pytest.raises(KeyboardInterrupt), interrupted_for_sure(), contextlib.suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_before_the_command_begins_is_one_line():
    program = """
from octavo.cli import main as cli
def main():
    raise KeyboardInterrupt
cli.main = main
from octavo.__main__ import main
main()
"""
    done = subprocess.run((sys.executable, "-c", program), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "octavo: error: interrupted\n")
