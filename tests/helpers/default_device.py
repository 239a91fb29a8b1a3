"""What the kernels and an engine on the CPU give, from inputs that say where they are."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.kernels import (
    apply_rotary,
    embedding,
    flash_attn_with_kvcache,
    gelu_tanh,
    grouped_linear,
    linear,
    pack_experts,
    pack_weight,
    rms_norm,
    rotate_and_write_kv_cache,
    silu_and_mul,
    write_kv_cache,
)
from octavo.kernels.self_check import FORMS


def _random(*shape: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randn(*shape, generator=generator, device="cpu")


def _ints(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device="cpu")


def kernel_results() -> dict[str, Tensor]:
    """What every compiled kernel writes, by its name."""
    x, table, slots = _random(5, 64), _random(16, 16), _ints(3, 0, 9, -1, 6, dtype=torch.int64)
    heads = x.view(5, 4, 16)
    caches, rotated = (torch.zeros(2, 3, 4, 2, 16, device="cpu") for _ in range(2))
    write_kv_cache(heads[:, :2], heads[:, 2:], caches[0], caches[1], slots)
    q = rotate_and_write_kv_cache(heads, heads[:, :2], heads[:, 2:], table, slots.abs(), *rotated, slots)
    turned = heads.clone()
    apply_rotary(turned[:, :2], turned[:, 2:], table, slots.abs())
    results = {
        "write_kv_cache": caches,
        "rotate_and_write_kv_cache": torch.cat([q.flatten(), rotated.flatten()]),
        "apply_rotary": turned,
        "rms_norm": torch.cat(rms_norm(x, table.flatten()[:64], 1e-5, residual=x)),
        "silu_and_mul": silu_and_mul(x),
        "silu_and_mul, apart": silu_and_mul(x, x.flip(0)),
        "gelu_tanh": gelu_tanh(x),
    }
    for name, more in {
        "a length": {"cache_seqlens": 5},
        "a window": {"cache_seqlens": 5, "window_size": (2, 0), "causal": True},
        "padding": {"cache_seqlens": _ints(9, 7), "cache_leftpad": _ints(2, 0)},
    }.items():
        query, (k, v) = _random(2, 1, 4, 16), _random(2, 2, 12, 2, 16)
        results[f"attention, {name}"] = flash_attn_with_kvcache(query, k, v, **more)
        blocks = {"block_table": _ints(2, 0, 1, 1, 2, 0).view(2, 3)}
        query, (k, v) = _random(2, 1, 4, 16), _random(2, 3, 4, 2, 16)
        results[f"attention in blocks, {name}"] = flash_attn_with_kvcache(query, k, v, **blocks, **more)
    for form in FORMS["cpu"]:
        weight = pack_weight(_random(24, 64), form)
        experts = pack_experts(_random(3, 24, 64), 3, form)
        results[f"linear, {form}"] = linear(x, weight)
        results[f"embedding, {form}"] = embedding(_ints(3, 23, 0, dtype=torch.int64), weight)
        results[f"grouped_linear, {form}"] = grouped_linear(x, experts, _ints(0, 2, 2, 5))
    return results


def engine_results(folder: Path) -> list[list[int]]:
    """The tokens of two requests, one of which has all sorts of options."""
    options = SamplingParams(
        max_tokens=8, ignore_eos=True, temperature=1.0, seed=3, top_k=20, min_p=0.01, presence_penalty=0.5,
        logprobs=2, prompt_logprobs=1, logit_bias={3: 1.0}, n=2,
    )  # fmt: skip
    with LLM(folder, device="cpu", num_blocks=64, block_size=4) as llm:
        greedy = SamplingParams(max_tokens=8, ignore_eos=True)
        outputs = llm.generate([[1, 2, 3], [4, 5, 6, 7]], [greedy, options], use_tqdm=False)
    return [one.token_ids for output in outputs for one in output.outputs]
