"""Every test that asks for `implementation` runs once for each of them."""

from collections.abc import Iterator

import pytest
from helpers.kernels import IMPLEMENTATIONS

from octavo.kernels import backend


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    """Forces one implementation; where it cannot do the job, the call fails instead of falling back."""
    with backend.use(request.param):
        yield request.param
