"""Kernels compiled in other processes; what happens there is seen from scripts of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from octavo.kernels.triton import compile_ahead

SCRIPT = Path(__file__).parents[1] / "helpers" / "compile_ahead_cases.py"
KERNELS = ["_choose", "_finish_decode", "_norm", "_summarise", "attend", "rows_linear", "search"]

Case = Callable[[str], dict[str, Any]]


def environment(cache: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = os.pathsep.join(sys.path)
    own = {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": paths, "PYTHONWARNINGS": "ignore"}
    return {**kept, **own, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def case(tmp_path: Path) -> Case:
    def run(name: str) -> dict[str, Any]:
        command = (sys.executable, SCRIPT, name)
        done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)  # and nothing else was printed there
        return found

    return run


def test_what_launches_need_is_compiled_elsewhere_and_then_on_disk(case: Case) -> None:
    found = case("elsewhere")
    assert found["wanted"] == found["compiled"] == KERNELS
    assert sorted(found["launched"]) == [[name, True] for name in KERNELS]


def test_other_threads_launch_meanwhile(case: Case) -> None:
    assert case("others") == {"noted": 1, "made": 1}


@pytest.mark.parametrize("name", ["dies", "hangs"])
def test_without_those_processes_all_is_compiled_here(case: Case, name: str) -> None:
    # The two that they had in hand are compiled when they are launched; others are ready.
    launched = [["_norm", False]] * 2
    assert case(name) == {"wanted": 8, "compiled": 0, "ended": True, "launched": launched}


def test_they_end_with_the_process_they_compile_for(tmp_path: Path) -> None:
    command = (sys.executable, SCRIPT, "killed")
    process = subprocess.Popen(command, env=environment(tmp_path), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        group = int(process.stdout.readline())
        assert len(running(group)) >= 3, "one that is told, and two that compile"
    finally:
        process.kill()
        process.communicate()
    until = time.monotonic() + 60
    while running(group) and time.monotonic() < until:
        time.sleep(0.02)
    assert running(group) == []


def running(group: int) -> list[int]:
    """Processes of that group, but for those that only wait to be waited for."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, (state, _, its_group) = stat.parent.name, stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(its_group) == group and state not in "ZX":
            found.append(int(pid))
    return found


def test_a_first_start_has_them_and_a_second_one_does_not(case: Case) -> None:
    first, second = case("whole"), case("whole")
    names = [name for name, _ in first["made"]]
    assert {"_norm", "_decode", "_write"} <= set(names)
    assert first == {"made": [[name, False] for name in names], "started": 1, "devices": [[0]]}
    assert second == {"made": [[name, True] for name in names], "started": 0, "devices": []}
    assert case("another")["started"] == 1, "with one cache for GPUs of both kinds"


def test_two_threads_note_one_after_the_other_and_leave_no_hook(case: Case) -> None:
    assert case("crossed") == {"is_waiting": True, "is_left": False}


def test_files_in_the_current_folder_are_nothing_to_the_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("open('seen', 'w')")
    monkeypatch.chdir(tmp_path)
    workers = compile_ahead.Workers()
    try:
        process = workers._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        assert process.stdout.read() == "", "it ends when nothing more can come"
    finally:
        workers.close()
    assert not (tmp_path / "seen").exists()


class Idle:
    def close(self) -> None: ...


def is_first(shape: object) -> bool:
    with compile_ahead.first_start(shape) as workers:
        return workers is not None


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_ahead, "Workers", Idle)
    monkeypatch.setattr(compile_ahead, "_most_processes", lambda: 2)
    return tmp_path


@pytest.mark.usefixtures("disk")
def test_a_start_is_the_first_until_one_of_its_shape_went_well() -> None:
    with pytest.raises(ZeroDivisionError), compile_ahead.first_start("a shape"):
        _ = 1 / 0
    assert [is_first(shape) for shape in ("a shape", "a shape", "another", "a shape")] == [
        True, False, True, False,
    ]  # fmt: skip


def test_no_start_is_the_first_where_nothing_would_be_found(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (disk / "file").touch()
    with monkeypatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(disk / "file"))  # no folder can be made in it
        assert not is_first("a shape")
    with monkeypatch.context() as patch:
        patch.setenv("TRITON_ALWAYS_COMPILE", "1")
        assert not is_first("a shape")
    with monkeypatch.context() as patch:
        patch.setattr("triton.__version__", "4.0.0")  # of which nobody knows what it tells its hooks
        assert not is_first("a shape")
    with monkeypatch.context() as patch:
        patch.setattr(compile_ahead, "_most_processes", lambda: 0)
        assert not is_first("a shape")
    assert is_first("a shape")


@pytest.mark.parametrize(("processors", "expected"), [(1, 0), (2, 0), (3, 2), (12, 11), (100, 16)])
def test_a_processor_is_left_for_this_process(
    processors: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)))
    assert compile_ahead._most_processes() == expected
    monkeypatch.setattr(sys, "executable", "")
    assert compile_ahead._most_processes() == 0


def test_a_kernel_s_hash_is_the_same_whatever_was_hashed_before() -> None:
    """Triton before 3.9 left constants out of it, or not: on disk it was found again, or not."""
    code = (
        "import sys; from octavo.kernels.triton.compile_worker import kernel_of as of; names = sys.argv[1:];"
        "print(sorted((name, of('octavo.kernels.triton.' + name.split()[0], name.split()[1]).cache_key)"
        " for name in names))"
    )
    names = ["sampling _choose", "sampling_search search", "sampling _summarise", "decode _decode"]

    def hashes(names: list[str]) -> str:
        command = (sys.executable, "-c", code, *names)
        env = environment(Path("unused"))
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout

    assert hashes(names) == hashes(names[::-1])
