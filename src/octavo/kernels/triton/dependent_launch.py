"""Programmatic dependent launch (NVIDIA, from compute capability 9.0): a kernel gets on its way while the one
before it still runs.

Its programs start as soon as there is room for them and then wait for the kernels before them to end; nothing
in memory is touched until then. In a chain of short kernels that hides the launches.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from octavo.kernels import triton as room
from octavo.kernels.triton.tuning import Parameters


@triton.jit
def begin(PDL: tl.constexpr):
    """First of all in a kernel: lets the next kernel get on its way, and waits for those before."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


def options(launch: Parameters, device: torch.device) -> dict[str, int]:
    """The launch parameters, whose PDL is 1 or 0, as the kernel is called with on that device."""
    if launch["PDL"] and _can(device):
        return {**launch, "launch_pdl": True}
    return {**launch, "PDL": 0}


@functools.cache
def _can(device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and not room.is_interpreted()
        and torch.cuda.get_device_capability(device) >= (9, 0)
    )
