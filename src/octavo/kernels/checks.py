"""One wording for every error a kernel's caller can make; all of them are found before anything is written.

A message names the function, the argument, what was expected, what came, and the way out. Shapes, dtypes,
devices and strides are checked for every call. *Values* of index tensors (prefix sums, block tables, slots,
positions) are checked where they can be read without waiting for a device, that is on the CPU; each distinct
content is checked once and then recognised by its bytes, because the layers of a model pass the same indices
one after another.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.errors import KernelArgumentError, UnsupportedKernelConfig, shown

MAX_HEAD_DIM = 256
FLOAT32_MAX = torch.finfo(torch.float32).max
_UNBOUNDED = 2**31 - 1
INT32 = (torch.int32,)
FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64})
QUANTISED_CACHES = frozenset({torch.float8_e4m3fn, torch.int8})
_QUANTISED = frozenset(
    {torch.int8, torch.uint8} | {dtype for name, dtype in vars(torch).items() if name.startswith("float8_")}
)


def wrong(function: str, argument: str, expected: str, got: object, way_out: str = "") -> KernelArgumentError:
    """The error for an argument that cannot be right; the caller raises it."""
    return KernelArgumentError(
        f"{function}: {argument} must be {expected}, got {got}.{' ' if way_out else ''}{way_out}"
    )


def unsupported(function: str, argument: str, value: object, way_out: str) -> UnsupportedKernelConfig:
    """The error for an argument that makes sense but that no kernel here does."""
    return UnsupportedKernelConfig(f"{function}: {argument} = {value} is not supported. {way_out}")


def tensor(function: str, name: str, x: Tensor, shape: str, device: torch.device | None = None) -> None:
    """A float tensor with as many dimensions as `shape` names, dense in its last one, on `device`."""
    if x.dim() != shape.count(",") + 1:
        raise wrong(function, name, f"of shape ({shape})", f"shape {tuple(x.shape)}")
    floats(function, name, x, device)


def floats(function: str, name: str, x: Tensor, device: torch.device | None = None) -> None:
    """A float tensor of one or more dimensions, dense in its last one, on `device`."""
    if x.dtype not in FLOATS:
        if x.dtype in _QUANTISED:
            way_out = "Only caches may be quantised; use float32, float16 or bfloat16."
            raise unsupported(function, f"{name}.dtype", x.dtype, way_out)
        raise wrong(function, f"{name}.dtype", "float32, float16, bfloat16 or float64", x.dtype)
    _usable(function, name, x, device)


def _usable(function: str, name: str, x: Tensor, device: torch.device | None) -> None:
    """Dense in the last dimension, on `device`, and without a gradient."""
    if not x.is_contiguous() and x.stride(-1) != 1 and x.shape[-1] > 1:
        way_out = f"Pass {name}.contiguous()."
        got = f"stride {x.stride(-1)}"
        raise wrong(function, f"the last dimension of {name}", "contiguous (stride 1)", got, way_out)
    if device is not None and x.device != device:
        raise wrong(function, f"{name}.device", f"{device} like the other arguments", x.device)
    if x.requires_grad and torch.is_grad_enabled():
        way_out = "No kernel has a backward pass: call it under torch.inference_mode(), or detach the tensor."
        raise unsupported(function, f"{name}.requires_grad", True, way_out)


def exactly(
    function: str,
    name: str,
    x: Tensor,
    shape: tuple[int, ...],
    device: torch.device,
    dtypes: Sequence[torch.dtype],
) -> None:
    """A tensor of exactly that shape and one of those dtypes, contiguous in its last dimension."""
    if x.shape != shape:
        raise wrong(function, name, f"of shape {shape}", f"shape {tuple(x.shape)}")
    if x.dtype not in dtypes:
        raise wrong(function, f"{name}.dtype", " or ".join(str(d) for d in dtypes), x.dtype)
    if x.device != device:
        raise wrong(function, f"{name}.device", f"{device} like the other arguments", x.device)
    if not x.is_contiguous() and x.stride(-1) != 1 and shape[-1] > 1:
        way_out = f"Pass {name}.contiguous()."
        raise wrong(
            function,
            f"the last dimension of {name}",
            "contiguous (stride 1)",
            f"stride {x.stride(-1)}",
            way_out,
        )


def same(function: str, name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    """Two tensors of one shape and dtype."""
    if x.shape != other.shape:
        expected = f"of the shape of {other_name} {tuple(other.shape)}"
        raise wrong(function, name, expected, f"shape {tuple(x.shape)}")
    if x.dtype != other.dtype:
        raise wrong(function, f"{name}.dtype", f"{other.dtype} like {other_name}", x.dtype)


def caches(
    function: str,
    k_name: str,
    k_cache: Tensor,
    v_name: str,
    v_cache: Tensor,
    device: torch.device,
    *,
    paged: bool = True,
) -> None:
    """A pair of caches (num_blocks, block_size, num_kv_heads, head_dim) of one dtype, maybe quantised."""
    for name, cache in ((k_name, k_cache), (v_name, v_cache)):
        if cache.dim() != 4:
            first = "num_blocks, block_size" if paged else "batch, capacity"
            expected = f"of shape ({first}, num_kv_heads, head_dim)"
            raise wrong(function, name, expected, f"shape {tuple(cache.shape)}")
        if cache.dtype in FLOATS or cache.dtype in QUANTISED_CACHES:
            _usable(function, name, cache, device)
        elif cache.dtype in _QUANTISED:
            way_out = "Quantised caches are torch.float8_e4m3fn or torch.int8."
            raise unsupported(function, f"{name}.dtype", cache.dtype, way_out)
        else:
            expected = "float32, float16, bfloat16, float64, or quantised: float8_e4m3fn or int8"
            raise wrong(function, f"{name}.dtype", expected, cache.dtype)
    same(function, v_name, v_cache, k_name, k_cache)
    if paged:
        size = k_cache.shape[1]
        if size < 1 or size & (size - 1):
            raise wrong(function, f"the block size (dimension 1 of {k_name})", "a power of two", size)


def scales(
    function: str, k_scale: Tensor | float | None, v_scale: Tensor | float | None, k_cache: Tensor
) -> None:
    """What a quantised cache's numbers are multiplied with, and nothing for another cache.

    None (1.0, for float8 only), a number, a float32 tensor of one element, or one scale per token and head:
    float32 of the shape of the cache without its last dimension, any strides.
    """
    if k_scale is None and v_scale is None and k_cache.dtype != torch.int8:
        return
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if k_cache.dtype not in QUANTISED_CACHES:
            if scale is not None:
                expected = f"None with caches of {k_cache.dtype}"
                way_out = "Scales belong to caches of torch.float8_e4m3fn or torch.int8."
                raise wrong(function, name, expected, shown(scale), way_out)
        elif isinstance(scale, Tensor):
            _scale_tensor(function, name, scale, k_cache)
        elif scale is None:
            if k_cache.dtype == torch.int8:
                way_out = "Pass a tensor of zeros of that shape: write_kv_cache fills in the scales."
                expected = f"a number or float32 of shape {tuple(k_cache.shape[:3])} with int8 caches"
                raise wrong(function, name, expected, None, way_out)
        elif not 0.0 < scale <= FLOAT32_MAX:
            raise wrong(function, name, "positive and finite", scale)


def _scale_tensor(function: str, name: str, scale: Tensor, cache: Tensor) -> None:
    shape = tuple(cache.shape[:3])
    if scale.shape != shape and (scale.numel() != 1 or scale.dim() > 1):
        expected = f"of one element, or of shape {shape} like the cache: one per token and head"
        raise wrong(function, name, expected, f"shape {tuple(scale.shape)}")
    if scale.dtype != torch.float32:
        raise wrong(function, f"{name}.dtype", "torch.float32", scale.dtype)
    if scale.device != cache.device:
        raise wrong(function, f"{name}.device", f"{cache.device} like the cache", scale.device)


def table(function: str, block_table: Tensor, batch: int, device: torch.device) -> None:
    """A block table (batch, max_blocks) int32; its rows may be strided."""
    if block_table.dim() != 2:
        expected = f"of shape ({batch}, max_blocks)"
        raise wrong(function, "block_table", expected, f"shape {tuple(block_table.shape)}")
    exactly(function, "block_table", block_table, (batch, block_table.shape[1]), device, INT32)


def heads(function: str, num_heads: int, num_kv_heads: int, head_dim: int, kv_head_dim: int) -> None:
    """Query heads are a multiple of KV heads, head dimensions agree and are at most MAX_HEAD_DIM."""
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        expected = f"a multiple of the {num_kv_heads} KV heads"
        raise wrong(function, "the number of query heads", expected, num_heads)
    if head_dim != kv_head_dim:
        raise wrong(function, "head_dim of q", f"{kv_head_dim} like that of k and v", head_dim)
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise unsupported(function, "head_dim", head_dim, f"Head dimensions from 1 to {MAX_HEAD_DIM} are.")


def attention_options(
    function: str,
    num_heads: int,
    batch: int,
    device: torch.device,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    return_softmax_lse: bool,
) -> tuple[int, int]:
    """The options that every attention function shares; returns the window, -1 for what bounds nothing."""
    flag(function, "causal", causal)
    flag(function, "return_softmax_lse", return_softmax_lse)
    if softmax_scale is not None and not -FLOAT32_MAX <= softmax_scale <= FLOAT32_MAX:
        raise wrong(function, "softmax_scale", "None or finite", softmax_scale)
    if len(window_size) != 2:
        raise wrong(function, "window_size", "a pair (left, right), -1 for no bound", window_size)
    left, right = operator.index(window_size[0]), operator.index(window_size[1])  # TypeErrors: see the door
    if not 0.0 <= softcap <= FLOAT32_MAX:
        raise wrong(function, "softcap", "0 (off) or positive", softcap)
    if alibi_slopes is not None:
        shape = (batch, num_heads) if alibi_slopes.dim() == 2 else (num_heads,)
        exactly(function, "alibi_slopes", alibi_slopes, shape, device, (torch.float32,))
    if sinks is not None:
        dtypes = (torch.float32, torch.bfloat16, torch.float16)
        exactly(function, "sinks", sinks, (num_heads,), device, dtypes)
    # No sequence is that long; smaller numbers cannot overflow when positions are added to them.
    return (left if 0 <= left < _UNBOUNDED else -1, right if 0 <= right < _UNBOUNDED else -1)


def flag(function: str, name: str, value: object) -> None:
    """True or False and nothing that merely counts as one of them."""
    if value is not True and value is not False:
        raise wrong(function, name, "True or False", shown(value))


def two_caches(
    function: str,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
) -> None:
    """Caches, and scales per token, that are to be written are not one and the same memory."""
    if k_cache is v_cache or _begin_alike(k_cache, v_cache):
        raise wrong(function, "v_cache", "another tensor than k_cache", "the same memory")
    if (
        isinstance(k_scale, Tensor)
        and isinstance(v_scale, Tensor)
        and k_scale.dim() == 3
        and _begin_alike(k_scale, v_scale)
    ):
        raise wrong(function, "v_scale", "another tensor than k_scale", "the same memory")


def _begin_alike(a: Tensor, b: Tensor) -> bool:
    """Two tensors with one first element and one shape. Empty ones have none, nor has the meta device."""
    return a.data_ptr() == b.data_ptr() != 0 and a.numel() > 0 and a.shape == b.shape


def output(function: str, out: Tensor, q: Tensor) -> None:
    """A caller's output buffer: shape, dtype and device of q, dense in its last dimension."""
    same(function, "out", out, "q", q)
    floats(function, "out", out, q.device)


