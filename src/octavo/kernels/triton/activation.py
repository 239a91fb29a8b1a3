"""The activations of the MLP."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.known_calls import prepared_by
from octavo.kernels.triton import launch, tuning
from octavo.kernels.triton.tuning import Parameters

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@launch.direct
@triton.jit(do_not_specialize=["x_row", "up_row"])
def _silu_and_mul(
    x, apart, out, x_row, up_row,
    IS_APART: tl.constexpr,
    WIDTH: tl.constexpr, CHUNKS: tl.constexpr, ALIGN: tl.constexpr, BLOCK_I: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch.begin(PDL)
    row = (tl.program_id(0) // CHUNKS).to(tl.int64)
    dims = tl.program_id(0) % CHUNKS * BLOCK_I + tl.arange(0, BLOCK_I)
    mask = dims < WIDTH
    gate_row = x + launch.part(row, x_row, ALIGN)
    gate = tl.load(gate_row + dims, mask=mask, eviction_policy="evict_first").to(tl.float32)
    if IS_APART:
        up_at = apart + launch.part(row, up_row, ALIGN) + dims
    else:
        up_at = gate_row + (WIDTH + dims)
    up = tl.load(up_at, mask=mask, eviction_policy="evict_first").to(tl.float32)
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


def _prepare_silu(
    x: Tensor, up: Tensor | None = None, *, parameters: Parameters | None = None
) -> Callable[..., Tensor]:
    if up is None:
        form = {"apart": None, "up_row": 0, "IS_APART": False}
        return _prepare(_silu_and_mul, "silu_and_mul", x, None, x.shape[1] // 2, form, parameters)
    form = {"up_row": up.stride(0), "IS_APART": True}
    return _prepare(_silu_and_mul, "silu_and_mul", x, up, x.shape[1], form, parameters)


def _prepare(
    kernel, name: str, x: Tensor, up: Tensor | None, width: int, form: dict[str, Any],
    parameters: Parameters | None = None,
) -> Callable[..., Tensor]:  # fmt: skip
    """The function for calls of this signature; `form`: what else the kernel is told."""
    tensors = {"x": x} if up is None else {"x": x, "apart": up}
    shape, dtype, device = (x.shape[0], width), x.dtype, x.device
    out = torch.empty(shape, dtype=dtype, device=device)
    if out.numel() == 0:
        return lambda x, up=None: torch.empty(shape, dtype=dtype, device=device)
    parameters = parameters or tuning.parameters(name, device, *launch_class(x, width))
    chunks = -(-width // parameters["BLOCK_I"])
    launched = launch.Prepared(
        kernel, (shape[0] * chunks,),
        {
            **tensors, "out": out, "x_row": x.stride(0), "WIDTH": width, "CHUNKS": chunks, **form,
            "ALIGN": launch.alignment(*tensors.values()), **launch.options(parameters, device),
        },
    )  # fmt: skip

    def call(x: Tensor, up: Tensor | None = None) -> Tensor:
        out = torch.empty(shape, dtype=dtype, device=device)
        if up is None:
            launched(x, out)
        else:
            launched(x, up, out)
        return out

    return call


@prepared_by(_prepare_silu)
def silu_and_mul(x: Tensor, up: Tensor | None = None, *, parameters: Parameters | None = None) -> Tensor:
    """`silu(gate) * up` of `x = [gate | up]`, or of `x` and `up` apart.

    `parameters` take the place of those of this GPU's table.
    """
    return _prepare_silu(x, up, parameters=parameters)(x, up)


@prepared_by(lambda x: _prepare(_gelu_tanh, "gelu_tanh", x, None, x.shape[1], {}))
def gelu_tanh(x: Tensor) -> Tensor:
    """`x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))`."""
    return _prepare(_gelu_tanh, "gelu_tanh", x, None, x.shape[1], {})(x)


def launch_class(x: Tensor, width: int) -> tuple[str, Parameters]:
    """The class of a call in the table of tuned launch parameters, and those that are right on any GPU.

    `width` is that of the result.
    """
    block = min(1024, launch.block_for(width))
    given = {"BLOCK_I": block, "num_warps": max(1, block // 128), "PDL": 1}
    return f"I{width} {x.element_size()} bytes", given
