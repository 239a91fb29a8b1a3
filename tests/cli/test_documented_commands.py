"""Every `octavo` line in README and docs names a command and options that exist."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from octavo.cli.main import COMMANDS, app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def documented():
    for page in PAGES:
        for block in re.findall(
            r"```(?:bash|sh|console)\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL
        ):
            for line in block.replace("\\\n", " ").splitlines():
                for part in re.split(r"\s[|&<>]+\s", line):
                    command = re.match(r"\$?\s*(?:\.venv/bin/)?octavo\s+(\w+.*)", part)
                    if command:
                        yield pytest.param(shlex.split(command[1], comments=True), id=command[1].strip())


@pytest.mark.parametrize("arguments", list(documented()))
def test_it_parses(arguments):
    command = typer.main.get_command(app)
    while True:
        context = command.make_context("octavo", list(arguments), resilient_parsing=False)
        if not hasattr(command, "get_command"):
            break
        name, *arguments = arguments
        command = command.get_command(context, name)
        assert command is not None, f"no command {name}"


def test_the_pages_show_every_command():
    shown = {param.values[0][0] for param in documented()}
    assert shown == set(COMMANDS)
