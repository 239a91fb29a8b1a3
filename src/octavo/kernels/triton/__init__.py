"""Kernels for GPUs, compiled by Triton on first use and kept on disk: no nvcc, only a wheel.

Each module holds `@triton.jit` bodies and what launches them. `tuning.py` finds launch parameters for this
GPU, `monitor.py` counts what gets compiled, `warm_up.py` has it compiled before the first request.

Importing this package loads neither Triton nor a kernel.
"""

from __future__ import annotations

import functools

OLDEST = (3, 6)  # of Triton; the newest that the tests run on is 3.9
OLDEST_CAPABILITY = (8, 0)  # of an NVIDIA GPU: bfloat16 and asynchronous copies


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
    import torch

    if torch.version.hip is not None or not torch.cuda.is_available():
        return None
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        if capability < OLDEST_CAPABILITY:
            name = torch.cuda.get_device_name(index)
            return f"{name} has compute capability {capability[0]}.{capability[1]}; 8.0 or newer is needed"
    return None
