"""LLVM vector instructions as Numba intrinsics.

`FloatVector(lanes)` is a Numba type for one SIMD register of fp32 numbers (or several, or a part: LLVM splits
what the machine does not have). Kernels read like scalar code: ``load``, ``store``, ``fma``, ``+ - * /``,
``maximum``. Addresses are plain integers in bytes. `lanes` and `dtype` arguments must be compile time
constants.

A floating point operation written here is done as written: no fast-math flag is set, so LLVM neither reorders
sums nor contracts a product and a sum behind our back, and the same code gives the same bits on every tile.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numba.extending
from llvmlite import ir
from numba import types
from numba.core.datamodel import models
from numba.extending import overload, register_model

# Numba's annotations describe the function as written, with a typing context that callers do not pass.
intrinsic: Any = numba.extending.intrinsic

I8, I16, I32, I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
F16, F32 = ir.HalfType(), ir.FloatType()

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}


class FloatVector(types.Type):
    """`lanes` fp32 numbers in registers."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        super().__init__(name=f"FloatVector({lanes})")


@register_model(FloatVector)
class _FloatVectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, frontend_type: FloatVector) -> None:
        super().__init__(  # type: ignore[no-untyped-call]  # numba's models have no annotations
            manager, frontend_type, ir.VectorType(F32, frontend_type.lanes)
        )


# --- emitting IR: used by the intrinsics below and by tile.py ---


def pointer(builder: Any, address: Any, element: Any) -> Any:
    return builder.inttoptr(address, element.as_pointer())


def constant_vector(value: float, lanes: int) -> Any:
    return ir.Constant(ir.VectorType(F32, lanes), [value] * lanes)


def call_llvm(builder: Any, name: str, result: Any, arguments: Sequence[Any]) -> Any:
    """Call an LLVM intrinsic by its full name, declared on first use."""
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(result, [a.type for a in arguments]), name)
    return builder.call(function, list(arguments))


def emit_fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return call_llvm(builder, f"llvm.fma.v{a.type.count}f32", a.type, (a, b, c))


def emit_splat(builder: Any, scalar: Any, lanes: int) -> Any:
    one = builder.insert_element(
        ir.Constant(ir.VectorType(F32, lanes), ir.Undefined), scalar, ir.Constant(I32, 0)
    )
    zeros = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
    return builder.shuffle_vector(one, ir.Constant(one.type, ir.Undefined), zeros)


def emit_load(builder: Any, address: Any, dtype: str, lanes: int) -> Any:
    """`lanes` items of `dtype` at `address`, exactly converted to fp32."""
    wide = ir.VectorType(F32, lanes)
    item = {"float32": F32, "float16": F16, "bfloat16": I16, "int8": I8}[dtype]
    value = builder.load(pointer(builder, address, ir.VectorType(item, lanes)), align=ITEM_BYTES[dtype])
    if dtype == "float16":
        return builder.fpext(value, wide)
    if dtype == "bfloat16":  # a bfloat16 is the upper half of an fp32
        bits = builder.zext(value, ir.VectorType(I32, lanes))
        return builder.bitcast(builder.shl(bits, ir.Constant(bits.type, [16] * lanes)), wide)
    if dtype == "int8":
        return builder.sitofp(builder.sext(value, ir.VectorType(I32, lanes)), wide)
    return value


def emit_store(builder: Any, address: Any, value: Any, dtype: str) -> None:
    """Store fp32 lanes as `dtype`, rounded to nearest even."""
    lanes = value.type.count
    if dtype == "float16":
        value = builder.fptrunc(value, ir.VectorType(F16, lanes))
    elif dtype == "bfloat16":
        value = _emit_round_to_bfloat16(builder, value)
    builder.store(value, pointer(builder, address, value.type), align=ITEM_BYTES[dtype])


def _emit_round_to_bfloat16(builder: Any, value: Any) -> Any:
    lanes = value.type.count
    wide = ir.VectorType(I32, lanes)

    def const(number: int) -> Any:
        return ir.Constant(wide, [number] * lanes)

    bits = builder.bitcast(value, wide)
    odd = builder.and_(builder.lshr(bits, const(16)), const(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, const(0x7FFF))), const(16))
    is_nan = builder.fcmp_unordered("uno", value, value)  # rounding could turn a NaN into an infinity
    return builder.trunc(builder.select(is_nan, const(0x7FC0), rounded), ir.VectorType(I16, lanes))


