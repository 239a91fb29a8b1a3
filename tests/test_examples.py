import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
# What each prints, as far as it is worth holding on to.
EXPECTED = {
    "kernels_only.py": "(3, 9, 64), largest difference from dense attention ",
    "offline.py": "'The capital of France is' -> ' Paris.",
    "openai_client.py": "tool_calls get_weather {'city': 'Paris'",
    "shared_prefix.py": "How many pages are there? 176 of 190 prompt tokens came from the cache",
    "streaming.py": "rainbow",
    "structured_output.py": "  a book of ",
    "transformers_continuous_batching.py": "'The capital of France is' -> ' Paris.",
    "transformers_generate.py": "'The capital of France is' -> ' Paris.",
}


def test_every_example_is_run():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(EXPECTED)


@pytest.mark.model
@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_an_example_prints_what_it_promises(name):
    command = (sys.executable, "-W", "error", str(EXAMPLES / name))
    quiet = os.environ | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}  # bars are Transformers' only word on stderr
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=quiet)
    assert EXPECTED[name] in done.stdout
    assert done.stderr == ""
