"""Quantizers of the K types with minimums: Q2_K, Q4_K, Q5_K (256 weights a super-block).

x ~ d sc[j] q - dmin mn[j]: d, dmin halves a super-block, sc and mn integers a sub-block j, q a
weight.
First every sub-block gets its own best real scale and minimum, then these are rounded to integers,
then d and dmin are solved again for the levels found, as long as the error falls.
"""

import numpy as np

from dali_gguf.convert.quant_lanes import (
    fit_affine,
    muladd,
    safe_inverse,
    to_half,
    half_bits,
    transpose,
)
from dali_gguf.kernels.lanes import zero_f32x8
from dali_gguf.kernels.simd import (
    address_of,
    inline,
    jit,
    load_f32x8,
    splat_f32x8,
    store,
    v_fadd,
    v_fmul,
    v_fsub,
    v_max,
    v_min,
    v_round,
)
from dali_gguf.kernels.sums import sum_f32


@jit
def integer_scales(values, weights, count, top, integers):
    """Integers 0..top and the real unit of values ~ unit integers, by weighted least squares."""
    largest = np.float32(0.0)
    for j in range(count):
        largest = max(largest, values[j])
    if largest <= np.float32(1e-15):
        integers[:count] = 0
        return np.float32(0.0)
    best, unit = np.float32(-1.0), np.float32(0.0)
    for k in range(-6, 7):
        inverse = (np.float32(top) + np.float32(0.15) * np.float32(k)) / largest
        sxl = sl2 = np.float32(0.0)
        for j in range(count):
            q = min(np.floor(values[j] * inverse + np.float32(0.5)), np.float32(top))
            sxl += weights[j] * q * values[j]
            sl2 += weights[j] * q * q
        if sl2 > 0 and sxl * sxl > best * sl2:
            best, unit = sxl * sxl / sl2, sxl / sl2
    inverse = np.float32(1.0) / unit if unit > 0 else np.float32(0.0)
    for j in range(count):
        integers[j] = min(np.int64(np.floor(values[j] * inverse + np.float32(0.5))), top)
    return unit


@inline
def levels_pass(x, w, n, high, d, dmin, sc, mn, q, sums):
    """Levels q [n, 8] float32 for 8 sub-blocks at given d, dmin; returns the lanes' weighted
    errors.

    sums float32 [3, 8] receives sum w q, sum w q^2, sum w q x.
    """
    scale = v_fmul(splat_f32x8(d), load_f32x8(sc))
    offset = v_fmul(splat_f32x8(dmin), load_f32x8(mn))
    inverse, highs = safe_inverse(scale), splat_f32x8(np.float32(high))
    sl = sl2 = sxl = error = zero = zero_f32x8()
    for i in range(n):
        v, weight = load_f32x8(x + 32 * i), load_f32x8(w + 32 * i)
        level = v_max(v_min(v_round(v_fmul(v_fadd(v, offset), inverse)), highs), zero)
        store(q + 32 * i, level)
        wq = v_fmul(weight, level)
        sl, sl2, sxl = v_fadd(sl, wq), muladd(wq, level, sl2), muladd(wq, v, sxl)
        gap = v_fsub(v_fsub(v_fmul(scale, level), offset), v)
        error = muladd(v_fmul(weight, gap), gap, error)
    store(sums, sl)
    store(sums + 32, sl2)
    store(sums + 64, sxl)
    return sum_f32(error)


@jit
def solve_units(sc, mn, sums, sw, sx, count):
    """Least-squares (d, dmin) of sum w (x - d sc q + dmin mn)^2; (0, 0) where it has no solution.

    sums float32 [groups, 3, 8] as levels_pass writes them.
    """
    a = b = c = p = r = np.float64(0.0)
    for j in range(count):
        g, lane = j // 8, j % 8
        s, m = np.float64(sc[j]), np.float64(mn[j])
        a += s * s * sums[g, 1, lane]
        b += s * m * sums[g, 0, lane]
        c += m * m * sw[j]
        p += s * sums[g, 2, lane]
        r += m * sx[j]
    determinant = a * c - b * b
    if c <= 0 and a > 0:
        return np.float32(p / a), np.float32(0.0)
    if determinant <= 1e-9 * a * c or a <= 0:
        return np.float32(0.0), np.float32(0.0)
    return np.float32((p * c - b * r) / determinant), np.float32((b * p - a * r) / determinant)


