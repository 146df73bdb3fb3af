"""Quantizers of the 256-weight types without minimums: Q3_K, Q6_K, IQ4_XS.

x ~ d sc[j] q: d a half a super-block, sc a signed integer a sub-block j, q a signed level a weight
(IQ4_XS: one of sixteen uneven values). Fitted like the affine types: real scales first, then
integers, then d solved again for the levels found, as long as the error falls.
"""

import numpy as np

from dali_gguf.convert.quant_affine import put_half
from dali_gguf.convert.quant_lanes import (
    GRID,
    IQ4_VALUES,
    TABLE,
    fit_scale,
    muladd,
    nearest_level,
    safe_inverse,
    to_half,
    transpose,
    weighted_sums,
)
from dali_gguf.kernels.lanes import zero_f32x8
from dali_gguf.kernels.simd import (
    address_of,
    inline,
    jit,
    load_f32x8,
    splat_f32x8,
    store,
    v_fmul,
    v_fsub,
)
from dali_gguf.kernels.sums import sum_f32


@jit
def signed_scales(values, weights, count, top, integers):
    """Integers -top..top-1 and the unit of values ~ unit integers; the largest value gets -top."""
    largest = np.float32(0.0)
    for j in range(count):
        if abs(values[j]) > abs(largest):
            largest = values[j]
    if abs(largest) <= np.float32(1e-15):
        integers[:count] = 0
        return np.float32(0.0)
    best, unit = np.float32(-1.0), np.float32(0.0)
    for k in range(-6, 7):
        inverse = -(np.float32(top) + np.float32(0.15) * np.float32(k)) / largest
        sxl = sl2 = np.float32(0.0)
        for j in range(count):
            q = max(min(np.rint(values[j] * inverse), np.float32(top - 1)), np.float32(-top))
            sxl += weights[j] * q * values[j]
            sl2 += weights[j] * q * q
        if sl2 > 0 and sxl * sxl > best * sl2:
            best, unit = sxl * sxl / sl2, sxl / sl2
    inverse = np.float32(1.0) / unit if unit != 0 else np.float32(0.0)
    for j in range(count):
        integers[j] = max(min(np.rint(values[j] * inverse), np.float32(top - 1)), np.float32(-top))
    return unit


@inline
def levels_pass(x, w, n, low, high, levels, d, sc, q, sums):
    """Levels q [n, 8] of 8 sub-blocks at unit d; sums [2, 8]: sum w q x, sum w q^2. Returns the
    error."""
    scale = v_fmul(splat_f32x8(d), load_f32x8(sc))
    inverse = safe_inverse(scale)
    lows, highs = splat_f32x8(np.float32(low)), splat_f32x8(np.float32(high))
    sxl = sl2 = error = zero_f32x8()
    for i in range(n):
        v, weight = load_f32x8(x + 32 * i), load_f32x8(w + 32 * i)
        level = nearest_level(v_fmul(v, inverse), lows, highs, levels)
        store(q + 32 * i, level)
        wq = v_fmul(weight, level)
        sxl, sl2 = muladd(wq, v, sxl), muladd(wq, level, sl2)
        gap = v_fsub(v_fmul(scale, level), v)
        error = muladd(v_fmul(weight, gap), gap, error)
    store(sums, sxl)
    store(sums + 32, sl2)
    return sum_f32(error)


