"""GGUF blocks in Triton: where a tile of quantized weights lies, and its values.

A row is cut into groups, and a group into PLANES runs of RUN values. Plane p of a group holds the
values [p * RUN, (p + 1) * RUN), and all planes of a group come from the same RUN bytes (one byte
carries several values). So a tile of bytes [R, G, RUN] (R rows, G groups) is read in runs of
neighbouring bytes, and meets activations that are neighbours too.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from gguf import GGMLQuantizationType

Q4_K = tl.constexpr(12)
Q5_K = tl.constexpr(13)
Q6_K = tl.constexpr(14)
Q8_0 = tl.constexpr(8)
Q4_0 = tl.constexpr(2)
MXFP4 = tl.constexpr(39)
F16 = tl.constexpr(1)
BF16 = tl.constexpr(30)


@dataclass(frozen=True, slots=True)
class Layout:
    """values of a group, bytes of a run, planes of a group, groups of a tile."""

    run: int
    planes: int
    groups: int

    @property
    def group(self) -> int:
        return self.run * self.planes


_T = GGMLQuantizationType
LAYOUTS = {
    _T.Q4_K: Layout(32, 2, 4),
    _T.Q5_K: Layout(32, 2, 4),
    _T.Q6_K: Layout(32, 4, 2),
    _T.Q8_0: Layout(32, 1, 4),
    _T.Q4_0: Layout(16, 2, 8),
    _T.MXFP4: Layout(16, 2, 8),
    _T.F16: Layout(32, 1, 4),
    _T.BF16: Layout(32, 1, 4),
}


@triton.jit
def half_at(p):
    """float32 of the half-precision numbers at the (even) byte addresses p."""
    low = tl.load(p).to(tl.uint16)
    high = tl.load(p + 1).to(tl.uint16)
    return (low | (high << 8)).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def signed(byte):
    """int8 in a uint8, as float32."""
    return byte.to(tl.int8, bitcast=True).to(tl.float32)


@triton.jit
def scale_min(block, s):
    """Scale and minimum of sub-block s of Q4_K and Q5_K blocks (6 bits each in 12 bytes)."""
    d, dmin = half_at(block), half_at(block + 2)
    table = block + 4
    low = s < 4
    a = tl.load(table + tl.where(low, s, s + 4)).to(tl.int32)
    b = tl.load(table + tl.where(low, s + 4, s - 4)).to(tl.int32)
    c = tl.load(table + tl.where(low, s + 4, s)).to(tl.int32)
    scale = tl.where(low, a & 63, (a & 15) | ((b >> 2) & 48))
    least = tl.where(low, b & 63, (a >> 4) | ((c >> 2) & 48))
    return d * scale.to(tl.float32), dmin * least.to(tl.float32)


@triton.jit
def fp4(q):
    """Doubled value of a 4-bit float (e2m1): 0 1 2 3 4 6 8 12, and a sign bit."""
    m = q & 7
    size = tl.where(m < 2, m, (2 + (m & 1)) << (tl.maximum(m >> 1, 1) - 1))
    return tl.where(q > 7, -size, size).to(tl.float32)


@triton.jit
def exponent_half(e):
    """2^(e - 128) of a byte e."""
    bits = tl.where(e < 2, 0x00200000 << tl.minimum(e, 1), (e - 1) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def plane(row, g, i, p: tl.constexpr, KIND: tl.constexpr):
    """Values float32 [R, G, RUN] of plane p. row: byte addresses [R, 1, 1] of the rows' first
    blocks; g: group numbers [1, G, 1]; i: 0..RUN-1 as [1, 1, RUN]."""
    if KIND == Q4_K:
        block = row + (g // 4) * 144
        scale, least = scale_min(block, 2 * (g % 4) + p)
        q = tl.load(block + (16 + 32 * (g % 4)) + i).to(tl.int32) >> (4 * p)
        return scale * (q & 15).to(tl.float32) - least
    elif KIND == Q5_K:
        block = row + (g // 4) * 176
        s = 2 * (g % 4) + p
        scale, least = scale_min(block, s)
        q = (tl.load(block + (48 + 32 * (g % 4)) + i).to(tl.int32) >> (4 * p)) & 15
        high = (tl.load(block + 16 + i).to(tl.int32) >> s) & 1
        return scale * (q | (high << 4)).to(tl.float32) - least
    elif KIND == Q6_K:
        block, n = row + (g // 2) * 210, g % 2
        q = (tl.load(block + (64 * n + 32 * (p % 2)) + i).to(tl.int32) >> (4 * (p // 2))) & 15
        high = (tl.load(block + (128 + 32 * n) + i).to(tl.int32) >> (2 * p)) & 3
        scale = signed(tl.load(block + (192 + 8 * n + 2 * p) + i // 16))
        return half_at(block + 208) * scale * ((q | (high << 4)) - 32).to(tl.float32)
    elif KIND == Q8_0:
        block = row + g * 34
        return half_at(block) * signed(tl.load(block + 2 + i))
    elif KIND == Q4_0:
        block = row + g * 18
        q = (tl.load(block + 2 + i).to(tl.int32) >> (4 * p)) & 15
        return half_at(block) * (q - 8).to(tl.float32)
    elif KIND == MXFP4:
        block = row + g * 17
        q = (tl.load(block + 1 + i).to(tl.int32) >> (4 * p)) & 15
        return exponent_half(tl.load(block).to(tl.int32)) * fp4(q)
    elif KIND == F16:
        return half_at(row + (g * 64 + 2 * i))
    else:
        tl.static_assert(KIND == BF16, "no Triton decoder for this type")
        at = row + (g * 64 + 2 * i)
        bits = (tl.load(at).to(tl.int32) << 16) | (tl.load(at + 1).to(tl.int32) << 24)
        return bits.to(tl.float32, bitcast=True)