def appended(
    function: str,
    k: Tensor | None,
    v: Tensor | None,
    k_cache: Tensor,
    batch: int,
    cache_seqlens: Tensor | int | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
) -> int:
    """Keys and values to append, and the angles to turn them by; returns how many there are per sequence."""
    for name, given, other, there in (("v", v, "k", k), ("rotary_sin", rotary_sin, "rotary_cos", rotary_cos)):
        if (given is None) != (there is None):
            raise wrong(function, name, f"given exactly when {other} is", "only one of the two")
    if k is None or v is None:
        if rotary_cos is not None:
            way_out = "Turn q yourself with apply_rotary, or append k and v here."
            raise wrong(function, "rotary_cos", "None without k and v", "a tensor", way_out)
        return 0
    if cache_seqlens is None:
        raise wrong(function, "cache_seqlens", "given with k: where the new keys go", None)
    _, _, num_kv_heads, head_dim = k_cache.shape
    tensor(function, "k", k, "B, Snew, num_kv_heads, head_dim", k_cache.device)
    tensor(function, "v", v, "B, Snew, num_kv_heads, head_dim", k_cache.device)
    same(function, "v", v, "k", k)
    if k.shape[0] != batch or k.shape[2:] != k_cache.shape[2:]:
        expected = f"of shape ({batch}, Snew, {num_kv_heads}, {head_dim}) like q and the cache"
        raise wrong(function, "k", expected, f"shape {tuple(k.shape)}")
    if rotary_cos is not None and rotary_sin is not None:
        tensor(function, "rotary_cos", rotary_cos, "max_position, rotary_dim / 2", k.device)
        tensor(function, "rotary_sin", rotary_sin, "max_position, rotary_dim / 2", k.device)
        same(function, "rotary_sin", rotary_sin, "rotary_cos", rotary_cos)
    return k.shape[1]


