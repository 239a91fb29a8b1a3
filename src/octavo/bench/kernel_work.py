"""What a row of `octavo bench kernels` runs: inputs, calls, what they must come to, and what they move."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.kernels import backend

BF16, FP8, INT8 = torch.bfloat16, torch.float8_e4m3fn, torch.int8
DTYPES = {"bf16": BF16, "fp8": FP8, "int8": INT8}
MAX_SETS = 64  # of inputs to rotate through


@dataclass
class Work:
    """One row, ready to run.

    Attributes:
        calls: one launch on each set of inputs; together the sets are larger than the cache of the GPU.
        error: the worst relative error of sampled results against the reference; runs `calls[0]` first.
        tolerance: the most that `error` may be.
        bytes_moved, flops: of one call, at the least. copies: whether as much is written as read.
        inputs: for the peers (`AttentionInputs`, `WriteInputs`, ...).
    """

    calls: Sequence[Callable[[], object]]
    error: Callable[[], float]
    tolerance: float
    bytes_moved: float
    flops: float = 0.0
    copies: bool = False
    inputs: Any = None


class Memory:
    """Random numbers on the device, drawn once and handed out as views: rows are built one after another."""

    def __init__(self, device: torch.device, cold_bytes: int) -> None:
        self.device = device
        self.cold_bytes = cold_bytes
        self._pools: dict[torch.dtype, Tensor] = {}
        self._growing = threading.Lock()

    def hot(self) -> Memory:
        """The same numbers for one set of inputs: to compile, not to measure."""
        other = Memory(self.device, cold_bytes=0)
        other._pools, other._growing = self._pools, self._growing
        return other

    def values(self, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
        """A view of standard normal values, the same ones for every caller. For what is only read."""
        count = math.prod(shape)
        with self._growing:
            pool = self._pools.get(dtype)
            if pool is None or pool.numel() < count:
                self._pools.pop(dtype, None)
                pool = self._pools[dtype] = torch.empty(count, dtype=dtype, device=self.device)
                for part in torch.split(pool, 1 << 28):
                    drawn = torch.randn(part.shape, device=self.device, dtype=BF16)
                    part.copy_(drawn.mul_(32).clamp_(-127, 127) if dtype == INT8 else drawn)
        return pool[:count].view(shape)

    def drawn(self, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
        """A new tensor of standard normal values."""
        return torch.randn(shape, device=self.device, dtype=dtype)

    def ints(self, values: Sequence[int] | Tensor, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.as_tensor(values, dtype=dtype, device=self.device)

    def sets(self, bytes_of_one: float) -> int:
        """How many sets of inputs of that size it takes to be cold."""
        return max(1, min(MAX_SETS, math.ceil(self.cold_bytes / bytes_of_one)))

    def release(self) -> None:
        self._pools.clear()


def relative_error(ours: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm of the exact values; infinite where something is not finite."""
    error = float((ours.double() - exact.double()).norm() / exact.double().norm().clamp_min(1e-30))
    return error if math.isfinite(error) else math.inf


# ---- writes into the cache ----


@dataclass
class WriteInputs:
    """`sets` times T new tokens; qkv[r] (T, H + 2 KVH, D) as the fused projection makes them."""

    qkv: Tensor
    heads: tuple[int, int, int]
    k_cache: Tensor
    v_cache: Tensor
    slots: Tensor  # (sets, T) int64
    positions: Tensor
    cos_sin: Tensor
    weight: Tensor

    def split(self, r: int) -> tuple[Tensor, Tensor, Tensor]:
        heads, kv_heads, _ = self.heads
        q, k, v = self.qkv[r].split_with_sizes([heads, kv_heads, kv_heads], dim=1)
        return q, k, v

    def written(self, r: int) -> tuple[Tensor, Tensor]:
        """K and V (T, KVH, D) as they lie in the caches now."""
        block, offset = self.slots[r] // self.k_cache.shape[1], self.slots[r] % self.k_cache.shape[1]
        return self.k_cache[block, offset], self.v_cache[block, offset]