@inline
def fit_super_block(x, w, n, groups, high, top, tries, polish, rounds, work, q, best_sc, best_mn):
    """Quantizes one super-block: returns d, dmin (rounded to half), fills best_sc, best_mn and q.

    x, w: addresses of float32 [groups, n, 8]; q float32 [2, groups, n, 8]: the result is in q[0].
    """
    sc, mn, scales, minimums, sw, sx, sens, sums = work
    count, size = 8 * groups, 32 * n
    for g in range(groups):
        s, m, weight = fit_affine(
            x + g * size, w + g * size, n, high, -0.9, 1.8 / (tries - 1), tries, False, polish
        )
        store(address_of(scales) + 32 * g, s)
        store(address_of(minimums) + 32 * g, v_fsub(zero_f32x8(), m))
        store(address_of(sw) + 32 * g, weight)
        wx = zero_f32x8()
        for i in range(n):
            at = g * size + 32 * i
            wx = muladd(load_f32x8(w + at), load_f32x8(x + at), wx)
        store(address_of(sx) + 32 * g, wx)
    d = to_half(integer_scales(scales, sw, count, top, sc))
    dmin = to_half(integer_scales(minimums, sw, count, top, mn))
    best, best_d, best_dmin = np.float32(np.inf), np.float32(0.0), np.float32(0.0)
    target, half = address_of(q), groups * size
    for round_ in range(rounds + 1):
        error = np.float32(0.0)
        for g in range(groups):
            error += levels_pass(
                x + g * size,
                w + g * size,
                n,
                high,
                d,
                dmin,
                address_of(sc) + 32 * g,
                address_of(mn) + 32 * g,
                target + half + g * size,
                address_of(sums) + 96 * g,
            )
        if not error < best:
            break
        best, best_d, best_dmin = error, d, dmin
        best_sc[:count], best_mn[:count] = sc[:count], mn[:count]
        q[0] = q[1]
        d, dmin = solve_units(sc, mn, sums, sw, sx, count)
        if d <= 0 or dmin < 0:
            break
        d, dmin = to_half(d), to_half(dmin)
        if round_ % 2 == 1:
            rescale(d, dmin, sums, sw, sx, sc, mn, count, top)
    return best_d, best_dmin


@jit
def rescale(d, dmin, sums, sw, sx, sc, mn, count, top):
    """New integers: each sub-block's own least-squares scale and minimum in units of d and dmin."""
    for j in range(count):
        g, lane = j // 8, j % 8
        sl, sl2, sxl = (
            np.float64(sums[g, 0, lane]),
            np.float64(sums[g, 1, lane]),
            np.float64(sums[g, 2, lane]),
        )
        determinant = sw[j] * sl2 - sl * sl
        if determinant <= 0:
            continue
        if dmin > 0:
            m = (sl * sxl - sl2 * sx[j]) / determinant
            mn[j] = min(max(np.rint(m / dmin), 0), top)
        if sl2 > 0:  # the best scale for the minimum just chosen
            s = (sxl + sl * dmin * mn[j]) / sl2
            sc[j] = min(max(np.rint(s / d), 0), top)


@jit
def scratch(groups, n):
    """Buffers of one thread: x, w [groups, n, 8]; q [2, groups, n, 8]; and the work tuple."""
    lanes = np.empty((2, groups, n * 8), np.float32)
    q = np.empty((2, groups * n * 8), np.float32)
    small = np.zeros((7, 8 * groups), np.float32)
    sums = np.zeros((groups, 3, 8), np.float32)
    work = (small[0], small[1], small[2], small[3], small[4], small[5], small[6], sums)
    return lanes, q, work, np.zeros(8 * groups, np.float32), np.zeros(8 * groups, np.float32)


@inline
def load_super_block(x, w, at, column, n, groups, lanes):
    for g in range(groups):
        transpose(x, at + g * 8 * n, n, n, lanes[0, g])
        transpose(w, column + g * 8 * n, n, n, lanes[1, g])