# ---- values of index tensors, read only on the CPU ----

# The last content found right, per check. The layers of a model pass the same indices one after another, and
# comparing is much cheaper than checking.
_accepted: dict[str, tuple[tuple[Tensor, ...], object]] = {}


def _is_accepted(check: str, contents: tuple[Tensor, ...], bounds: object) -> bool:
    known = _accepted.get(check)
    if known is None or known[1] != bounds or len(known[0]) != len(contents):
        return False
    return all(map(torch.equal, known[0], contents))


def _accept(check: str, contents: tuple[Tensor, ...], bounds: object) -> None:
    _accepted[check] = tuple(x.clone() for x in contents), bounds


def slots(function: str, slot_mapping: Tensor, num_slots: int) -> None:
    """Every slot (int64) is negative (skipped) or inside the cache."""
    if _is_accepted("slots", (slot_mapping,), num_slots):
        return
    if slot_mapping.numel() and (highest := int(slot_mapping.max())) >= num_slots:
        expected = f"below num_blocks * block_size = {num_slots}, or negative to skip a token"
        raise wrong(function, "every slot of slot_mapping", expected, highest)
    _accept("slots", (slot_mapping,), num_slots)


def positions(function: str, values: Tensor, num_positions: int) -> None:
    """Every position has a row in the table of cosines."""
    if _is_accepted("positions", (values,), num_positions):
        return
    if values.numel():
        lowest, highest = int(values.min()), int(values.max())
        if lowest < 0 or highest >= num_positions:
            expected = f"from 0 to {num_positions - 1}, the rows of the cos/sin table"
            raise wrong(function, "every position", expected, lowest if lowest < 0 else highest)
    _accept("positions", (values,), num_positions)


