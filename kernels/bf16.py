"""BF16: the upper half of a float32."""

import numpy as np

from dali_gguf.kernels.lanes import bf16_to_float
from dali_gguf.kernels.simd import inline, load_bf16, load_i16x8

BYTES = 2


def reference(blocks):
    """uint8 [n, 2 m] -> float32 [n, m]."""
    return (blocks.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


@inline
def load8(p):
    return bf16_to_float(load_i16x8(p))


@inline
def load1(p):
    return load_bf16(p)
