"""The Triton kernels in the interpreter: tiny shapes, every option. On a GPU, tests/gpu takes their place."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers import triton_here

from octavo.kernels import backend


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return None if triton_here.interpreted() or collection_path.name == "test_compiled.py" else True


@pytest.fixture
def triton_room() -> Iterator[None]:
    """Every kernel call goes to the Triton room; what it cannot do fails instead of falling back."""
    with backend.use("triton"), np.errstate(all="ignore"):  # masked lanes overflow, as they do on a GPU
        yield
