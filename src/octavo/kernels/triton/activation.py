"""The activations of the MLP."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton import launch, tuning
from octavo.kernels.triton.tuning import Parameters

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@launch.direct
@triton.jit(do_not_specialize=["x_row"])
def _silu_and_mul(
    x, out, x_row,
    WIDTH: tl.constexpr, CHUNKS: tl.constexpr, ALIGN: tl.constexpr, BLOCK_I: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch.begin(PDL)
    row = (tl.program_id(0) // CHUNKS).to(tl.int64)
    dims = tl.program_id(0) % CHUNKS * BLOCK_I + tl.arange(0, BLOCK_I)
    mask = dims < WIDTH
    gate_row = x + launch.part(row, x_row, ALIGN)
    gate = tl.load(gate_row + dims, mask=mask, eviction_policy="evict_first").to(tl.float32)
    up = tl.load(gate_row + (WIDTH + dims), mask=mask, eviction_policy="evict_first").to(tl.float32)
    activated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * WIDTH + dims, activated.to(out.dtype.element_ty), mask=mask)


@launch.direct
@triton.jit(do_not_specialize=["x_row"])
def _gelu_tanh(
    x, out, x_row,
    WIDTH: tl.constexpr, CHUNKS: tl.constexpr, ALIGN: tl.constexpr, BLOCK_I: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch.begin(PDL)
    row = (tl.program_id(0) // CHUNKS).to(tl.int64)
    dims = tl.program_id(0) % CHUNKS * BLOCK_I + tl.arange(0, BLOCK_I)
    mask = dims < WIDTH
    x_at = x + launch.part(row, x_row, ALIGN) + dims
    value = tl.load(x_at, mask=mask, eviction_policy="evict_first").to(tl.float32)
    # (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)), u = sqrt(2 / pi) * (x + 0.044715 x^3)
    exponent = value * (1.5957691216057308 + 0.07135481282706127 * value * value)
    activated = value / (1.0 + tl.exp(-exponent))
    tl.store(out + row * WIDTH + dims, activated.to(out.dtype.element_ty), mask=mask)


def supports(x_dtype: torch.dtype) -> str | None:
    """None when the kernel can do it, else why not."""
    return None if x_dtype in _DTYPES else f"no Triton kernel for {x_dtype}"


def silu_and_mul(x: Tensor, *, parameters: Parameters | None = None) -> Tensor:
    """`silu(gate) * up` of `x = [gate | up]`; `parameters` take the place of those of this GPU's table."""
    width = x.shape[1] // 2
    parameters = parameters or tuning.parameters("silu_and_mul", x.device, *launch_class(x, width))
    return _launch(_silu_and_mul, x, width, parameters)


def gelu_tanh(x: Tensor) -> Tensor:
    """`x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))`."""
    width = x.shape[1]
    parameters = tuning.parameters("gelu_tanh", x.device, *launch_class(x, width))
    return _launch(_gelu_tanh, x, width, parameters)


def _launch(kernel, x: Tensor, width: int, parameters: Parameters) -> Tensor:
    num_rows = x.shape[0]
    out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    options = launch.options(parameters, x.device)
    chunks = -(-width // parameters["BLOCK_I"])
    kernel[num_rows * chunks,](
        x, out, x.stride(0), WIDTH=width, CHUNKS=chunks, ALIGN=launch.alignment(x), **options
    )
    return out


def launch_class(x: Tensor, width: int) -> tuple[str, Parameters]:
    """The class of a call in the table of tuned launch parameters, and those that are right on any GPU.

    `width` is that of the result.
    """
    block = min(1024, launch.block_for(width))
    given = {"BLOCK_I": block, "num_warps": max(1, block // 128), "PDL": 1}
    return f"I{width} {x.element_size()} bytes", given
