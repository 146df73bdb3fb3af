"""MXFP4 (OCP microscaling): 32 weights in 17 bytes: exponent e | 16 bytes of 4-bit floats.

weight = 2^(e-127) * value, value in +-{0, .5, 1, 1.5, 2, 3, 4, 6}. Codes are the doubled values
plus 12, so that they are whole and not negative; the scale is halved.
"""

import numpy as np

from dali_gguf.kernels.lanes import gather_i8x8, lookup, power_of_two
from dali_gguf.kernels.simd import inline

BYTES, SIGNED, MAX_CODE, OFFSET, HAS_MIN = 17, False, 24, 12, False
NIBBLES = 1  # where they start

TABLE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # doubled

code = lookup([v + OFFSET for v in TABLE])


def reference(blocks):
    """uint8 [n, 17] -> float32 [n, 32]."""
    scale = np.exp2(blocks[:, :1].astype(np.float32) - 128)
    q = np.concatenate([blocks[:, 1:] & 15, blocks[:, 1:] >> 4], axis=1)
    return scale * np.array(TABLE, np.float32)[q]


@inline
def scales8(p, stride):
    return power_of_two(gather_i8x8(p, stride))
