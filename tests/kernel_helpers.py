"""Random quant blocks with sane scales, and ways to call compiled addresses."""

import ctypes

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q

from dali_gguf.kernels.formats import FORMATS

# byte offset of each half-precision scale in a block
HALVES = {
    Q.Q8_0: [0], Q.Q4_0: [0], Q.Q4_1: [0, 2], Q.Q5_0: [0], Q.Q5_1: [0, 2], Q.IQ4_NL: [0],
    Q.Q2_K: [80, 82], Q.Q3_K: [108], Q.Q4_K: [0, 2], Q.Q5_K: [0, 2], Q.Q6_K: [208], Q.IQ4_XS: [0],
}


def random_weights(ggml_type, rows, cols, rng):
    """uint8 [rows, row bytes] of random blocks of the type."""
    if ggml_type in (Q.F32, Q.F16, Q.BF16):
        values = rng.standard_normal((rows, cols)).astype(np.float32)
        return gguf.quants.quantize(values, ggml_type).view(np.uint8)
    block, size = gguf.GGML_QUANT_SIZES[ggml_type]
    raw = rng.integers(0, 256, (rows, cols // block, size), dtype=np.uint8)
    for at in HALVES.get(ggml_type, []):
        scale = rng.uniform(-1.5, 1.5, (rows, cols // block, 1)).astype(np.float16) / np.float16(64)
        raw[..., at : at + 2] = scale.view(np.uint8)
    if ggml_type == Q.MXFP4:
        raw[..., 0] = rng.integers(110, 130, raw.shape[:2])
        raw[0, 0, 0] = 0  # the smallest exponents are special
        raw[-1, -1, 0] = 1
    return raw.reshape(rows, -1)


def reference_rows(ggml_type, w):
    """float32 [rows, cols] by the numpy reference of the type's own file."""
    _, size = gguf.GGML_QUANT_SIZES[ggml_type]
    return FORMATS[ggml_type].module.reference(w.reshape(-1, size)).reshape(len(w), -1)


def call(address, *args):
    """Calls void f(intp, ...) at an address."""
    ctypes.CFUNCTYPE(None, *[ctypes.c_ssize_t] * len(args))(address)(*args)


def amx_cases(ggml_type):
    """(weights, activations) that go through AMX in every way: rows that are no multiple of 16,
    columns that are none of a chunk, the largest sums of products, a NaN."""
    rng = np.random.default_rng(8)
    block, _ = gguf.GGML_QUANT_SIZES[ggml_type]
    for rows, n in ((21, 1024 + block), (16, block)):
        x = rng.standard_normal((64, n)).astype(np.float32)
        x[1::5], x[2::5] = 1, -1
        x[61, n // 2] = np.nan
        yield random_weights(ggml_type, rows, n, rng), x
