"""Vector mathematics: exponentials, maxima, conversion to half.

Everything here is plain IEEE arithmetic and fused multiply-add in a fixed order, so it gives the
same bits on every processor.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from dali_gguf.kernels import isa
from dali_gguf.kernels.simd import (
    F16, F32, I16, I32, Vec, call, const, shuffle, splat_ir,
)

# ---- comparisons that keep NaN in their second operand ----------------------------------------


def _choose(comparison):
    @intrinsic
    def f(typing, x, y):
        def gen(context, b, sig, args):
            return b.select(b.fcmp_ordered(comparison, *args), *args)

        return x(x, y), gen

    return f


v_larger, v_smaller = _choose(">"), _choose("<")


@intrinsic
def zero_below(typing, value, x, limit):
    """Lanes of value, and 0 where x < limit."""

    def gen(context, b, sig, args):
        zero = ir.Constant(args[0].type, [0.0] * value.n)
        return b.select(b.fcmp_ordered("<", args[1], args[2]), zero, args[0])

    return value(value, x, x), gen


@intrinsic
def largest_lane(typing, x):
    """The largest lane of f32x8."""

    def gen(context, b, sig, args):
        v = args[0]
        for half in (4, 2, 1):
            low, high = shuffle(b, v, range(half)), shuffle(b, v, range(half, 2 * half))
            v = b.select(b.fcmp_ordered(">", low, high), low, high)
        return b.extract_element(v, ir.Constant(I32, 0))

    return types.float32(x), gen


# ---- exponentials -----------------------------------------------------------------------------

F32X8, I32X8 = ir.VectorType(F32, 8), ir.VectorType(I32, 8)
MAGIC = 12582912.0  # adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits
# relative minimax polynomials: (2^r - 1) / r on [-1/2, 1/2], error 9e-8, and
# (e^r - 1 - r) / r^2 on [-ln2/2, ln2/2], error 2e-9; highest power first
EXP2_TERMS = (0.001326472731307149, 0.009671512991189957, 0.05550733581185341,
              0.24022242426872253, 0.6931470036506653, 1.0)
EXP_TERMS = (0.001384364441037178, 0.008374162949621677, 0.04166800156235695,
             0.16666431725025177, 0.4999999403953552)
LOG2E, LN2_HIGH, LN2_LOW = 1.4426950408889634, 0.693145751953125, 1.42860682030941723e-6


def _all(value: float):
    """f32x8 constant; the value is rounded to float32 first, as LLVM's text form demands."""
    return const("f32", [float(np.float32(value))] * 8)


def _fma_ir(b, x, y, z):
    return call(b, "llvm.fma.v8f32", F32X8, [x, y, z])


def _polynomial_ir(b, r, terms):
    value = _all(terms[0])
    for term in terms[1:]:
        value = _fma_ir(b, value, r, _all(term))
    return value


def _times_power_ir(b, x, z):
    """x * 2^n, where z = n + MAGIC; exponents must stay in range."""
    n = b.shl(b.bitcast(z, I32X8), const("i32", [23] * 8))
    return b.bitcast(b.add(b.bitcast(x, I32X8), n), F32X8)


def _at_least_ir(b, x, limit: float):
    """max(x, limit) that keeps NaN."""
    return b.select(b.fcmp_ordered("<", x, _all(limit)), _all(limit), x)


def exp2_softmax_ir(b, x):
    t = _at_least_ir(b, x, -125.0)
    z = b.fadd(t, _all(MAGIC))
    r = b.fsub(t, b.fsub(z, _all(MAGIC)))
    value = _times_power_ir(b, _polynomial_ir(b, r, EXP2_TERMS), z)
    return b.select(b.fcmp_ordered("<", x, _all(-125.0)), _all(0.0), value)


def exp_ir(b, x):
    t = _at_least_ir(b, x, -87.0)
    t = b.select(b.fcmp_ordered(">", t, _all(88.0)), _all(88.0), t)
    z = _fma_ir(b, t, _all(LOG2E), _all(MAGIC))
    n = b.fsub(z, _all(MAGIC))
    r = _fma_ir(b, n, _all(-LN2_LOW), _fma_ir(b, n, _all(-LN2_HIGH), t))
    p = _polynomial_ir(b, r, EXP_TERMS)
    p = _fma_ir(b, b.fmul(p, r), r, r)
    return _times_power_ir(b, b.fadd(p, _all(1.0)), z)


def silu_ir(b, x):
    return b.fdiv(x, b.fadd(_all(1.0), exp_ir(b, b.fsub(_all(0.0), x))))


def _function(emit, doc):
    @intrinsic
    def f(typing, x):
        def gen(context, b, sig, args):
            return emit(b, args[0])

        return x(x), gen

    f.__doc__ = doc
    return f


exp2_softmax = _function(exp2_softmax_ir, "2^x of f32x8, x <= 0, within 2.1 ulp; 0 below -125.")
exp_f32x8 = _function(exp_ir, "e^x of f32x8 within 1.2 ulp; x is clamped to -87 .. 88.")
silu_f32x8 = _function(silu_ir, "x / (1 + e^-x) of f32x8.")


# ---- half floats ------------------------------------------------------------------------------


def _round_to_half_ir(b, x):
    """i16 bits of the nearest half (ties to even) of f32 x8, by integer arithmetic."""
    wide = ir.VectorType(I32, 8)
    number = lambda v: const("i32", [v] * 8)
    bits = b.bitcast(x, wide)
    sign = b.and_(bits, number(0x80000000))
    size = b.xor(bits, sign)
    odd = b.and_(b.lshr(size, number(13)), number(1))
    normal = b.lshr(b.add(b.add(size, number(0xC8000FFF)), odd), number(13))
    denormal_magic = number(0x3F000000)  # 0.5: aligns a subnormal half's bits to the low end
    sum_ = b.fadd(b.bitcast(size, x.type), b.bitcast(denormal_magic, x.type))
    subnormal = b.sub(b.bitcast(sum_, wide), denormal_magic)
    nan = b.icmp_unsigned(">", size, number(0x7F800000))
    result = b.select(b.icmp_unsigned("<", size, number(0x38800000)), subnormal, normal)
    special = b.select(nan, number(0x7E00), number(0x7C00))
    result = b.select(b.icmp_unsigned(">=", size, number(0x47800000)), special, result)
    return b.trunc(b.or_(result, b.lshr(sign, number(16))), ir.VectorType(I16, 8))


def _half_ir(b, x):
    if isa.HALF:
        return b.bitcast(b.fptrunc(x, ir.VectorType(F16, 8)), ir.VectorType(I16, 8))
    return _round_to_half_ir(b, x)


@intrinsic
def float_to_half(typing, x):
    """i16x8: bits of the IEEE halves nearest to f32x8."""

    def gen(context, b, sig, args):
        return _half_ir(b, args[0])

    return Vec("i16", 8)(x), gen


@intrinsic
def half_of_float(typing, x):
    """int16 bits of the half nearest to a scalar."""

    def gen(context, b, sig, args):
        return b.extract_element(_half_ir(b, splat_ir(b, args[0], 8)), ir.Constant(I32, 0))

    return types.int16(types.float32), gen
