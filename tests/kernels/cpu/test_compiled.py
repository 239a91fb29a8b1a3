"""Where compiled kernels are kept."""

import errno
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from numba.core import caching

from octavo.kernels.cpu import compiled, host, small_kernels


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


@pytest.mark.parametrize("size", [0, 40], ids=["empty", "cut short"])
@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
def test_what_cannot_be_read_in_the_cache_is_written_anew(tmp_path: Path, suffix: str, size: int) -> None:
    """As a machine leaves it that went down before the disk had it all."""
    script = (
        "from octavo.kernels.cpu import compiled, small_kernels\n"
        "assert small_kernels.silu_kernel('float32') > 0\n"
        "print(compiled._alive[0].cache_hits)"
    )

    def hits() -> str:
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        arguments = (sys.executable, "-W", "error", "-c", script)
        done = subprocess.run(arguments, env=environment, check=True, capture_output=True, text=True)
        return done.stdout

    assert hits() == "0\n"
    (damaged,) = tmp_path.rglob(f"*{suffix}")
    os.truncate(damaged, size)
    assert hits() == "0\n"
    assert hits() == "1\n"


def test_on_a_full_disk_kernels_are_compiled_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(compiled, "_alive", [])
    monkeypatch.setattr(caching.FunctionCache, "save_overload", full)
    kernel = small_kernels._silu("float32", host.vector_shape().lanes, "on a full disk")
    with caplog.at_level(logging.WARNING, "octavo"):
        assert compiled.compile_kernel(kernel) > 0
    assert "compiled kernels are not kept on disk ([Errno 28] No space left on device)" in caplog.text
    assert compiled.cache_folder() is None
