"""Q2_K: 256 weights in 84 bytes: 16 bytes of scale | min nibbles, 64 bytes of 2-bit codes, d, dmin.

weight = d * scale * q - dmin * min, one scale and min for 16 weights. Byte l of half h holds the
codes of weights 128h + l + 32 * (0, 1, 2, 3).
"""

import numpy as np

from dali_gguf.kernels.blocks256 import FLOAT_MIN
from dali_gguf.kernels.dots import madd
from dali_gguf.kernels.lanes import (
    bit_field, even_then_odd, high_nibbles, low_nibbles, zero_extend_i16,
)
from dali_gguf.kernels.simd import (
    inline, load_i8x16, load_i8x32, load_i16x16, load_twice, splat_i8x32, v_and, v_shr,
)
from dali_gguf.kernels.sums import fold

BYTES, SIGNED, MAX_CODE, SUB, MIN = 84, False, 3, 16, FLOAT_MIN
D_AT, M_AT = 80, 82

first_pairs, last_pairs = bit_field(0, 2, 2, 0), bit_field(4, 6, 2, 0)


def reference(blocks):
    """uint8 [n, 84] -> float32 [n, 256]."""
    scales, halves = blocks[:, :16], blocks[:, 16:80].reshape(-1, 2, 1, 32)
    d, dmin = blocks[:, 80:84].copy().view(np.float16).astype(np.float32).T[..., None, None]
    q = (halves >> np.array([0, 2, 4, 6]).reshape(1, 1, 4, 1) & 3).reshape(-1, 16, 16)
    low, high = (scales & 15)[..., None], (scales >> 4)[..., None]
    return (d * low * q - dmin * high).astype(np.float32).reshape(-1, 256)


@inline
def codes(p, j):
    packed = load_i8x32(p + 16 + 32 * (j // 4))
    return v_and(v_shr(packed, 2 * (j % 4)), splat_i8x32(np.uint8(3)))


@inline
def codes64(p, j):
    packed = load_twice(p + 16 + 32 * (j // 2))
    if j & 1:
        return last_pairs(packed)
    return first_pairs(packed)


@inline
def scales16(p):
    return zero_extend_i16(low_nibbles(load_i8x16(p)))


@inline
def mins16(p):
    return zero_extend_i16(high_nibbles(load_i8x16(p)))


@inline
def spread(p):
    return even_then_odd(scales16(p))


@inline
def min_dot(p, sums, sums32):
    return fold(madd(mins16(p), load_i16x16(sums)))
