"""How Triton kernels run in this test session: compiled on a GPU, interpreted on the CPU, or not at all."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch

VARIABLE = "TRITON_INTERPRET"


def installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Whether `@triton.jit` makes functions that run on CPU tensors."""
    if not installed():
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)


def interpret_without_gpu() -> None:
    """Have Triton interpret its kernels in this process if there is no GPU to compile them for.

    Triton decides when a kernel is decorated, its own library included, so this comes before anything else
    imports it. Child processes do not inherit it: what a user's command does is not to depend on us.
    """
    if not installed() or VARIABLE in os.environ or torch.accelerator.is_available():
        return
    os.environ[VARIABLE] = "1"
    try:
        import triton.language  # noqa: F401
        from triton import knobs
    finally:
        del os.environ[VARIABLE]
    propagate, knobs.propagate_env = knobs.propagate_env, False
    knobs.runtime.interpret = True
    knobs.propagate_env = propagate
    _round_to_bfloat16()


def _round_to_bfloat16() -> None:
    """GPUs round float32 to the nearest bfloat16; left to itself, the interpreter cuts it off."""
    import triton.language as tl
    from triton.runtime import interpreter

    cut = interpreter.InterpreterBuilder.cast_impl

    def cast(builder: object, source: Any, to: Any) -> Any:
        if source.dtype.scalar != tl.float32 or to.scalar != tl.bfloat16:
            return cut(builder, source, to)
        rounded = torch.tensor(source.data).bfloat16().view(torch.uint16).numpy()
        return interpreter.TensorHandle(rounded, tl.bfloat16)

    interpreter.InterpreterBuilder.cast_impl = cast
