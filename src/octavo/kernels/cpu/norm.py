"""Root-mean-square normalisation on the CPU."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from octavo.kernels.cpu import host, threads

_PARALLEL_ITEMS = 1 << 15  # numbers below which waking the other threads costs more than it brings
_ROWS_PER_TASK = 8


def supports(x_dtype: torch.dtype, weight_dtype: torch.dtype) -> str | None:
    """None when the compiled kernel can do it, else why not."""
    if x_dtype not in host.DTYPE_NAMES:
        return f"no compiled kernel for {x_dtype}"
    if weight_dtype not in host.DTYPE_NAMES:
        return f"no compiled kernel for weights of {weight_dtype}"
    return host.unfit_reason()


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """`(out, new_residual)`; the sum is rounded to the dtype of `x` before it is normalised."""
    from octavo.kernels.cpu import small_kernels

    depth = x.shape[-1]
    rows = x if x.dim() == 2 else x.reshape(-1, depth)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    new_residual = None
    added_address = added_stride = 0
    if residual is not None:
        added = residual if residual.dim() == 2 else residual.reshape(-1, depth)
        added_address, added_stride = added.data_ptr(), added.stride(0)
        new_residual = torch.empty_like(out)
    item = x.element_size()
    parameters = (
        rows.shape[0],
        depth,
        rows.data_ptr(),
        rows.stride(0) * item,
        weight.data_ptr(),
        out.data_ptr(),
        added_address,
        added_stride * item,
        0 if new_residual is None else new_residual.data_ptr(),
        struct.unpack("<i", struct.pack("<f", eps))[0],
        _ROWS_PER_TASK,
    )
    kernel = small_kernels.norm_kernel(host.DTYPE_NAMES[x.dtype], host.DTYPE_NAMES[weight.dtype])
    threads.run(kernel, parameters, parallel=x.numel() > _PARALLEL_ITEMS)
    return out, new_residual
