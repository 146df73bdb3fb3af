"""Products with weights in blocks of 256: Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_XS.

A type gives, for the block at p,
    codes(p, j) -> i8x32: codes of weights 32j .. 32j+31, in order
    scales16(p) -> i16x16: the integer scale of each 16 weights (in pairs where it covers 32)
    mins16(p)   -> i16x16: the integer minimum of each 16 weights
    spread(p)   -> i16x16: scales16 with the even ones first, then the odd ones
    min_dot(p, sums, n) -> i32x8 whose lanes sum to msum (where MIN is not NO_MIN)
and says where its halves lie: D_AT, M_AT (dmin, where MIN == FLOAT_MIN);
    weight = d * scale * code - dmin * min              (MIN == FLOAT_MIN)
    weight = d * (scale * code - min)                   (MIN == INT_MIN: Q3_K, Q6_K offsets)
For each row:  y = sum over blocks of  d dx isum - dmin dx msum, where isum = sum of scale code q and
msum = sum of min sum16 are exact integers (below 2^31) and q, dx, sum16 come from the QK record.
Blocks are added in order: the same bits on every path. Templates, as in blocks32.py.
"""

import numpy as np

from dali_gguf.kernels.dots import madd, pair_dot_s, pair_dot_u
from dali_gguf.kernels.lanes import (
    first_lane, gather_i16x8, half_to_float, permutation, to_f32, transpose8, zero_f32x8,
)
from dali_gguf.kernels.panel import (
    add_scaled, double_pairs, subtract_scaled, tile_subtract, tile_sums, zero_tile,
)
from dali_gguf.kernels.simd import (
    load_f32, load_i8, load_i8x32, load_i16, prefetch, splat_f32x8, store, v_add, v_fma,
    v_fmul, v_fsub, v_sub,
)
from dali_gguf.kernels.sums import sum_scratch

NO_MIN, FLOAT_MIN, INT_MIN = 0, 1, 2
GROUP = 16  # blocks of a row
AHEAD = 2048  # bytes: hardware prefetch stops at each page

lane0, lane1, lane2, lane3, lane4, lane5, lane6, lane7 = (
    permutation([j] * 8 + [8 + j] * 8) for j in range(8)
)


def scales8(p, stride):
    return half_to_float(gather_i16x8(p + D_AT, stride))


def mins8(p, stride):
    return half_to_float(gather_i16x8(p + M_AT, stride))


def scaled(p, j, q, scale):
    if SIGNED:
        return madd(pair_dot_s(codes(p, j), load_i8x32(q + 32 * j)), scale)
    return madd(pair_dot_u(codes(p, j), load_i8x32(q + 32 * j)), scale)


def dot(p, q, sums):
    """i32x8 whose lanes sum to isum of one block (less msum where MIN == INT_MIN)."""
    s = spread(p)
    acc = v_add(scaled(p, 0, q, lane0(s)), scaled(p, 1, q, lane1(s)))
    acc = v_add(acc, v_add(scaled(p, 2, q, lane2(s)), scaled(p, 3, q, lane3(s))))
    acc = v_add(acc, v_add(scaled(p, 4, q, lane4(s)), scaled(p, 5, q, lane5(s))))
    acc = v_add(acc, v_add(scaled(p, 6, q, lane6(s)), scaled(p, 7, q, lane7(s))))
    if MIN == INT_MIN:
        acc = v_sub(acc, madd(mins16(p), load_i16x16(sums)))
    return acc


