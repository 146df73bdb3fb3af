"""F16: IEEE half."""

import numpy as np

from dali_gguf.kernels.lanes import half_to_float
from dali_gguf.kernels.simd import inline, load_f16, load_i16x8

BYTES = 2


def reference(blocks):
    """uint8 [n, 2 m] -> float32 [n, m]."""
    return blocks.view(np.float16).astype(np.float32)


@inline
def load8(p):
    return half_to_float(load_i16x8(p))


@inline
def load1(p):
    return load_f16(p)
