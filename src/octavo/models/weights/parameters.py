"""From a checkpoint's tensors to a model's parameters: read, fuse, pack, one matrix at a time."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from octavo.kernels.grouped_linear import PackedExperts, pack_experts
from octavo.kernels.linear import UNPACKED, Form, PackedWeight, pack_weight
from octavo.layers.linear import Linear
from octavo.layers.norm import LayerNorm
from octavo.models.weights.checkpoint import Checkpoint, Shape, is_harmless

# The C library gives blocks above this back to the system when they are freed; smaller ones may leave holes.
_SCRATCH_BYTES = 32 * 2**20


class Parameters:
    """Hands out a model's parameters, each read when it is asked for and packed before the next is.

    `dtype` is that of activations, biases and norms, `form` the packed form of matrices, `nbytes` the
    memory of what was handed out so far. Memory beyond that is one matrix at a time. Where `form` rounds, the
    few matrices asked for with `is_quantised=False` are in float32 form.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype,
        form: Form,
        device: torch.device,
        ties_head_by_config: bool | None,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self.device = device
        self.nbytes = 0
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._form = form
        self._ties_head_by_config = ties_head_by_config
        self._progress = progress
        self._num_read = 0
        self._num_tensors = sum(not is_harmless(name) for name in checkpoint.shapes)
        self._place = device if checkpoint.fills_any_device else torch.device("cpu")  # what it is read into
        self._buffer = torch.empty(0, dtype=dtype, device=self._place)

    def matrix(self, *names: str, is_quantised: bool = True) -> PackedWeight:
        """The matrices `names`, stacked row-wise in that order, packed; exactly, unless `is_quantised`."""
        shape = self._stacked_shape(names)
        is_smaller = self._form in ("float16", "int8")
        form: Form = "float32" if is_smaller and not is_quantised else self._form
        # Unpacked forms keep the very tensor they are given; the others copy, so theirs can be used again.
        is_kept = form in UNPACKED and self.device == self._place
        rows = self._empty(shape) if is_kept else self._scratch(shape)
        self._read(names, rows)
        packed = pack_weight(rows.to(self.device), form)
        scratch = self._buffer.untyped_storage().data_ptr()
        if not is_kept and packed.data.untyped_storage().data_ptr() == scratch:
            # a machine that cannot pack: the form became dense
            packed = replace(packed, data=packed.data.clone())
        self.nbytes += packed.nbytes
        return replace(packed, at_rest=True)

    def experts(self, names: Sequence[tuple[str, ...]]) -> PackedExperts:
        """For each expert the matrices that its names say, stacked row-wise; packed one after the other."""

        def each() -> Iterator[torch.Tensor]:
            for stacked in names:
                rows = self._scratch(self._stacked_shape(stacked))
                self._read(stacked, rows)
                yield rows.to(self.device)

        packed = pack_experts(each(), len(names), self._form)
        self.nbytes += packed.nbytes
        return packed

    def vector(self, *names: str) -> torch.Tensor:
        """The vectors `names`, laid end to end."""
        values = self._empty(self._stacked_shape(names))
        self._read(names, values)
        vector = values.to(self.device)
        self.nbytes += vector.nbytes
        return vector

    def linear(self, *prefixes: str, is_quantised: bool = True) -> Linear:
        """Projections of one input as one layer: each `prefix.weight`, and `prefix.bias` if there is one."""
        weight = self.matrix(*(f"{prefix}.weight" for prefix in prefixes), is_quantised=is_quantised)
        biases = [f"{prefix}.bias" for prefix in prefixes]
        has_bias = biases[0] in self._checkpoint.shapes
        return Linear(weight, self.vector(*biases) if has_bias else None)

    def layer_norm(self, prefix: str, eps: float) -> LayerNorm:
        """The norm of `prefix.weight` and `prefix.bias`."""
        return LayerNorm(self.vector(f"{prefix}.weight"), self.vector(f"{prefix}.bias"), eps)

    def ties_head(self, embedding: str, head: str) -> bool:
        """Whether the head shares the embedding's weight: what is in the checkpoint decides, not the config.

        No head, or one equal to the embedding: tied. A different head: not tied, even if the config says so.
        """
        if head not in self._checkpoint.shapes:
            if self._ties_head_by_config is False:
                warnings.warn(
                    f"{self._checkpoint.name}: tie_word_embeddings is false, but there is no {head}; "
                    "the embedding serves as the head",
                    stacklevel=2,
                )
            return True
        is_tied = self._checkpoint.same_values(embedding, head)
        if is_tied:
            self._report(head)  # read here and not again, so that progress reaches its end
        return is_tied

    def _stacked_shape(self, names: tuple[str, ...]) -> Shape:
        shapes = [self._checkpoint.shapes[name] for name in names]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def _scratch(self, shape: Shape) -> torch.Tensor:
        """Room for one matrix to be packed from. Small ones share it: holes would outlive loading."""
        size = math.prod(shape)
        if size * self._dtype.itemsize > _SCRATCH_BYTES:
            return self._empty(shape)
        if self._buffer.numel() < size:
            self._buffer = self._empty((size,))
        return self._buffer[:size].view(shape)

    def _empty(self, shape: Shape) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._place)

    def _read(self, names: tuple[str, ...], out: torch.Tensor) -> None:
        first = 0
        for name in names:
            last = first + self._checkpoint.shapes[name][0]
            self._checkpoint.read_into(name, out[first:last])
            first = last
            self._report(name)

    def _report(self, name: str) -> None:
        self._num_read += 1
        if self._progress is not None:
            self._progress(name, self._num_read, self._num_tensors)
