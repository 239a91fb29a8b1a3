"""compute-sanitizer over a few small calls, where the tool is installed and lets itself be used."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("sanitized_calls.py")
TOOL = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"


def sanitized(tool: str, *program: str | Path) -> subprocess.CompletedProcess[str]:
    # Without torch's own cache of memory every tensor is an allocation, whose ends the tool knows.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    # Errors of the CUDA API are often questions that torch asks to learn what there is.
    options = ("--report-api-errors", "no") if tool == "memcheck" else ()
    command = (TOOL, "--tool", tool, *options, "--error-exitcode", "9", *program)
    return subprocess.run(command, capture_output=True, text=True, env=environment)


# It comes with the CUDA toolkit, which the kernels do without: a GPU without it can run all other tests.
@pytest.mark.skipif(not Path(TOOL).exists(), reason="compute-sanitizer is not installed")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_no_errors(tool: str) -> None:
    done = sanitized(tool, sys.executable, SCRIPT, tool)
    if "Device not supported" in done.stdout + done.stderr:
        pytest.skip("compute-sanitizer cannot look into this virtual machine's GPU")
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert "done" in done.stdout
    assert "0 errors" in done.stdout
