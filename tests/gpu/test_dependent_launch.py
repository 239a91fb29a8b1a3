"""Kernels that start before the ones before them have ended must still see all that those wrote."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.kernels import (
    flash_attn_varlen_func,
    rms_norm,
    rotate_and_write_kv_cache,
    sample,
    silu_and_mul,
)

REPEATS = 200
STEPS = 6
BATCH, HEADS, KV_HEADS, HEAD_DIM = 40, 16, 4, 128
WIDTH = HEADS * HEAD_DIM // 2


class Chain:
    """Short kernels, each fed by the one right before it, and caches that all steps write and read."""

    def __init__(self) -> None:
        self.x = torch.zeros(BATCH, WIDTH, device="cuda", dtype=torch.bfloat16)
        self.caches = [
            torch.zeros(BATCH, 16, KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2)
        ]
        self.weight = torch.rand(WIDTH, device="cuda").bfloat16() + 0.5
        angles = torch.rand(16, HEAD_DIM // 2, device="cuda") * 6
        self.angles = torch.cat([angles.cos(), angles.sin()], dim=1)
        self.blocks = torch.randperm(BATCH, device="cuda", dtype=torch.int32)[:, None]
        steps = torch.arange(STEPS, device="cuda")[:, None]
        self.positions = steps.expand(STEPS, BATCH).contiguous()
        self.slots = self.blocks[:, 0].long() * 16 + self.positions
        self.rows = torch.arange(BATCH + 1, device="cuda", dtype=torch.int32)
        self.lengths = (self.rows * (steps + 1)).int()
        self.temperature, self.top_p = torch.full((2, BATCH), 0.9, device="cuda")
        self.seeds = torch.arange(BATCH, device="cuda")

    def __call__(self, between: Callable[[], object]) -> tuple[Tensor, Tensor]:
        """The last hidden state and what is sampled from it; `between` is called after every kernel."""
        hidden, residual = self.x, self.x
        for step in range(STEPS):
            normed, residual = rms_norm(hidden, self.weight, 1e-6, residual=residual)
            between()
            q = normed.as_strided((BATCH, HEADS, HEAD_DIM), (WIDTH, 56, 1))  # the heads overlap
            k, v = normed.view(BATCH, 2, KV_HEADS, HEAD_DIM).unbind(1)
            q = rotate_and_write_kv_cache(
                q, k, v, self.angles, self.positions[step], *self.caches, self.slots[step],
                q_weight=self.weight[:HEAD_DIM], k_weight=self.weight[HEAD_DIM : 2 * HEAD_DIM], eps=1e-6,
            )  # fmt: skip
            between()
            attended = flash_attn_varlen_func(
                q, *self.caches, self.rows, self.lengths[step], 1, step + 1, causal=True,
                block_table=self.blocks,
            )  # fmt: skip
            between()
            hidden = silu_and_mul(attended.view(BATCH, 2 * WIDTH))
            between()
        ids = sample(
            hidden, temperature=self.temperature, top_p=self.top_p, seeds=self.seeds, positions=self.seeds
        )
        between()
        return residual, ids


def test_a_chain_in_a_graph_is_what_it_is_one_kernel_at_a_time() -> None:
    chain = Chain()
    chain(torch.cuda.synchronize)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        residual, ids = chain(lambda: None)
    for repeat in range(REPEATS):
        chain.x.copy_(torch.randn(chain.x.shape, generator=torch.Generator().manual_seed(repeat)))
        for cache in chain.caches:
            cache.fill_(float("nan"))
        graph.replay()
        got = residual.clone(), ids.clone()
        for cache in chain.caches:
            cache.fill_(float("nan"))
        right = chain(torch.cuda.synchronize)
        assert torch.equal(got[0], right[0]), repeat
        assert torch.equal(got[1], right[1]), repeat
        assert torch.isfinite(got[0]).all()
