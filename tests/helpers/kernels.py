"""Inputs, oracles and the tolerance rule for kernel tests.

The oracle is torch's `scaled_dot_product_attention` in float64, one sequence at a time, which we did not
write. The
tolerance is an error budget: starting from the same low-precision inputs, we may be at most twice as wrong as
plain torch in that precision, at the worst point and in the root mean square.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from helpers import triton_here
from torch import Tensor
from torch.nn import functional

# Triton's take CPU tensors where it interprets them; on a GPU machine, tests/gpu has them compiled.
IMPLEMENTATIONS = ("reference", "cpu", *(["triton"] if triton_here.interpreted() else []))


@dataclass
class Batch:
    """Packed sequences; `q` (Tq, H, D), `k` and `v` (Tk, KVH, D)."""

    lens_q: list[int]
    lens_k: list[int]
    q: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def random(
        cls,
        lens_q: list[int],
        lens_k: list[int],
        heads: tuple[int, int] = (4, 2),
        head_dim: int = 64,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> Batch:
        """Drawn on the CPU, so the same everywhere, and given on torch's default device."""
        rng, device = torch.Generator().manual_seed(seed), torch.get_default_device()
        shapes = ((sum(lens_q), heads[0]), (sum(lens_k), heads[1]), (sum(lens_k), heads[1]))
        drawn = [torch.randn(*shape, head_dim, generator=rng, device="cpu") for shape in shapes]
        q, k, v = (x.to(device, dtype) for x in drawn)
        return cls(lens_q, lens_k, q, k, v)

    @property
    def cu_q(self) -> Tensor:
        return prefix_sums(self.lens_q)

    @property
    def cu_k(self) -> Tensor:
        return prefix_sums(self.lens_k)

    @property
    def lengths(self) -> tuple[Tensor, Tensor, int, int]:
        """The four length arguments of `flash_attn_varlen_func`."""
        return self.cu_q, self.cu_k, max(self.lens_q, default=0), max(self.lens_k, default=0)

    def sequences(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        parts = zip(
            self.q.split(self.lens_q), self.k.split(self.lens_k), self.v.split(self.lens_k), strict=True
        )
        return list(parts)


@dataclass
class Paged:
    """The keys and values of a batch in a cache: shuffled blocks, poison elsewhere, holes past the end."""

    k_cache: Tensor
    v_cache: Tensor
    table: Tensor
    slots: list[Tensor] = field(default_factory=list)  # per sequence, in token order


def prefix_sums(lens: list[int]) -> Tensor:
    return torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def page(batch: Batch, block_size: int, poison: float = math.nan, spare: int = 3, seed: int = 0) -> Paged:
    """Lay the keys and values of `batch` into a cache, by hand and not through the kernel under test."""
    counts = [math.ceil(n / block_size) for n in batch.lens_k]
    num_blocks = sum(counts) + spare
    rng = torch.Generator().manual_seed(seed)
    free = torch.randperm(num_blocks, generator=rng, device="cpu").tolist()
    table = torch.full((len(counts), max(counts, default=0) + 1), -1, dtype=torch.int32)
    k_cache = torch.full((num_blocks, block_size, *batch.k.shape[1:]), poison, dtype=batch.k.dtype)
    v_cache = k_cache.clone()
    paged = Paged(k_cache, v_cache, table)
    for b, (_, k, v) in enumerate(batch.sequences()):
        blocks = [free.pop() for _ in range(counts[b])]
        table[b, : counts[b]] = torch.tensor(blocks, dtype=torch.int32)
        slots = [blocks[i // block_size] * block_size + i % block_size for i in range(batch.lens_k[b])]
        paged.slots.append(torch.tensor(slots, dtype=torch.int64))
        for token, slot in enumerate(slots):
            k_cache[slot // block_size, slot % block_size] = k[token]
            v_cache[slot // block_size, slot % block_size] = v[token]
    return paged


def visible(num_rows: int, num_keys: int, causal: bool, window: tuple[int, int] = (-1, -1)) -> Tensor:
    """The mask (rows, keys), written as the sentence that defines it."""
    left, right = window[0], 0 if causal else window[1]
    mask = torch.zeros(num_rows, num_keys, dtype=torch.bool, device="cpu")
    for i in range(num_rows):
        own = i + num_keys - num_rows
        for j in range(num_keys):
            mask[i, j] = (left < 0 or j >= own - left) and (right < 0 or j <= own + right)
    return mask.to(torch.get_default_device())


def sdpa(
    batch: Batch,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """`scaled_dot_product_attention` on each sequence alone, computed in `dtype`; rows without keys are 0."""
    outs = []
    num_heads, group = batch.q.shape[1], batch.q.shape[1] // batch.k.shape[1]
    for b, (q, k, v) in enumerate(batch.sequences()):
        seen = visible(len(q), len(k), causal, window)
        bias = torch.zeros(num_heads, len(q), len(k), dtype=dtype).masked_fill(~seen, -math.inf)
        if slopes is not None:
            own = torch.arange(len(q))[:, None] + len(k) - len(q)
            slope = slopes[b] if slopes.dim() == 2 else slopes
            bias = bias - slope.to(dtype)[:, None, None] * (own - torch.arange(len(k))).abs()
        keys, values = (x.to(dtype).repeat_interleave(group, dim=1) for x in (k, v))
        if sinks is not None:  # a sink is one more key, of score `sink` and value 0
            zero = torch.zeros(1, *keys.shape[1:], dtype=dtype)
            keys, values = torch.cat([keys, zero]), torch.cat([values, zero])
            bias = torch.cat([bias, sinks.to(dtype)[:, None, None].expand(-1, len(q), 1)], dim=-1)
        heads_first = [x.transpose(0, 1) for x in (q.to(dtype), keys, values)]
        if dtype == torch.float32:
            out = _in_order(*heads_first, bias, scale)
        else:
            out = functional.scaled_dot_product_attention(*heads_first, attn_mask=bias, scale=scale)
        outs.append(out.transpose(0, 1).masked_fill(~seen.any(-1)[:, None, None], 0.0))
    return torch.cat(outs)


def _in_order(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float | None) -> Tensor:
    """The yardstick of a float32 error: softmax attention with every sum taken one term after the other.

    torch's fused kernel adds in trees that fit the registers of the CPU it runs on, so its error differs from
    machine to machine: three times smaller on an Intel Xeon than on an AMD EPYC for one query and 300 keys.
    """
    if not k.shape[1]:
        return torch.zeros_like(q)
    scores = torch.zeros_like(bias)
    for d in range(q.shape[-1]):
        scores += q[:, :, d, None] * k[:, None, :, d]
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale) + bias
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    out, total = torch.zeros_like(q), torch.zeros_like(q[..., :1])
    for j in range(k.shape[1]):
        out += weights[:, :, j, None] * v[:, None, j]
        total += weights[:, :, j, None]
    return out / total


def assert_within_budget(ours: Tensor, exact: Tensor, plain: Tensor) -> None:
    """At most twice the error that plain torch makes in the same precision, pointwise and in the RMS.

    The floor under it is two roundings of the result, for inputs where plain torch happens to be exact.
    """
    assert ours.dtype == plain.dtype
    assert ours.shape == exact.shape
    floor = 2 * torch.finfo(ours.dtype).eps * max(1.0, exact.abs().max().item() if exact.numel() else 0.0)
    error, allowed = (ours.double() - exact).abs(), (plain.double() - exact).abs()
    assert torch.isfinite(error).all()
    if error.numel():
        assert error.max() <= 2 * allowed.max() + floor
        assert error.square().mean().sqrt() <= 2 * allowed.square().mean().sqrt() + floor / 2