def eight_rows(p, stride, n, record, scratch):
    """Products of 8 rows at p, p + stride, ... with one record: f32x8.

    Memory is read in one stream, row after row, up to GROUP blocks of each at a time: the integer
    sums of a group wait in scratch until all 8 rows are there.
    """
    acc = zero_f32x8()
    blocks, d, sums = n // 256, record + n, record + n + n // 64
    for first in range(0, blocks, GROUP):
        last = min(first + GROUP, blocks)
        for r in range(8):
            block = p + r * stride + first * BYTES
            for i in range(first, last):
                for line in range(0, BYTES, 64):
                    prefetch(block + AHEAD + line)
                total = dot(block, record + 256 * i, sums + 32 * i)
                at = scratch + 512 * (i - first) + 32 * r
                if MIN == FLOAT_MIN:
                    store(at + 256, min_dot(block, sums + 32 * i, n))
                store(at, total)
                block += BYTES
        for i in range(first, last):
            at, here = scratch + 512 * (i - first), p + i * BYTES
            scale = splat_f32x8(load_f32(d + 4 * i))
            acc = v_fma(to_f32(sum_scratch(at)), v_fmul(scales8(here, stride), scale), acc)
            if MIN == FLOAT_MIN:
                down = v_fsub(zero_f32x8(), v_fmul(mins8(here, stride), scale))
                acc = v_fma(to_f32(sum_scratch(at + 256)), down, acc)
    return acc


def pack_block(p, stride, last, target, scratch):
    """The block at p of 8 rows (rows after `last` repeat it) to a panel block at target."""
    scales, mins = target + 2048, target + 2048 + 32 * (256 // SUB)
    for j in range(8):
        for r in range(8):
            store(scratch + 32 * r, codes(p + min(r, last) * stride, j))
        transpose8(scratch, 32, target + 256 * j, 32)
    for r in range(8):
        row = p + min(r, last) * stride
        store(scratch + 32 * r, scales16(row))
        store(scratch + 256 + 32 * r, mins16(row))
        store(mins + 256 + 4 * r, first_lane(scales8(row, 0)))
        if MIN == FLOAT_MIN:
            store(mins + 288 + 4 * r, first_lane(mins8(row, 0)))
    transpose8(scratch + 256, 32, mins, 32)
    if SUB == 32:
        transpose8(scratch, 32, scales, 32)
    else:
        transpose8(scratch, 32, scratch + 512, 32)
        for k in range(8):
            double_pairs(scratch + 512 + 32 * k, scales + 64 * k)


def tile_block(acc, w, step, i, n, y0, y1, y2, y3):
    """acc + the products of panel block w with block i of four records."""
    scales, mins = w + 2048, w + 2048 + 32 * (256 // SUB)
    total = zero_tile()
    for j in range(256 // SUB):
        q = 256 * i + SUB * j
        at = w + 8 * SUB * j
        total = tile(total, at, step, scales + 32 * j, y0 + q, y1 + q, y2 + q, y3 + q)
    d, s = n + 4 * i, n + n // 64 + 32 * i
    if MIN == INT_MIN:
        low = tile_sums(zero_tile(), mins, step, y0 + s, y1 + s, y2 + s, y3 + s)
        total = tile_subtract(total, low)
    acc = add_scaled(acc, total, mins + 256, step, y0 + d, y1 + d, y2 + d, y3 + d)
    if MIN == FLOAT_MIN:
        total = tile_sums(zero_tile(), mins, step, y0 + s, y1 + s, y2 + s, y3 + s)
        acc = subtract_scaled(acc, total, mins + 288, step, y0 + d, y1 + d, y2 + d, y3 + d)
    return acc


def expand(p, n, out, scratch):
    """n weights at p to float32 at out."""
    for i in range(n // 256):
        block = p + i * BYTES
        d, dmin = first_lane(scales8(block, 0)), np.float32(0)
        if MIN == FLOAT_MIN:
            dmin = first_lane(mins8(block, 0))
        store(scratch, scales16(block))
        store(scratch + 32, mins16(block))
        for k in range(256):
            if k % 32 == 0:
                store(scratch + 64, codes(block, k // 32))
            product = np.int32(load_i16(scratch + 2 * (k // 16)))
            product *= np.int32(load_i8(scratch + 64 + k % 32))
            low = np.int32(load_i16(scratch + 32 + 2 * (k // 16)))
            if MIN == INT_MIN:
                value = d * np.float32(product - low)
            elif MIN == FLOAT_MIN:
                value = d * np.float32(product) - dmin * np.float32(low)
            else:
                value = d * np.float32(product)
            store(out + 1024 * i + 4 * k, value)


PANEL_BLOCK = 2048 + 512 + 256 + 64
INLINE, ONCE = (scales8, mins8, scaled), (dot, eight_rows, pack_block, tile_block)
