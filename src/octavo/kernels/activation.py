"""The activations of the MLP: the gated one of most models, and GPT-2's."""

from __future__ import annotations

from torch import Tensor

from octavo.kernels import backend, checks
from octavo.kernels.argument_types import names_wrong_types
from octavo.kernels.known_calls import KnownCalls, prepared

_known_silu, _known_gelu = KnownCalls(), KnownCalls()


@names_wrong_types
def silu_and_mul(x: Tensor, up: Tensor | None = None) -> Tensor:
    """``silu(gate) * up`` where ``x = [gate | up]``, or ``x = gate`` and up comes apart. In float32.

    Args:
        x: (T, 2 * I), or with `up` (T, I); any float dtype, any strides with a contiguous last dimension.
            Not changed.
        up: None, or (T, I) of the dtype of x, strides likewise. Not changed.

    Returns:
        (T, I), a new contiguous tensor of the dtype of x.

    Raises:
        KernelArgumentError: x is not two-dimensional, its last dimension is odd, or up is not like x.
    """
    call = _known_silu.get((x, up))
    if call is None:
        name = "silu_and_mul"
        if up is None:
            checks.tensor(name, "x", x, "T, 2 * I")
            if x.shape[1] % 2:
                raise checks.wrong(name, "the last dimension of x", "even: [gate | up]", x.shape[1])
        else:
            checks.tensor(name, "x", x, "T, I")
            checks.tensor(name, "up", up, "T, I", x.device)
            if up.shape != x.shape or up.dtype != x.dtype:
                expected = f"{x.dtype} of shape {tuple(x.shape)} like x"
                raise checks.wrong(name, "up", expected, f"{up.dtype} of shape {tuple(up.shape)}")
        call = prepared(backend.select(name, "cpu" if x.is_cpu else x.device.type, x.dtype), x, up)
        _known_silu.keep(call, (x, up))
    out: Tensor = call(x, up)
    return out


@names_wrong_types
def gelu_tanh(x: Tensor) -> Tensor:
    """``x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))``, computed in float32.

    Args:
        x: (T, I), any float dtype, any strides with a contiguous last dimension. Not changed.

    Returns:
        (T, I), a new contiguous tensor of the dtype of x. On the CPU a row has the same bits wherever it is.

    Raises:
        KernelArgumentError: x is not two-dimensional.
    """
    call = _known_gelu.get((x,))
    if call is None:
        name = "gelu_tanh"
        checks.tensor(name, "x", x, "T, I")
        call = prepared(backend.select(name, "cpu" if x.is_cpu else x.device.type, x.dtype), x)
        _known_gelu.keep(call, (x,))
    out: Tensor = call(x)
    return out
