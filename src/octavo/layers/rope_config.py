"""What rotary position embedding a model uses. No torch, so that configs stay readable without it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RopeType = Literal["default", "linear", "dynamic", "yarn", "llama3"]


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: which frequencies the first `rotary_dim` features of a head turn with.

    Lengths are in tokens. Fields that a rope type does not use keep their defaults. `freq_factors` (GGUF's
    rope_freqs tensor) divide the frequencies one by one; they already hold llama3 scaling.
    """

    rope_type: RopeType = "default"
    theta: float = 10_000.0
    rotary_dim: int
    max_position_embeddings: int
    original_max_position_embeddings: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    freq_factors: tuple[float, ...] | None = None

    @property
    def num_positions(self) -> int:
        """Positions the rope table covers: no sequence of this model may be longer."""
        scaled = self.max_position_embeddings
        if self.rope_type in ("linear", "dynamic"):
            scaled = int(self.max_position_embeddings * self.factor)
        elif self.rope_type == "yarn":
            scaled = int(self.original_max_position_embeddings * self.factor)
        return max(self.max_position_embeddings, scaled)
