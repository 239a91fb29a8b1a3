"""What every kind of checkpoint offers: named tensors whose shapes are known before any of them is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch

from octavo.errors import WeightsError

Shape = tuple[int, ...]

# Buffers that old checkpoints store although they follow from the config: frequencies, GPT-2's causal mask.
_HARMLESS_SUFFIXES = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
_SHOWN = 6


class Checkpoint(Protocol):
    """Tensors under their Hugging Face names, read one at a time and never held."""

    name: str
    fills_any_device: bool
    """Whether `read_into` takes tensors that are not on the CPU, too."""

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Shape of every tensor by name."""

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Fill `out` (of shape `shapes[name]`, contiguous, any float dtype) with that tensor."""

    def same_values(self, first: str, second: str) -> bool:
        """Whether the two tensors hold the same bytes in the same format."""

    def close(self) -> None:
        """Give the files back."""


def check_tensors(
    checkpoint: Checkpoint, expected: Mapping[str, Shape], optional: Mapping[str, Shape]
) -> None:
    """Every expected tensor is there, every tensor there is expected or optional, and all shapes fit.

    Raises WeightsError that names what does not fit, before anything is read.
    """
    shapes = checkpoint.shapes
    missing = [name for name in expected if name not in shapes]
    if missing:
        raise WeightsError(
            f"{checkpoint.name}: {_count(missing)} missing that the config asks for: {_first(missing)}; "
            "the checkpoint is incomplete, or config.json belongs to another model"
        )
    known = {**expected, **optional}
    unknown = [name for name in shapes if name not in known and not is_harmless(name)]
    if unknown:
        raise WeightsError(
            f"{checkpoint.name}: {_count(unknown)} in the checkpoint that this model has no place for: "
            f"{_first(unknown)}; config.json belongs to another model, or this variant is not supported"
        )
    wrong = [
        f"{name}: expected {known[name]}, got {shape}"
        for name, shape in shapes.items()
        if name in known and shape != known[name]
    ]
    if wrong:
        raise WeightsError(
            f"{checkpoint.name}: {_count(wrong)} of another shape than the config says: {_first(wrong)}"
        )


def is_harmless(name: str) -> bool:
    """Whether a tensor is one that nobody reads: a buffer that follows from the config."""
    return name.endswith(_HARMLESS_SUFFIXES)


def _count(names: list[str]) -> str:
    return f"{len(names)} tensor{'s are' if len(names) > 1 else ' is'}"


def _first(names: Iterable[str]) -> str:
    names = list(names)
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
