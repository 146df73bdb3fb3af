"""Q5_0: 32 weights in 22 bytes: d half | fifth bits uint32 | 16 bytes of nibbles. d * (q - 16)."""

import numpy as np

from dali_gguf.kernels.lanes import bits_to_bytes, nibbles
from dali_gguf.kernels.simd import inline, load_i8x16, load_u32, v_or, v_shl

BYTES, SIGNED, MAX_CODE, OFFSET, HAS_MIN = 22, False, 31, 16, False
NIBBLES = 0  # not nibbles alone
D_AT = 0


def reference(blocks):
    """uint8 [n, 22] -> float32 [n, 32]."""
    d = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    fifth = np.unpackbits(blocks[:, 2:6], axis=1, bitorder="little")
    q = np.concatenate([blocks[:, 6:] & 15, blocks[:, 6:] >> 4], axis=1) | fifth << 4
    return d * (q.astype(np.float32) - 16)


@inline
def codes(p):
    return v_or(nibbles(load_i8x16(p + 6)), v_shl(bits_to_bytes(load_u32(p + 2)), 4))
