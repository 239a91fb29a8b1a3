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


@pytest.fixture(params=["decode", "prefill-hopper", "prefill-hopper-split", "prefill-whole", "prefill-split"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which kernels a call runs through: gives the name of a test's case, and forces the kernel in it.

    hopper: the kernel of that architecture, where it fits the call; whole: the one for every GPU. The keys
    of a row are in one program, or with split divided among 7. Other names are as they come.
    """
    # Here, since a machine without a GPU may have no Triton.
    from octavo.kernels.triton import attention, prefill, prefill_hopper

    name, *kind = str(request.param).split("-")
    if kind:
        splits = 7 if "split" in kind else 1
        monkeypatch.setattr(prefill, "_splits", lambda *_: splits)
        monkeypatch.setattr(prefill_hopper, "splits_for", lambda *_: splits)
        if "hopper" not in kind:
            monkeypatch.setattr(attention, "_hopper", lambda: "not in this test")
    return name
