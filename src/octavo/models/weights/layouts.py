"""Checkpoints that store a model's tensors under other names, in one piece, or turned around."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from octavo.models.weights.checkpoint import Checkpoint, Shape


@dataclass(frozen=True)
class Part:
    """A tensor that is stored as `tensor[index]`, transposed or not."""

    tensor: str
    index: tuple[int | slice, ...] = ()
    is_transposed: bool = False


class MappedCheckpoint(Checkpoint, Protocol):
    """A checkpoint whose tensors can be looked at without being read whole."""

    def view(self, name: str) -> torch.Tensor:
        """The stored tensor, in the file's memory: what is not touched is not read."""


class Rearranged:
    """`checkpoint` with the tensors of `parts` in place of those that they are parts of."""

    fills_any_device = False

    def __init__(self, checkpoint: MappedCheckpoint, parts: Mapping[str, Part]) -> None:
        self.name = checkpoint.name
        self._checkpoint = checkpoint
        self._parts = dict(parts)
        used = {part.tensor for part in self._parts.values()}
        self.shapes: dict[str, Shape] = {
            **{name: shape for name, shape in checkpoint.shapes.items() if name not in used},
            **{name: _shape(checkpoint.shapes[part.tensor], part) for name, part in self._parts.items()},
        }

    def read_into(self, name: str, out: torch.Tensor) -> None:
        out.copy_(self._view(name))

    def same_values(self, first: str, second: str) -> bool:
        a, b = self._view(first), self._view(second)
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)

    def close(self) -> None:
        self._checkpoint.close()

    def _view(self, name: str) -> torch.Tensor:
        part = self._parts.get(name)
        if part is None:
            return self._checkpoint.view(name)
        stored = self._checkpoint.view(part.tensor)[part.index]
        return stored.T if part.is_transposed else stored


def _shape(stored: Shape, part: Part) -> Shape:
    shape: list[int] = []
    for size, index in zip(stored, part.index, strict=False):
        if isinstance(index, slice):
            shape.append(len(range(*index.indices(size))))
    shape += stored[len(part.index) :]
    return tuple(reversed(shape)) if part.is_transposed else tuple(shape)


_FUSED = re.compile(r"(.*\.mlp\.experts\.)(gate_up_proj|down_proj)")
_MIXTRAL = re.compile(r"(.*)\.block_sparse_moe\.(gate|experts\.\d+\.w[123])\.weight")
_MIXTRAL_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def experts(shapes: Mapping[str, Shape]) -> dict[str, Part]:
    """Where each expert's matrices are in a checkpoint that has them in one tensor a layer (Transformers 5:
    gate's rows above up's), or under Mixtral's names."""
    parts: dict[str, Part] = {}
    for name, shape in shapes.items():
        if (match := _FUSED.fullmatch(name)) and len(shape) == 3:
            prefix, kind = match.groups()
            for expert in range(shape[0]):
                if kind == "down_proj":
                    parts[f"{prefix}{expert}.down_proj.weight"] = Part(name, (expert,))
                else:
                    half = shape[1] // 2
                    parts[f"{prefix}{expert}.gate_proj.weight"] = Part(name, (expert, slice(0, half)))
                    parts[f"{prefix}{expert}.up_proj.weight"] = Part(name, (expert, slice(half, shape[1])))
        elif match := _MIXTRAL.fullmatch(name):
            prefix, rest = match.groups()
            for theirs, ours in _MIXTRAL_NAMES.items():
                rest = rest.replace(f".{theirs}", f".{ours}")
            parts[f"{prefix}.mlp.{rest}.weight"] = Part(name)
    return parts


def gpt2(shapes: Iterable[str]) -> dict[str, Part]:
    """GPT-2's tensors, whose first checkpoints lack the prefix, and whose projections lie the other way."""
    parts: dict[str, Part] = {}
    for name in shapes:
        ours = name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"
        is_transposed = re.search(r"\.(c_attn|c_proj|c_fc)\.weight$", name) is not None
        if ours != name or is_transposed:
            parts[ours] = Part(name, is_transposed=is_transposed)
    return parts
