"""Q4_0: 32 weights in 18 bytes: d half | 16 bytes, low nibbles first. weight = d * (q - 8)."""

import numpy as np

from dali_gguf.kernels.simd import inline

BYTES, SIGNED, MAX_CODE, OFFSET, HAS_MIN = 18, False, 15, 8, False
NIBBLES = 2  # where they start
D_AT = 0


def reference(blocks):
    """uint8 [n, 18] -> float32 [n, 32]."""
    d = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    q = np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], axis=1)
    return d * (q.astype(np.float32) - 8)


@inline
def code(nibble):
    return nibble
