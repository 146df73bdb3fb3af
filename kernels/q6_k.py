"""Q6_K: 256 weights in 210 bytes: 128 bytes of nibbles, 64 of high bit pairs, 16 int8 scales, d.

weight = d * scale * (q - 32), one scale for 16 weights; d is a half. In half h, nibble byte l holds
weight 128h + l low and 128h + 64 + l high (l < 64); bits 2k, 2k+1 of high byte l belong to
128h + 32k + l.
"""

import numpy as np

from dali_gguf.kernels.blocks256 import INT_MIN
from dali_gguf.kernels.lanes import (
    bit_field, even_then_odd, high_nibbles, low_nibbles, sign_extend_i16,
)
from dali_gguf.kernels.simd import (
    inline, load_i8x16, load_i8x32, load_i8x64, load_twice, splat_i8x32,
    v_and, v_or, v_shl, v_shr,
)

BYTES, SIGNED, MAX_CODE, SUB, MIN = 210, False, 63, 16, INT_MIN
D_AT = 208

first_pairs, last_pairs = bit_field(0, 2, 2, 4), bit_field(4, 6, 2, 4)


def reference(blocks):
    """uint8 [n, 210] -> float32 [n, 256]."""
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    shifts = np.array([0, 2, 4, 6]).reshape(1, 1, 4, 1)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    scales = blocks[:, 192:208].view(np.int8).astype(np.int32)
    d = blocks[:, 208:].copy().view(np.float16).astype(np.float32)[:, :, None]
    nibbles = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    q = (nibbles | high << 4).astype(np.int32).reshape(-1, 16, 16) - 32
    return (d * (scales[..., None] * q)).astype(np.float32).reshape(-1, 256)


@inline
def codes(p, j):
    half, k = j // 4, j % 4
    packed = load_i8x32(p + 64 * half + 32 * (k % 2))
    nibble = high_nibbles(packed) if k >= 2 else low_nibbles(packed)
    pair = v_and(v_shr(load_i8x32(p + 128 + 32 * half), 2 * k), splat_i8x32(np.uint8(3)))
    return v_or(nibble, v_shl(pair, 4))


@inline
def codes64(p, j):
    packed, high = load_i8x64(p + 64 * (j // 2)), load_twice(p + 128 + 32 * (j // 2))
    if j & 1:
        return v_or(high_nibbles(packed), last_pairs(high))
    return v_or(low_nibbles(packed), first_pairs(high))


@inline
def scales16(p):
    return sign_extend_i16(load_i8x16(p + 192))


@inline
def mins16(p):
    return v_shl(scales16(p), 5)


@inline
def spread(p):
    return even_then_odd(scales16(p))
