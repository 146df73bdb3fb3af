"""Vector mathematics: exponentials, maxima, conversion to half, transposition.

Everything here is plain IEEE arithmetic and fused multiply-add in a fixed order, so it gives the
same bits on every processor.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from dali_gguf.kernels import isa
from dali_gguf.kernels.lanes import constant, permutation, zero_f32x8
from dali_gguf.kernels.records import merged
from dali_gguf.kernels.simd import (
    F16, F32, I16, I32, I64, Vec, const, load_ir, shuffle, splat_f32x8, store_ir,
    v_fadd, v_fdiv, v_fma, v_fmul, v_fsub,
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


_half4 = permutation([4, 5, 6, 7, 4, 5, 6, 7])
_half2 = permutation([2, 3, 2, 3, 2, 3, 2, 3])
_half1 = permutation([1, 1, 1, 1, 1, 1, 1, 1])


@intrinsic
def lane0(typing, x):
    def gen(context, b, sig, args):
        return b.extract_element(args[0], ir.Constant(I32, 0))

    return types.float32(x), gen


@merged
def largest_lane(x):
    """The largest lane of f32x8."""
    x = v_larger(x, _half4(x))
    x = v_larger(x, _half2(x))
    return lane0(v_larger(x, _half1(x)))


# ---- exponentials -----------------------------------------------------------------------------


def _all(value):
    return constant("f32", [value] * 8)


# adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits of the sum
_magic, _one = _all(12582912.0), _all(1.0)
# relative minimax polynomials of 2^r on [-1/2, 1/2] (9e-8) and e^r on [-ln2/2, ln2/2] (2e-9)
_p1, _p2, _p3, _p4, _p5 = map(_all, (0.6931470036506653, 0.24022242426872253, 0.05550733581185341,
                                     0.009671512991189957, 0.001326472731307149))
_e2, _e3, _e4, _e5, _e6 = map(_all, (0.4999999403953552, 0.16666431725025177, 0.04166800156235695,
                                     0.008374162949621677, 0.001384364441037178))
_log2e, _ln2_high, _ln2_low = map(_all, (1.4426950408889634, -0.693145751953125,
                                         -1.42860682030941723e-6))
_exp2_lowest, _exp_lowest, _exp_highest = _all(-125.0), _all(-87.0), _all(88.0)


@intrinsic
def _times_power(typing, x, z):
    """x * 2^n, where z = n + 1.5 * 2^23; exponents must stay in range."""

    def gen(context, b, sig, args):
        as_int = ir.VectorType(I32, 8)
        n = b.shl(b.bitcast(args[1], as_int), const("i32", [23] * 8))
        return b.bitcast(b.add(b.bitcast(args[0], as_int), n), args[0].type)

    return x(x, z), gen


@merged
def exp2_softmax(x):
    """2^x of f32x8 for x <= 0, within 2 ulp; 0 below -125 and for -infinity."""
    t = v_larger(_exp2_lowest(), x)
    z = v_fadd(t, _magic())
    r = v_fsub(t, v_fsub(z, _magic()))
    p = v_fma(_p5(), r, _p4())
    p = v_fma(p, r, _p3())
    p = v_fma(p, r, _p2())
    p = v_fma(p, r, _p1())
    p = v_fma(p, r, _one())
    return zero_below(_times_power(p, z), x, _exp2_lowest())


@merged
def exp_f32x8(x):
    """e^x of f32x8 within 1 ulp for -87 <= x <= 88; beyond, the value at the nearer end."""
    t = v_smaller(_exp_highest(), v_larger(_exp_lowest(), x))
    z = v_fma(t, _log2e(), _magic())
    n = v_fsub(z, _magic())
    r = v_fma(n, _ln2_low(), v_fma(n, _ln2_high(), t))
    p = v_fma(_e6(), r, _e5())
    p = v_fma(p, r, _e4())
    p = v_fma(p, r, _e3())
    p = v_fma(p, r, _e2())
    p = v_fma(v_fmul(p, r), r, r)
    return _times_power(v_fadd(p, _one()), z)


@merged
def silu_f32x8(x):
    """x / (1 + e^-x)."""
    return v_fdiv(x, v_fadd(_one(), exp_f32x8(v_fsub(zero_f32x8(), x))))


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


@intrinsic
def float_to_half(typing, x):
    """i16x8: bits of the IEEE halves nearest to f32x8."""

    def gen(context, b, sig, args):
        if isa.HALF:
            return b.bitcast(b.fptrunc(args[0], ir.VectorType(F16, 8)), ir.VectorType(I16, 8))
        return _round_to_half_ir(b, args[0])

    return Vec("i16", 8)(x), gen


@intrinsic
def _first_i16(typing, x):
    def gen(context, b, sig, args):
        return b.extract_element(args[0], ir.Constant(I32, 0))

    return types.int16(x), gen


@merged
def half_of_float(x):
    """int16 bits of the half nearest to a scalar."""
    return _first_i16(float_to_half(splat_f32x8(x)))


# ---- blocks of vectors ------------------------------------------------------------------------


@intrinsic
def transpose_8x8(typing, source, source_stride, target, target_stride):
    """Eight rows of eight float32 at source become eight columns at target; strides in bytes."""

    def gen(context, b, sig, args):
        vec = ir.VectorType(F32, 8)
        rows = [load_ir(b, b.add(args[0], b.mul(args[1], ir.Constant(I64, i))), vec)
                for i in range(8)]
        pair = lambda x, y, index: shuffle(b, x, index, y)
        low, high = [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]
        t = [pair(rows[2 * i], rows[2 * i + 1], half) for i in range(4) for half in (low, high)]
        low, high = [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]
        u = [pair(t[i + j], t[i + j + 2], half)
             for i in (0, 4) for j in (0, 1) for half in (low, high)]
        low, high = [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]
        columns = [pair(u[j], u[j + 4], half) for half in (low, high) for j in range(4)]
        for i, column in enumerate(columns):
            store_ir(b, column, b.add(args[2], b.mul(args[3], ir.Constant(I64, i))))
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), gen
