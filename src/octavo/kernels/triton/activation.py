"""The gated activation of the MLP."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton import launch, tuning
from octavo.kernels.triton.tuning import Parameters

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


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


def supports(x_dtype: torch.dtype) -> str | None:
    """None when the kernel can do it, else why not."""
    return None if x_dtype in _DTYPES else f"no Triton kernel for {x_dtype}"


def silu_and_mul(x: Tensor, *, parameters: Parameters | None = None) -> Tensor:
    """`silu(gate) * up` of `x = [gate | up]`; `parameters` take the place of those of this GPU's table."""
    num_rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    parameters = parameters or tuning.parameters("silu_and_mul", x.device, *launch_class(x))
    options = launch.options(parameters, x.device)
    chunks = -(-width // parameters["BLOCK_I"])
    _silu_and_mul[num_rows * chunks,](
        x, out, x.stride(0), WIDTH=width, CHUNKS=chunks, ALIGN=launch.alignment(x), **options
    )
    return out


def launch_class(x: Tensor) -> tuple[str, Parameters]:
    """The class of a call in the table of tuned launch parameters, and those that are right on any GPU."""
    width = x.shape[1] // 2
    block = min(1024, launch.block_for(width))
    given = {"BLOCK_I": block, "num_warps": max(1, block // 128), "PDL": 1}
    return f"I{width} {x.element_size()} bytes", given
