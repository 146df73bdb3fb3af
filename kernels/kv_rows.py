"""Rows of the key/value cache: quantizing, and dequantizing a block of them for many queries.

Blocks of BLOCK keys become float32 panels (products.py): keys transposed, so that a column is a
key, values as they are.
"""

import numpy as np

from dali_gguf.kernels.lanes import (
    constant, half_to_float, narrow_i8, sign_extend_i32, to_f32, to_i32, transpose8,
    zero_f32x8,
)
from dali_gguf.kernels.products import PANEL
from dali_gguf.kernels.records import merged, padded
from dali_gguf.kernels.simd import (
    jit, load_f16, load_f32, load_f32x8, load_i8x8, load_i16x8, prefetch, splat_f32x8, store,
    v_abs, v_copysign, v_fadd, v_fmul,
)
from dali_gguf.kernels.vmath import float_to_half, half_of_float, largest_lane, v_larger

BLOCK = 64  # keys of a block: part of the order of summation, so a change changes last bits
VALUE_PANEL = 64 * BLOCK + 64  # bytes; a power of two would put all panels into one cache set
F32_ROWS, F16_ROWS, Q8_0_ROWS = 0, 1, 2  # formats of a cache row


_below_half = constant("f32", [0.49999997] * 8)


@merged
def _quantize_block(source, target):
    """32 float32 to a Q8_0 block: scale max |x| / 127 as a half, codes rounded half away from 0."""
    largest = zero_f32x8()
    for j in range(0, 128, 32):
        largest = v_larger(v_abs(load_f32x8(source + j)), largest)
    scale = largest_lane(largest) / np.float32(127)
    inverse = splat_f32x8(np.float32(1) / scale if scale > 0 else np.float32(0))
    store(target, half_of_float(scale))
    for j in range(4):
        x = v_fmul(load_f32x8(source + 32 * j), inverse)
        codes = to_i32(v_fadd(x, v_copysign(_below_half(), x)))
        store(target + 2 + 8 * j, narrow_i8(codes))


@merged
def store_row(kind, source, n, target):
    """n float32 at source as a cache row at target."""
    i = 0
    if kind == F16_ROWS:
        while i + 8 <= n:
            store(target + 2 * i, float_to_half(load_f32x8(source + 4 * i)))
            i += 8
        while i < n:
            store(target + 2 * i, half_of_float(load_f32(source + 4 * i)))
            i += 1
    elif kind == Q8_0_ROWS:
        while i < n:
            _quantize_block(source + 4 * i, target + i // 32 * 34)
            i += 32
    else:
        while i < n:
            store(target + 4 * i, load_f32(source + 4 * i))
            i += 1


@jit
def load_rows(kind, source, stride, count, size, rows, transpose, target):
    """`count` cache rows of `size` elements as float32 panels.

    transpose: keys; element k of row i at panel i // 16, line k, column i % 16, a panel having
    size lines (rounded up to 8); rows: scratch for 8 rows of size rounded up to 32. Else values;
    at panel k // 16, line i, column k % 16, panels VALUE_PANEL bytes apart. Panel columns beyond
    the data hold anything. size may be less than the row holds (MLA: values are in the keys).
    """
    line, depth = 4 * padded(size, 32), padded(size, 8)
    apart = 64 if transpose else VALUE_PANEL
    for first in range(0, count, 8):
        for r in range(first, min(first + 8, count)):
            at = source + r * stride
            for i in range(0, stride, 64):  # the same row of the next block: 1.3-1.4 times faster
                prefetch(at + BLOCK * stride + i)
            to = rows + (r - first) * line if transpose else target + 64 * r
            i = 0
            if kind == F16_ROWS:
                while i + 8 <= size:
                    place = to + (i >> 4) * apart + 4 * (i & 8)
                    store(place, half_to_float(load_i16x8(at + 2 * i)))
                    i += 8
                while i < size:
                    store(to + (i >> 4) * apart + 4 * (i & 15), load_f16(at + 2 * i))
                    i += 1
            elif kind == Q8_0_ROWS:
                while i < size:  # blocks of 32: a half scale, then 32 int8
                    scale = splat_f32x8(load_f16(at))
                    for j in range(0, 32, 8):
                        codes = to_f32(sign_extend_i32(load_i8x8(at + 2 + j)))
                        place = to + ((i + j) >> 4) * apart + 4 * (j & 8)
                        store(place, v_fmul(codes, scale))
                    at += 34
                    i += 32
            else:
                while i < size:
                    store(to + (i >> 4) * apart + 4 * (i & 15), load_f32(at + 4 * i))
                    i += 1
        if transpose:
            panel = target + first // PANEL * 64 * depth + first % PANEL * 4
            for k in range(0, depth, 8):
                transpose8(rows + 4 * k, line, panel + 64 * k, 64)
