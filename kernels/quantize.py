"""Activations to int8, on the fly, in the form the weight's type wants.

A record is one token's activations of n values, at one address:
    Q8 (weights in blocks of 32):    q int8 [n] | d float32 [n/32]  | sum int32 [n/32]
    QK (weights in blocks of 256):   q int8 [n] | d float32 [n/256] | sum int16 [n/16] | sum of 32
                                     values each int16 [n/32]
                                     | with 64-byte vectors, from pairs_at(n) on, q once more, where
                                     the second and third 32 of each 128 have changed places
value = d * q, |q| <= 127; sum = sum of q over 32 (Q8) or 16 (QK) values. These are ggml's Q8_0
and Q8_K with a float32 d and a symmetric range. F32 weights take the float32 row itself.
A NaN or infinity among the values makes the block's d NaN: it shows in the result.
"""

import numpy as np

from dali_gguf.kernels.isa import WIDE
from dali_gguf.kernels.lanes import concat, narrow_i8, to_i32, zero_f32x8
from dali_gguf.kernels.simd import (
    inline, jit, load_f32x8, load_i8x32, splat_f32x8, store, v_abs, v_add, v_fma, v_fmul, v_max,
    v_round,
)
from dali_gguf.kernels.sums import max_f32, sum_f32, sum_i32

FLOAT, Q8, QK = 0, 1, 2


@jit
def pairs_at(n):
    """Where the second copy of q lies in a QK record: a multiple of 64."""
    return (n + n // 64 + n // 8 + n // 16 + 63) // 64 * 64


@jit
def record_bytes(kind, n):
    """Size of a token's record, a multiple of 64."""
    if kind == Q8:
        size = n + n // 4
    elif kind == QK:
        size = pairs_at(n)
        if WIDE:
            size += n
    else:
        size = 4 * n
    return (size + 63) // 64 * 64


@inline
def _largest(x, count):
    """Largest magnitude of 8 * count values, and 0 (NaN if any value is not finite)."""
    top, bad = zero_f32x8(), zero_f32x8()
    for i in range(count):
        v = load_f32x8(x + 32 * i)
        top = v_max(top, v_abs(v))
        bad = v_fma(v, zero_f32x8(), bad)
    return max_f32(top), sum_f32(bad)


@inline
def _round16(x, scale, q):
    """16 values times scale, rounded to int8 at q; returns their sum."""
    a = to_i32(v_round(v_fmul(load_f32x8(x), scale)))
    b = to_i32(v_round(v_fmul(load_f32x8(x + 32), scale)))
    store(q, narrow_i8(concat(a, b)))
    return sum_i32(v_add(a, b))


@inline
def _inverse(top):
    return np.float32(127) / top if top > np.float32(0) else np.float32(0)


@jit
def quantize_q8(x, n, record):
    for i in range(n // 32):
        top, bad = _largest(x + 128 * i, 4)
        scale = splat_f32x8(_inverse(top))
        total = _round16(x + 128 * i, scale, record + 32 * i)
        total += _round16(x + 128 * i + 64, scale, record + 32 * i + 16)
        store(record + n + 4 * i, top * np.float32(1 / 127) + bad)
        store(record + n + n // 8 + 4 * i, np.int32(total))


@jit
def quantize_qk(x, n, record):
    sums = record + n + n // 64
    sums32 = sums + n // 8
    for i in range(n // 256):
        top, bad = _largest(x + 1024 * i, 32)
        scale = splat_f32x8(_inverse(top))
        for j in range(8 * i, 8 * i + 8):
            first = _round16(x + 128 * j, scale, record + 32 * j)
            second = _round16(x + 128 * j + 64, scale, record + 32 * j + 16)
            store(sums + 4 * j, np.int16(first))
            store(sums + 4 * j + 2, np.int16(second))
            store(sums32 + 2 * j, np.int16(first + second))
        store(record + n + 4 * i, top * np.float32(1 / 127) + bad)
    if WIDE:
        for i in range(n // 32):
            target = i & ~3 | (i & 1) << 1 | i >> 1 & 1
            store(record + pairs_at(n) + 32 * target, load_i8x32(record + 32 * i))


@jit
def quantize_row(kind, x, n, record):
    """float32 row at x to a record of the kind."""
    if kind == Q8:
        quantize_q8(x, n, record)
    else:
        quantize_qk(x, n, record)
