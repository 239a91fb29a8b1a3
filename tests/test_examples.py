import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
# What each prints, as far as it is worth holding on to.
EXPECTED = {
    "kernels.py": "(3, 9, 64), largest difference from dense attention ",
    "offline.py": "'The capital of France is' -> ' Paris.",
    "shared_prefix.py": "How many pages are there? 176 of 190 prompt tokens came from the cache",
    "streaming.py": "rainbow",
}


def test_every_example_is_run():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(EXPECTED)


@pytest.mark.model
@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_an_example_prints_what_it_promises(name):
    command = (sys.executable, "-W", "error", str(EXAMPLES / name))
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert EXPECTED[name] in done.stdout
    assert done.stderr == ""
