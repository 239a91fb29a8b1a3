"""What both attention kernels are launched with: pointers, strides and the facts they are compiled for."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton import is_interpreted, tiles

# Sizes of a batch, not of a model: specialising on them would compile on live traffic.
UNSPECIALISED = (
    "batch", "num_rows", "num_tiles", "num_splits", "section", "left", "right",
    "table_stride", "slopes_stride", "lse_stride",
)  # fmt: skip
# Small index tensors, often slices of larger ones: their alignment gains nothing and would compile twice.
UNALIGNED = ("cu_seqlens_q", "cu_seqlens_k", "block_table", "leftpad", "alibi_slopes", "sinks", "lse")

# What the second launches of decode, which merge partials, need of the arguments.
MERGE_FACTS = (
    "out", "lse", "cu_seqlens_q", "cu_seqlens_k", "leftpad", "sinks", "v_scale", "out_stride_token",
    "out_stride_head", "lse_stride", "value_scale", "left", "batch", "NUM_KV_HEADS", "GROUP", "HEAD_DIM",
    "BLOCK_D", "V_SCALES",
)  # fmt: skip

FAR = 2**30  # further than any key; added to a position it stays inside int32
_TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_QUANTISED = (torch.float8_e4m3fn, torch.int8)


@functools.cache
def compute_dtype(q_dtype: torch.dtype, cache_dtype: torch.dtype) -> torch.dtype:
    """What the products are computed in: the tensors' own dtype, float32 where two are mixed.

    Quantised values are exact in float16, and cheaper to convert to it than to bfloat16.
    """
    if is_interpreted() and torch.bfloat16 in (q_dtype, cache_dtype):
        return torch.float32  # the interpreter multiplies the bits of a bfloat16 as if they were an integer
    if q_dtype == cache_dtype:
        return q_dtype
    if cache_dtype in _QUANTISED and q_dtype != torch.float32:
        return torch.float16
    return torch.float32


def shape_key(q: Tensor, k: Tensor, block_size: int) -> str:
    """The class of a call in a table of tuned launch parameters."""
    cache = f" {_short(k.dtype)}" if k.dtype != q.dtype else ""
    group = q.shape[1] // k.shape[-2]
    return f"G{group} D{q.shape[2]} {_short(q.dtype)}{cache} bs{block_size}"


def _short(dtype: torch.dtype) -> str:
    names = {
        torch.bfloat16: "bf16",
        torch.float16: "fp16",
        torch.float32: "fp32",
        torch.float8_e4m3fn: "fp8",
        torch.int8: "int8",
    }
    return names[dtype]


def block_size_of(k: Tensor, block_table: Tensor | None) -> int:
    """BLOCK_SIZE of the kernels: 0 when each sequence's keys lie in one run."""
    if block_table is None:
        return 0
    size = k.shape[1]
    # A contiguous cache comes in as one large block per sequence; as a run it costs no look-ups.
    if size & (size - 1) or (block_table.shape[1] == 1 and size > 256):
        return 0
    return size


def arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    block_table: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    k_scale: Tensor | float | None,
    v_scale: Tensor | float | None,
    leftpad: Tensor | None,
) -> dict[str, Any]:
    """The keyword arguments that the kernels have in common; what is absent or off is None there, too.

    Scales that are floats are folded into `scale` and `value_scale`.
    """
    left, right = window_size
    if causal:
        right = 0
    value_scale = 1.0
    if isinstance(k_scale, (int, float)):
        softmax_scale, k_scale = softmax_scale * k_scale, None
    if isinstance(v_scale, (int, float)):
        value_scale, v_scale = float(v_scale), None
    k_scales, k_scale_strides = _scales(k_scale)
    v_scales, v_scale_strides = _scales(v_scale)
    compute = compute_dtype(q.dtype, k.dtype)
    plain = softmax_scale > 0 and softcap == 0 and alibi_slopes is None
    return {
        "q": q, "k": k, "v": v, "out": out, "lse": lse,
        "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "block_table": block_table,
        "leftpad": leftpad, "alibi_slopes": alibi_slopes, "sinks": sinks,
        "k_scale": k_scale, "v_scale": v_scale,
        "q_stride_token": q.stride(0), "q_stride_head": q.stride(1),
        "k_stride_block": k.stride(0), "k_stride_slot": k.stride(-3), "k_stride_head": k.stride(-2),
        "v_stride_block": v.stride(0), "v_stride_slot": v.stride(-3), "v_stride_head": v.stride(-2),
        "out_stride_token": out.stride(0), "out_stride_head": out.stride(1),
        "lse_stride": 0 if lse is None else lse.stride(0),
        "table_stride": 0 if block_table is None else block_table.stride(0),
        "slopes_stride": 0 if alibi_slopes is None or alibi_slopes.dim() == 1 else alibi_slopes.stride(0),
        "k_scale_stride_block": k_scale_strides[0], "k_scale_stride_slot": k_scale_strides[1],
        "k_scale_stride_head": k_scale_strides[2], "v_scale_stride_block": v_scale_strides[0],
        "v_scale_stride_slot": v_scale_strides[1], "v_scale_stride_head": v_scale_strides[2],
        "scale": float(softmax_scale), "softcap": float(softcap) if softcap > 0 else None,
        "value_scale": value_scale, "left": min(left, FAR) if left >= 0 else None,
        "right": min(right, FAR) if right >= 0 else None, "batch": cu_seqlens_q.shape[0] - 1,
        "NUM_KV_HEADS": k.shape[-2], "GROUP": q.shape[1] // k.shape[-2],
        "HEAD_DIM": q.shape[2], "BLOCK_D": max(16, triton.next_power_of_2(q.shape[2])),
        "BLOCK_SIZE": block_size_of(k, block_table), "COMPUTE": _TRITON_DTYPES[compute],
        "PLAIN": plain and k_scales == tiles.NO_SCALE and v_scales != tiles.TOKEN_SCALES,
        "K_SCALES": k_scales, "V_SCALES": v_scales,
    }  # fmt: skip


def tensors_of(facts: dict[str, Any]) -> list[Tensor]:
    """The tensors among `arguments`, in that order."""
    return [x for x in facts.values() if isinstance(x, Tensor)]


def with_scales_applied(facts: dict[str, Any]) -> dict[str, Any]:
    """The same for `tiles.absorb_tiles`, which multiplies the scales of tokens into products and values.

    Values are then of the range that the query's dtype has, and scores are plain if nothing else is done.
    """
    if tiles.TOKEN_SCALES not in (facts["K_SCALES"], facts["V_SCALES"]):
        return facts
    dtype = facts["q"].dtype
    plain = facts["scale"] > 0 and facts["softcap"] is None and facts["alibi_slopes"] is None
    plain = plain and facts["K_SCALES"] != tiles.ONE_SCALE
    return facts | {"COMPUTE": _TRITON_DTYPES[compute_dtype(dtype, dtype)], "PLAIN": plain}


def invariant_tile(facts: dict[str, Any]) -> dict[str, int]:
    """Tiles of batch-invariant mode, the same for prefill and decode: the bits of a row depend on them."""
    wide = facts["HEAD_DIM"] > 128
    if facts["COMPUTE"] == tl.float32:
        block_m, block_n, num_warps = (16, 32, 8) if wide else (32, 32, 4)
    else:
        block_m, block_n, num_warps = (64, 32, 8) if wide else (64, 64, 4)
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": num_warps, "num_stages": 2}


def _scales(scale: Tensor | None) -> tuple[int, tuple[int, int, int]]:
    """How the scales come, and their strides over block, slot and head."""
    if scale is None:
        return tiles.NO_SCALE, (0, 0, 0)
    if scale.numel() == 1 and scale.dim() < 3:
        return tiles.ONE_SCALE, (0, 0, 0)
    return tiles.TOKEN_SCALES, (scale.stride(0), scale.stride(1), scale.stride(2))


@functools.cache
def num_processors(device: torch.device) -> int:
    """The multiprocessors of a GPU; a handful for the interpreter."""
    if device.type == "cpu":
        return 2
    found = torch.get_device_module(device).get_device_properties(device)
    return int(getattr(found, "multi_processor_count", 0) or getattr(found, "gpu_subslice_count", 64))
