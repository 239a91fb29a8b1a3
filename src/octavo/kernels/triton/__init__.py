"""Kernels for GPUs, compiled by Triton on first use and kept on disk: no nvcc, only a wheel.

Each module holds `@triton.jit` bodies and what launches them. `tuning.py` finds launch parameters for this
GPU, `monitor.py` counts what gets compiled, `warm_up.py` has it compiled before the first request.

Importing this package loads neither Triton nor a kernel.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

OLDEST = (3, 6)  # of Triton; the newest that the tests run on is 3.9
OLDEST_CAPABILITY = (8, 0)  # of an NVIDIA GPU: bfloat16 and asynchronous copies
SHORT = 8  # attention of sequences of at most so many query rows is decode's, of longer ones prefill's

_NOTHING_TO_DO = nullcontext()

logger = logging.getLogger("octavo")


def unfit_reason(device_type: str) -> str | None:
    """Why these kernels cannot run on tensors of such a device here; None when they can."""
    reason = _installation_reason()
    if reason is not None:
        return reason
    if device_type == "cpu":
        if is_interpreted() or _compiles_for_cpu():
            return None
        return "Triton runs on GPUs; on the CPU only with TRITON_INTERPRET=1"
    if device_type == "cuda":
        return _capability_reason()
    return None


@functools.cache
def hashing_of_triton() -> threading.Thread:
    """A thread, begun by the first call, in which Triton hashes itself, once a process.

    The hash is part of what a kernel is kept under, and takes half a second and more: Triton's library is of
    half a gigabyte. Begun early it costs nothing, as it leaves the interpreter to others.
    """
    _installation_reason()  # imports Triton in this thread: two that do so at once may see half of it
    thread = threading.Thread(target=_hash_triton, name="hash of Triton", daemon=True)
    thread.start()
    return thread


def _hash_triton() -> None:
    try:
        from triton.runtime.cache import triton_key

        triton_key()
    except Exception as error:  # another version; or one that whoever compiles will say more of
        logger.debug("Triton is not hashed ahead: %s: %s", type(error).__name__, error)


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Makes the tensor's GPU the current one: Triton launches there, whatever its arguments are on."""
    devices = torch.cuda if x.is_cuda else torch.xpu if x.is_xpu else None
    if devices is None or devices.current_device() == x.get_device():
        return _NOTHING_TO_DO
    made_current: AbstractContextManager[object] = devices.device(x.get_device())
    return made_current


def on_its_device(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel, launched on the device of its first argument."""

    @functools.wraps(kernel)
    def launch(x: Tensor, *arguments: Any, **options: Any) -> Any:
        with on_device_of(x):
            return kernel(x, *arguments, **options)

    return launch


@functools.cache
def _installation_reason() -> str | None:
    try:
        import triton
    except ImportError as error:
        return f"Triton does not import ({error}); pip install triton"
    if _version(triton.__version__) < OLDEST:
        return f"Triton {triton.__version__} is too old; 3.6 or newer is needed"
    return None


def _compiles_for_cpu() -> bool:
    """Whether the CPU is what this Triton compiles for: a driver of that kind is in place."""
    from triton.runtime import driver

    try:
        return bool(driver.active.get_active_torch_device().type == "cpu")
    except RuntimeError:  # there is no driver at all
        return False


def is_interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter (on any device, and very slowly)."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


@functools.cache
def _capability_reason() -> str | None:
    if torch.version.hip is not None or not torch.cuda.is_available():
        return None
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        if capability < OLDEST_CAPABILITY:
            name = torch.cuda.get_device_name(index)
            return f"{name} has compute capability {capability[0]}.{capability[1]}; 8.0 or newer is needed"
    return None
