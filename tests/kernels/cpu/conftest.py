"""Every test of this folder runs compiled kernels; on a machine that cannot, saying so is a failure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from octavo.kernels.cpu import host, threads


@pytest.fixture(autouse=True)
def compiled_kernels_run_here() -> None:
    assert host.unfit_reason() is None


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], int]]:
    before = threads.num_threads()
    yield lambda num_threads: threads.configure(num_threads)
    threads.configure(before)
