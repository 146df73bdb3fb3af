"""IQ4_NL: 32 weights in 18 bytes: d half | 16 bytes of nibbles that index a fixed table.

With VNNI, whose products take bytes without sign, codes are the table's values + 128.
"""

import numpy as np

from dali_gguf.kernels.isa import VNNI
from dali_gguf.kernels.lanes import lookup

BYTES, HAS_MIN = 18, False
SIGNED, MAX_CODE, OFFSET = (False, 241, 128) if VNNI else (True, 128, 0)
NIBBLES = 2  # where they start
D_AT = 0

TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # ggml's

code = lookup([v + OFFSET for v in TABLE])


def reference(blocks):
    """uint8 [n, 18] -> float32 [n, 32]."""
    d = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    q = np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], axis=1)
    return d * np.array(TABLE, np.float32)[q]