def ragged(
    function: str,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_rows: int,
    num_packed_keys: int | None,
    window_left: int,
    block_table: Tensor | None,
    num_blocks: int,
    size: int,
) -> None:
    """Prefix sums that rise from 0 to the number of tokens, true bounds, a block for every visible key."""
    sums = (cu_seqlens_q, cu_seqlens_k)
    contents = sums if block_table is None else (*sums, block_table)
    bounds = (max_seqlen_q, max_seqlen_k, num_rows, num_packed_keys, window_left, num_blocks, size)
    if _is_accepted("ragged", contents, bounds):
        return
    lens_q = _lengths(function, "q", cu_seqlens_q, max_seqlen_q, num_rows)
    lens_k = _lengths(function, "k", cu_seqlens_k, max_seqlen_k, num_packed_keys)
    if block_table is not None:
        first = np.maximum(lens_k - lens_q - window_left, 0) if window_left >= 0 else np.zeros_like(lens_k)
        _blocks(function, block_table.numpy(), first, np.where(lens_q > 0, lens_k, 0), num_blocks, size)
    _accept("ragged", contents, bounds)


def cache_rows(function: str, cache_batch_idx: Tensor, num_rows: int) -> None:
    """Every sequence names a row of the contiguous cache."""
    for b, row in enumerate(cache_batch_idx.tolist()):
        if not 0 <= row < num_rows:
            raise wrong(function, f"cache_batch_idx[{b}]", f"from 0 to {num_rows - 1}, a row of k_cache", row)


