"""IQ4_XS: 256 weights in 136 bytes: d half, high scale bits uint16, 4 bytes of low ones, nibbles.

weight = d * (scale - 32) * table[q] with IQ4_NL's table, one 6-bit scale for 32 weights. With VNNI,
whose products take bytes without sign, codes are the table's values + 128.
"""

import numpy as np

from dali_gguf.kernels.blocks256 import INT_MIN, NO_MIN
from dali_gguf.kernels.iq4_nl import TABLE, code
from dali_gguf.kernels.isa import VNNI
from dali_gguf.kernels.lanes import bytes_of_u64, even_then_odd, nibbles, sign_extend_i16
from dali_gguf.kernels.q4_k import twice
from dali_gguf.kernels.simd import (
    inline, load_i8x16, load_u16, load_u32, splat_i16x16, v_shl, v_sub,
)

BYTES, SUB, D_AT = 136, 32, 0
SIGNED, MAX_CODE, MIN = (False, 241, INT_MIN) if VNNI else (True, 128, NO_MIN)


def reference(blocks):
    """uint8 [n, 136] -> float32 [n, 256]."""
    d = blocks[:, :2].copy().view(np.float16).astype(np.float32)[:, :, None]
    high = blocks[:, 2:4].copy().view(np.uint16) >> np.arange(0, 16, 2).reshape(1, 8) & 3
    low = (blocks[:, 4:8, None] >> np.array([0, 4]).reshape(1, 1, 2) & 15).reshape(-1, 8)
    scales = (low | high << 4).astype(np.int32) - 32
    packed = blocks[:, 8:].reshape(-1, 8, 16)
    q = np.concatenate([packed & 15, packed >> 4], axis=2)
    weights = d * scales[..., None] * np.array(TABLE, np.float32)[q]
    return weights.astype(np.float32).reshape(-1, 256)


@inline
def codes(p, j):
    return code(nibbles(load_i8x16(p + 8 + 16 * j)))


@inline
def scales16(p):
    low, high = np.uint64(load_u32(p + 4)), np.uint64(load_u16(p + 2))
    scales = np.uint64(0)
    for j in range(8):
        four = (low >> np.uint64(4 * j)) & np.uint64(15)
        two = (high >> np.uint64(2 * j)) & np.uint64(3)
        scales |= (four | two << np.uint64(4)) << np.uint64(8 * j)
    return v_sub(twice(sign_extend_i16(bytes_of_u64(scales))), splat_i16x16(np.int16(32)))


@inline
def mins16(p):
    return v_shl(scales16(p), 7)


@inline
def spread(p):
    return even_then_odd(scales16(p))
