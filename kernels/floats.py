"""Products with F32, F16 and BF16 weights: float32 activations, nothing rounded on the way.

Each product is one f32x8 of running sums over the columns in order, added up in a fixed tree, then
the columns past the last multiple of 8 one by one: the same order for every count of tokens.
Templates, as in blocks32.py: a type gives load8(p) -> f32x8, load1(p) -> float32 and BYTES.
"""

import numpy as np

from dali_gguf.kernels.lanes import zero_f32x8
from dali_gguf.kernels.simd import fma, load_f32, load_f32x8, load_intp, prefetch, store, v_fma
from dali_gguf.kernels.sums import sum_f32


def finish(acc, p, x, n):
    """Sum of the lanes and of the columns left over."""
    total = sum_f32(acc)
    for i in range(n // 8 * 8, n):
        total = fma(load1(p + i * BYTES), load_f32(x + 4 * i), total)
    return total


def four_rows(p0, p1, p2, p3, n, x, out):
    """Four products with one token's x, to out[0..3]."""
    a0, a1, a2, a3 = zero_f32x8(), zero_f32x8(), zero_f32x8(), zero_f32x8()
    ahead = 4 * (p1 - p0)
    for i in range(0, n // 8 * 8, 8):
        v, o = load_f32x8(x + 4 * i), i * BYTES
        prefetch(p0 + o + ahead)
        prefetch(p1 + o + ahead)
        prefetch(p2 + o + ahead)
        prefetch(p3 + o + ahead)
        a0 = v_fma(load8(p0 + o), v, a0)
        a1 = v_fma(load8(p1 + o), v, a1)
        a2 = v_fma(load8(p2 + o), v, a2)
        a3 = v_fma(load8(p3 + o), v, a3)
    store(out, finish(a0, p0, x, n))
    store(out + 4, finish(a1, p1, x, n))
    store(out + 8, finish(a2, p2, x, n))
    store(out + 12, finish(a3, p3, x, n))


def four_by_two(p0, p1, p2, p3, n, x, z, out, out2):
    """Four rows with two tokens."""
    a0, a1, a2, a3 = zero_f32x8(), zero_f32x8(), zero_f32x8(), zero_f32x8()
    b0, b1, b2, b3 = zero_f32x8(), zero_f32x8(), zero_f32x8(), zero_f32x8()
    for i in range(0, n // 8 * 8, 8):
        v, u, o = load_f32x8(x + 4 * i), load_f32x8(z + 4 * i), i * BYTES
        w0, w1, w2, w3 = load8(p0 + o), load8(p1 + o), load8(p2 + o), load8(p3 + o)
        a0, b0 = v_fma(w0, v, a0), v_fma(w0, u, b0)
        a1, b1 = v_fma(w1, v, a1), v_fma(w1, u, b1)
        a2, b2 = v_fma(w2, v, a2), v_fma(w2, u, b2)
        a3, b3 = v_fma(w3, v, a3), v_fma(w3, u, b3)
    store(out, finish(a0, p0, x, n))
    store(out + 4, finish(a1, p1, x, n))
    store(out + 8, finish(a2, p2, x, n))
    store(out + 12, finish(a3, p3, x, n))
    store(out2, finish(b0, p0, z, n))
    store(out2 + 4, finish(b1, p1, z, n))
    store(out2 + 8, finish(b2, p2, z, n))
    store(out2 + 12, finish(b3, p3, z, n))


def matvec(w, stride, r0, r1, n, records, tokens, out, out_stride, scratch):
    """As rows.py says; a record is the float32 row itself."""
    for r in range(r0, r1, 4):
        count = min(4, r1 - r)
        p = w + r * stride
        p1, p2 = p + min(1, count - 1) * stride, p + min(2, count - 1) * stride
        p3 = p + min(3, count - 1) * stride
        for t in range(0, tokens, 2):
            x = load_intp(records + 8 * t)
            z = load_intp(records + 8 * min(t + 1, tokens - 1))
            if t + 1 < tokens:
                four_by_two(p, p1, p2, p3, n, x, z, scratch, scratch + 16)
            else:
                four_rows(p, p1, p2, p3, n, x, scratch)
            for k in range(min(2, tokens - t)):
                for i in range(count):
                    target = out + (t + k) * out_stride + 4 * (r + i)
                    store(target, load_f32(scratch + 16 * k + 4 * i))


def expand(p, n, out, scratch):
    """n weights at p to float32 at out."""
    for i in range(n):
        store(out + 4 * i, load1(p + i * BYTES))


INLINE, ONCE = (finish,), (four_rows, four_by_two)
