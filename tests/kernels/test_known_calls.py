"""A call that is known goes to its launch at once: to the same one, and only if it is the same call."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from octavo.errors import KernelArgumentError
from octavo.kernels import backend, known_calls, silu_and_mul
from octavo.kernels.known_calls import KnownCalls
from octavo.kernels.triton import tuning

SCRIPT = Path(__file__).parents[1] / "helpers" / "repeated_calls.py"
META = torch.device("meta")


@pytest.fixture
def known() -> KnownCalls:
    return KnownCalls()


@pytest.fixture(autouse=True)
def without_gradients() -> object:
    with torch.inference_mode():
        yield


def on_gpu(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def test_a_call_is_known_by_its_signature(known: KnownCalls) -> None:
    known.keep("first", (on_gpu(2, 3), None), 1, "name")
    assert known.get((on_gpu(2, 3), None), 1, "name") == "first"
    others: list[tuple[tuple[object, ...], tuple[object, ...]]] = [
        ((on_gpu(3, 2), None), (1, "name")),
        ((on_gpu(3, 2).t(), None), (1, "name")),
        ((on_gpu(2, 3, dtype=torch.float16), None), (1, "name")),
        ((on_gpu(2, 3), on_gpu(1)), (1, "name")),
        ((on_gpu(2, 3), 1.0), (1, "name")),
        ((on_gpu(2, 3), None), (2, "name")),
        ((on_gpu(2, 3), None), (True, "name")),
        ((on_gpu(2, 3), None), (1.0, "name")),
        ((on_gpu(2, 3), None), (1,)),
    ]
    for tensors, values in others:
        assert known.get(tensors, *values) is None


def test_where_contents_or_gradients_matter_nothing_is_known(known: KnownCalls) -> None:
    for x in (torch.empty(2), on_gpu(2)):
        known.keep("once", (x,))
    assert known.get((torch.empty(2),)) is None
    assert known.get((on_gpu(2),)) == "once"
    with torch.inference_mode(False), torch.enable_grad():
        assert known.get((on_gpu(2),)) is None


def test_a_value_that_is_a_tensor_has_contents(known: KnownCalls) -> None:
    eps = torch.tensor(1e-6)
    known.keep("small", (on_gpu(2),), eps)
    assert known.get((on_gpu(2),), eps) is None


def test_no_tensor_is_kept_and_not_everything_for_ever(
    known: KnownCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = on_gpu(2)
    gone = weakref.ref(x)
    known.keep("x", (x,))
    del x
    gc.collect()
    assert gone() is None
    monkeypatch.setattr(known_calls, "_MOST", 3)
    for size in range(10):
        known.keep(size, (on_gpu(size),))
    assert known.get((on_gpu(9),)) == 9
    assert sum(known.get((on_gpu(size),)) is not None for size in range(10)) <= 3


def test_another_choice_of_kernels_or_of_their_parameters_is_heeded(known: KnownCalls) -> None:
    known.keep("kernel", (on_gpu(2),))
    with backend.use("reference"):
        assert known.get((on_gpu(2),)) is None
        known.keep("reference", (on_gpu(2),))
    assert known.get((on_gpu(2),)) is None
    known.keep("default", (on_gpu(2),))
    tuning.forget()
    assert known.get((on_gpu(2),)) is None


def test_a_wrong_call_is_wrong_after_a_right_one() -> None:
    silu_and_mul(on_gpu(2, 4))
    for _ in range(2):
        with pytest.raises(KernelArgumentError, match="even"):
            silu_and_mul(on_gpu(2, 5))


def test_a_known_call_launches_what_it_would_have_launched(tmp_path: Path) -> None:
    """For a GPU that is not there: kernels, launch attributes, grids, and arguments with their addresses."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        (sys.executable, SCRIPT), env=environment, capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["wrong"] == []
    assert found["count"] > 150
    assert found["accepted"] == []
