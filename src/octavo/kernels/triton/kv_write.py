"""Writing keys and values into the paged cache: one launch, 16 bytes at a time."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.known_calls import prepared_by
from octavo.kernels.triton import launch, quantization, tiles, tuning
from octavo.kernels.triton.tuning import Parameters

_TOKEN_SCALES: tl.constexpr = tl.constexpr(tiles.TOKEN_SCALES)

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_QUANTISED = (torch.float8_e4m3fn, torch.int8)
_CACHE_DTYPES = (*_DTYPES, *_QUANTISED)
_VARYING = [
    "num_rows", "num_slots", "block_size",
    "k_token", "k_head", "v_token", "v_head",
    "k_cache_block", "k_cache_slot", "k_cache_head", "v_cache_block", "v_cache_slot", "v_cache_head",
    "k_scale_block", "k_scale_slot", "k_scale_head", "v_scale_block", "v_scale_slot", "v_scale_head",
]  # fmt: skip


@triton.jit
def place_of(slots, num_slots, block_size, BLOCK_SIZE: tl.constexpr):
    """(block, offset, whether there is anything to write) of slots (int64)."""
    inside = (slots >= 0) & (slots < num_slots)
    slots = tl.where(inside, slots, 0)
    if BLOCK_SIZE != 0:
        block_size = BLOCK_SIZE
    return slots // block_size, slots % block_size, inside


@launch.direct
@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=["slot_mapping"])
def _write(
    k, v, k_cache, v_cache, k_scale, v_scale, slot_mapping, num_rows, num_slots, block_size,
    k_token, k_head, v_token, v_head,
    k_cache_block, k_cache_slot, k_cache_head, v_cache_block, v_cache_slot, v_cache_head,
    k_scale_block, k_scale_slot, k_scale_head, v_scale_block, v_scale_slot, v_scale_head,
    k_scale_value, v_scale_value,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ALIGN: tl.constexpr, CACHE_ALIGN: tl.constexpr,
    FORM: tl.constexpr, K_SCALE: tl.constexpr, V_SCALE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch.begin(PDL)
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token, head = rows // NUM_HEADS, rows % NUM_HEADS
    live = rows < num_rows
    slots = tl.load(slot_mapping + token, mask=live, other=-1)

    dims = tl.arange(0, BLOCK_D)[None, :]
    mask = live[:, None] & (dims < HEAD_DIM)
    k_at = launch.part(token, k_token, ALIGN) + launch.part(head, k_head, ALIGN)
    v_at = launch.part(token, v_token, ALIGN) + launch.part(head, v_head, ALIGN)
    k_new = tl.load(k + (k_at[:, None] + dims), mask=mask, other=0.0)
    v_new = tl.load(v + (v_at[:, None] + dims), mask=mask, other=0.0)

    block, offset, inside = place_of(slots, num_slots, block_size, BLOCK_SIZE)
    mask = inside[:, None] & (dims < HEAD_DIM)
    k_to = launch.part(block, k_cache_block, CACHE_ALIGN) + launch.part(offset, k_cache_slot, CACHE_ALIGN)
    v_to = launch.part(block, v_cache_block, CACHE_ALIGN) + launch.part(offset, v_cache_slot, CACHE_ALIGN)
    k_to = (k_to + launch.part(head, k_cache_head, CACHE_ALIGN))[:, None] + dims
    v_to = (v_to + launch.part(head, v_cache_head, CACHE_ALIGN))[:, None] + dims
    k_highest, v_highest = 0.0, 0.0
    if K_SCALE == _TOKEN_SCALES:
        k_highest = tl.max(quantization.magnitude(k_new.to(tl.float32)), 1)
    if V_SCALE == _TOKEN_SCALES:
        v_highest = tl.max(quantization.magnitude(v_new.to(tl.float32)), 1)
    k_scale_at = block * k_scale_block + offset * k_scale_slot + head * k_scale_head
    v_scale_at = block * v_scale_block + offset * v_scale_slot + head * v_scale_head
    k_factor = quantization.factor(k_highest, k_scale, k_scale_at, inside, k_scale_value, FORM, K_SCALE, 1)
    v_factor = quantization.factor(v_highest, v_scale, v_scale_at, inside, v_scale_value, FORM, V_SCALE, 1)
    quantization.store(k_cache, k_to, k_new, mask, k_factor, FORM)
    quantization.store(v_cache, v_to, v_new, mask, v_factor, FORM)


def supports(k_dtype: torch.dtype, cache_dtype: torch.dtype) -> str | None:
    """None when the kernel can do it, else why not."""
    for dtype, known in ((k_dtype, _DTYPES), (cache_dtype, _CACHE_DTYPES)):
        if dtype not in known:
            return f"no Triton kernel for {dtype}"
    return None


def prepare(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    parameters: Parameters | None = None,
) -> Callable[..., None]:
    """`write_kv_cache` for calls of this signature."""
    num_tokens, num_heads, head_dim = k.shape
    num_rows = num_tokens * num_heads
    if num_rows == 0 or head_dim == 0 or k_cache.numel() == 0:
        return lambda *_, **__: None
    parameters = parameters or tuning.parameters("write_kv_cache", k.device, *launch_class(k, k_cache))
    launched = launch.Prepared(
        _write, (-(-num_rows // parameters["BLOCK_ROWS"]),),
        {
            "k": k, "v": v, "slot_mapping": slot_mapping,
            **cache_arguments(k_cache, v_cache, k_scale, v_scale), "num_rows": num_rows,
            "k_token": k.stride(0), "k_head": k.stride(1), "v_token": v.stride(0), "v_head": v.stride(1),
            "NUM_HEADS": num_heads, "HEAD_DIM": head_dim, "BLOCK_D": launch.block_for(head_dim),
            "ALIGN": launch.alignment(k, v), **launch.options(parameters, k.device),
        },
    )  # fmt: skip

    def call(
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        *,
        k_scale: Tensor | float | None = None,
        v_scale: Tensor | float | None = None,
    ) -> None:
        launched(k, v, slot_mapping, *cache_tensors(k_cache, v_cache, k_scale, v_scale))

    return call


@prepared_by(prepare)
def write_kv_cache(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    parameters: Parameters | None = None,
) -> None:
    """Slot s of the caches becomes token t of `k` and `v` where `slot_mapping[t] = s >= 0`.

    `parameters` take the place of those of this GPU's table.
    """
    tensors = (k, v, k_cache, v_cache, slot_mapping)
    call = prepare(*tensors, k_scale=k_scale, v_scale=v_scale, parameters=parameters)
    call(*tensors, k_scale=k_scale, v_scale=v_scale)


def launch_class(k: Tensor, k_cache: Tensor) -> tuple[str, Parameters]:
    """The class of a call in the table of tuned launch parameters, and those that are right on any GPU."""
    head_dim, item = k.shape[2], k_cache.element_size()
    # 16 bytes a thread, of what is stored; few programs, as each takes its time to start.
    rows = max(1, (2048 if item == 1 else 1024) // launch.block_for(head_dim))
    key = f"D{head_dim} {k.element_size()} to {item} bytes"
    return key, {"BLOCK_ROWS": rows, "num_warps": 4, "PDL": 1}


def cache_arguments(
    k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | float | None, v_scale: Tensor | float | None
) -> dict[str, Any]:
    """What a kernel that writes into the caches is told of them."""
    num_blocks, block_size = k_cache.shape[:2]
    form = quantization.form_of(k_cache.dtype, k_cache.device)
    k_kind, k_scales, k_value, k_strides = quantization.scale_arguments(k_scale, form)
    v_kind, v_scales, v_value, v_strides = quantization.scale_arguments(v_scale, form)
    is_power = block_size & (block_size - 1) == 0
    arguments: dict[str, Any] = {
        "k_cache": quantization.as_stored(k_cache), "v_cache": quantization.as_stored(v_cache),
        "k_scale": k_scales, "v_scale": v_scales, "num_slots": num_blocks * block_size,
        "block_size": block_size, "k_scale_value": k_value, "v_scale_value": v_value,
        "BLOCK_SIZE": block_size if is_power else 0, "CACHE_ALIGN": launch.alignment(k_cache, v_cache),
        "FORM": form, "K_SCALE": k_kind, "V_SCALE": v_kind,
    }  # fmt: skip
    strides = {
        "k_cache": k_cache.stride(),
        "v_cache": v_cache.stride(),
        "k_scale": k_strides,
        "v_scale": v_strides,
    }
    for name, of in strides.items():
        arguments |= {f"{name}_block": of[0], f"{name}_slot": of[1], f"{name}_head": of[2]}
    return arguments


def cache_tensors(
    k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | float | None, v_scale: Tensor | float | None
) -> list[Tensor]:
    """The tensors among `cache_arguments`, in that order."""
    if k_cache.dtype not in _QUANTISED:
        return [k_cache, v_cache]
    caches = [quantization.as_stored(k_cache), quantization.as_stored(v_cache)]
    return caches + [scale for scale in (k_scale, v_scale) if isinstance(scale, Tensor)]
