"""Matrix products with weights that were packed once, at load time.

=============  ===========================================  ==============================================
form           a weight is stored as                        for
=============  ===========================================  ==============================================
``dense``      the (N, K) tensor as it came                 any dtype and device; torch's own `linear`, and on
                                                            a GPU kernels of ours for few rows (`few_rows.py`)
``invariant``  likewise, contiguous                         GPUs: a row has the same bits in every batch
``float32``    panels of float32                            the CPU: exact, the same bits in every batch
``float16``    panels of float16                            the CPU: half the bytes, lossless in practice
``int8``       panels of int8, symmetric, with one float32  the CPU: a quarter of the bytes
               scale for each group of 64 along K
=============  ===========================================  ==============================================

With the last two, activations and products stay float32.

The packed forms, those of the CPU, run in `octavo.kernels.cpu`: ``[ceil(N / panel)][K][panel]``, where a
panel is as many output columns as one register tile computes on this CPU, the last one padded with zeros. A
packed weight therefore belongs to the machine that packed it: do not save it. A result element is the same
sum in the same order whatever the number of rows.

Without the compiled kernels (no Numba, a CPU without AVX2) ``float32`` becomes ``dense`` and says so in
`PackedWeight.note`; ``float16`` and ``int8``, which someone asked for, are refused with the way out.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from octavo.errors import UnsupportedKernelConfig, nearest
from octavo.kernels import backend, checks, few_rows
from octavo.kernels.activation import silu_and_mul
from octavo.kernels.argument_types import names_wrong_types
from octavo.kernels.cpu import host
from octavo.kernels.norm import rms_norm

Form = Literal["dense", "invariant", "float32", "float16", "int8"]

GROUP = 64  # weights along K that share one scale in the int8 form
_INT8_MAX = 127
_FLOAT16_MAX = 65504.0
_ROWS_AT_ONCE = 4096  # quantised together, a multiple of nothing in particular: bounds the temporaries
_PARALLEL_WORK = 1 << 16  # multiplications below which waking other threads costs more than it brings
_TASKS = 32  # about as many per call: enough to even out a thread that was held up
_IDS_PER_TASK = 8
UNPACKED = ("dense", "invariant")
_ITEMS = {"float32": torch.float32, "float16": torch.float16, "int8": torch.int8}


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight (N, K) in one of the forms; made by `pack_weight`, not to be changed afterwards.

    Attributes:
        shape: (N, K), as the weight was.
        form: the form it is in.
        data: (N, K) for ``dense`` and ``invariant``, otherwise (panels, K, panel).
        scales: float32 (panels, ceil(K / GROUP), panel) for ``int8``, otherwise None.
        note: why the form is not the one asked for, or empty.
        at_rest: whoever holds it promises that nothing writes `data` any more, nor did any kernel that may
            still be under way: a GPU then reads it before the kernels in front have ended.
    """

    shape: tuple[int, int]
    form: Form
    data: Tensor
    scales: Tensor | None = None
    note: str = ""
    at_rest: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of memory it holds."""
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def dense(self) -> Tensor:
        """The (N, K) float32 values it stands for, a new tensor unless they are held as just that."""
        if self.form in UNPACKED:
            return self.data.float()
        values = self.data.float()
        if self.scales is not None:
            values *= self.scales.repeat_interleave(GROUP, dim=1)[:, : self.shape[1]]
        return values.transpose(1, 2).reshape(-1, self.shape[1])[: self.shape[0]].contiguous()


def pack_weight(weight: Tensor, form: Form) -> PackedWeight:
    """Pack a weight (N, K) of any float dtype.

    Args:
        weight: (N, K), any strides. ``dense`` keeps this very tensor, and so does ``invariant`` where it is
            contiguous; the other forms copy, on the CPU.
        form: see the module docstring.

    Returns:
        The packed weight. Its `form` is ``dense`` with a `note` where ``float32`` cannot be packed here.

    Raises:
        KernelArgumentError: not a float matrix, an unknown form, or values that float16 cannot hold.
        UnsupportedKernelConfig: ``float16`` or ``int8`` on a machine without the compiled kernels, or not on
        the CPU.
    """
    name = "pack_weight"
    if weight.dim() != 2 or weight.dtype not in checks.FLOATS:
        got = f"{weight.dtype} of shape {tuple(weight.shape)}"
        raise checks.wrong(name, "weight", "a float tensor of shape (N, K)", got)
    if form not in get_args(Form):
        expected = f"one of {', '.join(get_args(Form))}"
        raise checks.wrong(name, "form", expected, f"{form!r}{nearest(form, get_args(Form))}")
    rows, columns = weight.shape
    shape = (rows, columns)
    weight = weight.detach()
    if form in UNPACKED:
        return PackedWeight(shape, form, weight if form == "dense" else weight.contiguous())
    reason = _unpackable(weight)
    if reason is not None:
        if form == "float32":
            return PackedWeight(shape, "dense", weight.float(), note=f"not packed: {reason}")
        way_out = "Use dtype float32." if weight.is_cpu else "Use form 'dense' there."
        raise UnsupportedKernelConfig(
            f"{name}: form = {form!r} needs the compiled CPU kernels, and {reason}. {way_out}"
        )
    if form == "int8":
        return _pack_int8(weight, shape)
    if form == "float16" and rows and columns and weight.abs().max() > _FLOAT16_MAX:
        got = f"{weight.abs().max():.3g}"
        raise checks.wrong(name, "every weight", f"at most {_FLOAT16_MAX:.0f} for form 'float16'", got)
    return PackedWeight(shape, form, _panels(weight, _ITEMS[form]))


@names_wrong_types
def linear(x: Tensor, w: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """``x @ w.T + bias``.

    Args:
        x: (T, K) contiguous; float32, for ``dense`` and ``invariant`` the dtype of the weight.
        w: packed weight (N, K).
        bias: (N,) contiguous, of the dtype of x.

    Returns:
        (T, N), new, of the dtype of x. In all forms but ``dense`` a row has the same bits for every T,
        position and number of threads.

    Raises:
        KernelArgumentError: a shape, dtype, device or stride is wrong.
    """
    columns, depth = w.shape
    if w.form == "dense":
        if not few_rows.suits(x, w):
            return functional.linear(x, w.data, bias)
        return few_rows.product("linear", x, w, bias)[0]
    if w.form == "invariant":
        checks.exactly(
            "linear", "x", x, (x.shape[0] if x.dim() else 0, depth), w.data.device, (w.data.dtype,)
        )
        if bias is not None:
            checks.exactly("linear", "bias", bias, (columns,), w.data.device, (w.data.dtype,))
        product: Tensor = backend.select("invariant_linear", x.device.type, x.dtype)(
            x.contiguous(), w.data, bias
        )
        return product
    if (
        x.dim() != 2
        or x.shape[1] != depth
        or x.dtype != torch.float32
        or not x.is_contiguous()
        or not x.is_cpu
    ):
        expected = f"contiguous float32 of shape (T, {depth}) on the CPU"
        got = f"{x.dtype} of shape {tuple(x.shape)}, strides {x.stride()}, on {x.device}"
        raise checks.wrong("linear", "x", expected, got)
    if bias is not None and (
        bias.shape != (columns,) or bias.dtype != torch.float32 or not bias.is_contiguous() or not bias.is_cpu
    ):
        got = f"{bias.dtype} of shape {tuple(bias.shape)}, strides {bias.stride()}, on {bias.device}"
        raise checks.wrong("linear", "bias", f"contiguous float32 of shape ({columns},) on the CPU", got)
    return _linear_packed(x, w, bias)


@names_wrong_types
def linear_onto(
    x: Tensor, residual: Tensor | None, w: PackedWeight, bias: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """``linear(x, w, bias)`` on its way to a residual stream, as `norm_linear` and `rms_norm` take it up.

    Args:
        x, w, bias: as in `linear`.      residual: (T, N) contiguous, of the dtype of x, or None for 0.

    Returns:
        ``(out, residual)``, to be added; where the kernel adds them for nothing, ``(out + residual, None)``,
        out being rounded before, and the sum.

    Raises:
        KernelArgumentError: a shape, dtype, device or stride is wrong.
    """
    onto = (*x.shape[:-1], w.shape[0])
    if residual is not None and residual.shape != onto:
        raise checks.wrong("linear_onto", "residual", f"of shape {onto}", f"shape {tuple(residual.shape)}")
    if residual is None or residual.requires_grad or not few_rows.suits_many_rows(x, w):
        return linear(x, w, bias), residual
    return few_rows.product("linear_onto", x, w, bias, residual)[0], None


@names_wrong_types
def norm_linear(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    w: PackedWeight,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
) -> tuple[Tensor, Tensor]:
    """What stands between two layers of a decoder: ``linear(rms_norm(x + residual), w, bias)``, and the sum.

    One launch for rows as few as `few_rows.py` says on a GPU, where each launch is a good part of the time;
    else those functions.

    Args:
        x, residual: (T, K) contiguous; residual may be None for 0.      norm_weight, eps: as in `rms_norm`.
        w, bias: as in `linear`.
        gated: w is [gate; up], (2 I, K), and ``silu(gate) * up`` of the product is what comes out.

    Returns:
        ``(out, new_residual)``, of the dtype of x: (T, N), or (T, I) if gated, and (T, K). Both new, but that
        without a residual the second is x.

    Raises:
        KernelArgumentError: a shape, dtype, device or stride is wrong.
    """
    name = "norm_linear"
    if gated and w.shape[0] % 2:
        raise checks.wrong(name, "the rows of w", "an even number where gated", w.shape[0])
    suits = few_rows.suits_many_rows(x, w, has_norm=True)
    suits = suits or (residual is not None and few_rows.suits_few_rows(x, w))
    if not suits or norm_weight.dtype != x.dtype or (residual is not None and residual.requires_grad):
        if residual is None:
            normed, new_residual = rms_norm(x, norm_weight, eps), x
        else:
            normed, new_residual = rms_norm(x, norm_weight, eps, residual=residual)
        product = linear(normed, w, bias)
        return (silu_and_mul(product) if gated else product), new_residual
    out, summed = few_rows.product(name, x, w, bias, residual, norm_weight, eps, gated=gated)
    return out, (x if summed is None else summed)


@names_wrong_types
def embedding(ids: Tensor, w: PackedWeight) -> Tensor:
    """Rows `ids` of a packed weight: a tied embedding shares its storage with the LM head.

    Args:
        ids: (T,) int64 or int32, each from 0 to N - 1.
        w: packed weight (N, K).

    Returns:
        (T, K), new; float32, for ``dense`` and ``invariant`` the dtype of the weight.

    Raises:
        KernelArgumentError: not a vector of integers, or an id out of range.
    """
    if ids.dim() != 1 or ids.dtype not in (torch.int64, torch.int32):
        expected = "int64 or int32 of shape (T,)"
        raise checks.wrong("embedding", "ids", expected, f"{ids.dtype} of shape {tuple(ids.shape)}")
    if ids.device.type == "cpu" and ids.numel():
        lowest, highest = (int(bound) for bound in torch.aminmax(ids))
        if lowest < 0 or highest >= w.shape[0]:
            got = lowest if lowest < 0 else highest
            raise checks.wrong("embedding", "every id", f"from 0 to {w.shape[0] - 1}", got)
    if w.form in UNPACKED:
        return functional.embedding(ids, w.data)
    return _embedding_packed(ids, w)


def _unpackable(weight: Tensor) -> str | None:
    if weight.device.type != "cpu":
        return f"the weight is on {weight.device}"
    if weight.dtype == torch.float64:
        return "the weight is float64"
    return host.unfit_reason()


def _panels(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """(N, K) -> (panels, K, panel) in one pass over the memory, the last panel padded with zeros."""
    rows, columns = weight.shape
    panel = host.vector_shape().panel
    whole = rows // panel
    packed = weight.new_empty((-(-rows // panel), columns, panel), dtype=dtype)
    packed[:whole].copy_(weight[: whole * panel].view(whole, panel, columns).transpose(1, 2))
    if whole < packed.shape[0]:
        packed[whole].zero_()
        packed[whole, :, : rows - whole * panel].copy_(weight[whole * panel :].T)
    return packed


def _pack_int8(weight: Tensor, shape: tuple[int, int]) -> PackedWeight:
    rows, columns = shape
    groups = -(-columns // GROUP)
    quantised = weight.new_empty((rows, columns), dtype=torch.int8)
    scales = weight.new_empty((rows, groups), dtype=torch.float32)
    for start in range(0, rows, _ROWS_AT_ONCE):
        part = weight[start : start + _ROWS_AT_ONCE].float()
        padded = functional.pad(part, (0, groups * GROUP - columns)).view(part.shape[0], groups, GROUP)
        scale = padded.abs().amax(dim=-1) / _INT8_MAX
        steps = padded / scale.clamp_min(torch.finfo(torch.float32).tiny)[..., None]
        quantised[start : start + _ROWS_AT_ONCE] = steps.round_().view(part.shape[0], -1)[:, :columns]
        scales[start : start + _ROWS_AT_ONCE] = scale
    return PackedWeight(shape, "int8", _panels(quantised, torch.int8), _panels(scales, torch.float32))


@functools.cache
def zeros() -> Tensor:
    """A panel of zeros: what the compiled kernels begin with where there is no bias."""
    return torch.zeros(host.vector_shape().panel, dtype=torch.float32, device="cpu")


def _linear_packed(x: Tensor, w: PackedWeight, bias: Tensor | None) -> Tensor:
    from octavo.kernels.cpu import linear_kernel, threads

    rows = x.shape[0]
    columns, depth = w.shape
    out = torch.empty((rows, columns), dtype=torch.float32, device="cpu")
    if rows == 0 or columns == 0:
        return out
    if depth == 0:
        return out.zero_() if bias is None else out.copy_(bias)
    panels, _, panel = w.data.shape
    parameters = (
        rows,
        depth,
        columns,
        x.data_ptr(),
        w.data.data_ptr(),
        0 if w.scales is None else w.scales.data_ptr(),
        GROUP,
        0 if bias is None else bias.data_ptr(),
        zeros().data_ptr(),
        out.data_ptr(),
        max(1, panels // _TASKS),
    )
    kernel = linear_kernel.linear_kernel(w.form)
    threads.run(
        kernel,
        parameters,
        parallel=rows * columns * depth >= _PARALLEL_WORK,
        scratch_bytes=linear_kernel.scratch_bytes(panel),
    )
    return out


def _embedding_packed(ids: Tensor, w: PackedWeight) -> Tensor:
    from octavo.kernels.cpu import linear_kernel, threads

    ids = ids.to(torch.int64).contiguous()
    out = torch.empty((ids.shape[0], w.shape[1]), dtype=torch.float32, device="cpu")
    parameters = (
        ids.shape[0],
        w.shape[1],
        ids.data_ptr(),
        w.data.data_ptr(),
        0 if w.scales is None else w.scales.data_ptr(),
        GROUP,
        out.data_ptr(),
        _IDS_PER_TASK,
    )
    kernel = linear_kernel.embedding_kernel(w.form)
    threads.run(kernel, parameters, parallel=ids.shape[0] > 2 * _IDS_PER_TASK)
    return out
