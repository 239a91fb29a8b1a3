"""Rotary position embedding."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.kernels import backend, checks
from octavo.kernels.argument_types import names_wrong_types
from octavo.kernels.known_calls import KnownCalls, prepared

_known = KnownCalls()


@names_wrong_types
def apply_rotary(
    q: Tensor,
    k: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    *,
    interleaved: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Turn the first ``rotary_dim`` channels of every head by their token's angles, in place or into `out`.

    Channel pairs (a, b) become (a cos - b sin, b cos + a sin). Which channels make a pair::

        interleaved=False  (GPT-NeoX, Hugging Face Llama)   0 with r/2, 1 with r/2 + 1, ...
        interleaved=True   (GPT-J)                          0 with 1,   2 with 3,       ...

    Args:
        q: (T, num_heads, head_dim), k: (T, num_kv_heads, head_dim), of one dtype; any strides with a
            contiguous last dimension (slices of a fused qkv are fine). Without `out` changed in place, but
            for the channels from rotary_dim on; with it not changed.
        cos_sin_cache: (max_position, rotary_dim) float32; a row is rotary_dim / 2 cosines, then as many
            sines.
        positions: (T,) int64, each from 0 to max_position - 1.
        out: None, or two tensors like q and k, which get the results in all their channels. Strides may
            differ, the last dimension is contiguous. Their memory must not overlap that of another argument,
            or each other's: that is not checked.

    Raises:
        KernelArgumentError: a shape, dtype, device or stride is wrong, or (on the CPU) a position has no row.
    """
    tensors = (q, k, cos_sin_cache, positions, *((None, None) if out is None else out))
    call = _known.get(tensors, interleaved, type(out))
    if call is None:
        call = _checked(q, k, cos_sin_cache, positions, interleaved, out)
        _known.keep(call, tensors, interleaved, type(out))
    call(q, k, cos_sin_cache, positions, interleaved, out)


def _checked(
    q: Tensor,
    k: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    interleaved: bool,
    out: tuple[Tensor, Tensor] | None,
) -> Callable[..., None]:
    """The kernel for such a call, if it is a right one."""
    name = "apply_rotary"
    check_rotary(name, q, k, cos_sin_cache, positions, interleaved)
    if out is not None:
        if not isinstance(out, tuple | list):
            raise checks.wrong(name, "out", "None or a pair of tensors", f"a {type(out).__name__}")
        if len(out) != 2:
            raise checks.wrong(name, "out", "a pair of tensors, for q and for k", f"{len(out)} of them")
        for argument, x, like in (("out[0]", out[0], q), ("out[1]", out[1], k)):
            checks.exactly(name, argument, x, tuple(like.shape), q.device, (q.dtype,))
            if any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True)):
                expected = "a tensor whose elements have a place each"
                raise checks.wrong(name, argument, expected, f"strides {x.stride()}")
    kernel = backend.select(name, "cpu" if q.is_cpu else q.device.type, q.dtype)
    return prepared(kernel, q, k, cos_sin_cache, positions, interleaved, out)


def check_rotary(
    name: str, q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor, interleaved: bool
) -> None:
    """The checks of a call that turns q and k."""
    device = q.device
    checks.tensor(name, "q", q, "T, num_heads, head_dim")
    checks.tensor(name, "k", k, "T, num_kv_heads, head_dim", device)
    num_tokens, _, head_dim = q.shape
    if k.shape[0] != num_tokens or k.shape[2] != head_dim:
        expected = f"of shape ({num_tokens}, num_kv_heads, {head_dim}) like q"
        raise checks.wrong(name, "k", expected, f"shape {tuple(k.shape)}")
    if k.dtype != q.dtype:
        raise checks.wrong(name, "k.dtype", f"{q.dtype} like q", k.dtype)
    checks.tensor(name, "cos_sin_cache", cos_sin_cache, "max_position, rotary_dim", device)
    num_positions, rotary_dim = cos_sin_cache.shape
    if cos_sin_cache.dtype != torch.float32:
        raise checks.wrong(name, "cos_sin_cache.dtype", "torch.float32", cos_sin_cache.dtype)
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise checks.wrong(name, "rotary_dim", f"even and at most head_dim = {head_dim}", rotary_dim)
    checks.flag(name, "interleaved", interleaved)
    checks.exactly(name, "positions", positions, (num_tokens,), device, (torch.int64,))
    if q.is_cpu:
        checks.positions(name, positions, num_positions)
