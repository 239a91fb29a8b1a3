"""Small odd inputs on which `backend.self_check` compares the implementations of each kernel.

A case takes an implementation and the dtype to run it in, and returns every tensor it wrote, from the same
seeded values whatever the dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.linear import Form, pack_weight
from octavo.kernels.linear import linear as packed_linear

Case = Callable[[Callable[..., Any], torch.dtype], list[Tensor]]


def _random(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    # Drawn in float32, so that float64 starts from the same numbers.
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _attention(kernel: Callable[..., Any], dtype: torch.dtype) -> list[Tensor]:
    """A chunk with a past, a decode, nothing, more queries than keys; shuffled blocks, NaN elsewhere."""
    written: list[Tensor] = []
    table = torch.tensor([[6, 2, -1], [5, 0, 3], [-1, -1, -1], [1, -1, -1]], dtype=torch.int32)
    cu_q, cu_k = _int32(0, 3, 4, 4, 8), _int32(0, 7, 18, 18, 20)
    for head_dim, kv_heads in ((64, 3), (40, 1), (96, 9)):
        q = _random(dtype, 8, 9, head_dim)
        caches = [_random(dtype, 8, 4, kv_heads, head_dim, seed=s) for s in (1, 2)]
        for cache in caches:
            for block, offset in ((2, 3), (3, 3), (1, 2), (4, 0), (7, 0)):
                cache[block, offset:] = float("nan")
        for window, softcap, extras in (((-1, -1), 0.0, False), ((2, 0), 5.0, True)):
            out = torch.full_like(q, float("nan"))
            lse = torch.full((9, 8), float("nan"), dtype=dtype)
            slopes = torch.linspace(0.0, 1.0, 9) if extras else None
            sinks = torch.linspace(-1.0, 1.0, 9) if extras else None
            scores = {"softmax_scale": 0.2, "causal": True, "window_size": window, "softcap": softcap}
            places = {"block_table": table, "out": out, "lse": lse}
            kernel(q, *caches, cu_q, cu_k, 4, 11, alibi_slopes=slopes, sinks=sinks, **scores, **places)
            written += [out, lse]
    return written


def _write(kernel: Callable[..., Any], dtype: torch.dtype) -> list[Tensor]:
    k, v = _random(dtype, 5, 3, 40), _random(dtype, 5, 3, 40, seed=1)
    both = torch.zeros(4, 2, 8, 3, 40, dtype=dtype)  # K and V interleaved: neither is contiguous
    kernel(k, v, both[:, 0], both[:, 1], torch.tensor([31, 0, -1, 7, 8]))
    return [both]


def _norm(kernel: Callable[..., Any], dtype: torch.dtype) -> list[Tensor]:
    x, weight, residual = (
        _random(dtype, 3, 2, 72),
        _random(dtype, 72, seed=1),
        _random(dtype, 3, 2, 72, seed=2),
    )
    return [kernel(x, weight, 1e-6, None)[0], *kernel(x, weight, 1e-6, residual)]


def _rotary(kernel: Callable[..., Any], dtype: torch.dtype) -> list[Tensor]:
    written = []
    angles = torch.rand(16, 20, generator=torch.Generator().manual_seed(3)) * 6
    table = torch.cat([angles[:, :10].cos(), angles[:, :10].sin()], dim=-1)
    for interleaved in (False, True):
        qkv = _random(dtype, 5, 6 * 24)  # rotary dimension 20 of 24; 4 query heads, 1 key head
        q, k = qkv[:, :96].view(5, 4, 24), qkv[:, 96:120].view(5, 1, 24)
        kernel(q, k, table, torch.tensor([0, 15, 3, 3, 7]), interleaved)
        written.append(qkv)
    return written


def _activation(kernel: Callable[..., Any], dtype: torch.dtype) -> list[Tensor]:
    return [kernel(_random(dtype, 3, 2 * 37))]


CASES: dict[str, Case] = {
    "varlen_attention": _attention,
    "write_kv_cache": _write,
    "rms_norm": _norm,
    "apply_rotary": _rotary,
    "silu_and_mul": _activation,
}


def _linear_inputs() -> tuple[Tensor, Tensor, Tensor]:
    return (
        _random(torch.float32, 7, 72),
        _random(torch.float32, 37, 72, seed=1),
        _random(torch.float32, 37, seed=2),
    )


def linear(form: Form) -> list[Tensor]:
    """`linear` on a weight in that form; alone, in a batch, with a bias."""
    x, weight, bias = _linear_inputs()
    packed = pack_weight(weight, form)
    return [packed_linear(x, packed), packed_linear(x[:1], packed, bias)]


def linear_exactly() -> list[Tensor]:
    """The same products in float64."""
    x, weight, bias = (tensor.double() for tensor in _linear_inputs())
    return [x @ weight.T, x[:1] @ weight.T + bias]
