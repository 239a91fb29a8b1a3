"""The activations of the MLP on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.cpu import host, threads

_PARALLEL_ITEMS = 1 << 14  # numbers below which waking the other threads costs more than it brings
_ROWS_PER_TASK = 4


def supports(x_dtype: torch.dtype) -> str | None:
    """None when the compiled kernel can do it, else why not."""
    return host.unfit_reason() if x_dtype in host.DTYPE_NAMES else f"no compiled kernel for {x_dtype}"


def silu_and_mul(x: Tensor, up: Tensor | None = None) -> Tensor:
    """`silu(gate) * up` of `x = [gate | up]`, or of `x` and `up` apart."""
    from octavo.kernels.cpu import small_kernels

    kernel = small_kernels.silu_kernel(host.DTYPE_NAMES[x.dtype])
    width = x.shape[1] // 2 if up is None else x.shape[1]
    up = x[:, width:] if up is None else up
    return _run(kernel, x, width, up.data_ptr(), up.stride(0) * up.element_size())


def gelu_tanh(x: Tensor) -> Tensor:
    """`x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))`."""
    from octavo.kernels.cpu import small_kernels

    return _run(small_kernels.gelu_kernel(host.DTYPE_NAMES[x.dtype]), x, x.shape[1])


def _run(kernel: int, x: Tensor, width: int, *up: int) -> Tensor:
    rows = x.shape[0]
    out = x.new_empty((rows, width))
    stride = x.stride(0) * x.element_size()
    parameters = (rows, width, x.data_ptr(), stride, out.data_ptr(), _ROWS_PER_TASK, *up)
    threads.run(kernel, parameters, parallel=out.numel() > _PARALLEL_ITEMS)
    return out
