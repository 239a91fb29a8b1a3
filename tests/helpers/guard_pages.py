"""GPU memory between two pages that are mapped to nothing: whoever leaves it stops with an illegal access.

Such an access ruins the CUDA context: for a process of its own.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3
_VIEWS = {1: (torch.uint8, "|u1"), 2: (torch.int16, "<i2"), 4: (torch.int32, "<i4"), 8: (torch.int64, "<i8")}


class _Properties(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location_type", ctypes.c_int),
        ("location_id", ctypes.c_int),
        ("windows_only", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):  # CUmemAccessDesc
    _fields_ = (("location_type", ctypes.c_int), ("location_id", ctypes.c_int), ("flags", ctypes.c_int))


class _Memory:
    """What torch asks of memory it did not allocate."""

    def __init__(self, address: int, num_bytes: int, itemsize: int) -> None:
        shape, kind = (num_bytes // itemsize,), _VIEWS[itemsize][1]
        self.__cuda_array_interface__: dict[str, Any] = {
            "data": (address, False), "shape": shape, "typestr": kind, "version": 3,
        }  # fmt: skip


def guarded(x: Tensor, at_the_end: bool = True) -> Tensor:
    """A copy of x that ends where a hole in the address space begins, or begins where one ends.

    The copy is never freed. It keeps the shape of x, and is contiguous.
    """
    torch.cuda.init()
    torch.empty(1, device="cuda")  # makes the context that the driver calls below work in
    cuda = ctypes.CDLL("libcuda.so.1")
    properties = _Properties(type=_PINNED, location_type=_ON_DEVICE, location_id=torch.cuda.current_device())
    page = ctypes.c_size_t()
    _check(cuda.cuMemGetAllocationGranularity(ctypes.byref(page), ctypes.byref(properties), 0))
    num_bytes = x.numel() * x.element_size()
    size = max(1, -(-num_bytes // page.value)) * page.value
    start, handle, none = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint64(0)
    whole = ctypes.c_size_t(size + 2 * page.value)
    _check(cuda.cuMemAddressReserve(ctypes.byref(start), whole, ctypes.c_size_t(0), none, none))
    _check(cuda.cuMemCreate(ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(properties), none))
    mapped = ctypes.c_uint64(start.value + page.value)
    _check(cuda.cuMemMap(mapped, ctypes.c_size_t(size), ctypes.c_size_t(0), handle, none))
    access = _Access(_ON_DEVICE, torch.cuda.current_device(), _READ_WRITE)
    _check(cuda.cuMemSetAccess(mapped, ctypes.c_size_t(size), ctypes.byref(access), ctypes.c_size_t(1)))
    address = mapped.value + (size - num_bytes if at_the_end else 0)
    itemsize = x.element_size()
    memory = torch.as_tensor(_Memory(address, num_bytes, itemsize), device="cuda")
    assert memory.data_ptr() == address
    copy = memory.view(x.dtype).view(x.shape)
    copy.copy_(x)
    return copy


def _check(error: int) -> None:
    if error:
        raise OSError(f"CUDA driver error {error}")
