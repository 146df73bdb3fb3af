"""Q5_1: 32 weights in 24 bytes: d half | m half | fifth bits uint32 | 16 bytes. d * q + m."""

import numpy as np

from dali_gguf.kernels.lanes import bits_to_bytes, nibbles
from dali_gguf.kernels.simd import inline, load_i8x16, load_u32, v_or, v_shl

BYTES, SIGNED, MAX_CODE, OFFSET, HAS_MIN = 24, False, 31, 0, True
NIBBLES = 0  # not nibbles alone
D_AT, M_AT = 0, 2


def reference(blocks):
    """uint8 [n, 24] -> float32 [n, 32]."""
    d, m = blocks[:, :4].copy().view(np.float16).astype(np.float32).T[..., None]
    fifth = np.unpackbits(blocks[:, 4:8], axis=1, bitorder="little")
    q = np.concatenate([blocks[:, 8:] & 15, blocks[:, 8:] >> 4], axis=1) | fifth << 4
    return d * q.astype(np.float32) + m


@inline
def codes(p):
    return v_or(nibbles(load_i8x16(p + 8)), v_shl(bits_to_bytes(load_u32(p + 4)), 4))
