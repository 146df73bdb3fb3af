"""Q4_K: 256 weights in 144 bytes: d half, dmin half, 12 bytes of scales and mins, 128 of nibbles.

weight = d * scale * q - dmin * min, one 6-bit scale and min for 32 weights. Byte l of quarter k
holds weight 64k + l in its low nibble and 64k + 32 + l in its high one.
"""

import numpy as np

from dali_gguf.kernels.blocks256 import FLOAT_MIN
from dali_gguf.kernels.lanes import (
    bytes_of_u64, gather_i16x8, half_to_float, high_nibbles, low_nibbles, permutation,
    zero_extend_i16,
)
from dali_gguf.kernels.simd import inline, load_i8x32, load_u32

BYTES, SIGNED, MAX_CODE, SUB, MIN = 144, False, 15, 32, FLOAT_MIN

twice = permutation([i // 2 for i in range(16)])


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
def scales16(p):
    a, c = np.uint64(load_u32(p + 4)), np.uint64(load_u32(p + 12))
    high = (c & np.uint64(0x0F0F0F0F)) | ((a >> np.uint64(2)) & np.uint64(0x30303030))
    both = (a & np.uint64(0x3F3F3F3F)) | high << np.uint64(32)
    return twice(zero_extend_i16(bytes_of_u64(both)))


@inline
def mins16(p):
    b, c = np.uint64(load_u32(p + 8)), np.uint64(load_u32(p + 12))
    c = (c >> np.uint64(4)) & np.uint64(0x0F0F0F0F)
    high = c | ((b >> np.uint64(2)) & np.uint64(0x30303030))
    both = (b & np.uint64(0x3F3F3F3F)) | high << np.uint64(32)
    return twice(zero_extend_i16(bytes_of_u64(both)))


@inline
def scales8(p, stride):
    return half_to_float(gather_i16x8(p, stride))


@inline
def mins8(p, stride):
    return half_to_float(gather_i16x8(p + 2, stride))
