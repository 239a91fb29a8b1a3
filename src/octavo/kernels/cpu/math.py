"""exp and tanh of vectors, as polynomials of our own fit.

Worst errors against fp64 over all of their range (tests/kernels/cpu/test_math.py measures them on this
machine): `exp` 2 ulp, `tanh` 4 ulp. exp is 0 below -87.3 (true value under 1e-38) and saturates at e^88
(1.7e38), so that ``1 + exp(x)`` never overflows. NaN gives NaN, and exp(-inf) is exactly 0: a masked score
has no weight at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from octavo.kernels.cpu.ir import I32, constant_vector, emit_fma, intrinsic

LOG2_E = 1.4426950408889634
LN2_HIGH = 0.693145751953125  # ln 2 in two parts: n * LN2_HIGH is exact for every exponent n
LN2_LOW = 1.42860682030941723212e-6
EXP_LOWEST = -87.33
EXP_HIGHEST = 88.0
ROUND_TO_INTEGER = 12582912.0  # 1.5 * 2**23: adding it leaves the rounded integer in the low mantissa bits
MANTISSA_BITS = 23

# exp(r) = 1 + r + r^2 * (c0 + c1 r + ...), |r| <= ln(2) / 2: Chebyshev fit, relative error 1.1e-8
EXP = (
    0.5000000013470306,
    0.16666576967247584,
    0.04166646489535635,
    0.008363181544676647,
    0.0013933652487833912,
)
# tanh(x) = x + x^3 * (c0 + c1 x^2 + ...), |x| <= 0.625: Chebyshev fit, relative error 7e-10
TANH = (
    -0.3333333317785051,
    0.13333304277863836,
    -0.05395940590866069,
    0.021769960919040685,
    -0.008346980498876451,
    0.002295841266577695,
)
TANH_POLYNOMIAL_LIMIT = 0.625


def _emit_horner(builder: Any, x: Any, coefficients: Sequence[float]) -> Any:
    lanes = x.type.count
    value = constant_vector(coefficients[-1], lanes)
    for coefficient in reversed(coefficients[:-1]):
        value = emit_fma(builder, value, x, constant_vector(coefficient, lanes))
    return value


def emit_exp(builder: Any, x: Any) -> Any:
    """exp of each lane: 2^n * exp(r), n an integer and |r| at most ln(2) / 2."""
    lanes = x.type.count

    def const(value: float) -> Any:
        return constant_vector(value, lanes)

    too_low = builder.fcmp_ordered("<", x, const(EXP_LOWEST))
    x = builder.select(builder.fcmp_ordered(">", x, const(EXP_HIGHEST)), const(EXP_HIGHEST), x)
    shifted = emit_fma(builder, x, const(LOG2_E), const(ROUND_TO_INTEGER))
    n = builder.fsub(shifted, const(ROUND_TO_INTEGER))
    r = emit_fma(builder, n, const(-LN2_HIGH), x)
    r = emit_fma(builder, n, const(-LN2_LOW), r)
    squared = builder.fmul(r, r)
    mantissa = emit_fma(builder, _emit_horner(builder, r, EXP), squared, builder.fadd(r, const(1.0)))
    # Adding n to the exponent bits multiplies by 2^n; a NaN keeps its exponent or is overwritten by `select`.
    wide = ir.VectorType(I32, lanes)
    exponent = builder.shl(builder.bitcast(shifted, wide), ir.Constant(wide, [MANTISSA_BITS] * lanes))
    power = builder.bitcast(builder.add(builder.bitcast(mantissa, wide), exponent), x.type)
    is_nan = builder.fcmp_unordered("uno", x, x)
    return builder.select(is_nan, x, builder.select(too_low, const(0.0), power))


def emit_tanh(builder: Any, x: Any) -> Any:
    """tanh of each lane: an odd polynomial near 0, 1 - 2 / (exp(2|x|) + 1) elsewhere."""
    lanes = x.type.count

    def const(value: float) -> Any:
        return constant_vector(value, lanes)

    wide = ir.VectorType(I32, lanes)
    bits = builder.bitcast(x, wide)
    sign = builder.and_(bits, ir.Constant(wide, [-0x80000000] * lanes))
    size = builder.bitcast(builder.and_(bits, ir.Constant(wide, [0x7FFFFFFF] * lanes)), x.type)
    power = emit_exp(builder, builder.fadd(size, size))
    far = builder.fsub(const(1.0), builder.fdiv(const(2.0), builder.fadd(power, const(1.0))))
    far = builder.bitcast(builder.or_(builder.bitcast(far, wide), sign), x.type)
    squared = builder.fmul(x, x)
    near = emit_fma(builder, builder.fmul(_emit_horner(builder, squared, TANH), squared), x, x)
    return builder.select(builder.fcmp_ordered("<", size, const(TANH_POLYNOMIAL_LIMIT)), near, far)


@intrinsic
def exp(typing_context, x):  # type: ignore[no-untyped-def]
    """exp of each lane."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return emit_exp(builder, arguments[0])

    return x(x), codegen


@intrinsic
def tanh(typing_context, x):  # type: ignore[no-untyped-def]
    """tanh of each lane."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return emit_tanh(builder, arguments[0])

    return x(x), codegen