@inline
def common_scale(sc, sums, count):
    """(d rounded to half that fits best to the groups' scales sc float32 [count], whether there is
    one). sums: of levels_pass."""
    a = p = np.float64(0.0)
    for j in range(count):
        a += np.float64(sc[j]) * sc[j] * sums[j // 8, 1, j % 8]
        p += np.float64(sc[j]) * sums[j // 8, 0, j % 8]
    if a <= 0:
        return np.float32(0.0), False
    return to_half(np.float32(p / a)), True


@inline
def refit_scales(sc, sums, count, top, d):
    """Every group's scale in sc float32 [count] anew, as its own best at d."""
    for j in range(count):
        if sums[j // 8, 1, j % 8] > 0:
            own = sums[j // 8, 0, j % 8] / (sums[j // 8, 1, j % 8] * d)
            sc[j] = max(min(np.rint(own), np.float32(top - 1)), np.float32(-top))


@inline
def fit_super_block(x, w, n, groups, low, high, levels, top, first, step, tries, both, polish,
                    rounds, work, q, best_sc):
    """Quantizes one super-block: returns d (rounded to half), fills best_sc and q[0].

    x, w: addresses of float32 [groups, n, 8]; q float32 [2, groups n 8].
    """
    sc, scales, sw, sums = work
    count, size = 8 * groups, 32 * n
    for g in range(groups):
        s = fit_scale(
            x + g * size, w + g * size, n, low, high, levels, first, step, tries, both, polish
        )
        weight, _, _ = weighted_sums(x + g * size, w + g * size, n)
        store(address_of(scales) + 32 * g, s)
        store(address_of(sw) + 32 * g, weight)
    d = to_half(signed_scales(scales, sw, count, top, sc))
    best, best_d = np.float32(np.inf), np.float32(0.0)
    target, half = address_of(q), groups * size
    for round_ in range(rounds + 1):
        error = np.float32(0.0)
        for g in range(groups):
            error += levels_pass(
                x + g * size,
                w + g * size,
                n,
                low,
                high,
                levels,
                d,
                address_of(sc) + 32 * g,
                target + half + g * size,
                address_of(sums) + 64 * g,
            )
        if not error < best:
            break
        best, best_d = error, d
        best_sc[:count] = sc[:count]
        q[0] = q[1]
        d, found = common_scale(sc, sums, count)
        if not found:
            break
        if round_ % 2 == 1 and d != 0:
            refit_scales(sc, sums, count, top, d)
    return best_d


@jit
def scratch(groups, n):
    lanes = np.empty((2, groups, n * 8), np.float32)
    q = np.zeros((2, groups * n * 8), np.float32)
    small = np.zeros((3, 8 * groups), np.float32)
    work = (small[0], small[1], small[2], np.zeros((groups, 2, 8), np.float32))
    return lanes, q, work, np.zeros(8 * groups, np.float32)


@inline
def load_super_block(x, w, at, column, n, groups, lanes):
    for g in range(groups):
        transpose(x, at + g * 8 * n, n, n, lanes[0, g])
        transpose(w, column + g * 8 * n, n, n, lanes[1, g])


@inline
def untranspose16(q, offset, levels):
    """levels uint8 [256] in weight order from q float32 [2, 16, 8], offset added."""
    for j in range(16):
        for i in range(16):
            levels[16 * j + i] = np.uint8(np.int32(q[0, (j // 8) * 128 + 8 * i + j % 8]) + offset)


@jit
def quantize_q6_k(x, w, cols, out):
    """x float32 [rows cols], w float32 [cols], out uint8: 210 bytes a super-block."""
    lanes, q, work, sc = scratch(2, 16)
    xs, ws = address_of(lanes), address_of(lanes) + 1024
    levels = np.empty(256, np.uint8)
    for block in range(x.size // 256):
        load_super_block(x, w, block * 256, block * 256 % cols, 16, 2, lanes)
        d = fit_super_block(
            xs, ws, 16, 2, -32, 31, GRID, 128, -0.9, 0.15, 13, False, 1, 3, work, q, sc
        )
        untranspose16(q, 32, levels)
        o = out[block * 210 : block * 210 + 210]
        for half in range(2):
            for i in range(32):
                at = 128 * half + i
                a, b, c, e = levels[at], levels[at + 32], levels[at + 64], levels[at + 96]
                o[64 * half + i] = (a & 15) | ((c & 15) << 4)
                o[64 * half + 32 + i] = (b & 15) | ((e & 15) << 4)
                o[128 + 32 * half + i] = (
                    (a >> 4) | ((b >> 4) << 2) | ((c >> 4) << 4) | ((e >> 4) << 6)
                )
        for j in range(16):
            o[192 + j] = np.uint8(np.int64(sc[j]) & 255)
        put_half(o, 208, d)


@jit
def quantize_q3_k(x, w, cols, out):
    """x float32 [rows cols], w float32 [cols], out uint8: 110 bytes a super-block."""
    lanes, q, work, sc = scratch(2, 16)
    xs, ws = address_of(lanes), address_of(lanes) + 1024
    levels = np.empty(256, np.uint8)
    for block in range(x.size // 256):
        load_super_block(x, w, block * 256, block * 256 % cols, 16, 2, lanes)
        d = fit_super_block(xs, ws, 16, 2, -4, 3, GRID, 32, -0.9, 0.15, 13, True, 2, 5, work, q, sc)
        untranspose16(q, 4, levels)
        o = out[block * 110 : block * 110 + 110]
        for i in range(32):
            mask = 0
            for j in range(8):
                mask |= (levels[32 * j + i] >> 2) << j
            o[i] = mask
        for half in range(2):
            for i in range(32):
                at = 128 * half + i
                o[32 + 32 * half + i] = (
                    (levels[at] & 3)
                    | ((levels[at + 32] & 3) << 2)
                    | ((levels[at + 64] & 3) << 4)
                    | ((levels[at + 96] & 3) << 6)
                )
        for j in range(4):
            s0, s1 = np.int64(sc[j]) + 32, np.int64(sc[j + 4]) + 32
            s2, s3 = np.int64(sc[j + 8]) + 32, np.int64(sc[j + 12]) + 32
            o[96 + j] = (s0 & 15) | ((s2 & 15) << 4)
            o[100 + j] = (s1 & 15) | ((s3 & 15) << 4)
            o[104 + j] = (s0 >> 4) | ((s1 >> 4) << 2) | ((s2 >> 4) << 4) | ((s3 >> 4) << 6)
        put_half(o, 108, d)


@jit
def table_index(value):
    """Position of an IQ4 value in the table."""
    index = 0
    for k in range(16):
        if IQ4_VALUES[k] == value:
            index = k
    return index


@jit
def quantize_iq4_xs(x, w, cols, out):
    """x float32 [rows cols], w float32 [cols], out uint8: 136 bytes a super-block."""
    lanes, q, work, sc = scratch(1, 32)
    xs, ws = address_of(lanes), address_of(lanes) + 1024
    index = np.zeros(256, np.uint8)
    for k in range(16):
        index[IQ4_VALUES[k] + 128] = k
    for block in range(x.size // 256):
        load_super_block(x, w, block * 256, block * 256 % cols, 32, 1, lanes)
        d = fit_super_block(
            xs, ws, 32, 1, -127, 113, TABLE, 32, -7.0, 1.0, 15, True, 2, 4, work, q, sc
        )
        o = out[block * 136 : block * 136 + 136]
        put_half(o, 0, d)
        high = 0
        for j in range(4):
            s0, s1 = np.int64(sc[2 * j]) + 32, np.int64(sc[2 * j + 1]) + 32
            o[4 + j] = (s0 & 15) | ((s1 & 15) << 4)
            high |= ((s0 >> 4) | ((s1 >> 4) << 2)) << (4 * j)
        o[2], o[3] = high & 255, high >> 8
        for j in range(8):
            for i in range(16):
                low = index[np.int64(q[0, 8 * i + j]) + 128]
                upper = index[np.int64(q[0, 8 * (i + 16) + j]) + 128]
                o[8 + 16 * j + i] = low | (upper << 4)
