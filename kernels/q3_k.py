"""Q3_K: 256 weights in 110 bytes: 32 bytes of high bits, 64 of 2-bit codes, 12 of scales, d half.

weight = d * scale * (q - 4), one 6-bit scale (stored plus 32) for 16 weights. Byte l of half h
holds the low bits of weights 128h + l + 32 * (0, 1, 2, 3); bit 4h + k of high byte l is their
third.
"""

import numpy as np

from dali_gguf.kernels.blocks256 import INT_MIN
from dali_gguf.kernels.lanes import (
    bit_field, bytes_of_u64, concat, even_then_odd, sign_extend_i16,
)
from dali_gguf.kernels.q2_k import first_pairs, last_pairs
from dali_gguf.kernels.simd import (
    inline, load_i8x32, load_twice, load_u32, load_u64, splat_i8x16, splat_i8x32,
    v_and, v_or, v_shl, v_shr, v_sub,
)

BYTES, SIGNED, MAX_CODE, SUB, MIN = 110, False, 7, 16, INT_MIN
D_AT = 108

thirds = bit_field(0, 1, 1, 2)


def reference(blocks):
    """uint8 [n, 110] -> float32 [n, 256]."""
    high, halves, packed = blocks[:, :32], blocks[:, 32:96].reshape(-1, 2, 1, 32), blocks[:, 96:108]
    d = blocks[:, 108:].copy().view(np.float16).astype(np.float32)[:, :, None]
    low4 = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    top2 = packed[:, None, 8:] >> np.array([0, 2, 4, 6]).reshape(1, 4, 1) & 3
    scales = (low4 | top2.reshape(-1, 16) << 4).astype(np.int32) - 32
    q = (halves >> np.array([0, 2, 4, 6]).reshape(1, 1, 4, 1) & 3).reshape(-1, 8, 32)
    third = high[:, None, :] >> np.arange(8).reshape(1, 8, 1) & 1
    q = ((q | third << 2).astype(np.int32) - 4).reshape(-1, 16, 16)
    return (d * (scales[..., None] * q)).astype(np.float32).reshape(-1, 256)


@inline
def codes(p, j):
    low = v_and(v_shr(load_i8x32(p + 32 + 32 * (j // 4)), 2 * (j % 4)), splat_i8x32(np.uint8(3)))
    third = v_and(v_shr(load_i8x32(p), j), splat_i8x32(np.uint8(1)))
    return v_or(low, v_shl(third, 2))


@inline
def codes64(p, j):
    packed, third = load_twice(p + 32 + 32 * (j // 2)), thirds(v_shr(load_twice(p), 2 * j))
    if j & 1:
        return v_or(last_pairs(packed), third)
    return v_or(first_pairs(packed), third)


@inline
def scales16(p):
    four, two = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(0x03030303)
    low, top = load_u64(p + 96), np.uint64(load_u32(p + 104))
    a = (top & two) | ((top >> np.uint64(2)) & two) << np.uint64(32)
    b = ((top >> np.uint64(4)) & two) | ((top >> np.uint64(6)) & two) << np.uint64(32)
    first = (low & four) | a << np.uint64(4)
    second = ((low >> np.uint64(4)) & four) | b << np.uint64(4)
    both = concat(bytes_of_u64(first), bytes_of_u64(second))
    return sign_extend_i16(v_sub(both, splat_i8x16(np.uint8(32))))


@inline
def mins16(p):
    return v_shl(scales16(p), 2)


@inline
def spread(p):
    return even_then_odd(scales16(p))
