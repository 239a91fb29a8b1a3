"""What `octavo bench tune` tries for the plain prefill kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from octavo.kernels.triton import prefill
from octavo.kernels.triton.attention_arguments import arguments, shape_key
from octavo.kernels.triton.tuning import Case, Parameters, Tuning

# q heads, kv heads, head_dim, cache dtype, block size
_MODELS = (
    (16, 8, 128, torch.bfloat16, 16),
    (32, 8, 128, torch.bfloat16, 16),
    (32, 8, 128, torch.bfloat16, 64),
    (64, 8, 128, torch.bfloat16, 16),
    (32, 8, 128, torch.float8_e4m3fn, 16),
    (9, 3, 64, torch.bfloat16, 16),
    (12, 12, 64, torch.bfloat16, 16),
)
_LENS = ((8192,), (1024,) * 16)
_SETS = 2  # of inputs; one alone is larger than any cache
_SHAPES = (  # BLOCK_M, BLOCK_N, warps, most registers
    (64, 32, 4, 0), (64, 64, 4, 0), (64, 64, 4, 168), (64, 128, 4, 0), (128, 32, 8, 128), (128, 64, 8, 0),
    (128, 64, 8, 128), (128, 128, 8, 0),
)  # fmt: skip


def _space() -> list[dict[str, int]]:
    return [
        {"BLOCK_M": m, "BLOCK_N": n, "num_warps": warps, "num_stages": stages, "maxnreg": registers}
        for m, n, warps, registers in _SHAPES
        for stages in (2, 3, 5)
    ]


def _case(model: tuple[int, int, int, torch.dtype, int], lens: tuple[int, ...]) -> Case:
    heads, kv_heads, head_dim, cache_dtype, block_size = model
    q = torch.empty(0, heads, head_dim, dtype=torch.bfloat16)
    k = torch.empty(0, block_size, kv_heads, head_dim, dtype=cache_dtype)
    hopper = torch.cuda.is_available() and prefill.is_hopper(torch.device("cuda"))
    default = prefill.default_parameters(q, k, block_size, False, hopper)
    return {"key": shape_key(q, k, block_size), "default": default, "model": model, "lens": lens}


def _run(case: Case, parameters: Parameters) -> Sequence[Callable[[], object]]:
    return [_call(case, parameters) for _ in range(_SETS)]


def _call(case: Case, parameters: Parameters) -> Callable[[], object]:
    heads, kv_heads, head_dim, cache_dtype, block_size = case["model"]
    lens = torch.tensor([0, *case["lens"]], device="cuda")
    sums, total = lens.cumsum(0).to(torch.int32), sum(case["lens"])
    q = torch.randn(total, heads, head_dim, dtype=torch.bfloat16, device="cuda")
    shape = (total // block_size, block_size, kv_heads, head_dim)
    k, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda").to(cache_dtype) for _ in range(2))
    blocks = torch.randperm(shape[0], device="cuda", dtype=torch.int32).view(len(case["lens"]), -1)
    facts = arguments(
        q, k, v, sums, sums, softmax_scale=head_dim**-0.5, causal=True, window_size=(-1, -1), softcap=0.0,
        alibi_slopes=None, sinks=None, block_table=blocks, out=torch.empty_like(q), lse=None,
        k_scale=None, v_scale=None, leftpad=None,
    )  # fmt: skip
    return lambda: prefill.launch(facts, max(case["lens"]), parameters)


TUNING = Tuning(
    name="prefill_attention",
    space=_space(),
    cases=[_case(model, lens) for model in _MODELS for lens in _LENS],
    run=_run,
)
