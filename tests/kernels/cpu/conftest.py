"""Every test of this folder runs compiled kernels; on a machine that cannot, saying so is a failure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from octavo.kernels.cpu import host


@pytest.fixture(autouse=True)
def compiled_kernels_run_here() -> None:
    assert host.unfit_reason() is None


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
