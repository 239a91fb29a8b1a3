"""The thread team: it finishes what it is given, alone if need be, and leaves nobody waiting."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch

from octavo.errors import ConfigError
from octavo.kernels import linear, pack_weight
from octavo.kernels.cpu import threads

WEIGHT = torch.randn(700, 300, generator=torch.Generator().manual_seed(0))
X = torch.randn(40, 300, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def packed_and_expected(set_threads: Callable[[int], int]) -> tuple[Callable[[], torch.Tensor], torch.Tensor]:
    packed = pack_weight(WEIGHT, "float32")
    set_threads(1)
    return (lambda: linear(X, packed)), linear(X, packed)


Case = tuple[Callable[[], torch.Tensor], torch.Tensor]


def test_many_calls_and_sleeps_between_them(
    set_threads: Callable[[int], int], packed_and_expected: Case
) -> None:
    compute, expected = packed_and_expected
    assert set_threads(3) == 3
    for i in range(300):
        assert torch.equal(compute(), expected)
        if i % 100 == 50:
            time.sleep(0.05)  # long enough for the workers to fall asleep


def test_a_worker_that_never_comes_holds_up_nobody(
    set_threads: Callable[[int], int], packed_and_expected: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, expected = packed_and_expected
    monkeypatch.setattr(threads._Team, "_serve", lambda self, loop, cells: None)
    set_threads(2)
    for _ in range(20):
        assert torch.equal(compute(), expected)


def test_two_python_threads_may_call_at_once(
    set_threads: Callable[[int], int], packed_and_expected: Case
) -> None:
    compute, expected = packed_and_expected
    set_threads(2)
    wrong: list[int] = []

    def work() -> None:
        wrong.extend(i for i in range(100) if not torch.equal(compute(), expected))

    callers = [threading.Thread(target=work) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_makes_its_own_team(
    set_threads: Callable[[int], int], packed_and_expected: Case
) -> None:
    compute, expected = packed_and_expected
    set_threads(2)
    compute()

    def in_child() -> None:
        # Only what is under test: torch's own parallel operators do hang in a forked child.
        torch.set_num_threads(1)
        os._exit(0 if torch.equal(compute(), expected) else 1)

    child = multiprocessing.get_context("fork").Process(target=in_child)
    child.start()
    child.join(120)
    exit_code = child.exitcode
    child.kill()
    assert exit_code == 0


def test_the_process_ends_at_once_with_a_team_running() -> None:
    program = """
import torch
from octavo.kernels import linear, pack_weight
from octavo.kernels.cpu import threads
threads.configure(3)
print(linear(torch.ones(40, 300), pack_weight(torch.ones(700, 300), "float32")).sum().item())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "8400000.0\n", "")


def test_torch_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    with contextlib.suppress(KeyError), threads.torch_threads(1):
        assert torch.get_num_threads() == 1
        raise KeyError
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("number", [0, -1, 1.5, True, "2", 2**31])
def test_nonsense_numbers_are_refused(number: object) -> None:
    with pytest.raises(ConfigError, match="num_threads must be an int from 1 to"):
        threads.configure(number)  # type: ignore[arg-type]  # what a user might try
