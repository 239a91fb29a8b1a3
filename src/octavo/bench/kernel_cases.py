"""The rows of `octavo bench kernels`: inputs, what is called, what it must come to, and what it moves.

Names: ``decode/<B>x<context>/<heads>-<kv heads>-<head_dim>/<block size>/<dtype of the cache>``; for prefill
``<B>x<new tokens>``, ``+<context>`` where tokens are cached already, ``packed`` for keys outside a cache.
"""

from __future__ import annotations

import functools
import math
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Case:
    """A row by name. `value` says what is reported: "us", or "TFLOP/s"."""

    name: str
    build: Callable[[Memory], Work] = field(compare=False)
    unit: str = "us"
    bar: float | None = None  # what the project promises: at most so many us, at least so many TFLOP/s
    bar_over_floor: float | None = None  # or at most so many times the floor
    quick: bool = False
    small: bool = True  # its inputs are well below a few GB even on their own

    @property
    def family(self) -> str:
        return self.name.split("/")[0]


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


# ---- attention ----


@dataclass(frozen=True)
class AttentionShape:
    """`lens_k` include the `q_len` new tokens of each sequence. block_size 0: packed keys, no cache."""

    lens_k: tuple[int, ...]
    q_len: int
    heads: tuple[int, int, int]  # query heads, KV heads, head_dim
    block_size: int
    cache: str = "bf16"
    batch_invariant: bool = False

    @property
    def batch(self) -> int:
        return len(self.lens_k)

    @property
    def kv_bytes(self) -> int:
        _, kv_heads, head_dim = self.heads
        return 2 * sum(self.lens_k) * kv_heads * head_dim * DTYPES[self.cache].itemsize

    @property
    def qo_bytes(self) -> int:
        return 2 * self.batch * self.q_len * self.heads[0] * self.heads[2] * 2

    @property
    def flops(self) -> float:
        """Multiplications and additions of both products over the keys that a causal mask leaves."""
        pairs = sum(
            self.q_len * (length - self.q_len) + self.q_len * (self.q_len + 1) / 2 for length in self.lens_k
        )
        return 4.0 * self.heads[0] * self.heads[2] * pairs


