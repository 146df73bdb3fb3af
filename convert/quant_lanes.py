"""Least-squares fits of quantization scales, eight sub-blocks at a time, one in each vector lane.

A *sub-block* is the run of n weights that share one scale. x and w are addresses of float32 [n, 8]:
element i of sub-block j stands at 8 i + j, so that every sum over a sub-block stays in its lane.
All fits minimise sum(w (x - approximation)^2) over the integer levels q and the scale (and
minimum).
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from dali_gguf.kernels.lanes import zero_f32x8
from dali_gguf.kernels.simd import (
    call,
    inline,
    jit,
    load_f32x8,
    splat_f32x8,
    v_abs,
    v_fdiv,
    v_fmul,
    v_fsub,
    v_fadd,
    v_max,
    v_min,
    v_round,
)

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
GRID, TABLE = 0, 1  # levels: integers low..high, or the 16 values of IQ4_VALUES


@intrinsic
def muladd(typing, x, y, z):
    """x * y + z, fused where the processor does it for free."""

    def gen(context, b, sig, args):
        return call(b, f"llvm.fmuladd.v{x.n}f32", x.ir, list(args))

    return z(x, y, z), gen


@intrinsic
def where_less(typing, a, c, yes, no):
    """Lane by lane: yes where a < c, no elsewhere (also where either is NaN)."""

    def gen(context, b, sig, args):
        return b.select(b.fcmp_ordered("<", args[0], args[1]), args[2], args[3])

    return yes(a, c, yes, no), gen


@intrinsic
def float_bits(typing, x):
    def gen(context, b, sig, args):
        return b.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), gen


@intrinsic
def bits_float(typing, x):
    def gen(context, b, sig, args):
        return b.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), gen


@jit
def half_bits(x):
    """IEEE half of a float32, nearest even; too large becomes the largest finite half."""
    bits = np.int64(float_bits(x)) & 0xFFFFFFFF
    sign = (bits >> 16) & 0x8000
    body = bits & 0x7FFFFFFF
    if body >= 0x477FF000:
        return np.uint16(sign | 0x7BFF)
    if body < 0x38800000:  # subnormal: steps of 2^-24
        value = np.float64(bits_float(np.int32(body))) * 16777216.0
        return np.uint16(sign | np.int64(np.rint(value)))
    body = body + 0xFFF + ((body >> 13) & 1)
    return np.uint16(sign | ((body - 0x38000000) >> 13))


@jit
def half_value(h):
    """float32 of half bits (finite)."""
    exponent, fraction = (np.int64(h) >> 10) & 31, np.int64(h) & 1023
    if exponent == 0:
        value = np.float32(fraction) * np.float32(2.0**-24)
    else:
        value = bits_float(np.int32(((exponent + 112) << 23) | (fraction << 13)))
    return -value if h & 0x8000 else value


@jit
def to_half(x):
    """The float32 that a half of x stands for."""
    return half_value(half_bits(x))


@inline
def transpose(source, offset, stride, n, lanes):
    """lanes [n, 8] = source[offset + j stride + i] for sub-block j, element i (flat arrays)."""
    for j in range(8):
        at = offset + j * stride
        for i in range(n):
            lanes[8 * i + j] = source[at + i]


@inline
def table_level(v):
    """The nearest of IQ4_VALUES: a sum of the steps whose midpoints v exceeds."""
    level = splat_f32x8(np.float32(IQ4_VALUES[0]))
    zero = zero_f32x8()
    for k in range(15):
        step = IQ4_VALUES[k + 1] - IQ4_VALUES[k]
        middle = np.float32(IQ4_VALUES[k] + 0.5 * step)
        level = v_fadd(
            level, where_less(splat_f32x8(middle), v, splat_f32x8(np.float32(step)), zero)
        )
    return level


@inline
def nearest_level(v, low, high, levels):
    if levels == TABLE:
        return table_level(v)
    return v_max(v_min(v_round(v), high), low)


@inline
def safe_inverse(v):
    """1 / v, and 0 where |v| is too small for a quotient."""
    zero, one = zero_f32x8(), splat_f32x8(np.float32(1.0))
    return where_less(splat_f32x8(np.float32(1e-30)), v_abs(v), v_fdiv(one, v), zero)


@inline
def weighted_sums(x, w, n):
    """sum w, sum w x, sum w x^2 of each lane."""
    sw = sx = sx2 = zero_f32x8()
    for i in range(n):
        v, weight = load_f32x8(x + 32 * i), load_f32x8(w + 32 * i)
        wx = v_fmul(weight, v)
        sw, sx, sx2 = v_fadd(sw, weight), v_fadd(sx, wx), muladd(wx, v, sx2)
    return sw, sx, sx2


@inline
def extremes(x, n):
    """Smallest and largest value of each lane."""
    low = high = load_f32x8(x)
    for i in range(1, n):
        v = load_f32x8(x + 32 * i)
        low, high = v_min(low, v), v_max(high, v)
    return low, high


# ---- x ~ scale q ------------------------------------------------------------------------------


@inline
def level_sums(x, w, n, inverse, low, high, levels):
    """With q = nearest level of x inverse: sum w q x and sum w q^2."""
    sxl = sl2 = zero_f32x8()
    for i in range(n):
        v, weight = load_f32x8(x + 32 * i), load_f32x8(w + 32 * i)
        q = nearest_level(v_fmul(v, inverse), low, high, levels)
        wq = v_fmul(weight, q)
        sxl, sl2 = muladd(wq, v, sxl), muladd(wq, q, sl2)
    return sxl, sl2


@inline
def fit_scale(x, w, n, low, high, levels, first, step, tries, both, polish):
    """The scale of x ~ scale q, q in low..high (or the table): float32 lanes.

    Starts put the largest |x| on the level low + first + k step, k < tries; with `both` on the
    mirrored one of high too. sum(w x^2) - error = (sum w q x)^2 / sum w q^2 is what is maximised.
    The best start is polished by alternating levels and scale.
    """
    smallest, largest = extremes(x, n)
    top = where_less(largest, v_fsub(zero_f32x8(), smallest), smallest, largest)
    per_level = safe_inverse(top)
    lows, highs = splat_f32x8(np.float32(low)), splat_f32x8(np.float32(high))
    scale = gain = zero_f32x8()
    for k in range(2 * tries if both else tries):
        level = low - first - step * k if k < tries else high + first + step * (k - tries)
        inverse = v_fmul(splat_f32x8(np.float32(level)), per_level)
        sxl, sl2 = level_sums(x, w, n, inverse, lows, highs, levels)
        candidate = v_fmul(sxl, safe_inverse(sl2))
        candidate_gain = v_fmul(candidate, sxl)
        scale = where_less(gain, candidate_gain, candidate, scale)
        gain = v_max(gain, candidate_gain)
    for _ in range(polish):
        sxl, sl2 = level_sums(x, w, n, safe_inverse(scale), lows, highs, levels)
        candidate = v_fmul(sxl, safe_inverse(sl2))
        candidate_gain = v_fmul(candidate, sxl)
        scale = where_less(gain, candidate_gain, candidate, scale)
        gain = v_max(gain, candidate_gain)
    return scale


# ---- x ~ scale q + minimum --------------------------------------------------------------------


@inline
def affine_sums(x, w, n, inverse, minimum, high):
    """With q = round((x - minimum) inverse) in 0..high: sum w q, sum w q^2, sum w q x."""
    sl = sl2 = sxl = zero = zero_f32x8()
    for i in range(n):
        v, weight = load_f32x8(x + 32 * i), load_f32x8(w + 32 * i)
        q = v_max(v_min(v_round(v_fmul(v_fsub(v, minimum), inverse)), high), zero)
        wq = v_fmul(weight, q)
        sl, sl2, sxl = v_fadd(sl, wq), muladd(wq, q, sl2), muladd(wq, v, sxl)
    return sl, sl2, sxl


@inline
def solve_affine(sw, sx, sl, sl2, sxl, signed):
    """Least-squares scale, minimum and the explained part of sum w x^2; minimum <= 0 unless
    signed."""
    zero = zero_f32x8()
    product = v_fmul(sw, sl2)
    determinant = v_fsub(product, v_fmul(sl, sl))
    least = v_fmul(
        product, splat_f32x8(np.float32(1e-6))
    )  # below: all levels alike, no two unknowns
    inverse = where_less(least, determinant, safe_inverse(determinant), zero)
    through_zero = v_fmul(sxl, safe_inverse(sl2))
    scale = v_fmul(v_fsub(v_fmul(sw, sxl), v_fmul(sx, sl)), inverse)
    scale = where_less(least, determinant, scale, through_zero)
    minimum = v_fmul(v_fsub(v_fmul(sl2, sx), v_fmul(sl, sxl)), inverse)
    if not signed:
        scale = where_less(zero, minimum, through_zero, scale)
        minimum = v_min(minimum, zero)
    return scale, minimum, muladd(scale, sxl, v_fmul(minimum, sx))


@inline
def fit_affine(x, w, n, high, first, step, tries, signed, polish):
    """scale > 0 and minimum of x ~ scale q + minimum, q in 0..high: float32 lanes.

    Start k spreads the range of x over high + first + k step levels.
    """
    sw, sx, sx2 = weighted_sums(x, w, n)
    low, top = extremes(x, n)
    if not signed:
        low = v_min(low, zero_f32x8())
    per_level, highs = safe_inverse(v_fsub(top, low)), splat_f32x8(np.float32(high))
    scale = gain = zero_f32x8()
    minimum = low
    for k in range(tries + polish):
        if k < tries:
            inverse = v_fmul(splat_f32x8(np.float32(high + first + step * k)), per_level)
            start = low
        else:
            inverse, start = safe_inverse(scale), minimum
        sl, sl2, sxl = affine_sums(x, w, n, inverse, start, highs)
        s, m, explained = solve_affine(sw, sx, sl, sl2, sxl, signed)
        explained = where_less(zero_f32x8(), s, explained, zero_f32x8())
        scale = where_less(gain, explained, s, scale)
        minimum = where_less(gain, explained, m, minimum)
        gain = v_max(gain, explained)
    return scale, minimum, sw
