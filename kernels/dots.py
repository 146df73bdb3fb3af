"""Integer dot products of vectors: exact, and so the same on every instruction set."""

from llvmlite import ir
from numba.extending import intrinsic

from dali_gguf.kernels import isa
from dali_gguf.kernels.simd import I16, I32, Vec, call, const, shuffle
from dali_gguf.kernels.sums import add_pairs_ir


def pair_dot_ir(b, u, s, signed: bool):
    """i16 [n/2] = u[2i] s[2i] + u[2i+1] s[2i+1] of i8 vectors; u unsigned or signed."""
    n = u.type.count
    if isa.AVX2 and n == 32:
        if signed:
            s = call(b, "llvm.x86.avx2.psign.b", s.type, [s, u])
            u = call(b, "llvm.abs.v32i8", u.type, [u, ir.Constant(ir.IntType(1), 0)])
        return call(b, "llvm.x86.avx2.pmadd.ub.sw", ir.VectorType(I16, 16), [u, s])
    if isa.WIDE and n == 64 and not signed:
        return call(b, "llvm.x86.avx512.pmaddubs.w.512", ir.VectorType(I16, 32), [u, s])
    wide = ir.VectorType(I16, n)
    product = b.mul(b.sext(u, wide) if signed else b.zext(u, wide), b.sext(s, wide))
    return b.add(shuffle(b, product, range(0, n, 2)), shuffle(b, product, range(1, n, 2)))


def madd_ir(b, x, y):
    """i32 [n/2] = x[2i] y[2i] + x[2i+1] y[2i+1] of i16 vectors."""
    n = x.type.count
    if isa.AVX2 and n == 16:
        return call(b, "llvm.x86.avx2.pmadd.wd", ir.VectorType(I32, 8), [x, y])
    if isa.WIDE and n == 32:
        return call(b, "llvm.x86.avx512.pmaddw.d.512", ir.VectorType(I32, 16), [x, y])
    wide = ir.VectorType(I32, n)
    product = b.mul(b.sext(x, wide), b.sext(y, wide))
    return b.add(shuffle(b, product, range(0, n, 2)), shuffle(b, product, range(1, n, 2)))


def dot_four_ir(b, acc, u, s):
    """acc i32 [n/4] + sums of four neighbouring products u s; u unsigned (0..127 without VNNI)."""
    n = u.type.count
    if isa.VNNI and n in (32, 64):
        dwords = [b.bitcast(v, acc.type) for v in (u, s)]  # what every LLVM's intrinsic takes
        return call(b, f"llvm.x86.avx512.vpdpbusd.{8 * n}", acc.type, [acc, *dwords])
    ones = const("i16", [1] * (n // 2))
    return b.add(acc, madd_ir(b, pair_dot_ir(b, u, s, signed=False), ones))


@intrinsic
def pair_dot_u(typing, u, s):
    """Adjacent products summed to i16. u in 0..127, s in -127..127: never saturates."""

    def gen(context, b, sig, args):
        return pair_dot_ir(b, *args, signed=False)

    return Vec("i16", u.n // 2)(u, s), gen


@intrinsic
def pair_dot_s(typing, w, s):
    """The same for w in -128..127 and s in -127..127 (128 * 127 * 2 fits i16)."""

    def gen(context, b, sig, args):
        return pair_dot_ir(b, *args, signed=True)

    return Vec("i16", w.n // 2)(w, s), gen


@intrinsic
def dot_four(typing, u, s):
    """Four neighbouring products each, in i32 lanes. u in 0..127 (any byte with VNNI)."""

    def gen(context, b, sig, args):
        return dot_four_ir(b, ir.Constant(sig.return_type.ir, [0] * (u.n // 4)), *args)

    return Vec("i32", u.n // 4)(u, s), gen


@intrinsic
def add_dot_four(typing, acc, u, s):
    """acc + dot_four(u, s)."""

    def gen(context, b, sig, args):
        return dot_four_ir(b, *args)

    return acc(acc, u, s), gen


@intrinsic
def times_pairs(typing, x, pairs):
    """i32 lanes times the i16 that a pair holds twice."""

    def gen(context, b, sig, args):
        factor = b.ashr(b.bitcast(args[1], x.ir), const("i32", [16] * x.n))
        return b.mul(args[0], factor)

    return x(x, pairs), gen


@intrinsic
def madd(typing, x, y):
    """Adjacent i16 products summed to i32 lanes."""

    def gen(context, b, sig, args):
        return madd_ir(b, *args)

    return Vec("i32", x.n // 2)(x, y), gen


@intrinsic
def add_small_pairs(typing, x, y):
    """lanes.add_pairs of values that fit i16."""

    def gen(context, b, sig, args):
        if isa.AVX2 and x.n == 8:
            both = call(b, "llvm.x86.avx2.packssdw", ir.VectorType(I16, 16), args)
            return madd_ir(b, both, const("i16", [1] * 16))
        return add_pairs_ir(b, *args)

    return x(x, y), gen
