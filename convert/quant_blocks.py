"""Quantizers of the types with one scale for 32 weights: Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 IQ4_NL MXFP4.

Eight blocks are fitted at a time, one in each lane. x float32 [rows cols] flat, w float32 [cols]
importance of the columns, out uint8 flat; cols is a multiple of 32.
"""

import numpy as np

from dali_gguf.convert.quant_affine import put_half
from dali_gguf.convert.quant_lanes import (
    GRID,
    IQ4_VALUES,
    TABLE,
    fit_affine,
    fit_scale,
    half_bits,
    half_value,
    nearest_level,
    safe_inverse,
    to_half,
    where_less,
)
from dali_gguf.kernels.lanes import narrow_i8, to_i32, zero_f32x8
from dali_gguf.kernels.simd import (
    address_of,
    inline,
    jit,
    load_f32x8,
    splat_f32x8,
    store,
    v_abs,
    v_fadd,
    v_fmul,
    v_fsub,
    v_max,
    v_min,
    v_round,
)
from dali_gguf.kernels.sums import max_f32

FP4_HALVES = (0, 1, 2, 3, 4, 6, 8, 12)  # twice the magnitudes of FP4 (E2M1)


@inline
def load_group(x, w, cols, first, count, lanes):
    """lanes float32 [2, 32 8]: weights and importances of blocks first..first+7, the last
    repeated."""
    for j in range(8):
        at = min(first + j, count - 1) * 32
        column = at % cols
        for i in range(32):
            lanes[0, 8 * i + j] = x[at + i]
            lanes[1, 8 * i + j] = w[column + i]


@inline
def round_lanes(v, values):
    """The lanes of v rounded to half, also written to values float32 [8]."""
    store(address_of(values), v)
    for j in range(8):
        values[j] = to_half(values[j])
    return load_f32x8(address_of(values))


@inline
def symmetric_group(lanes, low, high, levels, first, step, tries, q, scales):
    """Half scales [8] and levels q float32 [32, 8] of a group."""
    xs, ws = address_of(lanes), address_of(lanes) + 1024
    scale = fit_scale(xs, ws, 32, low, high, levels, first, step, tries, True, 2)
    inverse = safe_inverse(round_lanes(scale, scales))
    lows, highs = splat_f32x8(np.float32(low)), splat_f32x8(np.float32(high))
    for i in range(32):
        v = v_fmul(load_f32x8(xs + 32 * i), inverse)
        store(address_of(q) + 32 * i, nearest_level(v, lows, highs, levels))


@inline
def affine_group(lanes, high, q, scales, minimums):
    """Half scales and minimums [8] and levels q float32 [32, 8] of a group."""
    xs, ws = address_of(lanes), address_of(lanes) + 1024
    scale, minimum, _ = fit_affine(xs, ws, 32, high, -0.9, 0.15, 13, True, 2)
    inverse = safe_inverse(round_lanes(scale, scales))
    offset = round_lanes(minimum, minimums)
    highs, zero = splat_f32x8(np.float32(high)), zero_f32x8()
    for i in range(32):
        v = v_fmul(v_fsub(load_f32x8(xs + 32 * i), offset), inverse)
        store(address_of(q) + 32 * i, v_max(v_min(v_round(v), highs), zero))


@inline
def pack_nibbles(q, j, offset, out, at):
    """16 bytes of low nibbles of block j: weight i with weight i + 16."""
    for i in range(16):
        low, high = np.int32(q[8 * i + j]) + offset, np.int32(q[8 * (i + 16) + j]) + offset
        out[at + i] = (low & 15) | ((high & 15) << 4)


@inline
def pack_fifth_bits(q, j, offset, out, at):
    bits = np.int64(0)
    for i in range(32):
        bits |= ((np.int64(q[8 * i + j]) + offset) >> 4) << i
    for k in range(4):
        out[at + k] = (bits >> (8 * k)) & 255


