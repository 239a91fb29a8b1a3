"""Gluon, which is not interpreted, as far as a kernel without shared memory needs it: Triton without layouts.

`interpreted(module)` is the module of a Gluon kernel once more, for Triton's interpreter: in float32 only,
since NumPy, which that computes with, has no bfloat16.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import triton
import triton.language as tl

_IMPORTS = {
    "from triton.experimental import gluon": "import triton.language as tl",
    "from triton.experimental.gluon import language as gl": "from helpers.gluon_stand_in import gl, gluon",
    "from triton.experimental.gluon.language.nvidia.ampere import mma_v2": (
        "from helpers.gluon_stand_in import mma_v2"
    ),
}


def _none(*_: Any) -> None:
    return None


def mma_v2(a: Any, b: Any, acc: Any) -> Any:
    return tl.dot(a, b, acc)


gluon = SimpleNamespace(jit=triton.jit)
gl = SimpleNamespace(
    constexpr=tl.constexpr, float32=tl.float32, int32=tl.int32, int64=tl.int64, static_range=range,
    arange=lambda *args, layout=None: tl.arange(*args),
    zeros=lambda *args, layout=None: tl.zeros(*args),
    load=lambda *args, **options: tl.load(*args, **options),
    store=lambda *args, **options: tl.store(*args, **options),
    minimum=lambda a, b: tl.minimum(a, b), sum=lambda x, axis: tl.sum(x, axis),
    exp=lambda x: tl.exp(x), rsqrt=lambda x: tl.rsqrt(x),
    program_id=lambda axis: tl.program_id(axis), num_programs=lambda axis: tl.num_programs(axis),
    convert_layout=lambda x, layout: x,
    NVMMADistributedLayout=_none, DotOperandLayout=_none, SliceLayout=_none, BlockedLayout=_none,
)  # fmt: skip


def interpreted(module: ModuleType, folder: Path) -> ModuleType:
    """With `gluon.jit` as `triton.jit`; needs TRITON_INTERPRET. Its source is written to `folder`."""
    assert module.__file__ is not None
    text = Path(module.__file__).read_text()
    for line, instead in _IMPORTS.items():
        assert text.count(f"{line}\n") == 1
        text = text.replace(f"{line}\n", f"{instead}\n")
    text = text.replace("gl.constexpr", "tl.constexpr")  # the interpreter knows it by this name
    path = folder / f"interpreted_{module.__name__.rpartition('.')[2]}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made
