"""Token embedding and language-model head; tied models give both the same weight."""

from __future__ import annotations

import torch

from octavo.kernels.linear import PackedWeight, embedding, linear


class Embedding:
    """ids (T,) int64 -> (T, hidden), rows of a packed weight (vocab, hidden)."""

    __slots__ = ("weight",)

    def __init__(self, weight: PackedWeight) -> None:
        self.weight = weight

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return embedding(ids, self.weight)


class LMHead:
    """hidden (R, hidden) -> logits (R, vocab), of the dtype of hidden."""

    __slots__ = ("weight",)

    def __init__(self, weight: PackedWeight) -> None:
        self.weight = weight

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return linear(hidden, self.weight)
