"""The programs in bench/: each can be asked for help, and has every option that a page names."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(path for path in (ROOT / "bench").glob("*.py") if "ArgumentParser(" in path.read_text())
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "scripts" / "benchmark"]


def documented() -> dict[str, set[str]]:
    """Program -> the options that stand behind its name, up to those that it passes on (` -- `)."""
    found: dict[str, set[str]] = {}
    for page in PAGES:
        for program, arguments in re.findall(r"bench/(\w+\.py)([^`\n]*)", page.read_text(encoding="utf-8")):
            own = arguments.partition(" -- ")[0]
            found.setdefault(program, set()).update(re.findall(r"--[\w-]+", own))
    return found


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_it_has_the_options_that_the_pages_name(program: Path) -> None:
    done = subprocess.run(
        (sys.executable, str(program), "--help"), check=True, capture_output=True, text=True
    )
    assert documented().get(program.name, set()) <= set(re.findall(r"--[\w-]+", done.stdout))


def test_the_pages_name_programs_that_exist() -> None:
    assert {"compare_cpu.py", "overheads.py", "quality.py"} <= set(documented())
    assert set(documented()) <= {path.name for path in PROGRAMS}
