"""Q8_0: 32 weights in 34 bytes: d half | 32 int8. weight = d * q."""

import numpy as np

from dali_gguf.kernels.lanes import gather_i16x8, half_to_float
from dali_gguf.kernels.simd import inline, load_i8x32

BYTES, SIGNED, MAX_CODE, OFFSET, HAS_MIN = 34, True, 128, 0, False


def reference(blocks):
    """uint8 [n, 34] -> float32 [n, 32]."""
    d = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    return d * blocks[:, 2:].view(np.int8).astype(np.float32)


@inline
def codes(p):
    return load_i8x32(p + 2)


@inline
def scales8(p, stride):
    return half_to_float(gather_i16x8(p, stride))


mins8 = scales8
