"""The rotary table: cos and sin for every position, computed once when a model is built.

Frequencies and angles follow Transformers operation by operation in float32 (a more exact angle would differ
from what the models were trained with). One choice is ours: `dynamic` NTK scaling. Transformers
recomputes all frequencies from the longest sequence seen so far, so a cached key keeps the frequencies
of the step that wrote it. Here position p always turns with the frequencies of a sequence of p + 1
tokens. That equals Transformers for every sequence up to max_position_embeddings and for every cached
decode that grows past it from a shorter prompt, and unlike its rule it does not depend on batching,
chunking, preemption or prefix hits. It differs for a prompt that is longer than max_position_embeddings
from the start.
"""

from __future__ import annotations

import math

import torch

from octavo.layers.rope_config import RopeConfig


def rope_table(rope: RopeConfig, num_positions: int | None = None) -> torch.Tensor:
    """(num_positions, rope.rotary_dim) float32 on the CPU: a row's first half is cos, the second sin.

    `num_positions` is `rope.num_positions` unless given. YaRN's attention factor is multiplied in.
    """
    num_positions = rope.num_positions if num_positions is None else num_positions
    positions = torch.arange(num_positions, dtype=torch.float32, device="cpu")
    if rope.rope_type == "dynamic":
        angles = positions[:, None] * _dynamic_frequencies(rope, num_positions)
        scale = 1.0
    else:
        frequencies, scale = inverse_frequencies(rope)
        angles = positions[:, None] * frequencies
    table = torch.empty(num_positions, rope.rotary_dim, dtype=torch.float32, device="cpu")
    half = rope.rotary_dim // 2
    torch.cos(angles, out=table[:, :half])
    torch.sin(angles, out=table[:, half:])
    return table.mul_(scale) if scale != 1.0 else table


def inverse_frequencies(rope: RopeConfig) -> tuple[torch.Tensor, float]:
    """Radians per position, (rotary_dim / 2,) float32, and the factor on cos and sin; not for dynamic."""
    frequencies = 1.0 / (rope.theta ** _exponents(rope.rotary_dim))
    scale = 1.0
    if rope.rope_type == "linear":
        frequencies = frequencies / rope.factor
    elif rope.rope_type == "llama3":
        frequencies = _llama3(rope, frequencies)
    elif rope.rope_type == "yarn":
        frequencies, scale = _yarn(rope)
    if rope.freq_factors is not None:
        frequencies = frequencies / torch.tensor(rope.freq_factors, dtype=torch.float32, device="cpu")
    return frequencies, scale


def _exponents(rotary_dim: int) -> torch.Tensor:
    return torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu") / rotary_dim


def _dynamic_frequencies(rope: RopeConfig, num_positions: int) -> torch.Tensor:
    """(num_positions, rotary_dim / 2): row p holds the frequencies of a sequence of p + 1 tokens."""
    dim, limit = rope.rotary_dim, rope.max_position_embeddings
    lengths = torch.arange(1, num_positions + 1, device="cpu").clamp(min=limit)
    growth = (rope.factor * lengths / limit) - (rope.factor - 1)
    base = rope.theta * growth ** (dim / (dim - 2))
    return 1.0 / (base[:, None] ** _exponents(dim))


def _llama3(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    length = rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    scaled = torch.where(wavelengths > length / rope.low_freq_factor, frequencies / rope.factor, frequencies)
    smooth = (length / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smoothed = (1 - smooth) * scaled / rope.factor + smooth * scaled
    low, high = length / rope.low_freq_factor, length / rope.high_freq_factor
    is_medium = (wavelengths >= high) & (wavelengths <= low)
    return torch.where(is_medium, smoothed, scaled)


def _yarn(rope: RopeConfig) -> tuple[torch.Tensor, float]:
    dim = rope.rotary_dim

    def dimension_of(num_rotations: float) -> float:
        turns = rope.original_max_position_embeddings / (num_rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    powers = rope.theta ** _exponents(dim)
    frequencies = 1.0 / (rope.factor * powers) * (1 - keep) + 1.0 / powers * keep
    return frequencies, _yarn_attention_factor(rope)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)
