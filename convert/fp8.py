"""The 256 values of the two 8-bit float formats, as float32 tables indexed by the byte.

E4M3 (finite-only): bias 7, no infinity, 0x7F and 0xFF are NaN. E5M2: bias 15, IEEE-like.
(https://arxiv.org/abs/2209.05433, table 1)
"""

import numpy as np


def _table(exponent_bits: int, bias: int) -> np.ndarray:
    code = np.arange(256)
    mantissa_bits = 7 - exponent_bits
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    fraction = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    size = np.where(
        exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias)
    )
    return np.where(code >= 128, -size, size).astype(np.float32)


E4M3 = _table(4, 7)
E4M3[[0x7F, 0xFF]] = np.nan
E5M2 = _table(5, 15)
E5M2[[0x7C, 0xFC]] = np.inf, -np.inf
E5M2[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan
