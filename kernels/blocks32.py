"""Products with weights in blocks of 32: Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 IQ4_NL MXFP4.

A type gives codes(p) -> i8x32 of the block at p, in order, and where its halves lie: D_AT, M_AT;
    weight = d * (code - OFFSET) + m            (m only where HAS_MIN)
A type of nibbles says instead where in a block they start (NIBBLES, else 0) and what one stands for
(code).
For each row:  y = sum over blocks of  d dx (codes . q - OFFSET sum) + m dx sum,  with q, dx, sum
from the Q8 record. The bracket is an exact integer; blocks are added in order, one fma each: so
matrix-vector and matrix-matrix, any vector width and any thread give the same bits.

The functions here are templates: formats.py makes a copy for each type, with its names filled in,
and with add_first and add_second, which add neighbouring lanes of sums (as i16 while they fit).
"""

import numpy as np

from dali_gguf.kernels.amx import (
    D_IN_SLOT, EARLY, PRODUCT, RING, SUMS_IN_SLOT, load_group, store_group,
)
from dali_gguf.kernels.dots import add_dot_four, dot_four, madd, pair_dot_s, pair_dot_u
from dali_gguf.kernels.isa import VNNI
from dali_gguf.kernels.lanes import (
    concat, first_lane, gather_i16x8, half_to_float, high_nibbles, low_nibbles, nibbles,
    ones_i16x16, to_f32, transpose8, zero_f32x8,
)
from dali_gguf.kernels.panel import LINE, add_scaled, tile_splat, zero_tile
from dali_gguf.kernels.simd import (
    load_f32, load_i8, load_i8x16, load_i8x32, load_i32, load_u8, prefetch, splat_f32x8,
    splat_i32x8, store, v_add, v_fma, v_fmul, v_sub,
)
from dali_gguf.kernels.sums import add_halves, first_halves, second_halves


def codes(p):
    return code(nibbles(load_i8x16(p + NIBBLES)))


def scales8(p, stride):
    return half_to_float(gather_i16x8(p + D_AT, stride))


def mins8(p, stride):
    return half_to_float(gather_i16x8(p + M_AT, stride))


def dot(p, q):
    """i32x8 whose lanes sum to codes . q of one block."""
    if SIGNED:
        return madd(pair_dot_s(codes(p), load_i8x32(q)), ones_i16x16())
    return dot_four(codes(p), load_i8x32(q))


def pair_dot(p, low, high):
    """codes . q of a row's two blocks of nibbles at p: lanes 0..3 sum to the first's, 4..7 to the
    second's. low, high: the q that meet the low and the high nibbles of both."""
    packed = concat(load_i8x16(p + NIBBLES), load_i8x16(p + BYTES + NIBBLES))
    first, second = code(low_nibbles(packed)), code(high_nibbles(packed))
    if VNNI:
        return add_dot_four(dot_four(first, low), second, high)
    if SIGNED:
        one = ones_i16x16()
        return v_add(madd(pair_dot_s(first, low), one), madd(pair_dot_s(second, high), one))
    return madd(v_add(pair_dot_u(first, low), pair_dot_u(second, high)), ones_i16x16())


def add_four(v0, v1, v2, v3):
    """Sums of each i32x8 within its halves: the four first halves', then the second ones'."""
    return add_second(add_first(v0, v1), add_first(v2, v3))


def add_block(acc, total, p, stride, d, s):
    """acc + what the block at p of 8 rows adds. total = codes . q; d, s: where in the record."""
    scale = splat_f32x8(load_f32(d))
    if OFFSET:
        total = v_sub(total, splat_i32x8(np.int32(OFFSET) * load_i32(s)))
    acc = v_fma(to_f32(total), v_fmul(scales8(p, stride), scale), acc)
    if HAS_MIN:
        acc = v_fma(v_fmul(mins8(p, stride), scale), to_f32(splat_i32x8(load_i32(s))), acc)
    return acc


