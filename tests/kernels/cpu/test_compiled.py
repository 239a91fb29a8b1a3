"""Where compiled kernels are kept."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.kernels.cpu import compiled


def test_the_cache_folder_is_where_the_kernels_lie(tmp_path: Path) -> None:
    script = (
        "from octavo.kernels.cpu import compiled, small_kernels\n"
        "print(compiled.cache_folder())\n"
        "small_kernels.silu_kernel('float32')\n"
        "print(compiled.cache_folder())"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        (sys.executable, "-c", script), env=environment, check=True, capture_output=True, text=True
    )
    before, after = done.stdout.splitlines()
    assert before == "None"
    assert {path.parent for path in tmp_path.rglob("*.nbi")} == {Path(after)}


def test_a_kernel_that_cannot_be_kept_is_compiled_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled, "_alive", [])
    made: dict[str, object] = {}
    exec("def kernel(block): pass", made)  # no file: Numba has no place for it
    exec("def other(block): pass", made)
    with caplog.at_level(logging.WARNING, "octavo"):
        assert compiled.compile_kernel(made["kernel"]) > 0
        assert compiled.compile_kernel(made["other"]) > 0
    (record,) = caplog.records
    assert "compiled kernels are not kept on disk" in record.message
    assert compiled.cache_folder() is None
