"""Root-mean-square normalisation, with the residual sum in front of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

from torch import Tensor

from octavo.kernels import backend, checks
from octavo.kernels.argument_types import names_wrong_types
from octavo.kernels.known_calls import KnownCalls, prepared

_known = KnownCalls()


@overload
def rms_norm(x: Tensor, weight: Tensor, eps: float, *, residual: None = None) -> Tensor: ...
@overload
def rms_norm(x: Tensor, weight: Tensor, eps: float, *, residual: Tensor) -> tuple[Tensor, Tensor]: ...
@names_wrong_types
def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, computed in float32.

    Args:
        x: (..., D) of any float dtype, any strides with a contiguous last dimension. Not changed.
        weight: (D,), any float dtype.
        eps: added to the mean square.
        residual: of the shape and dtype of x. When given, ``new_residual = x + residual`` (rounded to the
            dtype of x) is what gets normalised.

    Returns:
        ``out``, a new contiguous tensor of the shape and dtype of x; with a residual ``(out, new_residual)``.

    Raises:
        KernelArgumentError: a shape, dtype, device or stride is wrong.
    """
    call = _known.get((x, weight, residual), eps)
    if call is None:
        call = _checked(x, weight, eps, residual)
        _known.keep(call, (x, weight, residual), eps)
    out, new_residual = call(x, weight, eps, residual)
    return out if residual is None else (out, new_residual)


def _checked(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> Callable[..., Any]:
    """The kernel for such a call, if it is a right one."""
    name = "rms_norm"
    device = x.device
    shape = x.shape
    if len(shape) == 0:
        raise checks.wrong(name, "x", "of shape (..., D)", "a scalar")
    checks.floats(name, "x", x, device)
    if not 0.0 <= eps <= checks.FLOAT32_MAX:
        raise checks.wrong(name, "eps", "0 or positive", eps)
    checks.tensor(name, "weight", weight, "D", device)
    if weight.shape[0] != shape[-1]:
        expected = f"of shape ({shape[-1]},) like the last dimension of x"
        raise checks.wrong(name, "weight", expected, f"shape {tuple(weight.shape)}")
    if residual is not None:
        if residual.shape != shape or residual.dtype != x.dtype:
            expected = f"{x.dtype} of shape {tuple(shape)} like x"
            raise checks.wrong(
                name, "residual", expected, f"{residual.dtype} of shape {tuple(residual.shape)}"
            )
        checks.floats(name, "residual", residual, device)
    kernel = backend.select(name, "cpu" if x.is_cpu else device.type, x.dtype, weight.dtype)
    return prepared(kernel, x, weight, eps, residual)
