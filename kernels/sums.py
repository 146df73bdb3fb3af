"""Sums over the lanes of vectors: one fixed order each."""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from dali_gguf.kernels.lanes import merge, permutation
from dali_gguf.kernels.simd import ELEMENTS, I32, Vec, call, inline, load_i32x8, shuffle


def add_pairs_ir(b, x, y):
    even, odd = [0, 2, 8, 10, 4, 6, 12, 14], [1, 3, 9, 11, 5, 7, 13, 15]
    return b.add(shuffle(b, x, even, y), shuffle(b, x, odd, y))


@intrinsic
def add_pairs(typing, x, y):
    """Neighbouring lanes of i32x8 x and y added, within 128-bit halves."""

    def gen(context, b, sig, args):
        return add_pairs_ir(b, *args)

    return x(x, y), gen


@intrinsic
def fold(typing, x):
    """The lower half of x plus the upper one."""

    def gen(context, b, sig, args):
        half = x.n // 2
        return b.add(shuffle(b, args[0], range(half)), shuffle(b, args[0], range(half, x.n)))

    return Vec(x.elem, x.n // 2)(x), gen


FIRST, SECOND = [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]
first_halves, second_halves = merge(FIRST), merge(SECOND)


@intrinsic
def add_halves(typing, x, y):
    """i32x8 x, y -> low half + high half of x, then of y."""

    def gen(context, b, sig, args):
        return b.add(shuffle(b, args[0], FIRST, args[1]), shuffle(b, args[0], SECOND, args[1]))

    return x(x, y), gen


@inline
def sum_scratch(a):
    """Lane r of the result = sum of the lanes of the r-th of eight i32x8 at an address."""
    v0 = add_pairs(load_i32x8(a), load_i32x8(a + 32))
    v1 = add_pairs(load_i32x8(a + 64), load_i32x8(a + 96))
    v2 = add_pairs(load_i32x8(a + 128), load_i32x8(a + 160))
    v3 = add_pairs(load_i32x8(a + 192), load_i32x8(a + 224))
    return add_halves(add_pairs(v0, v1), add_pairs(v2, v3))


in_order = permutation([0, 4, 1, 5, 2, 6, 3, 7])


@inline
def sum_quads(a):
    """Lane r of the result = sum of the lanes of the r-th of eight i32x4 at an address."""
    v0 = add_pairs(load_i32x8(a), load_i32x8(a + 32))
    v1 = add_pairs(load_i32x8(a + 64), load_i32x8(a + 96))
    return in_order(add_pairs(v0, v1))


@intrinsic
def sum_f32(typing, x):
    """Sum of f32x8 in a fixed tree: (0+4)+(2+6) + ((1+5)+(3+7))."""

    def gen(context, b, sig, args):
        v = args[0]
        for half in (4, 2, 1):
            v = b.fadd(shuffle(b, v, range(half)), shuffle(b, v, range(half, 2 * half)))
        return b.extract_element(v, ir.Constant(I32, 0))

    return types.float32(x), gen


def _reduce(name, elem, numba_type):
    @intrinsic
    def f(typing, x):
        def gen(context, b, sig, args):
            return call(b, f"llvm.vector.reduce.{name}.v{x.n}{elem}", ELEMENTS[elem], [args[0]])

        return numba_type(x), gen

    return f


max_f32 = _reduce("fmax", "f32", types.float32)
sum_i32 = _reduce("add", "i32", types.int32)
