"""Random weights for benchmarks and tests: seeded, and scaled so that logits stay finite and varied."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch

from octavo.models.weights.checkpoint import Shape


class DummyCheckpoint:
    """Norm weights 1, biases within 0.02, matrices uniform with variance 1 / columns: logits have a
    spread of about 1.

    They are drawn on the device that is to have them. A tensor's values depend on `seed`, its name and that
    kind of device only.
    """

    fills_any_device = True

    def __init__(self, shapes: Mapping[str, Shape], seed: int) -> None:
        self.name = "dummy weights"
        self.shapes = dict(shapes)
        self._seed = seed

    def read_into(self, name: str, out: torch.Tensor) -> None:
        if name.endswith(("norm.weight", ".ln_1.weight", ".ln_2.weight", ".ln_f.weight")):
            out.fill_(1.0)
            return
        if out.is_meta:  # a shape without values, and no generator makes any
            return
        generator = torch.Generator(out.device).manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        bound = 0.02 if out.dim() == 1 else (3.0 / out.shape[1]) ** 0.5
        out.uniform_(-bound, bound, generator=generator)

    def same_values(self, first: str, second: str) -> bool:
        return first == second

    def close(self) -> None:
        pass
