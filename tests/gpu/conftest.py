"""Tests that need an NVIDIA GPU: `scripts/test tests/gpu`, or `python -m pytest tests/gpu`."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from octavo.kernels import backend


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return None if torch.cuda.is_available() else True


@pytest.fixture(autouse=True)
def _triton_room() -> Iterator[None]:
    """Every kernel call goes to the Triton room; what it cannot do fails instead of falling back."""
    with backend.use("triton"):
        yield


@pytest.fixture(params=["decode", "prefill", "prefill-everywhere", "mixed"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which kernels a call runs through: the name of a test's case.

    `prefill` has on Hopper a kernel of its own; `prefill-everywhere` is the same case without it.
    """
    if request.param == "prefill-everywhere":
        without_hopper_kernel(monkeypatch)
    return str(request.param).removesuffix("-everywhere")


def without_hopper_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.kernels.triton import prefill_hopper

    monkeypatch.setattr(prefill_hopper, "supports_hopper", lambda *_, **__: "not in this test")
