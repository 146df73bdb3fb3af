"""Products with weights in blocks of 256: Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_XS.

A type gives, for the block at p,
    codes(p, j) -> i8x32: codes of weights 32j .. 32j+31, in order
    codes64(p, j) -> i8x64: codes of weights 64j .. 64j+63; where PAIRED, those that the j-th 64 of
        the record's second copy of q meet. quarter(s, j) -> i16x32: their scales, in scales_of(p)
    scales16(p) -> i16x16: the integer scale of each 16 weights (in pairs where it covers 32)
    mins16(p)   -> i16x16: the integer minimum of each 16 weights
    spread(p)   -> i16x16: scales16 with the even ones first, then the odd ones
    min_dot(p, sums, sums32) -> i32x4 whose lanes sum to msum (where MIN == FLOAT_MIN)
and says where its halves lie: D_AT, M_AT (dmin, right behind d, where MIN == FLOAT_MIN);
    weight = d * scale * code - dmin * min              (MIN == FLOAT_MIN)
    weight = d * (scale * code - min)                   (MIN == INT_MIN: Q3_K, Q6_K offsets)
For each row:  y = sum over blocks of  d dx isum - dmin dx msum, where isum = sum of scale code q
and msum = sum of min sum16 are exact integers (below 2^31); q, dx and the sums come from the QK
record. Blocks are added in order: the same bits on every path. Templates, as in blocks32.py.
"""

import numpy as np

from dali_gguf.kernels.amx import (
    D_IN_SLOT, EARLY, PRODUCT, RING, SUMS_IN_SLOT, add_mins, add_to_stage, subtract_from_stage,
    subtract_mins, zero_group,
)
from dali_gguf.kernels.dots import dot_four, madd, pair_dot_s, pair_dot_u, times_pairs
from dali_gguf.kernels.isa import WIDE
from dali_gguf.kernels.lanes import (
    concat, first_lane, gather_i16x8, gather_i32x8, half_to_float, narrow_i16, permutation, to_f32,
    transpose8, zero_f32x8,
)
from dali_gguf.kernels.panel import (
    LINE, add_scaled, double_pairs, subtract_scaled, tile_subtract, zero_tile,
)
from dali_gguf.kernels.quantize import pairs_at
from dali_gguf.kernels.simd import (
    load_f32, load_i8, load_i8x32, load_i8x64, load_i16, load_i16x16, load_u8, prefetch,
    splat_f32x8, store, v_add, v_fma, v_fmul, v_fsub, v_shr, v_sub,
)
from dali_gguf.kernels.sums import fold, sum_quads, sum_scratch

NO_MIN, FLOAT_MIN, INT_MIN = 0, 1, 2
GROUP = 16  # blocks of a row
AHEAD = 2048  # bytes: hardware prefetch stops at each page

