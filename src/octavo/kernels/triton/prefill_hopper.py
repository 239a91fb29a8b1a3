"""Prefill on Hopper (sm_90): what `hopper_pipeline.py` can do, and its launch.

Where `supports_hopper` gives a reason, `prefill.py` computes the same, on this GPU or any other.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from octavo.kernels.triton import hopper_pipeline as pipeline
from octavo.kernels.triton import is_interpreted, prefill
from octavo.kernels.triton.attention_arguments import FAR, arguments, block_size_of, num_processors

_OLDEST, _NEWEST = (3, 6), (3, 9)  # of Triton, that the tests compile it with: Gluon's names still move
# By head_dim: keys in a tile, and tiles of K and of V in shared memory.
_TILES = {64: (128, 4), 128: (128, 2), 256: (64, 2)}
_FEW_ROWS = 96  # of a tile's 128, which are of one head: fewer, and most of the products are for nothing
_LEAST_KEYS = 512  # in a split: fewer are done before the partials are merged
_MOST_TURNS = 4  # of the processors, for tiles that are divided: what they leave to merge is written and read
_LEAST_BOX = 8  # rows of a TMA box: the swizzled layout repeats after so many


def supports_hopper(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_table: Tensor | None,
    out: Tensor,
    *,
    max_seqlen_q: int = FAR,
    softmax_scale: float,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    leftpad: Tensor | None = None,
    batch_invariant: bool = False,
) -> str | None:
    """None when `prefill_attention` can do it, else why not. Arguments as of `varlen_attention`."""
    reason = _unfit_reason(q.device)
    if reason is not None:
        return reason
    if q.dtype not in (torch.bfloat16, torch.float16) or k.dtype != q.dtype:
        return f"queries of {q.dtype} over keys of {k.dtype}"
    if q.shape[2] not in _TILES:
        return f"head_dim {q.shape[2]}"
    absent = {
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "leftpad": leftpad,
    }
    for name, value in absent.items():
        if value is not None:
            return name
    if batch_invariant:
        return "batch_invariant"
    if softmax_scale <= 0:
        return "a softmax_scale that is not positive"
    if max_seqlen_q <= _FEW_ROWS and q.shape[1] > k.shape[-2]:
        return (
            f"sequences of at most {max_seqlen_q} rows"  # the other kernel has the rows of a group in a tile
        )
    if 0 < block_size_of(k, block_table) < _LEAST_BOX:
        return f"blocks of {k.shape[1]} slots"
    if out.data_ptr() % 16 or out.stride(0) % 8 or out.stride(1) % 8:
        return "output rows that are not aligned to 16 bytes"
    return next((reason for x in (q, k, v) if (reason := _layout_reason(x)) is not None), None)


@functools.cache
def _unfit_reason(device: torch.device) -> str | None:
    major, minor = triton.__version__.split(".")[:2]
    if not _OLDEST <= (int(major), int(minor)) <= _NEWEST:
        return f"not proven on Triton {triton.__version__}"
    if is_interpreted():
        return "Gluon is not interpreted"
    if device.type not in ("cuda", "cpu") or torch.version.hip is not None:
        return "not an NVIDIA GPU"
    if torch.cuda.get_device_capability(device.index) != (9, 0):
        return "not a Hopper GPU"
    return None


def _layout_reason(x: Tensor) -> str | None:
    """Why TMA cannot see the tensor as a matrix of one row per token; None when it can."""
    if x.shape[0] == 0:
        return "no keys"
    if x.data_ptr() % 16 or x.stride(-3) % 8 or x.stride(-2) % 8 or x.stride(-3) <= 0:
        return "rows that are not aligned to 16 bytes"
    if x.dim() == 4 and x.stride(0) % x.stride(1):
        return "blocks that are not a whole number of rows apart"
    if x.shape[0] * _rows_per_block(x) > FAR:
        return "a cache of more rows than TMA counts"
    return None


def _rows_per_block(x: Tensor) -> int:
    return x.stride(0) // x.stride(1) if x.dim() == 4 else 1


def _as_matrix(x: Tensor, box_rows: int) -> TensorDescriptor:
    """Packed (rows, heads, d) or a cache (blocks, slots, heads, d): a matrix of one row per token."""
    num_rows = (x.shape[0] - 1) * _rows_per_block(x) + (x.shape[1] if x.dim() == 4 else 1)
    num_columns = (x.shape[-2] - 1) * x.stride(-2) + x.shape[-1]
    box = [box_rows, x.shape[-1]]
    return TensorDescriptor(x, [num_rows, num_columns], [x.stride(-3), 1], box, pipeline.TILE_LAYOUT.value)


def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
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
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    leftpad: Tensor | None = None,
    batch_invariant: bool = False,
) -> None:
    """Fill the rows of `out` (Tq, H, D) and `lse` (H, Tq) of sequences with more than SHORT query rows.

    For calls to which `supports_hopper` has no objection.
    """
    num_rows, num_heads, head_dim = q.shape
    batch = cu_seqlens_q.shape[0] - 1
    left, right = window_size[0], 0 if causal else window_size[1]
    block_n, slots = _TILES[head_dim]
    block_size = block_size_of(k, block_table)
    keys = pipeline.RUNS
    if block_table is None:
        block_table, keys = cu_seqlens_k, pipeline.PACKED  # any pointer: it is not looked at
    elif block_size:
        keys = pipeline.PAGED
    box_rows = min(block_size or block_n, block_n)
    scale, cap = softmax_scale * math.log2(math.e), 0.0
    if softcap > 0:
        scale, cap = 2 * scale / softcap, softcap * math.log2(math.e)
    most_tiles = num_rows // pipeline.BLOCK_M.value + batch
    window = (left if left >= 0 else None, right if right >= 0 else None)
    splits = splits_for(q, batch, max_seqlen_q, max_seqlen_k, window)
    partial_acc, partial_sums = prefill.partials(q, splits) if splits > 1 else _no_partials(q.device)
    pipeline.attend[(min(most_tiles * num_heads * splits, num_processors(q.device)),)](
        _as_matrix(q, 64), _as_matrix(k, box_rows), _as_matrix(v, box_rows), out, lse,
        partial_acc, partial_sums, cu_seqlens_q, cu_seqlens_k, block_table,
        torch.zeros(1, dtype=torch.int32, device=q.device),
        batch, num_rows, splits, min(left, FAR), min(right, FAR), scale, cap,
        block_table.stride(0), 0 if lse is None else lse.stride(0), out.stride(0), out.stride(1),
        NUM_HEADS=num_heads, GROUP=num_heads // k.shape[-2], HEAD_DIM=head_dim,
        HEAD_COLUMNS=(q.stride(1), k.stride(-2), v.stride(-2)),
        BLOCK_ROWS=(_rows_per_block(k), _rows_per_block(v)), BLOCK_SIZE=block_size, KEYS=keys.value,
        HAS_LEFT=left >= 0, HAS_RIGHT=right >= 0, HAS_CAP=softcap > 0,
        BLOCK_N=block_n, SLOTS=slots, num_warps=4,
    )  # fmt: skip
    if splits > 1:
        facts = arguments(
            q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=softmax_scale, causal=causal,
            window_size=window_size, softcap=softcap, alibi_slopes=None, sinks=None, block_table=None,
            out=out, lse=lse, k_scale=None, v_scale=None, leftpad=None,
        )  # fmt: skip
        prefill.combine(facts, partial_acc, partial_sums)


def splits_for(
    q: Tensor,
    batch: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    window: tuple[int | None, int | None] = (None, None),
) -> int:
    """Among how many programs the keys of a tile are divided: 1 where there are tiles enough for the GPU.

    Only where keys are many times the rows: in a prompt by itself the tiles are of all lengths, and a split
    would have few keys. Of a `window`, as of `prefill.most_keys`, a tile sees no more keys than are in it.
    """
    num_long = prefill.most_long(q.shape[0], batch)
    num_tiles = prefill.most_tiles(q.shape[0], num_long, pipeline.BLOCK_M.value) * q.shape[1]
    processors = num_processors(q.device)
    seen = prefill.most_keys(max_seqlen_k, pipeline.BLOCK_M.value, *window)
    most = min(seen // _LEAST_KEYS, _MOST_TURNS * processors // max(1, num_tiles))
    if max_seqlen_k < 8 * max_seqlen_q or most < 2:
        return 1
    return _fewest(num_tiles, processors, most)


@functools.lru_cache(4096)
def _fewest(num_tiles: int, processors: int, most: int) -> int:
    """The fewest splits for which the processors' last turn is nearly as full as it can be."""

    def usage(splits: int) -> float:
        programs = num_tiles * splits
        return programs / (-(-programs // processors) * processors)

    choices = range(1, most + 1)
    enough = 0.9 * max(map(usage, choices))
    return next(splits for splits in choices if usage(splits) >= enough)


@functools.cache
def _no_partials(device: torch.device) -> tuple[Tensor, Tensor]:
    """What the kernel is given where it writes none: it is compiled for pointers."""
    nothing = torch.empty(0, dtype=torch.float32, device=device)
    return nothing, nothing