def cache_values(
    function: str,
    lens: Tensor,
    num_new: int,
    leftpad: Tensor | None,
    first_key: Tensor | None,
    table: Tensor,
    num_blocks: int,
    size: int,
) -> None:
    """Lengths inside the capacity, padding inside the length, a block for every visible and every new key."""
    before: np.ndarray[Any, Any] = lens.numpy().astype(np.int64)
    after = before + num_new
    capacity = table.shape[1] * size
    for b, length in enumerate(before):
        if not 0 <= length <= capacity - num_new:
            expected = f"from 0 to the capacity {capacity}" + (
                f" less the {num_new} new keys" if num_new else ""
            )
            raise wrong(
                function, f"cache_seqlens[{b}]", expected, length, "Use a larger cache or block table."
            )
    if leftpad is not None:
        for b, padding in enumerate(leftpad.tolist()):
            if not 0 <= padding <= after[b]:
                raise wrong(function, f"cache_leftpad[{b}]", f"from 0 to the {after[b]} keys", padding)
    first = np.zeros_like(after) if first_key is None else np.minimum(first_key.numpy(), before)
    _blocks(function, table.numpy(), first, after, num_blocks, size)


def _lengths(
    function: str, of: str, prefix_sums: Tensor, longest: int, total: int | None
) -> np.ndarray[Any, Any]:
    name = f"cu_seqlens_{of}"
    sums: np.ndarray[Any, Any] = prefix_sums.numpy().astype(np.int64)
    lens = np.diff(sums)
    if sums[0] != 0:
        raise wrong(function, f"{name}[0]", "0", sums[0])
    if (lens < 0).any():
        i = int(np.argmax(lens < 0))
        raise wrong(function, name, "non-decreasing prefix sums", f"{sums[i]} then {sums[i + 1]} at {i + 1}")
    if total is not None and sums[-1] != total:
        raise wrong(function, f"{name}[-1]", f"the number of packed tokens, {total}", sums[-1])
    if lens.size and lens.max() > longest:
        raise wrong(function, f"max_seqlen_{of}", f"at least the longest sequence, {lens.max()}", longest)
    return lens


def _blocks(
    function: str,
    table: np.ndarray[Any, Any],
    first_key: np.ndarray[Any, Any],
    lens_k: np.ndarray[Any, Any],
    num_blocks: int,
    size: int,
) -> None:
    """Entries of `table` that cover keys [first_key, lens_k) of each sequence name a block of the cache."""
    capacity = table.shape[1] * size
    if lens_k.size and lens_k.max() > capacity:
        b = int(lens_k.argmax())
        expected = f"wide enough for the {lens_k[b]} keys of sequence {b}"
        raise wrong(function, "block_table", expected, f"{table.shape[1]} blocks of {size} = {capacity} keys")
    column = np.arange(table.shape[1])
    used = (column >= (first_key // size)[:, None]) & (column * size < lens_k[:, None])
    bad = used & ((table < 0) | (table >= num_blocks))
    if bad.any():
        b, i = (int(n) for n in np.argwhere(bad)[0])
        expected = f"a block id from 0 to {num_blocks - 1} (sequence {b} has {lens_k[b]} keys)"
        raise wrong(function, f"block_table[{b}, {i}]", expected, table[b, i], "Allocate the block first.")