quarter0, quarter1, quarter2, quarter3 = (
    permutation([4 * j + i // 8 for i in range(32)]) for j in range(4)
)
pairs_of_mins = permutation([2 * (i % 8) for i in range(16)])  # of mins that stand twice each
lane0, lane1, lane2, lane3, lane4, lane5, lane6, lane7 = (
    permutation([j] * 8 + [8 + j] * 8) for j in range(8)
)


def scales8(p, stride):
    return half_to_float(gather_i16x8(p + D_AT, stride))


def mins8(p, stride):
    return half_to_float(gather_i16x8(p + M_AT, stride))


def scaled(packed, q, scale):
    """i32 lanes whose sum is that of scale * code * q; scale: i16 pairs."""
    if SIGNED:
        return madd(pair_dot_s(packed, q), scale)
    if MAX_CODE > 128:  # sums of two would not fit an i16
        return times_pairs(dot_four(packed, q), scale)
    return madd(pair_dot_u(packed, q), scale)


def scaled32(p, j, q, scale):
    return scaled(codes(p, j), load_i8x32(q + 32 * j), scale)


def codes64(p, j):
    return concat(codes(p, 2 * j), codes(p, 2 * j + 1))


def scales_of(p):
    return scales16(p)


def quarter(s, j):
    if j == 0:
        return quarter0(s)
    if j == 1:
        return quarter1(s)
    if j == 2:
        return quarter2(s)
    return quarter3(s)


def scaled64(p, j, q, s):
    return scaled(codes64(p, j), load_i8x64(q + 64 * j), quarter(s, j))


def dot(p, q, sums):
    """i32x8 whose lanes sum to isum of one block (less msum where MIN == INT_MIN)."""
    if WIDE:
        s = scales_of(p)
        two = v_add(scaled64(p, 0, q, s), scaled64(p, 1, q, s))
        two = v_add(two, v_add(scaled64(p, 2, q, s), scaled64(p, 3, q, s)))
        if MIN == INT_MIN:
            return v_sub(fold(two), madd(mins16(p), load_i16x16(sums)))
        return fold(two)
    s = spread(p)
    acc = v_add(scaled32(p, 0, q, lane0(s)), scaled32(p, 1, q, lane1(s)))
    acc = v_add(acc, v_add(scaled32(p, 2, q, lane2(s)), scaled32(p, 3, q, lane3(s))))
    acc = v_add(acc, v_add(scaled32(p, 4, q, lane4(s)), scaled32(p, 5, q, lane5(s))))
    acc = v_add(acc, v_add(scaled32(p, 6, q, lane6(s)), scaled32(p, 7, q, lane7(s))))
    if MIN == INT_MIN:
        acc = v_sub(acc, madd(mins16(p), load_i16x16(sums)))
    return acc


def eight_rows(p, stride, n, record, scratch):
    """Products of 8 rows at p, p + stride, ... with one record: f32x8.

    Memory is read in one stream, row after row, up to GROUP blocks of each at a time: the integer
    sums of a group wait in scratch until all 8 rows are there.
    """
    acc, q = zero_f32x8(), record
    blocks, d, sums = n // 256, record + n, record + n + n // 64
    if WIDE and PAIRED:
        q = record + pairs_at(n)
    for first in range(0, blocks, GROUP):
        last = min(first + GROUP, blocks)
        for r in range(8):
            block = p + r * stride + first * BYTES
            for i in range(first, last):
                for line in range(0, BYTES, 64):
                    prefetch(block + AHEAD + line)
                total = dot(block, q + 256 * i, sums + 32 * i)
                at = scratch + 512 * (i - first) + 32 * r
                if MIN == FLOAT_MIN:
                    low = min_dot(block, sums + 32 * i, sums + n // 8 + 16 * i)
                    store(scratch + 512 * (i - first) + 256 + 16 * r, low)
                store(at, total)
                block += BYTES
        for i in range(first, last):
            at, here = scratch + 512 * (i - first), p + i * BYTES
            scale = splat_f32x8(load_f32(d + 4 * i))
            if MIN == FLOAT_MIN:
                halves = gather_i32x8(here + D_AT, stride)
                up = v_fmul(half_to_float(narrow_i16(halves)), scale)
                down = v_fmul(half_to_float(narrow_i16(v_shr(halves, 16))), scale)
                acc = v_fma(to_f32(sum_scratch(at)), up, acc)
                down = v_fsub(zero_f32x8(), down)
                acc = v_fma(to_f32(sum_quads(at + 256)), down, acc)
            else:
                acc = v_fma(to_f32(sum_scratch(at)), v_fmul(scales8(here, stride), scale), acc)
    return acc


def sums_at(n, i):
    """Where in a record the sums of block i are that a panel's min pairs meet: of 32 values each if
    the mins are, else of 16."""
    at = n + n // 64 + 4 * MIN_LINES * i
    if MIN_LINES == 4:
        return at + n // 8
    return at


def pack_block(p, stride, last, target, scratch):
    """The block at p of 8 rows (rows after `last` repeat it) to half the lines of a panel block."""
    for j in range(8):
        for r in range(8):
            store(scratch + 32 * r, codes(p + min(r, last) * stride, j))
        transpose8(scratch, 32, target + 8 * LINE * j, LINE)
    scales, mins = target + SCALES, target + MINS
    for r in range(8):
        row = p + min(r, last) * stride
        scale, low = scales16(row), mins16(row)  # unpacked together, so before anything is stored
        store(scratch + 32 * r, scale)
        if MIN_LINES == 4:
            store(scratch + 256 + 32 * r, pairs_of_mins(low))
        else:
            store(scratch + 256 + 32 * r, low)
    pack_scales(p, stride, last, mins + 8 * LINE)
    transpose8(scratch + 256, 32, mins, LINE)
    if SUB == 32:
        transpose8(scratch, 32, scales, LINE)
    else:
        transpose8(scratch, 32, scratch + 512, 32)
        for k in range(8):
            double_pairs(scratch + 512 + 32 * k, scales + 2 * LINE * k, LINE)


def tile_block(acc, w, i, n, y0, y1, y2, y3):
    """acc + the products of panel block w with block i of four records."""
    total = zero_tile()
    for j in range(256 // SUB):
        q, at = 256 * i + SUB * j, w + SUB // 4 * LINE * j
        total = tile(total, at, w + SCALES + LINE * j, y0 + q, y1 + q, y2 + q, y3 + q)
    d, s, halves = n + 4 * i, sums_at(n, i), w + MINS + 8 * LINE
    if MIN == INT_MIN:
        low = add_sums(zero_tile(), w + MINS, y0 + s, y1 + s, y2 + s, y3 + s)
        total = tile_subtract(total, low)
    acc = add_scaled(acc, total, halves, y0 + d, y1 + d, y2 + d, y3 + d)
    if MIN == FLOAT_MIN:
        total = add_sums(zero_tile(), w + MINS, y0 + s, y1 + s, y2 + s, y3 + s)
        acc = subtract_scaled(acc, total, halves + LINE, y0 + d, y1 + d, y2 + d, y3 + d)
    return acc


def gather_scales(record, first, last, n, slot):
    """Blocks' d and sums to a group's slot."""
    copy(record + n + 4 * first, slot + D_IN_SLOT, 4 * (last - first))
    size = 4 * MIN_LINES * (last - first)
    copy(record + sums_at(n, first), slot + SUMS_IN_SLOT, size)


def group_blocks(panel, count, slots, ring, stage):
    """Adds the products of `count` panel blocks with a group of 16 tokens to stage [16][16]."""
    for s in range(EARLY):
        start_product(s, panel, slots, ring)
    for i in range(count):
        w, d = panel + PANEL_BLOCK * i, slots + D_IN_SLOT + 4 * i
        sums, halves = slots + SUMS_IN_SLOT + 4 * MIN_LINES * i, w + MINS + 8 * LINE
        total = zero_group()
        if MIN == INT_MIN:
            for k in range(8):
                total = subtract_mins(total, w + MINS + LINE * k, sums + 4 * k)
        for j in range(PARTS):
            s = PARTS * i + j
            if s + EARLY < PARTS * count:
                start_product(s + EARLY, panel, slots, ring)
            total = add_product(total, ring + PRODUCT * (s % RING), w + SCALES + LINE * j)
        add_to_stage(stage, total, halves, d)
        if MIN == FLOAT_MIN:
            low = zero_group()
            for k in range(MIN_LINES):
                low = add_mins(low, w + MINS + LINE * k, sums + 4 * k)
            subtract_from_stage(stage, low, halves + LINE, d)


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
            at = scratch + 64 + k % 32
            product *= np.int32(load_i8(at)) if SIGNED else np.int32(load_u8(at))
            low = np.int32(load_i16(scratch + 32 + 2 * (k // 16)))
            if MIN == INT_MIN:
                value = d * np.float32(product - low)
            elif MIN == FLOAT_MIN:
                value = d * np.float32(product) - dmin * np.float32(low)
            else:
                value = d * np.float32(product)
            store(out + 1024 * i + 4 * k, value)


PAIRED = False
PANEL_BLOCK = 90 * LINE
INLINE = (sums_at, scales8, mins8, scaled, scaled32, codes64, scales_of, quarter, scaled64)
ONCE = (dot, eight_rows, pack_block, tile_block, gather_scales, group_blocks)
