"""Q5_K: 256 weights in 176 bytes: as Q4_K with 32 bytes of fifth bits before the nibbles.

Bit j of byte l is the fifth bit of weight 32j + l.
"""

import numpy as np

from dali_gguf.kernels.blocks256 import FLOAT_MIN
from dali_gguf.kernels.lanes import bit_field, high_nibbles, low_nibbles
from dali_gguf.kernels.q4_k import (
    min_dot, mins16, quarter0, quarter1, quarter2, quarter3, scales16, scales_of, spread,
    unpack_scales,
)
from dali_gguf.kernels.simd import (
    inline, load_i8x32, load_i8x64, load_twice, splat_i8x32, v_and, v_or, v_shl, v_shr,
)

BYTES, SIGNED, MAX_CODE, SUB, MIN = 176, False, 31, 32, FLOAT_MIN
D_AT, M_AT, PAIRED = 0, 2, True

fifths = bit_field(0, 2, 1, 4)


def reference(blocks):
    """uint8 [n, 176] -> float32 [n, 256]."""
    d, dmin = blocks[:, :4].copy().view(np.float16).astype(np.float32).T[..., None, None]
    scales, mins = unpack_scales(blocks[:, 4:16])
    quarters = blocks[:, 48:].reshape(-1, 4, 1, 32)
    q = np.concatenate([quarters & 15, quarters >> 4], axis=2).reshape(-1, 8, 32)
    q = q | (blocks[:, None, 16:48] >> np.arange(8).reshape(1, 8, 1) & 1) << 4
    return (d * scales[..., None] * q - dmin * mins[..., None]).astype(np.float32).reshape(-1, 256)


@inline
def codes(p, j):
    packed = load_i8x32(p + 48 + 32 * (j // 2))
    nibble = high_nibbles(packed) if j & 1 else low_nibbles(packed)
    fifth = v_and(v_shr(load_i8x32(p + 16), j), splat_i8x32(np.uint8(1)))
    return v_or(nibble, v_shl(fifth, 4))


@inline
def codes64(p, j):
    packed = load_i8x64(p + 48 + 64 * (j // 2))
    fifth = fifths(v_shr(load_twice(p + 16), j & 1 | j // 2 * 4))
    if j & 1:
        return v_or(high_nibbles(packed), fifth)
    return v_or(low_nibbles(packed), fifth)
