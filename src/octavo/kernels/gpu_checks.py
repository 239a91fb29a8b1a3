"""Whether this GPU keeps two promises that no single result shows: graphs replay, and nothing compiles late.

`octavo doctor` asks on the user's card, `tests/gpu` on ours.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from octavo.kernels import backend

if TYPE_CHECKING:
    from octavo.kernels.triton.monitor import Made
    from octavo.kernels.triton.warm_up import ModelShape

_HEADS, _KV_HEADS, _HEAD_DIM, _BLOCK_SIZE = 4, 2, 64, 16
_SMALL_MODEL: dict[str, Any] = {
    "num_heads": _HEADS, "num_kv_heads": _KV_HEADS, "head_dim": _HEAD_DIM, "dtype": torch.bfloat16,
    "cache_dtype": torch.bfloat16, "block_size": _BLOCK_SIZE, "max_num_seqs": 257,
    "max_num_batched_tokens": 2048, "max_model_len": 40_000, "qk_norm": True, "hidden_size": 256,
    "intermediate_size": 256, "vocab_size": 1000,
}  # fmt: skip
_CACHE_BLOCKS = 64  # of the sweep; tables name only the first


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


def late_compiles(device: torch.device, *, steps: int = 150, **shape: Any) -> tuple[list[Made], list[Made]]:
    """What `warm_up` compiled or loaded, and what a sweep like serving compiled after it: nothing, if well.

    The sweep: batches of 1 to 257, chunks and decodes mixed, lengths to 40,000, odd and even numbers of
    tokens, tensors and slices of tensors that begin anywhere. `shape`: arguments of `warm_up`; what is not
    said is that of a small model in bfloat16.
    """
    from octavo.kernels import warm_up
    from octavo.kernels.triton.monitor import watch

    shape = {**_SMALL_MODEL, **shape}
    made = warm_up(**shape, device=device)
    with watch() as late, torch.inference_mode():
        sweep = Sweep(model_shape(device, **shape))
        for batch in sweep.batches(steps):
            sweep.step(*batch)
        torch.accelerator.synchronize(device)
    return made, late


def model_shape(device: torch.device, **shape: Any) -> ModelShape:
    """A model of these dimensions, of the small one's where nothing is said."""
    from octavo.kernels.triton.warm_up import ModelShape

    shape = {**_SMALL_MODEL, **shape}
    rest = {
        "rotary_dim": shape["head_dim"], "interleaved": False, "window_sizes": ((-1, -1),), "softcap": 0.0,
        "sinks": False, "alibi": False, "scales": "none", "batch_invariant": False,
        "logits_dtype": torch.float32,
    }  # fmt: skip
    return ModelShape(**{**rest, **shape}, device=device)


class Sweep:
    """Random steps of one model's kernels."""

    def __init__(self, model: ModelShape) -> None:
        self.model = model
        self.block_size, self.device = model.block_size, model.device
        self.k_cache, self.v_cache = model.caches(_CACHE_BLOCKS)
        self.scales = model.cache_scales(_CACHE_BLOCKS)
        self.cos_sin = torch.zeros(model.max_model_len, model.rotary_dim, device=model.device)
        weight = torch.ones(model.head_dim, dtype=model.dtype, device=model.device)
        self.norms: dict[str, Any] = (
            {"q_weight": weight, "k_weight": weight, "eps": 1e-6} if model.qk_norm else {}
        )

    def batches(self, steps: int) -> Iterator[tuple[list[int], list[int], int, int]]:
        """Query lengths, key lengths, the bound of the latter, and where slices begin."""
        draw = random.Random(0)
        most_keys = _CACHE_BLOCKS * self.block_size
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

        model, tokens, batch = self.model, sum(lens_q), len(lens_q)
        assert model.hidden_size is not None
        assert model.intermediate_size is not None
        assert model.vocab_size is not None
        x = self._activations(tokens + offset, model.hidden_size)[offset:]
        weight = self._activations(model.hidden_size)
        x, _ = rms_norm(x, weight, 1e-6, residual=x)
        q, k, v = (part[offset:] for part in model.qkv(tokens + offset))
        positions = self._zeros(tokens, offset)
        q = rotate_and_write_kv_cache(
            q, k, v, self.cos_sin, positions, self.k_cache, self.v_cache, positions - 1,
            interleaved=model.interleaved, **self.norms, **self.scales,
        )  # fmt: skip
        width = -(-bound_k // self.block_size)
        table = torch.zeros((batch, width + offset), dtype=torch.int32, device=self.device)[:, offset:]
        sums = self._sums(lens_q, offset), self._sums(lens_k, offset)
        for window in model.window_sizes:
            options = model.attention_options(window, _CACHE_BLOCKS)
            flash_attn_varlen_func(
                q, self.k_cache, self.v_cache, *sums, max(lens_q), bound_k, block_table=table, **options
            )
        silu_and_mul(self._activations(tokens, 2 * model.intermediate_size))
        logits = torch.zeros((batch, model.vocab_size), dtype=model.logits_dtype, device=self.device)
        ones = torch.ones(batch + offset, device=self.device)[offset:]
        places = self._zeros(batch, offset)
        filters: dict[str, Any] = {"top_k": places.int() + 5, "top_p": ones, "min_p": ones * 0}
        sample(logits, temperature=ones, seeds=places, positions=places, **filters)
        sample(logits, temperature=ones, seeds=places, positions=places)

    def _activations(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.model.dtype, device=self.device)

    def _zeros(self, count: int, offset: int) -> Tensor:
        return torch.zeros(count + offset, dtype=torch.int64, device=self.device)[offset:]

    def _sums(self, lens: list[int], offset: int) -> Tensor:
        sums = [0] * (offset + 1)
        for length in lens:
            sums.append(sums[-1] + length)
        return torch.tensor(sums, dtype=torch.int32, device=self.device)[offset:]
