"""Q8_0: 32 weights in 34 bytes: d half | 32 int8. weight = d * q."""

import numpy as np

from dali_gguf.kernels.simd import inline, load_i8x32

BYTES, SIGNED, MAX_CODE, OFFSET, HAS_MIN = 34, True, 128, 0, False
NIBBLES = 0
D_AT = 0


def reference(blocks):
    """uint8 [n, 34] -> float32 [n, 32]."""
    d = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    return d * blocks[:, 2:].view(np.int8).astype(np.float32)


@inline
def codes(p):
    return load_i8x32(p + 2)