@jit
def quantize_q8_0(x, w, cols, out):
    """34 bytes a block. Levels are rounded for the scale as stored, in half precision."""
    xs, os = address_of(x), address_of(out)
    for block in range(x.size // 32):
        at = xs + 128 * block
        a, b, c, d = load_f32x8(at), load_f32x8(at + 32), load_f32x8(at + 64), load_f32x8(at + 96)
        largest = max_f32(v_max(v_max(v_abs(a), v_abs(b)), v_max(v_abs(c), v_abs(d))))
        bits = half_bits(largest / np.float32(127.0))
        scale = half_value(bits)
        inverse = splat_f32x8(np.float32(1.0) / scale if scale > 0 else np.float32(0.0))
        top, bottom = splat_f32x8(np.float32(127.0)), splat_f32x8(np.float32(-127.0))
        o = os + 34 * block
        store(o, bits)
        store(o + 2, narrow_i8(to_i32(v_max(v_min(v_round(v_fmul(a, inverse)), top), bottom))))
        store(o + 10, narrow_i8(to_i32(v_max(v_min(v_round(v_fmul(b, inverse)), top), bottom))))
        store(o + 18, narrow_i8(to_i32(v_max(v_min(v_round(v_fmul(c, inverse)), top), bottom))))
        store(o + 26, narrow_i8(to_i32(v_max(v_min(v_round(v_fmul(d, inverse)), top), bottom))))


@jit
def quantize_q4_0(x, w, cols, out):
    """18 bytes a block."""
    lanes, q, scales = (
        np.empty((2, 256), np.float32),
        np.empty(256, np.float32),
        np.empty(8, np.float32),
    )
    count = x.size // 32
    for first in range(0, count, 8):
        load_group(x, w, cols, first, count, lanes)
        symmetric_group(lanes, -8, 7, GRID, -0.9, 0.15, 13, q, scales)
        for j in range(min(8, count - first)):
            at = (first + j) * 18
            put_half(out, at, scales[j])
            pack_nibbles(q, j, 8, out, at + 2)


@jit
def quantize_q5_0(x, w, cols, out):
    """22 bytes a block."""
    lanes, q, scales = (
        np.empty((2, 256), np.float32),
        np.empty(256, np.float32),
        np.empty(8, np.float32),
    )
    count = x.size // 32
    for first in range(0, count, 8):
        load_group(x, w, cols, first, count, lanes)
        symmetric_group(lanes, -16, 15, GRID, -0.9, 0.15, 13, q, scales)
        for j in range(min(8, count - first)):
            at = (first + j) * 22
            put_half(out, at, scales[j])
            pack_fifth_bits(q, j, 16, out, at + 2)
            pack_nibbles(q, j, 16, out, at + 6)


@jit
def quantize_iq4_nl(x, w, cols, out):
    """18 bytes a block."""
    lanes, q, scales = (
        np.empty((2, 256), np.float32),
        np.empty(256, np.float32),
        np.empty(8, np.float32),
    )
    index = np.zeros(256, np.float32)
    for k in range(16):
        index[IQ4_VALUES[k] + 128] = k
    count = x.size // 32
    for first in range(0, count, 8):
        load_group(x, w, cols, first, count, lanes)
        symmetric_group(lanes, -127, 113, TABLE, -7.0, 1.0, 15, q, scales)
        for i in range(256):
            q[i] = index[np.int64(q[i]) + 128]
        for j in range(min(8, count - first)):
            at = (first + j) * 18
            put_half(out, at, scales[j])
            pack_nibbles(q, j, 0, out, at + 2)


@jit
def quantize_q4_1(x, w, cols, out):
    """20 bytes a block."""
    lanes, q = np.empty((2, 256), np.float32), np.empty(256, np.float32)
    scales, minimums = np.empty(8, np.float32), np.empty(8, np.float32)
    count = x.size // 32
    for first in range(0, count, 8):
        load_group(x, w, cols, first, count, lanes)
        affine_group(lanes, 15, q, scales, minimums)
        for j in range(min(8, count - first)):
            at = (first + j) * 20
            put_half(out, at, scales[j])
            put_half(out, at + 2, minimums[j])
            pack_nibbles(q, j, 0, out, at + 4)


@jit
def quantize_q5_1(x, w, cols, out):
    """24 bytes a block."""
    lanes, q = np.empty((2, 256), np.float32), np.empty(256, np.float32)
    scales, minimums = np.empty(8, np.float32), np.empty(8, np.float32)
    count = x.size // 32
    for first in range(0, count, 8):
        load_group(x, w, cols, first, count, lanes)
        affine_group(lanes, 31, q, scales, minimums)
        for j in range(min(8, count - first)):
            at = (first + j) * 24
            put_half(out, at, scales[j])
            put_half(out, at + 2, minimums[j])
            pack_fifth_bits(q, j, 0, out, at + 4)
            pack_nibbles(q, j, 0, out, at + 8)


@inline
def fp4_level(v):
    """The nearest FP4 value of v, doubled (0..12), sign kept."""
    size, level, zero = v_abs(v), zero_f32x8(), zero_f32x8()
    for k in range(7):
        low, high = FP4_HALVES[k], FP4_HALVES[k + 1]
        middle = splat_f32x8(np.float32(0.5 * (low + high)))
        level = v_fadd(level, where_less(middle, size, splat_f32x8(np.float32(high - low)), zero))
    return where_less(v, zero, v_fsub(zero, level), level)


@inline
def fp4_error(x, w, half_scale):
    """Weighted squared error of each lane at half the block's scale; x [32, 8]."""
    inverse, error = safe_inverse(half_scale), zero_f32x8()
    for i in range(32):
        v = load_f32x8(x + 32 * i)
        gap = v_fsub(v_fmul(fp4_level(v_fmul(v, inverse)), half_scale), v)
        error = v_fadd(error, v_fmul(v_fmul(load_f32x8(w + 32 * i), gap), gap))
    return error


@jit
def quantize_mxfp4(x, w, cols, out):
    """17 bytes a block: a power-of-two scale (the best of three) and 32 FP4 values."""
    lanes, q = np.empty((2, 256), np.float32), np.empty(256, np.float32)
    small = np.zeros((4, 8), np.float32)  # exponent, half scale, error, best exponent
    code = np.zeros(25, np.uint8)
    for k in range(8):
        code[12 + FP4_HALVES[k]], code[12 - FP4_HALVES[k]] = k, k + 8 if k else 0
    xs, ws, count = address_of(lanes), address_of(lanes) + 1024, x.size // 32
    for first in range(0, count, 8):
        load_group(x, w, cols, first, count, lanes)
        largest = v_abs(load_f32x8(xs))
        for i in range(1, 32):
            largest = v_max(largest, v_abs(load_f32x8(xs + 32 * i)))
        store(address_of(small), largest)
        for j in range(8):
            top = small[0, j]
            small[0, j] = np.floor(np.log2(top)) - 2 if top > np.float32(1e-30) else -127
        best = splat_f32x8(np.float32(np.inf))
        small[3] = -127
        for k in range(-1, 2):
            for j in range(8):
                small[1, j] = np.float32(0.5) * np.float32(2.0) ** max(
                    small[0, j] + k, np.float32(-120.0)
                )
            error = fp4_error(xs, ws, load_f32x8(address_of(small) + 32))
            candidate = splat_f32x8(np.float32(k))
            exponent = v_fadd(load_f32x8(address_of(small)), candidate)
            store(
                address_of(small) + 96,
                where_less(error, best, exponent, load_f32x8(address_of(small) + 96)),
            )
            best = v_min(best, error)
        for j in range(8):
            small[3, j] = max(small[3, j], np.float32(-127.0))
            small[1, j] = np.float32(0.5) * np.float32(2.0) ** max(small[3, j], np.float32(-120.0))
        inverse = safe_inverse(load_f32x8(address_of(small) + 32))
        for i in range(32):
            store(address_of(q) + 32 * i, fp4_level(v_fmul(load_f32x8(xs + 32 * i), inverse)))
        for i in range(256):
            q[i] = code[np.int64(q[i]) + 12]
        for j in range(min(8, count - first)):
            at = (first + j) * 17
            out[at] = np.uint8(small[3, j] + np.float32(127.0))
            pack_nibbles(q, j, 0, out, at + 1)
