"""Products with weights in blocks of 32: Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 IQ4_NL MXFP4.

A type gives codes(p) -> i8x32 of the block at p, in order, and
    weight = scale * (code - OFFSET) - min          (min only where HAS_MIN)
For each row:  y = sum over blocks of  scale d (codes . q - OFFSET sum) - min d sum,  with q, d, sum
from the Q8 record. The bracket is an exact integer; blocks are added in order, one fma each: so
matrix-vector and matrix-matrix, any vector width and any thread give the same bits.

The functions here are templates: formats.py makes a copy for each type, with its names filled in.
"""

import numpy as np

from dali_gguf.kernels.dots import madd, pair_dot_s, pair_dot_u
from dali_gguf.kernels.lanes import first_lane, ones_i16x16, sum_rows, to_f32, zero_f32x8
from dali_gguf.kernels.panel import (
    add_scaled, subtract_scaled, tile_splat, tile_subtract, transpose8, zero_tile,
)
from dali_gguf.kernels.simd import (
    load_f32, load_i8, load_i8x32, load_i32, prefetch, splat_f32x8, splat_i32x8, store, v_fma, v_fmul,
    v_fsub, v_sub,
)


def dot(p, q):
    """i32x8 whose lanes sum to codes . q of one block."""
    if SIGNED:
        return madd(pair_dot_s(codes(p), load_i8x32(q)), ones_i16x16())
    return madd(pair_dot_u(codes(p), load_i8x32(q)), ones_i16x16())


def eight_rows(p, stride, n, record, scratch):
    """Products of 8 rows at p, p + stride, ... with one record: f32x8.

    The 8 rows advance together, and the next 8 are prefetched: taking row after row, as with
    blocks of 256, measured slower here, where half of the work is done on all 8 rows.
    """
    acc, ahead = zero_f32x8(), 8 * stride
    d, s = record + n, record + n + n // 8
    for i in range(n // 32):
        if i & 1 == 0:
            for k in range(8):
                prefetch(p + k * stride + ahead)
        total = sum_rows(
            dot(p, record), dot(p + stride, record),
            dot(p + 2 * stride, record), dot(p + 3 * stride, record),
            dot(p + 4 * stride, record), dot(p + 5 * stride, record),
            dot(p + 6 * stride, record), dot(p + 7 * stride, record),
        )
        scale = splat_f32x8(load_f32(d))
        if OFFSET:
            total = v_sub(total, splat_i32x8(np.int32(OFFSET) * load_i32(s)))
        acc = v_fma(to_f32(total), v_fmul(scales8(p, stride), scale), acc)
        if HAS_MIN:
            down = v_fsub(zero_f32x8(), v_fmul(mins8(p, stride), scale))
            acc = v_fma(down, to_f32(splat_i32x8(load_i32(s))), acc)
        p += BYTES
        record += 32
        d += 4
        s += 4
    return acc


def pack_block(p, stride, last, target, scratch):
    """The block at p of 8 rows (rows after `last` repeat it) to a panel block at target."""
    for r in range(8):
        row = p + min(r, last) * stride
        store(scratch + 32 * r, codes(row))
        store(target + 256 + 4 * r, first_lane(scales8(row, 0)))
        if HAS_MIN:
            store(target + 288 + 4 * r, first_lane(mins8(row, 0)))
    transpose8(scratch, 32, target)


def tile_block(acc, w, step, i, n, y0, y1, y2, y3):
    """acc + the products of panel block w with block i of four records."""
    total = tile(zero_tile(), w, step, 0, y0 + 32 * i, y1 + 32 * i, y2 + 32 * i, y3 + 32 * i)
    d = n + 4 * i
    s = d + n // 8
    if OFFSET:
        offset = tile_splat(y0 + s, y1 + s, y2 + s, y3 + s, np.int32(OFFSET))
        total = tile_subtract(total, offset)
    acc = add_scaled(acc, total, w + 256, step, y0 + d, y1 + d, y2 + d, y3 + d)
    if HAS_MIN:
        total = tile_splat(y0 + s, y1 + s, y2 + s, y3 + s, np.int32(1))
        acc = subtract_scaled(acc, total, w + 288, step, y0 + d, y1 + d, y2 + d, y3 + d)
    return acc


def expand(p, n, out, scratch):
    """n weights at p to float32 at out."""
    for i in range(n // 32):
        block = p + i * BYTES
        scale, low = first_lane(scales8(block, 0)), np.float32(0)
        if HAS_MIN:
            low = first_lane(mins8(block, 0))
        store(scratch, codes(block))
        for k in range(32):
            code = np.int32(load_i8(scratch + k)) - np.int32(OFFSET)
            store(out + 128 * i + 4 * k, scale * np.float32(code) - low)


PANEL_BLOCK = 320
INLINE, ONCE = (dot,), (eight_rows, pack_block, tile_block)
