"""Attention rows of `octavo bench kernels`: sequences over a shuffled paged cache, or over packed keys."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.bench.kernel_work import BF16, DTYPES, Memory, Work, relative_error
from octavo.kernels import backend


@dataclass(frozen=True)
class AttentionShape:
    """`lens_k` include the `q_len` new tokens of each sequence. block_size 0: packed keys, no cache.
    token_scales: a quantised cache has a scale for every token and head, as an engine's has."""

    lens_k: tuple[int, ...]
    q_len: int
    heads: tuple[int, int, int]  # query heads, KV heads, head_dim
    block_size: int
    cache: str = "bf16"
    batch_invariant: bool = False
    token_scales: bool = False

    @property
    def batch(self) -> int:
        return len(self.lens_k)

    @property
    def kv_bytes(self) -> int:
        _, kv_heads, head_dim = self.heads
        size = head_dim * DTYPES[self.cache].itemsize + (4 if self.token_scales else 0)
        return 2 * sum(self.lens_k) * kv_heads * size

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
    scales: dict[str, Any] = {"k_scale": 0.05, "v_scale": 0.05} if shape.cache == "int8" else {}
    if shape.token_scales:
        each = torch.rand(2, *both.shape[1:4], device=memory.device) * 0.05 + 0.025
        scales = {"k_scale": each[0], "v_scale": each[1]}
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
        scales=scales,
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