def emit_loop(
    builder: Any,
    start: Any,
    stop: Any,
    carried: Sequence[Any],
    body: Callable[[Any, list[Any]], Sequence[Any]],
) -> list[Any]:
    """``for i in range(start, stop): carried = body(i, carried)`` in registers; returns the last."""
    before = builder.block
    function = builder.function
    head, after = function.append_basic_block("loop"), function.append_basic_block("after")
    builder.cbranch(builder.icmp_signed("<", start, stop), head, after)
    builder.position_at_end(head)
    index = builder.phi(I64)
    index.add_incoming(start, before)
    phis = []
    for value in carried:
        phi = builder.phi(value.type)
        phi.add_incoming(value, before)
        phis.append(phi)
    results = body(index, list(phis))
    following = builder.add(index, I64(1), flags=["nsw"])
    tail = builder.block  # the body may have added blocks of its own
    builder.cbranch(builder.icmp_signed("<", following, stop), head, after)
    index.add_incoming(following, tail)
    for phi, result in zip(phis, results, strict=True):
        phi.add_incoming(result, tail)
    builder.position_at_end(after)
    finals = []
    for value, result in zip(carried, results, strict=True):
        final = builder.phi(value.type)
        final.add_incoming(value, before)
        final.add_incoming(result, tail)
        finals.append(final)
    return finals


# --- addresses and integers ---


@intrinsic
def load_i64(typing_context, address, index):  # type: ignore[no-untyped-def]
    """The int64 at ``address + 8 * index``."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        at = builder.add(arguments[0], builder.mul(arguments[1], I64(8)))
        return builder.load(pointer(builder, at, I64))

    return types.intp(types.intp, types.intp), codegen


@intrinsic
def load_i32(typing_context, address, index):  # type: ignore[no-untyped-def]
    """The int32 at ``address + 4 * index``, widened."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        at = builder.add(arguments[0], builder.mul(arguments[1], I64(4)))
        return builder.sext(builder.load(pointer(builder, at, I32)), I64)

    return types.intp(types.intp, types.intp), codegen


@intrinsic
def store_i64(typing_context, address, index, value):  # type: ignore[no-untyped-def]
    """Store an int64 at ``address + 8 * index``."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        at = builder.add(arguments[0], builder.mul(arguments[1], I64(8)))
        builder.store(arguments[2], pointer(builder, at, I64))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), codegen


@intrinsic
def take(typing_context, address, index):  # type: ignore[no-untyped-def]
    """Atomically return the int64 at ``address + 8 * index`` and add one to it."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        at = builder.add(arguments[0], builder.mul(arguments[1], I64(8)))
        return builder.atomic_rmw("add", pointer(builder, at, I64), I64(1), "monotonic")

    return types.intp(types.intp, types.intp), codegen


@intrinsic
def bits_to_float(typing_context, bits):  # type: ignore[no-untyped-def]
    """The fp32 number whose bits are the low half of an integer parameter."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.bitcast(builder.trunc(arguments[0], I32), F32)

    return types.float32(types.intp), codegen


# --- vectors ---


@intrinsic(prefer_literal=True)
def load(typing_context, address, dtype, lanes):  # type: ignore[no-untyped-def]
    """`lanes` items of `dtype` at `address` as fp32."""
    result = FloatVector(lanes.literal_value)

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return emit_load(builder, arguments[0], dtype.literal_value, lanes.literal_value)

    return result(types.intp, dtype, lanes), codegen


@intrinsic(prefer_literal=True)
def store(typing_context, address, value, dtype):  # type: ignore[no-untyped-def]
    """Store a vector as `dtype` at `address`."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        emit_store(builder, arguments[0], arguments[1], dtype.literal_value)
        return context.get_dummy_value()

    return types.void(types.intp, value, dtype), codegen


@intrinsic(prefer_literal=True)
def splat(typing_context, scalar, lanes):  # type: ignore[no-untyped-def]
    """A vector with `scalar` in every lane."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return emit_splat(builder, arguments[0], lanes.literal_value)

    return FloatVector(lanes.literal_value)(types.float32, lanes), codegen


@intrinsic
def fma(typing_context, a, b, c):  # type: ignore[no-untyped-def]
    """``a * b + c`` with one rounding."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return emit_fma(builder, *arguments)

    return a(a, a, a), codegen


def _binary(emit: Callable[[Any, Any, Any], Any], doc: str) -> Any:
    def typed(typing_context, a, b):  # type: ignore[no-untyped-def]
        if not (isinstance(a, FloatVector) and a == b):
            return None

        def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            return emit(builder, *arguments)

        return a(a, a), codegen

    typed.__doc__ = doc
    return intrinsic(typed)