@jit
def pack_scales_6bit(sc, mn, out):
    """Eight 6-bit scales and minimums in 12 bytes (Q4_K and Q5_K)."""
    for j in range(4):
        s, m, s4, m4 = np.int64(sc[j]), np.int64(mn[j]), np.int64(sc[j + 4]), np.int64(mn[j + 4])
        out[j] = s | ((s4 >> 4) << 6)
        out[j + 4] = m | ((m4 >> 4) << 6)
        out[j + 8] = (s4 & 15) | ((m4 & 15) << 4)


@jit
def put_half(out, at, value):
    bits = half_bits(value)
    out[at], out[at + 1] = bits & 255, bits >> 8


@jit
def quantize_q4_k(x, w, cols, out):
    """x float32 [rows cols], w float32 [cols], out uint8: 144 bytes a super-block."""
    lanes, q, work, sc, mn = scratch(1, 32)
    xs, ws = address_of(lanes), address_of(lanes) + 1024
    for block in range(x.size // 256):
        load_super_block(x, w, block * 256, block * 256 % cols, 32, 1, lanes)
        d, dmin = fit_super_block(xs, ws, 32, 1, 15, 63, 16, 2, 3, work, q, sc, mn)
        o = out[block * 144 : block * 144 + 144]
        put_half(o, 0, d)
        put_half(o, 2, dmin)
        pack_scales_6bit(sc, mn, o[4:16])
        for j in range(4):
            for i in range(32):
                low, high = np.int32(q[0, 8 * i + 2 * j]), np.int32(q[0, 8 * i + 2 * j + 1])
                o[16 + 32 * j + i] = low | (high << 4)


@jit
def quantize_q5_k(x, w, cols, out):
    """x float32 [rows cols], w float32 [cols], out uint8: 176 bytes a super-block."""
    lanes, q, work, sc, mn = scratch(1, 32)
    xs, ws = address_of(lanes), address_of(lanes) + 1024
    for block in range(x.size // 256):
        load_super_block(x, w, block * 256, block * 256 % cols, 32, 1, lanes)
        d, dmin = fit_super_block(xs, ws, 32, 1, 31, 63, 14, 2, 3, work, q, sc, mn)
        o = out[block * 176 : block * 176 + 176]
        put_half(o, 0, d)
        put_half(o, 2, dmin)
        pack_scales_6bit(sc, mn, o[4:16])
        for i in range(32):
            fifth = 0
            for j in range(8):
                fifth |= (np.int32(q[0, 8 * i + j]) >> 4) << j
            o[16 + i] = fifth
            for j in range(4):
                low, high = np.int32(q[0, 8 * i + 2 * j]), np.int32(q[0, 8 * i + 2 * j + 1])
                o[48 + 32 * j + i] = (low & 15) | ((high & 15) << 4)


@jit
def quantize_q2_k(x, w, cols, out):
    """x float32 [rows cols], w float32 [cols], out uint8: 84 bytes a super-block."""
    lanes, q, work, sc, mn = scratch(2, 16)
    xs, ws = address_of(lanes), address_of(lanes) + 1024
    levels = np.empty(256, np.uint8)
    for block in range(x.size // 256):
        load_super_block(x, w, block * 256, block * 256 % cols, 16, 2, lanes)
        d, dmin = fit_super_block(xs, ws, 16, 2, 3, 15, 24, 3, 5, work, q, sc, mn)
        o = out[block * 84 : block * 84 + 84]
        for j in range(16):
            o[j] = np.int64(sc[j]) | (np.int64(mn[j]) << 4)
            for i in range(16):
                levels[16 * j + i] = np.uint8(q[0, (j // 8) * 128 + 8 * i + j % 8])
        for half in range(2):
            for i in range(32):
                at = 128 * half + i
                o[16 + 32 * half + i] = (
                    levels[at]
                    | (levels[at + 32] << 2)
                    | (levels[at + 64] << 4)
                    | (levels[at + 96] << 6)
                )
        put_half(o, 80, d)
        put_half(o, 82, dmin)
