"""Matrix products with the weight of each row's group: a program makes one tile of one group's rows.

How many rows a group has is known on the device alone. The grid has as many tiles as there can be at most; a
program finds out which group its tile belongs to, and those past the last tile end at once::

    offsets 0 5 5 22 (BLOCK_M 16)      tiles of each group 1 0 2      tile 2: group 2, rows 21 and up

Group after group passes through one column of tiles before the next column begins, so that the tiles of a
group find its weights in the L2 cache.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import checks
from octavo.kernels.grouped_linear import PackedExperts
from octavo.kernels.triton import is_interpreted, launch, tuning
from octavo.kernels.triton.tuning import Parameters

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Rows of a tile -> columns, bytes along K, warps, stages: safe on any GPU.
_TILES = {16: (64, 256, 4, 4), 32: (64, 256, 4, 3), 64: (128, 128, 4, 3), 128: (128, 128, 8, 3)}


@launch.direct
@triton.jit
def _grouped_linear(
    x, w, offsets, sources, targets, scale, out,
    NUM_GROUPS: tl.constexpr, GROUPS: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    HAS_SOURCES: tl.constexpr, HAS_TARGETS: tl.constexpr, HAS_SCALE: tl.constexpr, IN_FLOAT32: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch.begin(PDL)
    tile = tl.program_id(0)
    groups = tl.arange(0, GROUPS)
    begin = tl.load(offsets + groups, mask=groups < NUM_GROUPS, other=0)
    end = tl.load(offsets + (groups + 1), mask=groups < NUM_GROUPS, other=0)
    num_tiles = (end - begin + (BLOCK_M - 1)) // BLOCK_M
    is_before = tl.cumsum(num_tiles, 0) <= tile
    group = tl.sum((is_before & (groups < NUM_GROUPS)).to(tl.int32), 0)
    if group < NUM_GROUPS:
        first = tl.load(offsets + group) + (tile - tl.sum(tl.where(is_before, num_tiles, 0), 0)) * BLOCK_M
        rows = first + tl.arange(0, BLOCK_M)
        live = rows < tl.load(offsets + group + 1)
        columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        dims = tl.arange(0, BLOCK_K)
        # Dead rows and columns read something that exists, and are not written.
        if HAS_SOURCES:
            source = tl.load(sources + rows, mask=live, other=0)
        else:
            source = tl.where(live, rows, 0).to(tl.int64)
        row = tl.where(columns < N, columns, 0).to(tl.int64) + group.to(tl.int64) * N
        x_at = x + (source * K)[:, None] + dims[None, :]
        w_at = w + (row * K)[None, :] + dims[:, None]
        sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            if K % BLOCK_K == 0:
                a = tl.load(x_at + k)
                b = tl.load(w_at + k)
            else:
                a = tl.load(x_at + k, mask=(dims < K - k)[None, :], other=0.0)
                b = tl.load(w_at + k, mask=(dims < K - k)[:, None], other=0.0)
            if IN_FLOAT32:
                a, b = a.to(tl.float32), b.to(tl.float32)
            sums = tl.dot(a, b, sums, input_precision="ieee")
        if HAS_SCALE:
            sums *= tl.load(scale + rows, mask=live, other=0.0)[:, None]
        target = rows.to(tl.int64)
        if HAS_TARGETS:
            target = tl.load(targets + rows, mask=live, other=0)
        to = out + (target * N)[:, None] + columns[None, :]
        tl.store(to, sums.to(out.dtype.element_ty), mask=live[:, None] & (columns < N)[None, :])


def supports(x_dtype: torch.dtype) -> str | None:
    """None when the kernel can do it, else why not."""
    return None if x_dtype in _DTYPES else f"no Triton kernel for {x_dtype}"


def grouped_linear(
    x: Tensor,
    w: PackedExperts,
    offsets: Tensor,
    sources: Tensor | None,
    targets: Tensor | None,
    scale: Tensor | None,
    *,
    parameters: Parameters | None = None,
) -> Tensor:
    """`out[targets[i]] = scale[i] * (x[sources[i]] @ w[e].T)`.

    `parameters` take the place of those of this GPU's table.
    """
    if w.data.dim() != 3:  # panels for a CPU, with this room forced
        way_out = "Triton's kernel takes weights that are not packed: form 'dense'."
        raise checks.unsupported("grouped_linear", "w.form", repr(w.form), way_out)
    num_groups, width, depth = w.shape
    num_rows = x.shape[0] if sources is None else sources.shape[0]
    out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    if out.numel() == 0 or depth == 0:
        return out.zero_()
    if w.form == "invariant":  # one tile for any number of rows: what a row is added up like never changes
        parameters = launch_class(64 * num_groups, w.shape, x.dtype)[1]
    parameters = parameters or tuning.parameters(
        "grouped_linear", x.device, *launch_class(num_rows, w.shape, x.dtype)
    )
    options = launch.options(parameters, x.device)
    block = parameters["BLOCK_M"]
    most_tiles = (num_rows + min(num_groups, num_rows) * (block - 1)) // block
    _grouped_linear[most_tiles, -(-width // parameters["BLOCK_N"])](
        x, w.data, offsets, sources, targets, scale, out,
        NUM_GROUPS=num_groups, GROUPS=launch.block_for(num_groups), N=width, K=depth,
        HAS_SOURCES=sources is not None, HAS_TARGETS=targets is not None, HAS_SCALE=scale is not None,
        # The interpreter multiplies the bits of a bfloat16 as if they were an integer.
        IN_FLOAT32=is_interpreted(),
        **options,
    )  # fmt: skip
    return out


def launch_class(num_rows: int, shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[str, Parameters]:
    """The class of a call in the table of tuned launch parameters, and those that are right on any GPU.

    Of the number of rows only a power of two enters: as many as a group has on average, from 16 to 128.
    """
    num_groups, width, depth = shape
    rows = min(128, max(16, launch.block_for(-(-num_rows // num_groups))))
    columns, num_bytes, num_warps, num_stages = _TILES[rows]
    default = {
        "BLOCK_M": rows,
        "BLOCK_N": min(columns, max(16, launch.block_for(width))),
        "BLOCK_K": min(num_bytes // dtype.itemsize, max(16, launch.block_for(depth))),
        "num_warps": num_warps,
        "num_stages": num_stages,
        "PDL": 1,
    }
    return f"N{width} K{depth} {rows} rows {dtype.itemsize} bytes", default