def _emit_maximum(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


vector_add = _binary(lambda builder, a, b: builder.fadd(a, b), "``a + b`` lane by lane")
vector_subtract = _binary(lambda builder, a, b: builder.fsub(a, b), "``a - b`` lane by lane")
vector_multiply = _binary(lambda builder, a, b: builder.fmul(a, b), "``a * b`` lane by lane")
vector_divide = _binary(lambda builder, a, b: builder.fdiv(a, b), "``a / b`` lane by lane")
maximum = _binary(_emit_maximum, "The larger lane; `b` where either is NaN")


def _overload_operator(python_operator: Any, vector_operation: Any) -> None:
    def typed(a, b):  # type: ignore[no-untyped-def]
        if isinstance(a, FloatVector) and isinstance(b, FloatVector):
            return lambda a, b: vector_operation(a, b)
        return None

    overload(python_operator, inline="always")(typed)


for _operator, _operation in (
    (operator.add, vector_add),
    (operator.sub, vector_subtract),
    (operator.mul, vector_multiply),
    (operator.truediv, vector_divide),
):
    _overload_operator(_operator, _operation)


def _emit_tree(builder: Any, value: Any, combine: Callable[[Any, Any, Any], Any]) -> Any:
    """Fold the upper half of the lanes onto the lower half until one is left: a fixed order for sums."""
    lanes = value.type.count
    while lanes > 1:
        lanes //= 2
        undefined = ir.Constant(value.type, ir.Undefined)

        def half(first: int, value: Any = value, lanes: int = lanes, undefined: Any = undefined) -> Any:
            mask = ir.Constant(ir.VectorType(I32, lanes), list(range(first, first + lanes)))
            return builder.shuffle_vector(value, undefined, mask)

        value = combine(builder, half(0), half(lanes))
    return builder.extract_element(value, I32(0))


def _reduction(combine: Callable[[Any, Any, Any], Any], doc: str) -> Any:
    def typed(typing_context, a):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            return _emit_tree(builder, arguments[0], combine)

        return types.float32(a), codegen

    typed.__doc__ = doc
    return intrinsic(typed)


lanes_sum = _reduction(lambda builder, a, b: builder.fadd(a, b), "Sum of the lanes, as a tree of halves")
lanes_max = _reduction(_emit_maximum, "Largest lane")


@intrinsic
def keep_lanes(typing_context, value, first, stop, other):  # type: ignore[no-untyped-def]
    """Lane i of `value` where ``first <= i < stop``, else the scalar `other`."""
    lanes = value.lanes

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        vector, begin, end, replacement = arguments
        wide = ir.VectorType(I32, lanes)
        index = ir.Constant(wide, list(range(lanes)))

        def spread(bound: Any) -> Any:
            # Bounds come clamped to [0, lanes] from the caller's block arithmetic, so 32 bits hold them.
            return builder.bitcast(
                emit_splat(builder, builder.bitcast(builder.trunc(bound, I32), F32), lanes), wide
            )

        inside = builder.and_(
            builder.icmp_signed(">=", index, spread(begin)), builder.icmp_signed("<", index, spread(end))
        )
        return builder.select(inside, vector, emit_splat(builder, replacement, lanes))

    return value(value, types.intp, types.intp, types.float32), codegen


@intrinsic(prefer_literal=True)
def transpose(typing_context, addresses, offset, out, ldo, dtype, lanes):  # type: ignore[no-untyped-def]
    """``out[c, r] = item c of row r`` for a square of `lanes` rows.

    Row r starts `offset` bytes past the address number r at `addresses`; out is fp32, ldo items a row.
    """
    count = lanes.literal_value

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        table, skip, target, stride = arguments[:4]
        rows = []
        for row in range(count):
            start = builder.load(pointer(builder, builder.add(table, I64(8 * row)), I64))
            rows.append(emit_load(builder, builder.add(start, skip), dtype.literal_value, count))
        for row, value in enumerate(_emit_transpose(builder, rows)):
            emit_store(builder, builder.add(target, builder.mul(stride, I64(4 * row))), value, "float32")
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp, dtype, lanes), codegen


def _emit_transpose(builder: Any, rows: list[Any]) -> list[Any]:
    """log2(lanes) rounds, each swapping the off-diagonal quarters of ever larger squares, in registers."""
    lanes = len(rows)
    size = 1
    while size < lanes:
        low = [lane if not lane & size else lanes + lane - size for lane in range(lanes)]
        high = [lane + size if not lane & size else lanes + lane for lane in range(lanes)]
        masks = [ir.Constant(ir.VectorType(I32, lanes), mask) for mask in (low, high)]
        result = list(rows)
        for i in range(lanes):
            if not i & size:
                result[i] = builder.shuffle_vector(rows[i], rows[i + size], masks[0])
                result[i + size] = builder.shuffle_vector(rows[i], rows[i + size], masks[1])
        rows = result
        size *= 2
    return rows
