"""Q4_K: 256 weights in 144 bytes: d half, dmin half, 12 bytes of scales and mins, 128 of nibbles.

weight = d * scale * q - dmin * min, one 6-bit scale and min for 32 weights. Byte l of quarter k
holds weight 64k + l in its low nibble and 64k + 32 + l in its high one.
"""

import numpy as np

from dali_gguf.kernels.blocks256 import FLOAT_MIN
from dali_gguf.kernels.dots import madd
from dali_gguf.kernels.lanes import (
    concat, high_nibbles, low_nibbles, merge, permutation,
    zero_extend_i16,
)
from dali_gguf.kernels.simd import (
    inline, load_i8x16, load_i8x32, load_i16x16, splat_i8x16, v_and, v_or, v_shr,
)

BYTES, SIGNED, MAX_CODE, SUB, MIN = 144, False, 15, 32, FLOAT_MIN
D_AT, M_AT = 0, 2

twice = permutation([i // 2 for i in range(16)])
scales_twice = permutation([*range(8), *range(8)])
each_scale_twice = permutation([i // 2 for i in range(16)])
each_min_twice = permutation([8 + i // 2 for i in range(16)])
# where the two upper bits (of a, b) and the nibbles (of c) of the last four scales and mins belong
high_parts = permutation([0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7])
last_parts = permutation([8, 9, 10, 11, 8, 9, 10, 11, 24, 25, 26, 27, 24, 25, 26, 27])
pick = merge([0, 1, 2, 3, 20, 21, 22, 23, 4, 5, 6, 7, 28, 29, 30, 31])


def unpack_scales(packed):
    """12 bytes [n, 12] -> (scales, mins) uint8 [n, 8] each (also Q5_K)."""
    a, b, c = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([a & 63, (c & 15) | (a >> 6 << 4)], axis=1)
    mins = np.concatenate([b & 63, (c >> 4) | (b >> 6 << 4)], axis=1)
    return scales, mins


def reference(blocks):
    """uint8 [n, 144] -> float32 [n, 256]."""
    d, dmin = blocks[:, :4].copy().view(np.float16).astype(np.float32).T[..., None, None]
    scales, mins = unpack_scales(blocks[:, 4:16])
    quarters = blocks[:, 16:].reshape(-1, 4, 1, 32)
    q = np.concatenate([quarters & 15, quarters >> 4], axis=2).reshape(-1, 8, 32)
    return (d * scales[..., None] * q - dmin * mins[..., None]).astype(np.float32).reshape(-1, 256)


@inline
def codes(p, j):
    packed = load_i8x32(p + 16 + 32 * (j // 2))
    if j & 1:
        return high_nibbles(packed)
    return low_nibbles(packed)


@inline
def scales_then_mins(p):
    """i16x16: the 8 scales, then the 8 mins. Each is 6 bits of the bytes a[4] b[4] c[4]: the first
    four scales are a & 63 and the last c & 15 | a >> 6 << 4; mins likewise from b and c >> 4."""
    packed = load_i8x16(p + 4)
    six = v_and(packed, splat_i8x16(np.uint8(0x3F)))
    two = v_and(v_shr(packed, 2), splat_i8x16(np.uint8(0x30)))
    four = concat(low_nibbles(packed), high_nibbles(packed))
    return zero_extend_i16(pick(six, v_or(high_parts(two), last_parts(four))))


@inline
def spread(p):
    return scales_twice(scales_then_mins(p))


@inline
def min_dot(p, sums, n):
    """The zeros before the sums of 32 meet the scales."""
    return madd(scales_then_mins(p), load_i16x16(sums + n // 8))


@inline
def scales16(p):
    return each_scale_twice(scales_then_mins(p))


@inline
def mins16(p):
    return each_min_twice(scales_then_mins(p))
