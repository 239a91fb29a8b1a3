"""Whether this GPU keeps two promises that no single result shows: graphs replay, and nothing compiles late.

`octavo doctor` asks on the user's card, `tests/gpu` on ours.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from octavo.kernels import backend

if TYPE_CHECKING:
    from octavo.kernels.triton.monitor import Made

_HEADS, _KV_HEADS, _HEAD_DIM, _BLOCK_SIZE = 4, 2, 64, 16


def replay_error(device: torch.device) -> float:
    """The worst error of a captured decode step (write, then attend) that is replayed with other lengths.

    Infinite where it cannot be captured. It is captured with the bounds of the longest, as an engine does.
    """
    lens_before, lens_after = [1, 1, 1, 1], [3, 100, 1, 257]
    step = _Step(lens_before, 512, device)
    try:
        graph = _captured(step)
    except RuntimeError:
        return float("inf")
    worst = 0.0
    for lens in (lens_after, lens_before, [16, 17, 256, 511]):
        step.set_lengths(lens)
        graph.replay()
        torch.cuda.synchronize(device)
        ours = step.out.clone()
        with backend.use("reference"):
            step.run()
        worst = max(worst, backend.worst_error(ours, step.out))
    return worst


def _captured(step: _Step) -> torch.cuda.CUDAGraph:
    stream: torch.cuda.Stream = torch.cuda.Stream(step.q.device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        step.run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step.run()
    return graph


class _Step:
    """One decode step of some sequences; `set_lengths` changes what the tensors hold, and no shape."""

    def __init__(self, lens: Sequence[int], longest: int, device: torch.device) -> None:
        batch, blocks = len(lens), longest // _BLOCK_SIZE
        self.longest = longest
        self.q, k, v = (
            torch.randn(batch, heads, _HEAD_DIM, device=device, dtype=torch.bfloat16)
            for heads in (_HEADS, _KV_HEADS, _KV_HEADS)
        )
        self.k, self.v = k, v
        shape = (2, batch * blocks, _BLOCK_SIZE, _KV_HEADS, _HEAD_DIM)
        self.k_cache, self.v_cache = torch.randn(shape, device=device, dtype=torch.bfloat16)
        order = torch.randperm(batch * blocks).to(device, torch.int32)
        self.table = order.view(batch, blocks)
        self.slots = torch.zeros(batch, dtype=torch.int64, device=device)
        self.cu_q = torch.arange(batch + 1, dtype=torch.int32, device=device)
        self.cu_k = torch.zeros(batch + 1, dtype=torch.int32, device=device)
        self.out = torch.empty_like(self.q)
        self.set_lengths(lens)

    def set_lengths(self, lens: Sequence[int]) -> None:
        """Lengths include the token that the step writes."""
        last = torch.tensor(lens, device=self.q.device) - 1
        block = self.table.gather(1, (last // _BLOCK_SIZE)[:, None])[:, 0].long()
        self.slots.copy_(block * _BLOCK_SIZE + last % _BLOCK_SIZE)
        self.cu_k[1:].copy_((last + 1).cumsum(0))

    def run(self) -> None:
        from octavo.kernels import flash_attn_varlen_func, write_kv_cache

        write_kv_cache(self.k, self.v, self.k_cache, self.v_cache, self.slots)
        flash_attn_varlen_func(
            self.q, self.k_cache, self.v_cache, self.cu_q, self.cu_k, 1, self.longest,
            causal=True, block_table=self.table, out=self.out,
        )  # fmt: skip


def late_compiles(
    device: torch.device,
    *,
    num_heads: int = _HEADS,
    num_kv_heads: int = _KV_HEADS,
    head_dim: int = _HEAD_DIM,
    dtype: torch.dtype = torch.bfloat16,
    block_size: int = _BLOCK_SIZE,
    steps: int = 150,
) -> tuple[list[Made], list[Made]]:
    """What `warm_up` compiled or loaded, and what a sweep like serving compiled after it: nothing, if well.

    The sweep: batches of 1 to 257, chunks and decodes mixed, lengths to 40,000, odd and even numbers of
    tokens, tensors and slices of tensors that begin anywhere.
    """
    from octavo.kernels import warm_up
    from octavo.kernels.triton.monitor import watch

    made = warm_up(
        num_heads, num_kv_heads, head_dim, dtype, dtype, block_size, device,
        max_num_seqs=257, max_num_batched_tokens=2048, max_model_len=40_000, qk_norm=True,
        hidden_size=num_heads * head_dim, intermediate_size=256, vocab_size=1000,
    )  # fmt: skip
    with watch() as late, torch.inference_mode():
        sweep = _Sweep(num_heads, num_kv_heads, head_dim, dtype, block_size, device)
        for lens_q, lens_k, bound_k, offset in sweep.batches(steps):
            sweep.step(lens_q, lens_k, bound_k, offset)
        torch.accelerator.synchronize(device)
    return made, late


class _Sweep:
    """Random steps of one model's kernels."""

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        block_size: int,
        device: torch.device,
    ) -> None:
        self.heads = [num_heads, num_kv_heads, num_kv_heads]
        self.head_dim, self.dtype, self.block_size, self.device = head_dim, dtype, block_size, device
        shape = (2, 64, block_size, num_kv_heads, head_dim)
        self.k_cache, self.v_cache = torch.zeros(shape, dtype=dtype, device=device)
        self.cos_sin = torch.zeros(40_000, head_dim, device=device)
        self.head_weight = torch.ones(head_dim, dtype=dtype, device=device)

    def batches(self, steps: int) -> Iterator[tuple[list[int], list[int], int, int]]:
        """Query lengths, key lengths, the bound of the latter, and where slices begin."""
        draw = random.Random(0)
        most_keys = 64 * self.block_size
        for step in range(steps):
            batch = draw.choice((1, 2, 3, 7, 8, 16, 17, 64, 100, 129, 256, 257))
            lens_q = [1] * batch
            if step % 3 == 1:
                lens_q[0] = draw.choice((2, 8, 9, 16, 31, 64, 100, 127, 500, 1024))
            if step % 3 == 2 and batch <= 17:
                lens_q = [draw.randint(1, 100) for _ in lens_q]
            lens_k = [min(most_keys, length + draw.choice((0, 1, 15, 16, 100))) for length in lens_q]
            lens_k = [max(pair) for pair in zip(lens_k, lens_q, strict=True)]
            bound_k = max(*lens_k, draw.choice((1, 2, 16, 17, 255, 4096, 10_001, 40_000)), 1)
            yield lens_q, lens_k, bound_k, draw.choice((0, 1, 2, 3, 16))

    def step(self, lens_q: list[int], lens_k: list[int], bound_k: int, offset: int) -> None:
        """What a layer and the sampler launch for one batch; tensors are slices that begin at `offset`."""
        from octavo.kernels import (
            flash_attn_varlen_func,
            rms_norm,
            rotate_and_write_kv_cache,
            sample,
            silu_and_mul,
        )

        tokens, batch, device = sum(lens_q), len(lens_q), self.device
        hidden = self.heads[0] * self.head_dim
        x = torch.zeros((tokens + offset, hidden), dtype=self.dtype, device=device)[offset:]
        x, residual = rms_norm(x, torch.ones(hidden, dtype=self.dtype, device=device), 1e-6, residual=x)
        qkv = torch.zeros((tokens + offset, sum(self.heads), self.head_dim), dtype=self.dtype, device=device)
        q, k, v = qkv[offset:].split_with_sizes(self.heads, dim=1)
        positions = self._zeros(tokens, offset)
        q = rotate_and_write_kv_cache(
            q, k, v, self.cos_sin, positions, self.k_cache, self.v_cache, positions - 1,
            q_weight=self.head_weight, k_weight=self.head_weight, eps=1e-6,
        )  # fmt: skip
        width = -(-bound_k // self.block_size)
        table = torch.zeros((batch, width + offset), dtype=torch.int32, device=device)[:, offset:]
        flash_attn_varlen_func(
            q, self.k_cache, self.v_cache, self._sums(lens_q, offset), self._sums(lens_k, offset),
            max(lens_q), bound_k, causal=True, block_table=table,
        )  # fmt: skip
        silu_and_mul(torch.zeros((tokens, 512), dtype=self.dtype, device=device))
        logits = torch.zeros((batch, 1000), device=device)
        ones = torch.ones(batch + offset, device=device)[offset:]
        places = self._zeros(batch, offset)
        sample(
            logits,
            temperature=ones,
            top_k=places.int() + 5,
            top_p=ones,
            min_p=ones * 0,
            seeds=places,
            positions=places,
        )
        sample(logits, temperature=ones, seeds=places, positions=places)
        del residual

    def _zeros(self, count: int, offset: int) -> Tensor:
        return torch.zeros(count + offset, dtype=torch.int64, device=self.device)[offset:]

    def _sums(self, lens: list[int], offset: int) -> Tensor:
        sums = [0] * (offset + 1)
        for length in lens:
            sums.append(sums[-1] + length)
        return torch.tensor(sums, dtype=torch.int32, device=self.device)[offset:]
