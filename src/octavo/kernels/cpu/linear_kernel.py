"""The loops of ``out = x @ w.T (+ bias)`` around the register tile, and reading rows of a packed weight.

A packed weight is ``[N / panel][K][panel]``: one panel holds `panel` output columns, K steps long, and is
read front to back. Work is cut into tasks of a few panels; a worker takes one task after another. Inside a
task::

    for panel:                         the weights of a panel come from memory once
        for k block of K_BLOCK:        K_BLOCK * panel weights stay in the L1/L2 cache ...
            for tile of rows:          ... while all rows of x pass by

Partial sums of the k blocks are added to `out` in the order of k, always with the same K_BLOCK, so the sum of
an output element is the same expression for one row and for a thousand (and more accurate than one long
chain).

With many rows, converting int8 weights again for every tile costs a fifth of the speed (209 against 249
GFLOP/s at 512 rows), so a k block is converted once into fp32 scratch. float16 is converted by one
instruction and gains nothing from that. The converted numbers are the same either way, hence also the sums.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from octavo.kernels.cpu.compiled import compile_kernel, source_digest
from octavo.kernels.cpu.host import FLOAT_BYTES, vector_shape
from octavo.kernels.cpu.ir import ITEM_BYTES, load, load_i64, store, take
from octavo.kernels.cpu.tile import tile

K_BLOCK = 512  # a multiple of GROUP, see octavo.kernels.linear
CONVERT_ROWS = 32  # from this many rows on, converting an int8 k block into scratch pays


def scratch_bytes(panel: int) -> int:
    """Scratch memory of one worker: a converted k block."""
    return K_BLOCK * panel * FLOAT_BYTES


@functools.cache
def linear_kernel(dtype: str) -> int:
    """Address of the kernel for weights of `dtype` ("float32", "float16", "int8") on this host."""
    shape = vector_shape()
    return compile_kernel(_linear(dtype, shape.lanes, shape.vectors, shape.max_rows, source_digest()))


@functools.cache
def grouped_linear_kernel(dtype: str) -> int:
    """Address of the kernel that multiplies each group of rows with a weight of its own."""
    shape = vector_shape()
    return compile_kernel(_grouped_linear(dtype, shape.lanes, shape.vectors, shape.max_rows, source_digest()))


@functools.cache
def embedding_kernel(dtype: str) -> int:
    """Address of the kernel that reads rows of a packed weight."""
    return compile_kernel(_embedding(dtype, vector_shape().panel, source_digest()))


def _linear(dtype: str, lanes: int, vectors: int, max_rows: int, digest: str) -> Callable[[int], None]:
    panel = lanes * vectors
    item = ITEM_BYTES[dtype]
    is_int8 = 1 if dtype == "int8" else 0

    def linear(block: int) -> None:
        digest  # noqa: B018  # part of the cache key
        rows = load_i64(block, 2)
        k_size = load_i64(block, 3)
        n_size = load_i64(block, 4)
        x = load_i64(block, 5)
        w = load_i64(block, 6)
        scales = load_i64(block, 7)
        group = load_i64(block, 8)
        bias = load_i64(block, 9)  # 0: none
        zeros = load_i64(block, 10)  # a panel of zeros
        out = load_i64(block, 11)
        panels_per_task = load_i64(block, 12)
        scratch = load_i64(block, 13) + take(block, 1) * (K_BLOCK * panel * 4)

        num_panels = (n_size + panel - 1) // panel
        num_groups = (k_size + group - 1) // group
        num_tiles = (rows + max_rows - 1) // max_rows
        while True:
            first = take(block, 0) * panels_per_task
            if first >= num_panels:
                break
            for i_panel in range(first, min(first + panels_per_task, num_panels)):
                column = i_panel * panel
                columns = min(panel, n_size - column)
                for k in range(0, k_size, K_BLOCK):
                    k_count = min(K_BLOCK, k_size - k)
                    w_block = w + (i_panel * k_size + k) * (panel * item)
                    s_block = scales + (i_panel * num_groups + k // group) * (panel * 4)
                    if is_int8 and rows >= CONVERT_ROWS:
                        for j in range(k_count):
                            for c in range(0, panel, lanes):
                                scale = load(s_block + (j // group * panel + c) * 4, "float32", lanes)
                                value = load(w_block + (j * panel + c) * item, dtype, lanes) * scale
                                store(scratch + (j * panel + c) * 4, value, "float32")
                    for i_tile in range(num_tiles):
                        # Rows are shared out evenly: 16 rows on tiles of 12 are 8 + 8, not 12 + 4.
                        row = rows * i_tile // num_tiles
                        count = rows * (i_tile + 1) // num_tiles - row
                        x_at = x + (row * k_size + k) * 4
                        out_at = out + (row * n_size + column) * 4
                        init = out_at
                        ld_init = n_size
                        if k == 0:
                            ld_init = 0
                            init = zeros if bias == 0 else bias + column * 4
                        if is_int8 and rows >= CONVERT_ROWS:
                            tile(
                                count, columns, k_count, x_at, k_size, scratch, panel, 0, 1,
                                init, ld_init, out_at, n_size, "float32", lanes, vectors, max_rows, 0,
                            )  # fmt: skip
                        else:
                            tile(
                                count, columns, k_count, x_at, k_size, w_block, panel, s_block, group,
                                init, ld_init, out_at, n_size, dtype, lanes, vectors, max_rows, 0,
                            )  # fmt: skip

    return linear


def _grouped_linear(
    dtype: str, lanes: int, vectors: int, max_rows: int, digest: str
) -> Callable[[int], None]:
    """`_linear` for the groups that have rows; a task is a few panels of any of them, in their order."""
    panel = lanes * vectors
    item = ITEM_BYTES[dtype]
    is_int8 = 1 if dtype == "int8" else 0

    def grouped_linear(block: int) -> None:
        digest  # noqa: B018  # part of the cache key
        num_busy = load_i64(block, 2)
        busy = load_i64(block, 3)
        bounds = load_i64(block, 4)
        k_size = load_i64(block, 5)
        n_size = load_i64(block, 6)
        x_all = load_i64(block, 7)
        w_all = load_i64(block, 8)
        w_stride = load_i64(block, 9)
        scales_all = load_i64(block, 10)
        scales_stride = load_i64(block, 11)
        group = load_i64(block, 12)
        zeros = load_i64(block, 13)  # a panel of zeros
        out_all = load_i64(block, 14)
        panels_per_task = load_i64(block, 15)
        scratch = load_i64(block, 16) + take(block, 1) * (K_BLOCK * panel * 4)

        num_panels = (n_size + panel - 1) // panel
        num_groups = (k_size + group - 1) // group
        while True:
            first = take(block, 0) * panels_per_task
            if first >= num_busy * num_panels:
                break
            for index in range(first, min(first + panels_per_task, num_busy * num_panels)):
                expert = load_i64(busy, index // num_panels)
                i_panel = index % num_panels
                first_row = load_i64(bounds, expert)
                rows = load_i64(bounds, expert + 1) - first_row
                num_tiles = (rows + max_rows - 1) // max_rows
                x = x_all + first_row * k_size * 4
                out = out_all + first_row * n_size * 4
                w = w_all + expert * w_stride
                scales = scales_all + expert * scales_stride
                column = i_panel * panel
                columns = min(panel, n_size - column)
                for k in range(0, k_size, K_BLOCK):
                    k_count = min(K_BLOCK, k_size - k)
                    w_block = w + (i_panel * k_size + k) * (panel * item)
                    s_block = scales + (i_panel * num_groups + k // group) * (panel * 4)
                    if is_int8 and rows >= CONVERT_ROWS:
                        for j in range(k_count):
                            for c in range(0, panel, lanes):
                                scale = load(s_block + (j // group * panel + c) * 4, "float32", lanes)
                                value = load(w_block + (j * panel + c) * item, dtype, lanes) * scale
                                store(scratch + (j * panel + c) * 4, value, "float32")
                    for i_tile in range(num_tiles):
                        row = rows * i_tile // num_tiles
                        count = rows * (i_tile + 1) // num_tiles - row
                        x_at = x + (row * k_size + k) * 4
                        out_at = out + (row * n_size + column) * 4
                        init = out_at
                        ld_init = n_size
                        if k == 0:
                            ld_init = 0
                            init = zeros
                        if is_int8 and rows >= CONVERT_ROWS:
                            tile(
                                count, columns, k_count, x_at, k_size, scratch, panel, 0, 1,
                                init, ld_init, out_at, n_size, "float32", lanes, vectors, max_rows, 0,
                            )  # fmt: skip
                        else:
                            tile(
                                count, columns, k_count, x_at, k_size, w_block, panel, s_block, group,
                                init, ld_init, out_at, n_size, dtype, lanes, vectors, max_rows, 0,
                            )  # fmt: skip

    return grouped_linear


def _embedding(dtype: str, panel: int, digest: str) -> Callable[[int], None]:
    item = ITEM_BYTES[dtype]
    is_int8 = 1 if dtype == "int8" else 0

    def embedding(block: int) -> None:
        digest  # noqa: B018  # part of the cache key
        num_ids = load_i64(block, 2)
        k_size = load_i64(block, 3)
        ids = load_i64(block, 4)
        w = load_i64(block, 5)
        scales = load_i64(block, 6)
        group = load_i64(block, 7)
        out = load_i64(block, 8)
        ids_per_task = load_i64(block, 9)
        num_groups = (k_size + group - 1) // group
        while True:
            first = take(block, 0) * ids_per_task
            if first >= num_ids:
                break
            for i in range(first, min(first + ids_per_task, num_ids)):
                # One row lies across its panel: k goes from one panel row to the next.
                i_panel = load_i64(ids, i) // panel
                column = load_i64(ids, i) % panel
                for k in range(k_size):
                    value = load(w + ((i_panel * k_size + k) * panel + column) * item, dtype, 1)
                    if is_int8:
                        s_at = scales + ((i_panel * num_groups + k // group) * panel + column) * 4
                        value = value * load(s_at, "float32", 1)
                    store(out + (i * k_size + k) * 4, value, "float32")

    return embedding
