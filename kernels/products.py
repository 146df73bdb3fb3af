"""Register-blocked float32 products for attention.

A panel holds 16 columns side by side: [n, 16] float32, one cache line a row.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from dali_gguf.kernels.records import merged
from dali_gguf.kernels.simd import F32, I64, call, jit, load_ir, splat_ir, store_ir

PANEL = 16  # columns of a panel: two vectors, so that six rows of sums fit sixteen registers


def panel_product(rows: int, panels: int):
    """An intrinsic: c [rows, 16 panels] = a [rows, n] @ b, or c * keep + that * add.

    b lies in panels [n, 16], b_stride bytes apart; a and c have rows a_stride and c_stride bytes
    apart. keep, add: addresses of a factor a row, or 0 for plain storing. Every element is one
    chain of fused multiply-adds over n in ascending order, whatever rows and panels are.
    """

    @intrinsic
    def f(typing, a, a_stride, b, b_stride, n, c, c_stride, keep, add):
        def gen(context, builder, sig, args):
            _panel_product_ir(builder, rows, panels, *args)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 9), gen

    return f


def _panel_product_ir(b, rows, panels, a, a_stride, p, p_stride, n, c, c_stride, keep, add):
    vec = ir.VectorType(F32, 8)
    number = lambda v: ir.Constant(I64, v)
    at = lambda base, stride, i, more: b.add(b.add(base, b.mul(stride, number(i))), more)
    sums = [[cgutils.alloca_once_value(b, ir.Constant(vec, [0.0] * 8)) for _ in range(2 * panels)]
            for _ in range(rows)]
    for row in sums:
        for cell in row:
            b.store(ir.Constant(vec, [0.0] * 8), cell)
    with cgutils.for_range(b, n) as loop:
        a_at, p_at = b.mul(loop.index, number(4)), b.mul(loop.index, number(4 * PANEL))
        right = [load_ir(b, at(p, p_stride, j // 2, b.add(p_at, number(32 * (j % 2)))), vec)
                 for j in range(2 * panels)]
        for i in range(rows):
            left = splat_ir(b, load_ir(b, at(a, a_stride, i, a_at), F32), 8)
            for j in range(2 * panels):
                value = call(b, "llvm.fma.v8f32", vec, [left, right[j], b.load(sums[i][j])])
                b.store(value, sums[i][j])
    plain = b.icmp_unsigned("==", keep, number(0))
    with b.if_else(plain) as (then, otherwise):
        with then:
            for i in range(rows):
                for j in range(2 * panels):
                    store_ir(b, b.load(sums[i][j]), at(c, c_stride, i, number(32 * j)))
        with otherwise:
            for i in range(rows):
                factors = [splat_ir(b, load_ir(b, b.add(f, number(4 * i)), F32), 8)
                           for f in (keep, add)]
                for j in range(2 * panels):
                    target = at(c, c_stride, i, number(32 * j))
                    kept = b.fmul(load_ir(b, target, vec), factors[0])
                    args = [b.load(sums[i][j]), factors[1], kept]
                    store_ir(b, call(b, "llvm.fma.v8f32", vec, args), target)


_product_6x1, _product_4x1 = panel_product(6, 1), panel_product(4, 1)
_product_1x4, _product_1x1 = panel_product(1, 4), panel_product(1, 1)


@merged
def _tall(rows):
    """How many of the remaining rows the next step of multiply_panels takes (0: the thin rest)."""
    if rows >= 6 and rows != 8 and rows != 9:
        return 6
    return 4 if rows >= 4 else 0


@jit
def multiply_panels(a, a_stride, rows, p, p_stride, panels, n, c, c_stride, keep, add):
    """panel_product for any number of rows and panels. A panel stays in L1 for all tall rows."""
    thin = rows
    while _tall(thin):
        thin -= _tall(thin)
    for j in range(panels if thin < rows else 0):
        i, right, target = 0, p + j * p_stride, c + 64 * j
        k, f = keep, add
        while _tall(rows - i):
            step = _tall(rows - i)
            left, out = a + i * a_stride, target + i * c_stride
            if step == 6:
                _product_6x1(left, a_stride, right, p_stride, n, out, c_stride, k, f)
            else:
                _product_4x1(left, a_stride, right, p_stride, n, out, c_stride, k, f)
            i += step
            if keep:
                k, f = k + 4 * step, f + 4 * step
    for i in range(rows - thin, rows):
        left, out, k, f = a + i * a_stride, c + i * c_stride, keep, add
        if keep:
            k, f = keep + 4 * i, add + 4 * i
        for j in range(0, panels - 3, 4):
            right, target = p + j * p_stride, out + 64 * j
            _product_1x4(left, a_stride, right, p_stride, n, target, c_stride, k, f)
        for j in range(panels // 4 * 4, panels):
            right, target = p + j * p_stride, out + 64 * j
            _product_1x1(left, a_stride, right, p_stride, n, target, c_stride, k, f)