def eight_rows(p, stride, n, record, scratch):
    """Products of 8 rows at p, p + stride, ... with one record: f32x8.

    The 8 rows advance together. The next 8 are prefetched meanwhile, in the order of their
    addresses: memory is fastest when it is read as one stream. Nibbles are taken two blocks at a
    time, which fill whole vectors without moving halves about.
    """
    acc, d, s, far, done = zero_f32x8(), record + n, record + n + n // 8, p + 8 * stride, 0
    if NIBBLES:
        done = n // 64 * 2
        for _ in range(n // 64):
            for line in range(0, 16 * BYTES, 64):
                prefetch(far + line)
            low = concat(load_i8x16(record), load_i8x16(record + 32))
            high = concat(load_i8x16(record + 16), load_i8x16(record + 48))
            four = add_four(
                pair_dot(p, low, high), pair_dot(p + stride, low, high),
                pair_dot(p + 2 * stride, low, high), pair_dot(p + 3 * stride, low, high),
            )
            other = add_four(
                pair_dot(p + 4 * stride, low, high), pair_dot(p + 5 * stride, low, high),
                pair_dot(p + 6 * stride, low, high), pair_dot(p + 7 * stride, low, high),
            )
            acc = add_block(acc, first_halves(four, other), p, stride, d, s)
            acc = add_block(acc, second_halves(four, other), p + BYTES, stride, d + 4, s + 4)
            p += 2 * BYTES
            far += 16 * BYTES
            record += 64
            d += 8
            s += 8
    for _ in range(done, n // 32):
        for line in range(0, 8 * BYTES, 64):
            prefetch(far + line)
        four = add_four(
            dot(p, record), dot(p + stride, record),
            dot(p + 2 * stride, record), dot(p + 3 * stride, record),
        )
        other = add_four(
            dot(p + 4 * stride, record), dot(p + 5 * stride, record),
            dot(p + 6 * stride, record), dot(p + 7 * stride, record),
        )
        acc = add_block(acc, add_halves(four, other), p, stride, d, s)
        p += BYTES
        far += 8 * BYTES
        record += 32
        d += 4
        s += 4
    return acc


def pack_block(p, stride, last, target, scratch):
    """The block at p of 8 rows (rows after `last` repeat it) to half the lines of a panel block."""
    for r in range(8):
        store(scratch + 32 * r, codes(p + min(r, last) * stride))
    transpose8(scratch, 32, target, LINE)
    pack_scales(p, stride, last, target + 8 * LINE)


def tile_block(acc, w, i, n, y0, y1, y2, y3):
    """acc + the products of panel block w with block i of four records."""
    d = n + 4 * i
    s = d + n // 8
    total = zero_tile()
    if OFFSET:
        total = tile_splat(y0 + s, y1 + s, y2 + s, y3 + s, -np.int32(OFFSET))
    total = tile(total, w, 0, y0 + 32 * i, y1 + 32 * i, y2 + 32 * i, y3 + 32 * i)
    acc = add_scaled(acc, total, w + 8 * LINE, y0 + d, y1 + d, y2 + d, y3 + d)
    if HAS_MIN:
        total = tile_splat(y0 + s, y1 + s, y2 + s, y3 + s, np.int32(1))
        acc = add_scaled(acc, total, w + 9 * LINE, y0 + d, y1 + d, y2 + d, y3 + d)
    return acc


def gather_scales(record, first, last, n, slot):
    """Blocks' d and their sums, times what add_product adds of them, to a group's slot."""
    d = record + n + 4 * first
    copy(d, slot + D_IN_SLOT, 4 * (last - first))
    for i in range(0, 4 * (last - first), 4):
        total = load_i32(d + n // 8 + i)
        if OFFSET:
            total = np.int32(-OFFSET * total)
        store(slot + SUMS_IN_SLOT + i, total)


def group_blocks(panel, count, slots, ring, stage):
    """Adds the products of `count` panel blocks with a group of 16 tokens to stage [16][16]."""
    acc = load_group(stage)
    for s in range(min(EARLY, count)):
        start_product(s, panel, slots, ring)
    for s in range(count):
        if s + EARLY < count:
            start_product(s + EARLY, panel, slots, ring)
        w, d = panel + PANEL_BLOCK * s, slots + D_IN_SLOT + 4 * s
        sums = slots + SUMS_IN_SLOT + 4 * s
        acc = add_product(acc, ring + PRODUCT * (s % RING), sums, w + 8 * LINE, d)
    store_group(acc, stage)


def expand(p, n, out, scratch):
    """n weights at p to float32 at out."""
    for i in range(n // 32):
        block = p + i * BYTES
        scale, low = first_lane(scales8(block, 0)), np.float32(0)
        if HAS_MIN:
            low = first_lane(mins8(block, 0))
        store(scratch, codes(block))
        for k in range(32):
            code = np.int32(load_i8(scratch + k)) if SIGNED else np.int32(load_u8(scratch + k))
            store(out + 128 * i + 4 * k, scale * np.float32(code - np.int32(OFFSET)) + low)


PANEL_BLOCK = 10 * LINE
INLINE = (codes, scales8, mins8, dot, pair_dot, add_four, add_block)
ONCE = (eight_rows, pack_block, tile_block, gather_scales, group_blocks)
