"""Kernels for callers who call them often and whose arguments are right: checked once for each layout.

On a slow host the checks of a public function, which only looks up that it has seen such a call, take longer
than the launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from octavo import kernels
from octavo.kernels import backend, known_calls
from octavo.kernels.known_calls import prepared

_Call = TypeVar("_Call")

# Each keeps what was worked out for tensors laid out in one way: the steps of a request have few of them.
_norms: dict[tuple[Any, ...], Callable[..., Any] | None] = {}
_gates: dict[tuple[Any, ...], Callable[..., Any]] = {}
_MOST = 1024
_UNKNOWN: Any = object()


def keep(calls: dict[tuple[Any, ...], _Call], like: tuple[Any, ...], call: _Call) -> _Call:
    """`call`, kept under that key; when there are too many, all others are forgotten."""
    if len(calls) >= _MOST:
        calls.clear()
    calls[like] = call
    return call


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor | None:
    """`octavo.kernels.rms_norm` of x (..., D) and weight (D,) of one dtype and device, without gradients.

    What has heads before tokens in its shape, and after them in memory, comes back so. None for a weight that
    is not (D,), or numbers that do not lie side by side.
    """
    like = (
        x.shape, x.stride(), x.dtype, x.device, weight.shape, weight.stride(), eps, known_calls.num_forgotten
    )  # fmt: skip
    call = _norms.get(like, _UNKNOWN)
    if call is _UNKNOWN:
        call = keep(_norms, like, _norm(x, weight, eps))
    return None if call is None else call(x, weight, eps, None)[0]


def _norm(x: Tensor, weight: Tensor, eps: float) -> Callable[..., Any] | None:
    if x.shape[-1:] != weight.shape or x.stride(-1) != 1:
        return None
    if x.dim() == 4 and x.stride(1) < x.stride(2):
        by_token = _norm(x.transpose(1, 2), weight, eps)
        assert by_token is not None
        return lambda x, *others: (by_token(x.transpose(1, 2), *others)[0].transpose(1, 2),)
    kernels.rms_norm(x, weight, eps)
    kernel = backend.select("rms_norm", x.device.type, x.dtype, weight.dtype)
    return prepared(kernel, x, weight, eps, None)


def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """`octavo.kernels.silu_and_mul` of gate and up (T, I) of one dtype and device, without gradients.

    Raises:
        KernelArgumentError: as that function.
    """
    like = gate.shape, gate.stride(), up.stride(), gate.dtype, gate.device, known_calls.num_forgotten
    call = _gates.get(like)
    if call is None:
        kernels.silu_and_mul(gate, up)
        kernel = backend.select("silu_and_mul", gate.device.type, gate.dtype)
        call = keep(_gates, like, prepared(kernel, gate, up))
    out: Tensor = call(gate, up)
    return out
