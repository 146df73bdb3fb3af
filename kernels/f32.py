"""F32: plain float32."""

import numpy as np

from dali_gguf.kernels.simd import inline, load_f32, load_f32x8

BYTES = 4


def reference(blocks):
    """uint8 [n, 4 m] -> float32 [n, m]."""
    return blocks.view(np.float32)


@inline
def load8(p):
    return load_f32x8(p)


@inline
def load1(p):
    return load_f32(p)
