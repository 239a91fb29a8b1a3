"""Matrix products with many weights at once: each row of the input has the weight of its group.

That is what a mixture-of-experts layer does: its tokens are sorted by expert, and every expert multiplies the
rows that fall to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels import backend, checks
from octavo.kernels.argument_types import names_wrong_types
from octavo.kernels.linear import UNPACKED, Form, PackedWeight, pack_weight

_INDEX_DTYPES = (torch.int64,)


@dataclass(frozen=True, eq=False)
class PackedExperts:
    """E weights (N, K) in one of the forms of `octavo.kernels.linear`; made by `pack_experts`.

    Attributes:
        shape: (E, N, K), as the weights were.
        form: the form they are in.
        data: (E, N, K) contiguous for ``dense`` and ``invariant``, otherwise (E, panels, K, panel).
        scales: for ``int8`` float32 (E, panels, ceil(K / GROUP), panel), otherwise None.
        note: why the form is not the one asked for, or empty.
    """

    shape: tuple[int, int, int]
    form: Form
    data: Tensor
    scales: Tensor | None = None
    note: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of memory they hold."""
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def __getitem__(self, expert: int) -> PackedWeight:
        """One of the weights, a view."""
        scales = None if self.scales is None else self.scales[expert]
        return PackedWeight(self.shape[1:], self.form, self.data[expert], scales, self.note)


def pack_experts(weights: Iterable[Tensor], num_experts: int, form: Form) -> PackedExperts:
    """Pack E weights (N, K) of one shape, dtype and device, one after the other.

    Args:
        weights: as in `pack_weight`; each is copied before the next one is asked for, so that one buffer may
            serve them all.
        num_experts: how many there are.
        form: as in `pack_weight`.

    Raises:
        KernelArgumentError: `weights` are not `num_experts` float matrices of one shape.
        UnsupportedKernelConfig: as `pack_weight`.
    """
    name = "pack_experts"
    data: Tensor | None = None
    scales: Tensor | None = None
    first: PackedWeight | None = None
    count = 0
    for weight in weights:
        packed = pack_weight(weight, form)
        if first is None:
            first = packed
            data = packed.data.new_empty((num_experts, *packed.data.shape))
            if packed.scales is not None:
                scales = packed.scales.new_empty((num_experts, *packed.scales.shape))
        elif packed.shape != first.shape:
            raise checks.wrong(name, "every weight", f"of shape {first.shape}", f"shape {packed.shape}")
        if count < num_experts:
            assert data is not None
            data[count] = packed.data
            if scales is not None and packed.scales is not None:
                scales[count] = packed.scales
        count += 1
    if first is None or data is None or count != num_experts:
        raise checks.wrong(name, "weights", f"{num_experts} matrices, at least one", count)
    return PackedExperts((num_experts, *first.shape), first.form, data, scales, first.note)


@names_wrong_types
def grouped_linear(
    x: Tensor,
    w: PackedExperts,
    offsets: Tensor,
    *,
    sources: Tensor | None = None,
    targets: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """``out[targets[i]] = scale[i] * (x[sources[i]] @ w[e].T)`` for ``offsets[e] <= i < offsets[e + 1]``.

    ::

        offsets 0 2 2 5      rows 0, 1 -> weight 0;  none -> weight 1;  rows 2, 3, 4 -> weight 2

    Nothing of it waits for a GPU, whatever the offsets say: it can be captured in a CUDA graph.

    Args:
        x: (T, K), contiguous, of the dtype of a ``dense`` or ``invariant`` weight, float32 for the packed
            forms. Not changed.
        w: packed weights (E, N, K).
        offsets: (E + 1,) int32, not decreasing, the first 0 and the last M.
        sources: (M,) int64, each from 0 to T - 1, in any number; None = 0, 1, ... M - 1 with M = T.
        targets: (M,) int64, a permutation of 0 ... M - 1; None = 0, 1, ...
        scale: (M,) float32 that the products are multiplied with before they are rounded; None = 1.

    Returns:
        (M, N), a new contiguous tensor of the dtype of x. In all forms but ``dense`` a row has the same
        bits whatever the others are.

    Raises:
        KernelArgumentError: a type, shape, dtype, device or stride is wrong, or (on the CPU) an offset or an
            index is out of its range. On a GPU rows of the result that no offset names are undefined.
    """
    name = "grouped_linear"
    device = x.device
    num_experts, _, depth = w.shape
    checks.tensor(name, "x", x, "T, K")
    if x.shape[1] != depth or not x.is_contiguous():
        got = f"shape {tuple(x.shape)}, strides {x.stride()}"
        raise checks.wrong(name, "x", f"contiguous of shape (T, {depth}) like the weights", got)
    dtype = w.data.dtype if w.form in UNPACKED else torch.float32
    if x.dtype != dtype:
        raise checks.wrong(name, "x.dtype", f"{dtype} for weights in form {w.form!r}", x.dtype)
    if w.data.device != device:
        raise checks.wrong(name, "x.device", f"{w.data.device} like the weights", device)
    checks.exactly(name, "offsets", offsets, (num_experts + 1,), device, checks.INT32)
    num_rows = x.shape[0] if sources is None else sources.shape[0] if sources.dim() else 0
    for argument, values in (("sources", sources), ("targets", targets)):
        if values is not None:
            checks.exactly(name, argument, values, (num_rows,), device, _INDEX_DTYPES)
    if scale is not None:
        checks.exactly(name, "scale", scale, (num_rows,), device, (torch.float32,))
    if x.is_cpu:
        _check_values(name, offsets, sources, targets, x.shape[0], num_rows)
    kernel = backend.select(name, "cpu" if x.is_cpu else device.type, x.dtype)
    out: Tensor = kernel(x, w, offsets, sources, targets, scale)
    return out


def _check_values(
    name: str, offsets: Tensor, sources: Tensor | None, targets: Tensor | None, num_inputs: int, num_rows: int
) -> None:
    bounds = offsets.tolist()
    if bounds[0] != 0 or bounds[-1] != num_rows or sorted(bounds) != bounds:
        raise checks.wrong(name, "offsets", f"not decreasing from 0 to the {num_rows} rows", bounds)
    for argument, values, count in (("sources", sources, num_inputs), ("targets", targets, num_rows)):
        if values is not None and num_rows:
            lowest, highest = (int(bound) for bound in torch.aminmax(values))
            if lowest < 0 or highest >= count:
                got = lowest if lowest < 0 else highest
                raise checks.wrong(name, f"every index in {argument}", f"from 0 to {count - 1}", got)
