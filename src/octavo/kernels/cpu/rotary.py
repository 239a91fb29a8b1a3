"""Rotary position embedding on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.cpu import host, threads

_PARALLEL_ITEMS = 1 << 15  # numbers below which waking the other threads costs more than it brings
_TOKENS_PER_TASK = 8


def supports(q_dtype: torch.dtype) -> str | None:
    """None when the compiled kernel can do it, else why not."""
    return host.unfit_reason() if q_dtype in host.DTYPE_NAMES else f"no compiled kernel for {q_dtype}"


def apply_rotary(
    q: Tensor,
    k: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    interleaved: bool,
    out: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Turn the first `rotary_dim` channels of every head of `q` and `k`, in place or into `out`."""
    rotate_into(*(out or (q, k)), q, k, cos_sin_cache, positions, interleaved)


def rotate_into(
    q_out: Tensor,
    k_out: Tensor,
    q: Tensor,
    k: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    interleaved: bool,
) -> None:
    """`q_out` and `k_out` become `q` and `k` with the first `rotary_dim` channels of every head turned.

    Of the shapes and the dtype of `q` and `k`, with a contiguous last dimension; each is its source itself
    or shares no memory with it. The numbers are the same to the bit either way.
    """
    parts = (
        *_part(q, q_out.data_ptr(), 0, *q_out.stride()[:2]),
        *_part(k, k_out.data_ptr(), 0, *k_out.stride()[:2]),
    )
    _run(q, cos_sin_cache, positions, interleaved, (0, 0, 2), parts)


def rotate_into_cache(
    q_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    interleaved: bool,
) -> None:
    """As `rotate_into`, with `k` and `v`, which is not turned, into their slots of the caches.

    All of one dtype; a token with a negative slot is not written.
    """
    slot_mapping = slot_mapping.contiguous()
    slots = (slot_mapping.data_ptr(), k_cache.shape[1], 3)
    parts = (
        *_part(q, q_out.data_ptr(), 0, *q_out.stride()[:2]),
        *_part(k, k_cache.data_ptr(), *k_cache.stride()[:3]),
        *_part(v, v_cache.data_ptr(), *v_cache.stride()[:3]),
    )
    _run(q, cos_sin_cache, positions, interleaved, slots, parts)


def _run(
    q: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    interleaved: bool,
    slots: tuple[int, int, int],
    parts: tuple[int, ...],
) -> None:
    """`slots`: address of the slot mapping or 0, block size, number of parts."""
    from octavo.kernels.cpu import small_kernels

    positions = positions.contiguous()
    parameters = (
        q.shape[0],
        cos_sin_cache.data_ptr(),
        cos_sin_cache.stride(0) * 4,
        positions.data_ptr(),
        _TOKENS_PER_TASK,
        cos_sin_cache.shape[1] // 2,
        q.shape[2],
        *slots,
        *parts,
    )
    kernel = small_kernels.rotary_kernel(
        host.DTYPE_NAMES[q.dtype], "interleaved" if interleaved else "halves"
    )
    threads.run(kernel, parameters, parallel=q.numel() > _PARALLEL_ITEMS)


def _part(x: Tensor, out: int, out_block: int, out_token: int, out_head: int) -> tuple[int, ...]:
    """The kernel's parameters of q, k or v; strides given in numbers become bytes."""
    item = x.element_size()
    token, head, _ = x.stride()
    heads = (x.shape[1], x.data_ptr(), token * item, head * item)
    return (*heads, out, out_block * item, out_token * item, out_head * item)
