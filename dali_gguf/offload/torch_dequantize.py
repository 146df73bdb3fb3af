"""Every GGUF type the engine reads, dequantized by torch operations on whatever device holds it.

Each function takes blocks uint8 [N, bytes of a block] and gives float32 [N, values of a block], in
the same order of operations as gguf-py, so that the results are bit-identical (also IEEE on a
GPU: only multiplications, additions and conversions). This is the slow path: a dequantized copy is
written and read again, which on a GPU costs more than the CPU kernels need for the same expert.
"""

from typing import Callable

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from dali_gguf.errors import UnsupportedError

FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
NL4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def dequantize(data: Tensor, kind: GGMLQuantizationType, rows: int, cols: int) -> Tensor:
    """float32 [rows, cols] of the uint8 bytes of a matrix."""
    if kind not in DECODERS:
        raise UnsupportedError(f"no GPU decoder for the type {kind.name}: use --device cpu")
    blocks = data.reshape(-1, GGML_QUANT_SIZES[kind][1])
    return DECODERS[kind](blocks).reshape(rows, cols)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The half-precision number at byte `at` of every block, float32 [N, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _shift(x: Tensor, *by: int) -> Tensor:
    """uint8 [.., M] -> [.., len(by), M]: the same bytes shifted right by each amount."""
    return x.unsqueeze(-2) >> torch.tensor(by, dtype=torch.uint8, device=x.device)[:, None]


def _nibbles(x: Tensor, run: int) -> Tensor:
    """Runs of `run` bytes -> `run` low nibbles, then `run` high nibbles; uint8 [N, 2 M]."""
    n = len(x)
    return (_shift(x.reshape(n, -1, run), 0, 4) & 15).reshape(n, -1)


def _bits(x: Tensor, run: int, width: int) -> Tensor:
    """Runs of `run` bytes -> 8/width runs of fields of `width` bits; uint8 [N, M * 8/width]."""
    n = len(x)
    fields = _shift(x.reshape(n, -1, run), *range(0, 8, width))
    return (fields & ((1 << width) - 1)).reshape(n, -1)


def _high_bits(x: Tensor) -> Tensor:
    """4 bytes [N, 4] -> their 32 bits in order, as 0 or 16; uint8 [N, 32]."""
    by = torch.arange(8, dtype=torch.uint8, device=x.device)
    return (((x[:, :, None] >> by) & 1) << 4).reshape(len(x), 32)


def _f32(blocks: Tensor) -> Tensor:
    return blocks.contiguous().view(torch.float32)


def _f16(blocks: Tensor) -> Tensor:
    return blocks.contiguous().view(torch.float16).float()


def _bf16(blocks: Tensor) -> Tensor:
    return blocks.contiguous().view(torch.bfloat16).float()


def _q8_0(b: Tensor) -> Tensor:
    return b[:, 2:].contiguous().view(torch.int8).float() * _half(b, 0)


def _q4_0(b: Tensor) -> Tensor:
    return _half(b, 0) * (_nibbles(b[:, 2:], 16).to(torch.int8) - 8).float()


def _q4_1(b: Tensor) -> Tensor:
    return _half(b, 0) * _nibbles(b[:, 4:], 16).float() + _half(b, 2)


def _q5_0(b: Tensor) -> Tensor:
    q = _nibbles(b[:, 6:], 16) | _high_bits(b[:, 2:6])
    return _half(b, 0) * (q.to(torch.int8) - 16).float()


def _q5_1(b: Tensor) -> Tensor:
    q = _nibbles(b[:, 8:], 16) | _high_bits(b[:, 4:8])
    return _half(b, 0) * q.float() + _half(b, 2)


def _affine(q: Tensor, scale: Tensor, low: Tensor | None = None) -> Tensor:
    """q [N, 256] * scale [N, S] (- low [N, S]), S runs of 256 / S values."""
    n, runs = scale.shape
    y = scale[:, :, None] * q.reshape(n, runs, -1).float()
    return (y if low is None else y - low[:, :, None]).reshape(n, -1)


def _q2_k(b: Tensor) -> Tensor:
    scales, q = b[:, :16], _bits(b[:, 16:80], 32, 2)
    low = _half(b, 82) * (scales >> 4).float()
    return _affine(q, _half(b, 80) * (scales & 15).float(), low)


def _q3_k(b: Tensor) -> Tensor:
    low, high = b[:, 96:104], b[:, 104:108]
    scales = (_shift(low, 0, 4) & 15).reshape(-1, 16)
    scales = scales | ((_shift(high, 0, 2, 4, 6) & 3).reshape(-1, 16) << 4)
    missing = (_bits(b[:, :32], 32, 1) ^ 1) << 2  # a set bit of the mask means no offset
    q = _bits(b[:, 32:96], 32, 2).to(torch.int8) - missing.to(torch.int8)
    return _affine(q, _half(b, 108) * (scales.to(torch.int8) - 32).float())


def _scale_min(b: Tensor) -> tuple[Tensor, Tensor]:
    """The 6-bit scales and minima of Q4_K and Q5_K, times the block's own: float32 [N, 8] each."""
    s, m, both = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scale = torch.cat([s & 63, (both & 15) | ((s >> 2) & 48)], dim=1)
    low = torch.cat([m & 63, (both >> 4) | ((m >> 2) & 48)], dim=1)
    return _half(b, 0) * scale.float(), _half(b, 2) * low.float()


def _q4_k(b: Tensor) -> Tensor:
    return _affine(_nibbles(b[:, 16:], 32), *_scale_min(b))


def _q5_k(b: Tensor) -> Tensor:
    q = _nibbles(b[:, 48:], 32) | (_bits(b[:, 16:48], 32, 1) << 4)
    return _affine(q, *_scale_min(b))


def _q6_k(b: Tensor) -> Tensor:
    q = _nibbles(b[:, :128], 64) | (_bits(b[:, 128:192], 32, 2) << 4)
    scales = b[:, 192:208].contiguous().view(torch.int8).float()
    return _affine(q.to(torch.int8) - 32, _half(b, 208) * scales)


def _lookup(table: tuple[int, ...], q: Tensor) -> Tensor:
    return torch.tensor(table, dtype=torch.float32, device=q.device)[q.int()]


def _mxfp4(b: Tensor) -> Tensor:
    e = b[:, :1].int()  # half of 2^(e - 127), so that the table can hold doubled values
    tiny = torch.full_like(e, 0x00200000) << e.clamp(max=1)
    scale = torch.where(e < 2, tiny, (e - 1) << 23).view(torch.float32)
    return scale * _lookup(FP4, _nibbles(b[:, 1:], 16))


def _iq4_nl(b: Tensor) -> Tensor:
    return _half(b, 0) * _lookup(NL4, _nibbles(b[:, 2:], 16))


def _iq4_xs(b: Tensor) -> Tensor:
    by = torch.arange(0, 8, 2, dtype=torch.uint8, device=b.device)
    high = ((b[:, 2:4, None] >> by) & 3).reshape(-1, 8)
    low = ((b[:, 4:8, None] >> by[::2]) & 15).reshape(-1, 8)
    scale = _half(b, 0) * ((low | (high << 4)).to(torch.int8) - 32).float()
    n = len(b)
    q = _lookup(NL4, _nibbles(b[:, 8:], 16)).reshape(n, 8, 32)
    return (scale[:, :, None] * q).reshape(n, 256)


_T = GGMLQuantizationType
DECODERS: dict[GGMLQuantizationType, Callable[[Tensor], Tensor]] = {
    _T.F32: _f32,
    _T.F16: _f16,
    _T.BF16: _bf16,
    _T.Q8_0: _q8_0,
    _T.Q4_0: _q4_0,
    _T.Q4_1: _q4_1,
    _T.Q5_0: _q5_0,
    _T.Q5_1: _q5_1,
    _T.Q2_K: _q2_k,
    _T.Q3_K: _q3_k,
    _T.Q4_K: _q4_k,
    _T.Q5_K: _q5_k,
    _T.Q6_K: _q6_k,
    _T.MXFP4: _mxfp4,
    _T.IQ4_NL: _iq4_nl,
    _T.IQ4_XS: _iq4_xs,
}