@dataclass
class AttentionInputs:
    """`sets` times the same shape: q[r] (Tq, H, D), tables[r] (B, blocks); caches shared, blocks shuffled."""

    shape: AttentionShape
    sets: int
    q: Tensor
    k: Tensor  # caches (num_blocks, block_size, KVH, D); packed: (sets, Tk, KVH, D)
    v: Tensor
    tables: Tensor | None
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    lens_k: Tensor
    out: Tensor
    scales: dict[str, Any]  # of a quantised cache

    @property
    def max_seqlen_k(self) -> int:
        return max(self.shape.lens_k)

    def sampled(self) -> tuple[list[int], Tensor]:
        """Some rows of `out` for the first set, and what they should be, by the reference in float32."""
        from octavo.kernels import flash_attn_varlen_func

        shape = self.shape
        picked = sorted({0, shape.batch // 2, shape.batch - 1})
        offsets = sorted({0, shape.q_len // 3, shape.q_len - 1})
        rows = [(b, i) for b in picked for i in offsets]
        # Row i of a sequence is a sequence of one query whose keys end where the row stands.
        lens = [shape.lens_k[b] - shape.q_len + i + 1 for b, i in rows]
        index = [b * shape.q_len + i for b, i in rows]
        device = self.q.device
        cu_q = torch.arange(len(rows) + 1, dtype=torch.int32, device=device)
        cu_k = torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
        k, v, table = self.k, self.v, None
        if self.tables is None:
            starts = [sum(shape.lens_k[:b]) for b, _ in rows]
            parts = [(start, start + length) for start, length in zip(starts, lens, strict=True)]
            k, v = (torch.cat([x[0, a:b] for a, b in parts]) for x in (self.k, self.v))
        else:
            table = self.tables[0][[b for b, _ in rows]]
        with backend.use("reference"):
            exact = flash_attn_varlen_func(
                self.q[0][index].float(),
                k,
                v,
                cu_q,
                cu_k,
                1,
                max(lens),
                causal=True,
                block_table=table,
                **self.scales,
            )
        return index, exact

    def error(self, call: Callable[[], object]) -> float:
        """The relative error of the sampled rows after that call wrote the first set's result."""
        self.out.fill_(math.nan)
        call()
        index, exact = self.sampled()
        return relative_error(self.out[index], exact)


def attention_inputs(shape: AttentionShape, memory: Memory) -> AttentionInputs:
    """The inputs of a row; blocks of all sets lie shuffled in one pair of caches."""
    heads, kv_heads, head_dim = shape.heads
    dtype = DTYPES[shape.cache]
    sets = memory.sets(shape.kv_bytes + shape.qo_bytes)
    num_rows = shape.batch * shape.q_len
    tables = None
    if shape.block_size:
        blocks = math.ceil(max(shape.lens_k) / shape.block_size)
        num_blocks = sets * shape.batch * blocks
        both = memory.values(2, num_blocks, shape.block_size, kv_heads, head_dim, dtype=dtype)
        order = torch.randperm(num_blocks, device=memory.device, dtype=torch.int32)
        tables = order.view(sets, shape.batch, blocks)
    else:
        both = memory.values(2, sets, sum(shape.lens_k), kv_heads, head_dim, dtype=dtype)
    sums = [0]
    for length in shape.lens_k:
        sums.append(sums[-1] + length)
    return AttentionInputs(
        shape=shape,
        sets=sets,
        q=memory.drawn(sets, num_rows, heads, head_dim),
        k=both[0],
        v=both[1],
        tables=tables,
        cu_seqlens_q=memory.ints(range(0, num_rows + 1, shape.q_len)),
        cu_seqlens_k=memory.ints(sums),
        lens_k=memory.ints(shape.lens_k),
        out=torch.empty(num_rows, heads, head_dim, device=memory.device, dtype=BF16),
        scales={"k_scale": 0.05, "v_scale": 0.05} if shape.cache == "int8" else {},
    )


def attention(shape: AttentionShape, memory: Memory) -> Work:
    """A row of `flash_attn_varlen_func`, causal."""
    from octavo.kernels import flash_attn_varlen_func

    inputs = attention_inputs(shape, memory)
    options: dict[str, Any] = dict(inputs.scales)
    if shape.batch_invariant:
        options["batch_invariant"] = True

    def call(r: int) -> None:
        packed = inputs.tables is None
        flash_attn_varlen_func(
            inputs.q[r],
            inputs.k[r] if packed else inputs.k,
            inputs.v[r] if packed else inputs.v,
            inputs.cu_seqlens_q,
            inputs.cu_seqlens_k,
            shape.q_len,
            inputs.max_seqlen_k,
            causal=True,
            block_table=None if inputs.tables is None else inputs.tables[r],
            out=inputs.out,
            **options,
        )

    calls = [functools.partial(call, r) for r in range(inputs.sets)]
    return Work(
        calls=calls,
        error=lambda: inputs.error(calls[0]),
        tolerance=1e-2 if shape.cache == "bf16" else 2e-2,
        bytes_moved=shape.kv_bytes + shape.qo_bytes,
        flops=shape.flops,
        inputs=inputs,
    )


def ragged_lengths(batch: int, longest: int) -> tuple[int, ...]:
    """From 100 to `longest`, the same draw every time."""
    draw = random.Random(1)
    return tuple(draw.randint(100, longest) for _ in range(batch))


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


# ---- the list ----

QWEN3_0_6B, QWEN3_8B, ONE_KV_HEAD, SMOLLM2 = (16, 8, 128), (32, 8, 128), (8, 1, 128), (9, 3, 64)
# At most so many microseconds for 8 KV heads of 128 in bf16: the project's own bars.
_DECODE_BARS = {
    "1x1024": 8.5, "1x8192": 14.0, "1x32768": 38.0, "32x1024": 36.0, "32x8192": 240.0, "256x1024": 262.0,
    "256x8192": 1880.0, "256xragged2048": 270.0,
}  # fmt: skip
_LARGE_OVER_FLOOR = 1 / 0.95  # from a gigabyte of keys and values on


def _spelled(heads: tuple[int, int, int]) -> str:
    return "-".join(map(str, heads))


def _decode(
    batch: int,
    context: int,
    heads: tuple[int, int, int],
    block_size: int,
    cache: str = "bf16",
    *,
    ragged: bool = False,
    q_len: int = 1,
    invariant: bool = False,
    quick: bool = False,
) -> Case:
    lens = ragged_lengths(batch, context) if ragged else (context,) * batch
    what = f"{batch}x{'ragged' if ragged else ''}{context}{f'q{q_len}' if q_len > 1 else ''}"
    shape = AttentionShape(lens, q_len, heads, block_size, cache, invariant)
    name = f"decode/{what}/{_spelled(heads)}/{block_size}/{cache}{'-invariant' if invariant else ''}"
    has_bar = heads in (QWEN3_0_6B, QWEN3_8B) and cache == "bf16" and not invariant
    return Case(
        name,
        functools.partial(attention, shape),
        bar=_DECODE_BARS.get(what) if has_bar else None,
        quick=quick,
    )


def _prefill(
    batch: int,
    new: int,
    heads: tuple[int, int, int],
    block_size: int,
    cache: str = "bf16",
    *,
    past: int = 0,
    invariant: bool = False,
    bar: float | None = None,
    quick: bool = False,
) -> Case:
    what = f"{batch}x{new}{f'+{past}' if past else ''}"
    shape = AttentionShape((new + past,) * batch, new, heads, block_size, cache, invariant)
    where = block_size or "packed"
    name = f"prefill/{what}/{_spelled(heads)}/{where}/{cache}{'-invariant' if invariant else ''}"
    return Case(name, functools.partial(attention, shape), "TFLOP/s", bar, quick=quick)


def cases() -> Iterator[Case]:
    """Every row, in the order of the table."""
    for heads in (QWEN3_0_6B, QWEN3_8B):
        for block_size in (16, 64):
            first = heads == QWEN3_0_6B and block_size == 16
            for batch, context in (
                (1, 1024),
                (1, 8192),
                (1, 32768),
                (32, 1024),
                (32, 8192),
                (256, 1024),
                (256, 8192),
            ):
                yield _decode(batch, context, heads, block_size, quick=first and batch * context <= 1 << 18)
            yield _decode(256, 2048, heads, block_size, ragged=True, quick=first)
    for heads in (ONE_KV_HEAD, SMOLLM2):
        for batch, context in ((1, 8192), (32, 8192), (256, 1024), (256, 8192)):
            yield _decode(batch, context, heads, 16, quick=(batch, context) == (32, 8192))
    yield _decode(8, 32768, QWEN3_0_6B, 16, quick=True)
    for cache in ("fp8", "int8"):
        for batch, context in ((8, 32768), (256, 1024)):
            yield _decode(batch, context, QWEN3_0_6B, 16, cache, quick=batch == 8)
    for batch, context in ((1, 8192), (32, 8192), (256, 1024)):
        yield _decode(batch, context, QWEN3_0_6B, 16, invariant=True)
    yield _decode(32, 8192, QWEN3_0_6B, 16, q_len=4)

    for block_size in (16, 64, 0):
        first = block_size == 16
        paged = block_size > 0
        yield _prefill(1, 8192, QWEN3_8B, block_size, bar=560 if paged else None, quick=True)
        yield _prefill(4, 4096, QWEN3_8B, block_size)
        yield _prefill(16, 1024, QWEN3_8B, block_size, bar=400 if paged else None, quick=first)
        yield _prefill(1, 2048, QWEN3_8B, block_size, past=30720, bar=590 if paged else None, quick=first)
    for batch, new in ((1, 8192), (16, 1024)):
        yield _prefill(batch, new, QWEN3_0_6B, 16)
    yield _prefill(1, 8192, ONE_KV_HEAD, 16)
    yield _prefill(1, 8192, SMOLLM2, 16, bar=300, quick=True)
    yield _prefill(1, 128, QWEN3_8B, 16, past=32640)
    yield _prefill(1, 8192, QWEN3_8B, 16, "fp8")
    yield _prefill(1, 8192, QWEN3_8B, 16, invariant=True)

    for tokens, bar in ((1, None), (256, 2.8), (8192, 18.0)):
        for cache in ("bf16", "fp8"):
            name = f"kv_write/{tokens}/8-128/16/{cache}"
            build = functools.partial(kv_write, tokens, QWEN3_8B, 16, cache)
            yield Case(
                name, build, bar=bar if cache == "bf16" else None, quick=tokens > 1 and cache == "bf16"
            )
    for tokens, bar in ((1, None), (256, 3.0), (8192, None)):
        for heads, cache in ((QWEN3_0_6B, "bf16"), (QWEN3_8B, "bf16"), (QWEN3_8B, "fp8")):
            name = f"kv_write_fused/{tokens}/{_spelled(heads)}/16/{cache}"
            build = functools.partial(fused_write, tokens, heads, 16, cache)
            over = 1.3 if tokens == 8192 else None
            yield Case(name, build, bar=bar, bar_over_floor=over, quick=tokens > 1 and heads == QWEN3_0_6B)

    bars = {("top_k+top_p", 64): 60.0, ("top_k+top_p", 256): 150.0, ("greedy", 256): 45.0}
    for how in ("greedy", "temperature", "top_k+top_p"):
        for batch in (1, 64, 256):
            build = functools.partial(sampling, batch, 151_936, how)
            yield Case(f"sample/{batch}x151936/{how}", build, bar=bars.get((how, batch)), quick=batch == 64)

    for tokens in (1, 256, 8192):
        quick = tokens == 256
        yield Case(
            f"rms_norm/{tokens}x4096/bf16", functools.partial(rms_norm, tokens, 4096, False), quick=quick
        )
        yield Case(
            f"rms_norm_add/{tokens}x4096/bf16", functools.partial(rms_norm, tokens, 4096, True), quick=quick
        )
        yield Case(
            f"silu_and_mul/{tokens}x12288/bf16", functools.partial(silu_and_mul, tokens, 12288), quick=quick
        )
