"""GGUF blocks in Triton: where a tile of quantized weights lies, and its values.

A row is cut into groups of RUN neighbouring bytes; a group holds PLANES values for each byte. Plane
p of a group is RUN values that are neighbours in the row as well, from column(g, p) on. `fetch`
loads what a tile [R, G, RUN] of bytes needs (R rows, G groups), once; `plane` makes values of it.
Loads decide the speed: a thread reads its bytes as wide as the block's size allows, and the scales
of a block as whole words.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from gguf import GGMLQuantizationType


class Kind(tl.constexpr):
    """A ggml type in a kernel's text. At every launch Triton asks of every global whether it is not
    what it was; a plain constexpr takes more than a microsecond to answer."""

    def __ne__(self, other):
        return self.value != other.value


Q4_K, Q5_K, Q6_K = Kind(12), Kind(13), Kind(14)
Q8_0, Q4_0, MXFP4 = Kind(8), Kind(2), Kind(39)
F16, BF16 = Kind(1), Kind(30)


@dataclass(frozen=True, slots=True)
class Layout:
    """run: bytes (16-bit values for F16 and BF16) of a group; planes of a group; groups of a tile.
    A row has to be a multiple of `unit` values."""

    run: int
    planes: int
    groups: int
    unit: int


_T = GGMLQuantizationType
LAYOUTS = {
    _T.Q4_K: Layout(32, 2, 4, 256),
    _T.Q5_K: Layout(32, 2, 4, 256),
    _T.Q6_K: Layout(16, 4, 8, 256),
    _T.Q8_0: Layout(32, 1, 4, 32),
    _T.Q4_0: Layout(16, 2, 8, 32),
    _T.MXFP4: Layout(16, 2, 8, 32),
    _T.F16: Layout(32, 1, 4, 32),
    _T.BF16: Layout(32, 1, 4, 32),
}


@triton.jit
def column(g, p: tl.constexpr, KIND: tl.constexpr):
    """The column at which plane p of group g begins."""
    if KIND == Q6_K:  # 128 values in 4 planes of 32, half a plane in each group
        return (g // 2) * 128 + 32 * p + 16 * (g % 2)
    elif KIND == Q4_K or KIND == Q5_K:
        return g * 64 + 32 * p
    elif KIND == Q4_0 or KIND == MXFP4:
        return g * 32 + 16 * p
    else:
        return g * 32


@triton.jit
def half_at(p):
    """float32 of the half-precision numbers at the even byte addresses p."""
    return tl.load(p.to(tl.pointer_type(tl.float16))).to(tl.float32)


@triton.jit
def half_of(bits):
    """float32 of the half-precision numbers in the low 16 bits of int32."""
    return (bits & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def signed(byte):
    """int8 in a uint8, as float32."""
    return byte.to(tl.int8, bitcast=True).to(tl.float32)


@triton.jit
def scale_min(d, w0, w1, w2, s):
    """Scale and minimum of sub-block s of Q4_K and Q5_K: d holds both factors of the block as
    halves, w0..2 the 12 bytes with 6 bits for each sub-block."""
    by = 8 * (s & 3)
    a, b, c = w0 >> by, w1 >> by, w2 >> by
    low = s < 4
    scale = tl.where(low, a & 63, (c & 15) | ((a >> 2) & 48))
    least = tl.where(low, b & 63, ((c >> 4) & 15) | ((b >> 2) & 48))
    return half_of(d) * scale.to(tl.float32), half_of(d >> 16) * least.to(tl.float32)


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
def fetch(row, g, i, KIND: tl.constexpr):
    """What the tile's planes are made of. row: byte addresses [R, 1, 1] of the rows; g: groups
    [1, G, 1]; i: 0..RUN-1 as [1, 1, RUN]."""
    if KIND == Q4_K:
        block = row + (g // 4) * 144
        words = block.to(tl.pointer_type(tl.int32))
        q = tl.load(block + (16 + 32 * (g % 4)) + i)
        return q, tl.load(words), tl.load(words + 1), tl.load(words + 2), tl.load(words + 3), g
    elif KIND == Q5_K:
        block = row + (g // 4) * 176
        words = block.to(tl.pointer_type(tl.int32))
        low, high = tl.load(block + (48 + 32 * (g % 4)) + i), tl.load(block + 16 + i)
        q = low.to(tl.int32) | (high.to(tl.int32) << 8)
        return q, tl.load(words), tl.load(words + 1), tl.load(words + 2), tl.load(words + 3), g
    elif KIND == Q6_K:
        block, n, half = row + (g // 4) * 210, (g // 2) % 2, 16 * (g % 2)
        low = block + (64 * n + half)
        q0, q1 = tl.load(low + i).to(tl.int32), tl.load(low + 32 + i).to(tl.int32)
        high = tl.load(block + (128 + 32 * n + half) + i).to(tl.int32)
        scales = block + (192 + 8 * n + g % 2)
        return q0, q1, high, half_at(block + 208), scales
    elif KIND == Q8_0:
        block = row + g * 34
        return tl.load(block + 2 + i), half_at(block)
    elif KIND == Q4_0:
        block = row + g * 18
        return tl.load(block + 2 + i).to(tl.int32), half_at(block)
    elif KIND == MXFP4:
        block = row + g * 17
        return tl.load(block + 1 + i).to(tl.int32), exponent_half(tl.load(block).to(tl.int32))
    elif KIND == F16:
        return (tl.load((row + g * 64).to(tl.pointer_type(tl.float16)) + i),)
    else:
        tl.static_assert(KIND == BF16, "no Triton decoder for this type")
        return (tl.load((row + g * 64).to(tl.pointer_type(tl.bfloat16)) + i),)


@triton.jit
def plane(raw, p: tl.constexpr, KIND: tl.constexpr):
    """Values float32 [R, G, RUN] of plane p of what was fetched."""
    if KIND == Q4_K:
        scale, least = scale_min(raw[1], raw[2], raw[3], raw[4], 2 * (raw[5] % 4) + p)
        q = (raw[0].to(tl.int32) >> (4 * p)) & 15
        return scale * q.to(tl.float32) - least
    elif KIND == Q5_K:
        s = 2 * (raw[5] % 4) + p
        scale, least = scale_min(raw[1], raw[2], raw[3], raw[4], s)
        q = ((raw[0] >> (4 * p)) & 15) | (((raw[0] >> (8 + s)) & 1) << 4)
        return scale * q.to(tl.float32) - least
    elif KIND == Q6_K:
        low = raw[p % 2] >> (4 * (p // 2))
        q = (low & 15) | (((raw[2] >> (2 * p)) & 3) << 4)
        return raw[3] * signed(tl.load(raw[4] + 2 * p)) * (q - 32).to(tl.float32)
    elif KIND == Q8_0:
        return raw[1] * signed(raw[0])
    elif KIND == Q4_0:
        return raw[1] * (((raw[0] >> (4 * p)) & 15) - 8).to(tl.float32)
    elif KIND == MXFP4:
        return raw[1] * fp4((raw[0] >> (4 * p)) & 15)
    else:
        return raw[0].to(tl.float32)
