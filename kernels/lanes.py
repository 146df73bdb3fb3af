"""Vector operations that move or convert lanes."""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from dali_gguf.kernels import isa
from dali_gguf.kernels.simd import (
    F32, I8, I16, I32, I64, Vec, call, const, half_to_float_ir, load_ir, shuffle, store_ir,
)


def permutation(index):
    """An intrinsic that permutes lanes by a constant index."""
    index = tuple(index)

    @intrinsic
    def permute(typing, x):
        def gen(context, b, sig, args):
            return shuffle(b, args[0], index)

        return Vec(x.elem, len(index))(x), gen

    return permute


def widened(index):
    """An intrinsic: i16 lanes of the bytes of i8x16 at a constant index, zero-extended."""
    bytes_ = [i for k in index for i in (k, 16)]

    @intrinsic
    def widen(typing, x):
        def gen(context, b, sig, args):
            both = shuffle(b, args[0], bytes_, const("i8", [0] * 16))
            return b.bitcast(both, ir.VectorType(I16, len(index)))

        return Vec("i16", len(index))(x), gen

    return widen


def merge(index):
    """An intrinsic that picks lanes of two vectors by a constant index, the second's after."""
    index = tuple(index)

    @intrinsic
    def pick(typing, x, y):
        def gen(context, b, sig, args):
            return shuffle(b, args[0], index, args[1])

        return Vec(x.elem, len(index))(x, y), gen

    return pick


even_then_odd = permutation([*range(0, 16, 2), *range(1, 16, 2)])


def constant(elem, values):
    """An intrinsic that returns a constant vector."""
    vec = Vec(elem, len(values))

    @intrinsic
    def f(typing):
        def gen(context, b, sig, args):
            return const(elem, values)

        return vec(), gen

    return f


zero_f32x8, zero_i32x8 = constant("f32", [0.0] * 8), constant("i32", [0] * 8)
ones_i16x16 = constant("i16", [1] * 16)
fifteen_i8x32 = constant("i8", [15] * 32)


def lookup(table):
    """An intrinsic: 16-entry signed byte table, indexed by i8x32 values 0..15."""
    vec = Vec("i8", 32)
    entries = [v & 255 for v in table]

    @intrinsic
    def f(typing, index):
        def gen(context, b, sig, args):
            if isa.AVX2:
                return call(b, "llvm.x86.avx2.pshuf.b", vec.ir, [const("i8", entries * 2), args[0]])
            values, result = const("i8", entries), ir.Constant(vec.ir, ir.Undefined)
            for i in range(32):
                lane = ir.Constant(I32, i)
                at = b.zext(b.extract_element(args[0], lane), I32)
                result = b.insert_element(result, b.extract_element(values, at), lane)
            return result

        return vec(index), gen

    return f


@intrinsic
def nibbles(typing, x):
    """i8x16 -> i8x32: the low nibbles of all bytes, then the high ones (values 0..15)."""

    def gen(context, b, sig, args):
        high = b.lshr(args[0], const("i8", [4] * 16))
        both = shuffle(b, args[0], range(32), high)
        return b.and_(both, const("i8", [15] * 32))

    return Vec("i8", 32)(x), gen


@intrinsic
def low_nibbles(typing, x):
    def gen(context, b, sig, args):
        return b.and_(args[0], const("i8", [15] * x.n))

    return x(x), gen


