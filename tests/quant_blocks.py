"""Random GGUF blocks of any type: all bytes random but the scales, which stay moderate."""

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from dali_gguf.tensor import Tensor

T = GGMLQuantizationType
HALF_AT = {
    T.Q8_0: [0],
    T.Q4_0: [0],
    T.Q4_1: [0, 2],
    T.Q5_0: [0],
    T.Q5_1: [0, 2],
    T.Q2_K: [80, 82],
    T.Q3_K: [108],
    T.Q4_K: [0, 2],
    T.Q5_K: [0, 2],
    T.Q6_K: [208],
    T.IQ4_NL: [0],
    T.IQ4_XS: [0],
}


def random_tensor(
    kind: GGMLQuantizationType, shape: tuple[int, ...], seed: int = 0, size: float = 1.0
) -> Tensor:
    """A Tensor of random weights whose values are of the order of `size`."""
    rng = np.random.default_rng(seed)
    block, nbytes = GGML_QUANT_SIZES[kind]
    n = int(np.prod(shape)) // block
    if kind in (T.F32, T.F16, T.BF16):
        data = _plain(rng.normal(0, size, int(np.prod(shape))).astype(np.float32), kind)
        return Tensor("w", kind, shape, data)
    blocks = rng.integers(0, 256, (n, nbytes), dtype=np.uint8)
    for at in HALF_AT.get(kind, []):
        scale = rng.uniform(0.5, 1.5, n) * size / _span(kind)
        blocks[:, at : at + 2] = scale.astype(np.float16)[:, None].view(np.uint8)
    if kind == T.MXFP4:
        blocks[:, 0] = int(np.log2(size) + 127 - 3) + rng.integers(0, 3, n)
    return Tensor("w", kind, shape, blocks.reshape(-1))


def _plain(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    if kind == T.F16:
        return values.astype(np.float16).view(np.uint8)
    if kind == T.BF16:
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return values.view(np.uint8)


def _span(kind: GGMLQuantizationType) -> float:
    """Roughly the largest integer that the block's scale is multiplied with."""
    return {
        T.Q8_0: 127,
        T.Q6_K: 4096,
        T.Q3_K: 128,
        T.Q2_K: 45,
        T.Q4_K: 945,
        T.Q5_K: 1953,
        T.IQ4_NL: 127,
        T.IQ4_XS: 4064,
    }.get(kind, 16)
