"""A test that asks for `implementation` runs once for each of them, or for those that its `rooms` name."""

from collections.abc import Iterator

import numpy as np
import pytest
from helpers.kernels import IMPLEMENTATIONS

from octavo.kernels import backend


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "implementation" in metafunc.fixturenames:
        chosen = metafunc.definition.get_closest_marker("rooms")
        metafunc.parametrize("implementation", chosen.args if chosen else IMPLEMENTATIONS, indirect=True)


@pytest.fixture
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    """Forces one implementation; where it cannot do the job, the call fails instead of falling back."""
    # Triton's interpreter computes with NumPy, which warns of what overflows in lanes that are masked later.
    with backend.use(request.param), np.errstate(all="ignore"):
        yield request.param
