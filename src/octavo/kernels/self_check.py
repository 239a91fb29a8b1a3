"""Small odd inputs on which `backend.self_check` compares the implementations of each kernel.

A case takes an implementation and what draws its inputs, and returns every tensor it wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.linear import Form, pack_weight
from octavo.kernels.linear import linear as packed_linear

# Largest error allowed for results of a dtype; for 16 bits twice what rounding them makes.
BOUNDS = {torch.float32: 1e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
FORMS: dict[str, tuple[Form, ...]] = {"cpu": ("float32", "float16", "int8"), "reference": ("dense",)}


CPU = torch.device("cpu")


@dataclass(frozen=True)
class Draw:
    """Seeded normal values, rounded to `stored`, in the dtype `run`: float64 can start from the same ones."""

    stored: torch.dtype
    run: torch.dtype
    device: torch.device = CPU

    def __call__(self, *shape: int, seed: int = 0) -> Tensor:
        values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
        return self.place(values.to(self.stored).to(self.run))

    def place(self, values: Tensor) -> Tensor:
        """The same values on the device."""
        return values.to(self.device)

    def int32(self, *values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def int64(self, *values: int) -> Tensor:
        return torch.tensor(values, device=self.device)

    @property
    def lse_dtype(self) -> torch.dtype:
        return torch.float64 if self.run == torch.float64 else torch.float32


Case = Callable[[Callable[..., Any], Draw], list[Tensor]]
Pairs = list[tuple[Tensor, Tensor]]  # what a kernel made, and the exact values


def beside(exact: list[Tensor], case: Case, kernel: Callable[..., Any], draw: Draw) -> Pairs:
    """What the kernel makes of a case, beside the exact values."""
    return [(ours.cpu(), value) for ours, value in zip(case(kernel, draw), exact, strict=True)]


def _attention(kernel: Callable[..., Any], draw: Draw) -> list[Tensor]:
    """A chunk with a past, a decode, nothing, more queries than keys; shuffled blocks, NaN elsewhere."""
    written: list[Tensor] = []
    table = draw.int32(6, 2, -1, 5, 0, 3, -1, -1, -1, 1, -1, -1).view(4, 3)
    cu_q, cu_k = draw.int32(0, 3, 4, 4, 8), draw.int32(0, 7, 18, 18, 20)
    for head_dim, kv_heads in ((64, 3), (40, 1), (96, 9)):
        q = draw(8, 9, head_dim)
        caches = [draw(8, 4, kv_heads, head_dim, seed=s) for s in (1, 2)]
        for cache in caches:
            for block, offset in ((2, 3), (3, 3), (1, 2), (4, 0), (7, 0)):
                cache[block, offset:] = float("nan")
        for window, softcap, extras in (((-1, -1), 0.0, False), ((2, 0), 5.0, True)):
            out = torch.full_like(q, float("nan"))
            lse = torch.full((9, 8), float("nan"), dtype=draw.lse_dtype, device=draw.device)
            slopes = draw.place(torch.linspace(0.0, 1.0, 9)) if extras else None
            sinks = draw.place(torch.linspace(-1.0, 1.0, 9)) if extras else None
            scores = {"softmax_scale": 0.2, "causal": True, "window_size": window, "softcap": softcap}
            places = {"block_table": table, "out": out, "lse": lse}
            kernel(q, *caches, cu_q, cu_k, 4, 11, alibi_slopes=slopes, sinks=sinks, **scores, **places)
            written += [out, lse]
    return written


def _write(kernel: Callable[..., Any], draw: Draw) -> list[Tensor]:
    k, v = draw(5, 3, 40), draw(5, 3, 40, seed=1)
    both = draw.place(
        torch.zeros(4, 2, 8, 3, 40, dtype=draw.run)
    )  # K and V interleaved: neither is contiguous
    kernel(k, v, both[:, 0], both[:, 1], draw.int64(31, 0, -1, 7, 8))
    return [both]


def _norm(kernel: Callable[..., Any], draw: Draw) -> list[Tensor]:
    x, weight, residual = (
        draw(3, 2, 72),
        draw(72, seed=1),
        draw(3, 2, 72, seed=2),
    )
    return [kernel(x, weight, 1e-6, None)[0], *kernel(x, weight, 1e-6, residual)]


def _rotary(kernel: Callable[..., Any], draw: Draw) -> list[Tensor]:
    written = []
    angles = torch.rand(16, 20, generator=torch.Generator().manual_seed(3)) * 6
    table = draw.place(torch.cat([angles[:, :10].cos(), angles[:, :10].sin()], dim=-1))
    for interleaved in (False, True):
        qkv = draw(5, 6 * 24)  # rotary dimension 20 of 24; 4 query heads, 1 key head
        q, k = qkv[:, :96].view(5, 4, 24), qkv[:, 96:120].view(5, 1, 24)
        kernel(q, k, table, draw.int64(0, 15, 3, 3, 7), interleaved)
        written.append(qkv)
    return written


def _activation(kernel: Callable[..., Any], draw: Draw) -> list[Tensor]:
    return [kernel(draw(3, 2 * 37))]


CASES: dict[str, Case] = {
    "varlen_attention": _attention,
    "write_kv_cache": _write,
    "rms_norm": _norm,
    "apply_rotary": _rotary,
    "silu_and_mul": _activation,
}


def _linear_inputs() -> tuple[Tensor, Tensor, Tensor]:
    draw = Draw(torch.float32, torch.float32)
    return draw(7, 72), draw(37, 72, seed=1), draw(37, seed=2)


def linear(form: Form, device: torch.device) -> Pairs:
    """`linear` on a weight in that form, in a batch and alone with a bias, beside the exact products of the
    values the form holds; and by how much these miss the weight by more than half a step of the form.
    """
    x, weight, bias = (values.to(device) for values in _linear_inputs())
    packed = pack_weight(weight, form)
    values, x64 = packed.dense().double(), x.double()
    missed = ((values - weight).abs() - _half_step(weight, form)).clamp_min(0.0)
    return [
        (packed_linear(x, packed), x64 @ values.T),
        (packed_linear(x[:1], packed, bias), x64[:1] @ values.T + bias),
        (missed, torch.zeros_like(missed)),
    ]


def _half_step(weight: Tensor, form: Form) -> Tensor:
    if form == "int8":
        return weight.abs().amax(dim=1, keepdim=True) / 254  # a group's own largest value is at most that
    return weight.abs() * 2.0**-11 if form == "float16" else torch.zeros(())
