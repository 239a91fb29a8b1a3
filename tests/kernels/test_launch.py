"""A launch without most of Triton's dispatch does what Triton would do; with a stand-in for a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from octavo.kernels.triton import launch  # noqa: E402

SCRIPT = Path(__file__).parents[1] / "helpers" / "direct_calls.py"


def test_the_kernel_and_its_arguments_are_those_of_triton(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        (sys.executable, SCRIPT, "20"), env=environment, capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["wrong"] == []
    assert found["compiled"] == found["kept"] > 45  # each was seen by who watches compiles, once
    assert (found["hooked"], found["late"]) == (["_kernel"], 0)


def test_unknown_versions_and_what_is_no_compiled_kernel_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def kernel() -> None: ...

    assert launch.direct(kernel) is kernel
    compiled = triton.runtime.jit.JITFunction(kernel)
    assert isinstance(launch.direct(compiled), launch.Direct)
    monkeypatch.setattr(triton, "__version__", "3.10.0")
    assert launch.direct(compiled) is compiled


def test_what_was_launched_while_somebody_looked_on_is_not_launched_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs: list[str] = []

    class Compiled:
        function = packed_metadata = None

        def __init__(self, name: str) -> None:
            self.run = lambda *_: runs.append(name)

    class Kernel(launch.Direct):
        watched = True

        def __init__(self) -> None:
            self.kernel = SimpleNamespace(params=[SimpleNamespace(name="x"), SimpleNamespace(name="size")])

        def is_watched(self) -> bool:
            return self.watched

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            name = "with checks" if self.watched else "ordinary"
            return lambda **_: runs.append(f"Triton's {name}") or Compiled(name)

    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda _: 0)
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(launch, "CompiledKernel", Compiled)
    kernel, x = Kernel(), torch.zeros(4)
    launched = launch.Prepared(kernel, (1,), {"x": x, "size": 4})
    launched(x)
    kernel.watched = False
    launched(x)
    launched(x)
    kernel.watched = True
    launched(x)
    kernel.watched = False
    launched(x)
    assert runs == [
        "Triton's with checks", "Triton's ordinary", "ordinary", "Triton's with checks", "ordinary",
    ]  # fmt: skip
