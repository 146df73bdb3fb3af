"""Q4_1: 32 weights in 20 bytes: d half | m half | 16 bytes, low nibbles first. d * q + m."""

import numpy as np

from dali_gguf.kernels.lanes import gather_i16x8, half_to_float, nibbles, zero_f32x8
from dali_gguf.kernels.simd import inline, load_i8x16, v_fsub

BYTES, SIGNED, MAX_CODE, OFFSET, HAS_MIN = 20, False, 15, 0, True


def reference(blocks):
    """uint8 [n, 20] -> float32 [n, 32]."""
    d, m = blocks[:, :4].copy().view(np.float16).astype(np.float32).T[..., None]
    q = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    return d * q.astype(np.float32) + m


@inline
def codes(p):
    return nibbles(load_i8x16(p + 4))


@inline
def scales8(p, stride):
    return half_to_float(gather_i16x8(p, stride))


@inline
def mins8(p, stride):
    return v_fsub(zero_f32x8(), half_to_float(gather_i16x8(p + 2, stride)))
