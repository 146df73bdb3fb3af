"""Q5_1: 32 weights in 24 bytes: d half | m half | fifth bits uint32 | 16 bytes. d * q + m."""

import numpy as np

from dali_gguf.kernels.lanes import (
    bits_to_bytes, gather_i16x8, half_to_float, nibbles, zero_f32x8,
)
from dali_gguf.kernels.simd import inline, load_i8x16, load_u32, v_fsub, v_or, v_shl

BYTES, SIGNED, MAX_CODE, OFFSET, HAS_MIN = 24, False, 31, 0, True


def reference(blocks):
    """uint8 [n, 24] -> float32 [n, 32]."""
    d, m = blocks[:, :4].copy().view(np.float16).astype(np.float32).T[..., None]
    fifth = np.unpackbits(blocks[:, 4:8], axis=1, bitorder="little")
    q = np.concatenate([blocks[:, 8:] & 15, blocks[:, 8:] >> 4], axis=1) | fifth << 4
    return d * q.astype(np.float32) + m


@inline
def codes(p):
    return v_or(nibbles(load_i8x16(p + 8)), v_shl(bits_to_bytes(load_u32(p + 4)), 4))


@inline
def scales8(p, stride):
    return half_to_float(gather_i16x8(p, stride))


@inline
def mins8(p, stride):
    return v_fsub(zero_f32x8(), half_to_float(gather_i16x8(p + 2, stride)))
