"""Q4_1: 32 weights in 20 bytes: d half | m half | 16 bytes, low nibbles first. d * q + m."""

import numpy as np

from dali_gguf.kernels.q4_0 import code  # noqa: F401

BYTES, SIGNED, MAX_CODE, OFFSET, HAS_MIN = 20, False, 15, 0, True
NIBBLES = 4  # where they start
D_AT, M_AT = 0, 2


def reference(blocks):
    """uint8 [n, 20] -> float32 [n, 32]."""
    d, m = blocks[:, :4].copy().view(np.float16).astype(np.float32).T[..., None]
    q = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    return d * q.astype(np.float32) + m
