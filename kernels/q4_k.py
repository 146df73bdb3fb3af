"""Q4_K: 256 weights in 144 bytes: d half, dmin half, 12 bytes of scales and mins, 128 of nibbles.

weight = d * scale * q - dmin * min, one 6-bit scale and min for 32 weights. Byte l of quarter k
holds weight 64k + l in its low nibble and 64k + 32 + l in its high one.
"""

import numpy as np

from dali_gguf.kernels.blocks256 import FLOAT_MIN
from dali_gguf.kernels.dots import madd
from dali_gguf.kernels.lanes import (
    bytes_of_u64, concat, high_nibbles, low_nibbles, permutation, widened, zero_extend_i16,
)
from dali_gguf.kernels.simd import (
    inline, load_i8x32, load_i8x64, load_i16x8, load_u32, load_u64,
)

BYTES, SIGNED, MAX_CODE, SUB, MIN = 144, False, 15, 32, FLOAT_MIN
D_AT, M_AT, PAIRED = 0, 2, True

quarter0, quarter1, quarter2, quarter3 = (
    widened([first] * 16 + [first + 2] * 16) for first in (0, 1, 8, 9)
)
twice = permutation([i // 2 for i in range(16)])
scales_twice = permutation([*range(8), *range(8)])
each_scale_twice = permutation([i // 2 for i in range(16)])
each_min_twice = permutation([8 + i // 2 for i in range(16)])
mins_of = permutation([*range(4, 8), *range(12, 16)])
in_order = permutation([*range(4), *range(8, 12), *range(4, 8), *range(12, 16)])


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
def codes64(p, j):
    packed = load_i8x64(p + 16 + 64 * (j // 2))
    if j & 1:
        return high_nibbles(packed)
    return low_nibbles(packed)


@inline
def scales_of(p):
    """i8x16: scales 0..3, mins 0..3, scales 4..7, mins 4..7. Each is 6 bits of the bytes a[4] b[4]
    c[4]: the first four scales are a & 63 and the last c & 15 | a >> 6 << 4; mins likewise from b
    and c >> 4."""
    ab, c = load_u64(p + 4), np.uint64(load_u32(p + 12))
    first = ab & np.uint64(0x3F3F3F3F3F3F3F3F)
    four = (c | c << np.uint64(28)) & np.uint64(0x0F0F0F0F0F0F0F0F)
    last = (ab >> np.uint64(2)) & np.uint64(0x3030303030303030) | four
    return concat(bytes_of_u64(first), bytes_of_u64(last))


@inline
def scales_then_mins(p):
    """i16x16: the 8 scales, then the 8 mins."""
    return zero_extend_i16(in_order(scales_of(p)))


@inline
def spread(p):
    return scales_twice(scales_then_mins(p))


@inline
def min_dot(p, sums, sums32):
    mins = zero_extend_i16(mins_of(scales_of(p)))
    return madd(mins, load_i16x8(sums32))


@inline
def scales16(p):
    return each_scale_twice(scales_then_mins(p))


@inline
def mins16(p):
    return each_min_twice(scales_then_mins(p))
