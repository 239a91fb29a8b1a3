"""Matrix products with the weight of each row's group, on the CPU: one call for all groups."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.cpu import host, threads
from octavo.kernels.grouped_linear import PackedExperts
from octavo.kernels.linear import GROUP, UNPACKED, linear, zeros

_PARALLEL_WORK = 1 << 16  # multiplications below which waking the other threads costs more than it brings
_TASKS = 64  # about as many per call: groups differ in their rows


def supports(x_dtype: torch.dtype) -> str | None:
    """None when the compiled kernel can do it, else why not."""
    return host.unfit_reason() if x_dtype == torch.float32 else f"no compiled kernel for {x_dtype}"


def grouped_linear(
    x: Tensor,
    w: PackedExperts,
    offsets: Tensor,
    sources: Tensor | None,
    targets: Tensor | None,
    scale: Tensor | None,
) -> Tensor:
    """`out[targets[i]] = scale[i] * (x[sources[i]] @ w[e].T)`."""
    rows = x if sources is None else x.index_select(0, sources)
    out = rows.new_empty((rows.shape[0], w.shape[1]))
    _multiply(rows, w, offsets, out)
    if scale is not None:
        out *= scale[:, None]
    return out if targets is None else torch.empty_like(out).index_copy_(0, targets, out)


def _multiply(rows: Tensor, w: PackedExperts, offsets: Tensor, out: Tensor) -> None:
    bounds = offsets.to(torch.int64)
    busy = (bounds[1:] > bounds[:-1]).nonzero().flatten()
    _, columns, depth = w.shape
    if w.form in UNPACKED:
        for expert in busy.tolist():
            mine = slice(int(bounds[expert]), int(bounds[expert + 1]))
            out[mine] = linear(rows[mine], w[expert])
        return
    if not len(busy) or columns == 0:
        return
    if depth == 0:
        out.zero_()
        return
    from octavo.kernels.cpu import linear_kernel

    panels, _, panel = w.data.shape[1:]
    parameters = (
        len(busy),
        busy.data_ptr(),
        bounds.data_ptr(),
        depth,
        columns,
        rows.data_ptr(),
        w.data.data_ptr(),
        w.data.stride(0) * w.data.element_size(),
        0 if w.scales is None else w.scales.data_ptr(),
        0 if w.scales is None else w.scales.stride(0) * w.scales.element_size(),
        GROUP,
        zeros().data_ptr(),
        out.data_ptr(),
        max(1, panels * len(busy) // _TASKS),
    )
    threads.run(
        linear_kernel.grouped_linear_kernel(w.form),
        parameters,
        parallel=rows.shape[0] * columns * depth >= _PARALLEL_WORK,
        scratch_bytes=linear_kernel.scratch_bytes(panel),
    )