@intrinsic
def high_nibbles(typing, x):
    def gen(context, b, sig, args):
        wide = b.bitcast(args[0], ir.VectorType(I16, x.n // 2))
        shifted = b.bitcast(b.lshr(wide, const("i16", [4] * (x.n // 2))), x.ir)
        return b.and_(shifted, const("i8", [15] * x.n))

    return x(x), gen


def bit_field(first: int, second: int, width: int, to: int):
    """An intrinsic on i8x64: `width` bits of each byte moved to bit `to`, the others 0. They come
    from bit `first` in the lower 32 bytes and from bit `second` in the upper ones."""

    def matrix(start):
        """Of GF2P8AFFINEQB: byte 7 - i is the mask of the bits whose parity becomes bit i."""
        return sum(1 << start + i - to << 8 * (7 - i) for i in range(to, to + width))

    @intrinsic
    def field(typing, x):
        def gen(context, b, sig, args):
            if isa.GFNI:
                rows = const("i64", [matrix(first)] * 4 + [matrix(second)] * 4)
                last = ir.Constant(I8, 0)
                name = "llvm.x86.vgf2p8affineqb.512"
                return call(b, name, x.ir, [args[0], b.bitcast(rows, x.ir), last])
            down = [max(0, start - to) for start in (first, second) for _ in range(16)]
            up = [max(0, to - start) for start in (first, second) for _ in range(16)]
            value = b.lshr(b.bitcast(args[0], ir.VectorType(I16, 32)), const("i16", down))
            value = b.bitcast(b.shl(value, const("i16", up)), x.ir)
            return b.and_(value, const("i8", [((1 << width) - 1) << to] * 64))

        return x(x), gen

    return field


@intrinsic
def concat(typing, x, y):
    def gen(context, b, sig, args):
        return shuffle(b, args[0], range(2 * x.n), args[1])

    return Vec(x.elem, 2 * x.n)(x, y), gen


def _convert(op, elem):
    @intrinsic
    def f(typing, x):
        vec = Vec(elem, x.n)

        def gen(context, b, sig, args):
            return getattr(b, op)(args[0], vec.ir)

        return vec(x), gen

    return f


to_f32 = _convert("sitofp", "f32")
to_i32 = _convert("fptosi", "i32")
sign_extend_i16, zero_extend_i16 = _convert("sext", "i16"), _convert("zext", "i16")
sign_extend_i32, zero_extend_i32 = _convert("sext", "i32"), _convert("zext", "i32")
narrow_i8, narrow_i16 = _convert("trunc", "i8"), _convert("trunc", "i16")


@intrinsic
def half_to_float(typing, x):
    """i16 bits of IEEE half -> f32."""

    def gen(context, b, sig, args):
        return half_to_float_ir(b, args[0])

    return Vec("f32", x.n)(x), gen


@intrinsic
def bf16_to_float(typing, x):
    vec = Vec("f32", x.n)

    def gen(context, b, sig, args):
        wide = b.zext(args[0], ir.VectorType(I32, x.n))
        return b.bitcast(b.shl(wide, const("i32", [16] * x.n)), vec.ir)

    return vec(x), gen


@intrinsic
def bits_to_f32(typing, x):
    """i32 lanes read as float32 bits."""

    def gen(context, b, sig, args):
        return b.bitcast(args[0], ir.VectorType(F32, x.n))

    return Vec("f32", x.n)(x), gen


@intrinsic
def bytes_of_u64(typing, x):
    def gen(context, b, sig, args):
        return b.bitcast(args[0], ir.VectorType(I8, 8))

    return Vec("i8", 8)(types.uint64), gen


@intrinsic
def first_lane(typing, x):
    """Lane 0 of an f32 vector."""

    def gen(context, b, sig, args):
        return b.extract_element(args[0], ir.Constant(I32, 0))

    return types.float32(x), gen


@intrinsic
def bits_to_bytes(typing, x):
    """uint32 -> i8x32: byte i is bit i."""

    def gen(context, b, sig, args):
        bits = b.bitcast(args[0], ir.VectorType(ir.IntType(1), 32))
        return b.zext(bits, ir.VectorType(I8, 32))

    return Vec("i8", 32)(types.uint32), gen


@intrinsic
def power_of_two(typing, x):
    """i8x8 exponents e -> 2^(e-128) as f32 (MXFP4's scale, halved for the doubled codes)."""

    def gen(context, b, sig, args):
        e = b.zext(args[0], ir.VectorType(I32, 8))
        shifted = lambda n, more: b.add(b.shl(e, const("i32", [n] * 8)), const("i32", [more] * 8))
        normal, tiny = shifted(23, -(1 << 23)), shifted(21, 1 << 21)  # tiny is the larger if e < 2
        bits = b.select(b.icmp_signed(">", normal, tiny), normal, tiny)
        return b.bitcast(bits, ir.VectorType(F32, 8))

    return Vec("f32", 8)(x), gen


def _gather8(elem, ir_type):
    """An intrinsic: 8 elements at address + i * stride."""
    vec = Vec(elem, 8)

    @intrinsic
    def f(typing, address, stride):
        def gen(context, b, sig, args):
            result, at = ir.Constant(vec.ir, ir.Undefined), args[0]
            for i in range(8):
                result = b.insert_element(result, load_ir(b, at, ir_type), ir.Constant(I32, i))
                at = b.add(at, args[1])
            return result

        return vec(types.intp, types.intp), gen

    return f


gather_i16x8, gather_i8x8 = _gather8("i16", I16), _gather8("i8", I8)
gather_i32x8 = _gather8("i32", I32)


@intrinsic
def transpose8(typing, source, stride, target, apart):
    """Eight rows of eight dwords at source, `stride` bytes apart, to eight columns at target."""

    def gen(context, b, sig, args):
        at = lambda base, step, i: b.add(base, b.mul(step, ir.Constant(I64, i)))
        rows = [load_ir(b, at(args[0], args[1], i), ir.VectorType(I32, 8)) for i in range(8)]
        low, high = [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]
        t = [shuffle(b, rows[i], half, rows[i + 1]) for i in range(0, 8, 2) for half in (low, high)]
        low, high = [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]
        u = [shuffle(b, t[i + j], half, t[i + j + 2])
             for i in (0, 4) for j in (0, 1) for half in (low, high)]
        low, high = [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]
        columns = [shuffle(b, u[j], half, u[j + 4]) for half in (low, high) for j in range(4)]
        for i, column in enumerate(columns):
            store_ir(b, column, at(args[2], args[3], i))
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), gen