def write_inputs(
    num_tokens: int, heads: tuple[int, int, int], block_size: int, dtype: torch.dtype, memory: Memory
) -> WriteInputs:
    """New tokens with random slots in a cache of 262,144 tokens, far larger than any L2 cache."""
    num_heads, kv_heads, head_dim = heads
    sets = memory.sets(num_tokens * (num_heads + 2 * kv_heads) * head_dim * 2)
    num_slots = 1 << 18
    caches = torch.zeros(
        (2, num_slots // block_size, block_size, kv_heads, head_dim), device=memory.device, dtype=dtype
    )
    slots = torch.stack([torch.randperm(num_slots, device=memory.device)[:num_tokens] for _ in range(sets)])
    angles = torch.rand(4096, head_dim // 2, device=memory.device) * 6
    return WriteInputs(
        qkv=memory.drawn(sets, num_tokens, num_heads + 2 * kv_heads, head_dim),
        heads=heads,
        k_cache=caches[0],
        v_cache=caches[1],
        slots=slots,
        positions=torch.randint(0, 4096, (sets, num_tokens), device=memory.device),
        cos_sin=torch.cat([angles.cos(), angles.sin()], dim=1),
        weight=memory.drawn(head_dim) * 0.1 + 1,
    )


def kv_write(
    num_tokens: int, heads: tuple[int, int, int], block_size: int, cache: str, memory: Memory
) -> Work:
    """A row of `write_kv_cache`."""
    from octavo.kernels import write_kv_cache

    dtype = DTYPES[cache]
    inputs = write_inputs(num_tokens, (0, *heads[1:]), block_size, dtype, memory)
    scales: dict[str, Any] = {} if cache == "bf16" else {"k_scale": 0.05, "v_scale": 0.05}

    def call(r: int) -> None:
        _, k, v = inputs.split(r)
        write_kv_cache(k, v, inputs.k_cache, inputs.v_cache, inputs.slots[r], **scales)

    calls = [functools.partial(call, r) for r in range(len(inputs.slots))]

    def error() -> float:
        calls[0]()
        ours = torch.stack(inputs.written(0)).float()
        with backend.use("reference"):
            calls[0]()
        return relative_error(ours, torch.stack(inputs.written(0)).float())

    elements = 2 * num_tokens * heads[1] * heads[2]
    return Work(
        calls,
        error,
        0.0 if cache == "bf16" else 1e-3,
        elements * (2 + dtype.itemsize),
        copies=True,
        inputs=inputs,
    )


def fused_write(
    num_tokens: int, heads: tuple[int, int, int], block_size: int, cache: str, memory: Memory
) -> Work:
    """A row of `rotate_and_write_kv_cache`: norm of q and k, RoPE, write."""
    from octavo.kernels import rotate_and_write_kv_cache

    dtype = DTYPES[cache]
    inputs = write_inputs(num_tokens, heads, block_size, dtype, memory)
    scales: dict[str, Any] = {} if cache == "bf16" else {"k_scale": 0.05, "v_scale": 0.05}

    def call(r: int) -> Tensor:
        q, k, v = inputs.split(r)
        rotated: Tensor = rotate_and_write_kv_cache(
            q, k, v, inputs.cos_sin, inputs.positions[r], inputs.k_cache, inputs.v_cache, inputs.slots[r],
            q_weight=inputs.weight, k_weight=inputs.weight, eps=1e-6, **scales,
        )  # fmt: skip
        return rotated

    calls = [functools.partial(call, r) for r in range(len(inputs.slots))]

    def error() -> float:
        q = calls[0]()
        ours = [q, *(x.clone() for x in inputs.written(0))]
        with backend.use("reference"):
            q = calls[0]()
        exact = [q, *inputs.written(0)]
        return max(relative_error(a.float(), b.float()) for a, b in zip(ours, exact, strict=True))

    q_bytes = 2 * num_tokens * heads[0] * heads[2] * 2
    kv_bytes = 2 * num_tokens * heads[1] * heads[2] * (2 + dtype.itemsize)
    return Work(
        calls, error, 1e-2 if cache == "bf16" else 5e-2, q_bytes + kv_bytes, copies=True, inputs=inputs
    )


# ---- sampling and the small kernels ----


def sampling(batch: int, vocab_size: int, how: str, memory: Memory) -> Work:
    """A row of `sample` on float32 logits."""
    from octavo.kernels import sample

    sets = memory.sets(batch * vocab_size * 4)
    logits = memory.drawn(sets, batch, vocab_size, dtype=torch.float32) * 3
    seeds = torch.arange(batch, device=memory.device)
    positions = torch.zeros(batch, dtype=torch.int64, device=memory.device)
    filters: dict[str, Any] = {}
    if how == "top_k+top_p":
        filters["top_k"] = memory.ints([50] * batch)
        filters["top_p"] = torch.full((batch,), 0.9, device=memory.device)
    temperature = torch.full((batch,), 0.0 if how == "greedy" else 0.8, device=memory.device)

    def call(r: int) -> Tensor:
        ids: Tensor = sample(logits[r], temperature=temperature, seeds=seeds, positions=positions, **filters)
        return ids

    calls = [functools.partial(call, r) for r in range(sets)]

    def error() -> float:
        rows = slice(0, min(batch, 8))
        ours = calls[0]()[rows]
        with backend.use("reference"):
            few = {name: values[rows] for name, values in filters.items()}
            exact = sample(
                logits[0][rows],
                temperature=temperature[rows],
                seeds=seeds[rows],
                positions=positions[rows],
                **few,
            )
        return float((ours != exact).double().mean())

    inputs = {"logits": logits, "how": how}
    # The order of a float sum decides where a draw falls once in many: one row of eight may differ.
    return Work(calls, error, 0.0 if how == "greedy" else 0.126, batch * vocab_size * 4, inputs=inputs)


def rms_norm(num_tokens: int, size: int, with_residual: bool, memory: Memory) -> Work:
    """A row of `rms_norm`."""
    from octavo.kernels import rms_norm as kernel

    passes = 4 if with_residual else 2
    sets = memory.sets(num_tokens * size * 2 * passes)
    x, residual = memory.drawn(sets, num_tokens, size), memory.drawn(sets, num_tokens, size)
    weight = memory.drawn(size)

    def call(r: int) -> Tensor:
        if with_residual:
            return kernel(x[r], weight, 1e-6, residual=residual[r])[0]
        return kernel(x[r], weight, 1e-6)

    inputs = {"x": x, "weight": weight, "residual": residual if with_residual else None}
    return _elementwise(call, sets, num_tokens * size * 2 * passes, inputs)


def silu_and_mul(num_tokens: int, size: int, memory: Memory) -> Work:
    """A row of `silu_and_mul`; `size` is that of the result."""
    from octavo.kernels import silu_and_mul as kernel

    moved = num_tokens * size * 2 * 3
    sets = memory.sets(moved)
    x = memory.drawn(sets, num_tokens, 2 * size)
    return _elementwise(lambda r: kernel(x[r]), sets, moved, {"x": x})


def _elementwise(call: Callable[[int], Tensor], sets: int, moved: float, inputs: Any) -> Work:
    def error() -> float:
        ours = call(0)
        with backend.use("reference"):
            exact = call(0)
        return relative_error(ours, exact)

    calls = [functools.partial(call, r) for r in range(sets)]
    return Work(calls, error, 1e-2, moved, copies=True, inputs=inputs)
