"""Q8_0: 32 weights in 34 bytes: d half | 32 int8. weight = d * q.

With VNNI, whose products take bytes without sign, codes are q + 128.
"""

import numpy as np

from dali_gguf.kernels.isa import VNNI
from dali_gguf.kernels.simd import inline, load_i8x32, splat_i8x32, v_xor

BYTES, HAS_MIN = 34, False
SIGNED, MAX_CODE, OFFSET = (False, 255, 128) if VNNI else (True, 128, 0)
NIBBLES = 0
D_AT = 0


def reference(blocks):
    """uint8 [n, 34] -> float32 [n, 32]."""
    d = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    return d * blocks[:, 2:].view(np.int8).astype(np.float32)


@inline
def codes(p):
    if VNNI:
        return v_xor(load_i8x32(p + 2), splat_i8x32(np.uint8(128)))
    return load_i8x32(p + 2)
