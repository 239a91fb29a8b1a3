"""The micro-kernel: a register tile of ``out = init + x @ w``.

::

                      w: k rows of one panel        <- `vectors` registers wide, streamed once per tile
                      +-----------------------+
                      | w[0, 0..panel)        |
                      | w[1, 0..panel)        |
      x: rows         |  ...                  |
      +------------+  +-----------------------+
      | x[0, 0..k) |  | acc[0] acc[0] acc[0]  |   <- `rows` x `vectors` accumulators stay in registers
      | x[1, 0..k) |  | acc[1] acc[1] acc[1]  |
      +------------+  +-----------------------+
       one number of x at a time is broadcast and multiplied into its row of accumulators

Each accumulator lane is ``fma(x[r, k-1], w[k-1, n], ... fma(x[r, 0], w[0, n], 0))``: strictly in the order of
k, one chain per output element. The number of rows in the tile, its other rows and the vector width do not
enter, which is what makes a row's bits independent of the batch. Speed comes from many independent chains,
not from splitting one.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from octavo.kernels.cpu.ir import (
    F32,
    I32,
    I64,
    ITEM_BYTES,
    call_llvm,
    constant_vector,
    emit_fma,
    emit_load,
    emit_loop,
    emit_splat,
    emit_store,
    intrinsic,
    pointer,
)


@intrinsic(prefer_literal=True)
def tile(  # type: ignore[no-untyped-def]
    typing_context,
    rows,
    columns,
    k,
    x,
    ldx,
    w,
    ldw,
    scales,
    group,
    init,
    ldinit,
    out,
    ldo,
    dtype,
    lanes,
    vectors,
    max_rows,
    chain,
):
    """``out[r, n] = init[r, n] + sum over k of x[r, k] * w[k, n]`` for r < rows, n < columns.

    rows 1..max_rows and columns 1..lanes*vectors vary at run time; the last five arguments are constants. x,
    init, out are fp32; w holds `dtype`, rows of lanes*vectors items. All are byte addresses; ldx, ldw,
    ldinit, ldo count items from row to row (ldinit 0 repeats one row). For int8, w[k, n] is multiplied by
    scales[k // group, n] first. chain 0 adds a finished sum to init; chain 1 starts the chain of fmas at
    init, so that a sum over k may be cut anywhere into several calls without a change of a bit.
    """
    shape = _Shape(dtype.literal_value, lanes.literal_value, vectors.literal_value)

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        operands = _Operands(*arguments[:13])
        done = builder.function.append_basic_block("tile.done")
        unreachable = builder.function.append_basic_block("tile.rows")
        switch = builder.switch(operands.rows, unreachable)
        for count in range(1, max_rows.literal_value + 1):
            case = builder.function.append_basic_block(f"tile.{count}")
            switch.add_case(I64(count), case)
            builder.position_at_end(case)
            if chain.literal_value:
                start = _load_init(builder, shape, operands, count)
                _store(builder, shape, operands, _accumulate(builder, shape, operands, count, start), count)
            else:
                start = [constant_vector(0.0, shape.lanes)] * (count * shape.vectors)
                _add_to_init(
                    builder, shape, operands, _accumulate(builder, shape, operands, count, start), count
                )
            builder.branch(done)
        builder.position_at_end(unreachable)
        builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    integers = (types.intp,) * 13
    return types.void(*integers, dtype, lanes, vectors, max_rows, chain), codegen


class _Shape:
    def __init__(self, dtype: str, lanes: int, vectors: int) -> None:
        self.dtype, self.lanes, self.vectors = dtype, lanes, vectors
        self.panel = lanes * vectors
        self.vector_bytes = lanes * ITEM_BYTES[dtype]


class _Operands:
    def __init__(
        self,
        rows: Any,
        columns: Any,
        k: Any,
        x: Any,
        ldx: Any,
        w: Any,
        ldw: Any,
        scales: Any,
        group: Any,
        init: Any,
        ldinit: Any,
        out: Any,
        ldo: Any,
    ) -> None:
        self.rows, self.columns, self.k = rows, columns, k
        self.x, self.ldx, self.w, self.ldw = x, ldx, w, ldw
        self.scales, self.group = scales, group
        self.init, self.ldinit, self.out, self.ldo = init, ldinit, out, ldo


def _accumulate(builder: Any, shape: _Shape, at: _Operands, rows: int, start: list[Any]) -> list[Any]:
    """The loop over k from `start`; returns rows * vectors accumulators."""
    row_addresses = [
        builder.add(at.x, builder.mul(at.ldx, I64(4 * row))) if row else at.x for row in range(rows)
    ]
    row_bytes = builder.mul(at.ldw, I64(ITEM_BYTES[shape.dtype]))

    def step(k: Any, accumulators: list[Any], scales: list[Any] | None) -> list[Any]:
        w_row = builder.add(at.w, builder.mul(k, row_bytes))
        weights = []
        for vector in range(shape.vectors):
            address = builder.add(w_row, I64(vector * shape.vector_bytes))
            value = emit_load(builder, address, shape.dtype, shape.lanes)
            weights.append(value if scales is None else builder.fmul(value, scales[vector]))
        result = []
        x_offset = builder.mul(k, I64(4))
        for row in range(rows):
            scalar = builder.load(pointer(builder, builder.add(row_addresses[row], x_offset), F32))
            x = emit_splat(builder, scalar, shape.lanes)
            for vector in range(shape.vectors):
                accumulator = accumulators[row * shape.vectors + vector]
                result.append(emit_fma(builder, x, weights[vector], accumulator))
        return result

    if shape.dtype != "int8":
        return emit_loop(builder, I64(0), at.k, start, lambda k, acc: step(k, acc, None))

    def group_step(index: Any, accumulators: list[Any]) -> list[Any]:
        first = builder.mul(index, at.group)
        last = builder.add(first, at.group)
        stop = builder.select(builder.icmp_signed("<", last, at.k), last, at.k)
        base = builder.add(at.scales, builder.mul(index, I64(4 * shape.panel)))
        scales = [
            emit_load(builder, builder.add(base, I64(4 * shape.lanes * vector)), "float32", shape.lanes)
            for vector in range(shape.vectors)
        ]
        return emit_loop(builder, first, stop, accumulators, lambda k, acc: step(k, acc, scales))

    groups = builder.sdiv(builder.add(at.k, builder.sub(at.group, I64(1))), at.group)
    return emit_loop(builder, I64(0), groups, start, group_step)


def _place(builder: Any, shape: _Shape, base: Any, ld: Any, row: int, vector: int) -> Any:
    row_address = builder.add(base, builder.mul(ld, I64(4 * row)))
    return builder.add(row_address, I64(4 * vector * shape.lanes))


def _load_init(builder: Any, shape: _Shape, at: _Operands, rows: int) -> list[Any]:
    """The accumulators of a chained tile, which has all of its columns."""
    return [
        emit_load(builder, _place(builder, shape, at.init, at.ldinit, row, vector), "float32", shape.lanes)
        for row in range(rows)
        for vector in range(shape.vectors)
    ]


def _store(builder: Any, shape: _Shape, at: _Operands, accumulators: list[Any], rows: int) -> None:
    for row in range(rows):
        for vector in range(shape.vectors):
            place = _place(builder, shape, at.out, at.ldo, row, vector)
            emit_store(builder, place, accumulators[row * shape.vectors + vector], "float32")


def _add_to_init(builder: Any, shape: _Shape, at: _Operands, accumulators: list[Any], rows: int) -> None:
    """``out = init + accumulators``, the last columns of a matrix under a mask."""
    whole = builder.icmp_signed("==", at.columns, I64(shape.panel))
    with builder.if_else(whole) as (then, otherwise):
        for branch, masked in ((then, False), (otherwise, True)):
            with branch:
                for row in range(rows):
                    for vector in range(shape.vectors):
                        init = _place(builder, shape, at.init, at.ldinit, row, vector)
                        out = _place(builder, shape, at.out, at.ldo, row, vector)
                        value = accumulators[row * shape.vectors + vector]
                        if masked:
                            mask = _mask(builder, shape, at.columns, vector)
                            start = _masked_load(builder, shape, init, mask)
                            _masked_store(builder, shape, out, builder.fadd(start, value), mask)
                        else:
                            start = emit_load(builder, init, "float32", shape.lanes)
                            emit_store(builder, out, builder.fadd(start, value), "float32")


def _mask(builder: Any, shape: _Shape, columns: Any, vector: int) -> Any:
    """Lanes of this vector whose column exists."""
    wide = ir.VectorType(I32, shape.lanes)
    bound = builder.bitcast(builder.trunc(columns, I32), F32)
    limit = builder.bitcast(emit_splat(builder, bound, shape.lanes), wide)
    index = ir.Constant(wide, [vector * shape.lanes + lane for lane in range(shape.lanes)])
    return builder.icmp_signed("<", index, limit)


def _masked_load(builder: Any, shape: _Shape, address: Any, mask: Any) -> Any:
    wide = ir.VectorType(F32, shape.lanes)
    arguments = (pointer(builder, address, wide), I32(4), mask, constant_vector(0.0, shape.lanes))
    return call_llvm(builder, f"llvm.masked.load.v{shape.lanes}f32.p0", wide, arguments)


def _masked_store(builder: Any, shape: _Shape, address: Any, value: Any, mask: Any) -> None:
    arguments = (value, pointer(builder, address, value.type), I32(4), mask)
    call_llvm(builder, f"llvm.masked.store.v{shape.lanes}f32.p0", ir.VoidType(), arguments)
