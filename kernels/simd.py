"""LLVM vectors as Numba values: each operation is one intrinsic, kernels are plain @jit Python.

Addresses are intp everywhere (int64 mixed with uint64 would become float64 in Numba). Loads and
stores assume no alignment: GGUF blocks have none. The instruction set is chosen in isa.py; it picks
instructions in dots.py, lookup and bit_field (lanes.py), and the width of vectors and the form of
codes where the products are written. Everything else is generic LLVM.
"""

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, models, register_model

from dali_gguf.kernels import isa

I8, I16, I32, I64 = (ir.IntType(b) for b in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
ELEMENTS = {"i8": I8, "i16": I16, "i32": I32, "i64": I64, "f16": F16, "f32": F32}

OPTIONS = dict(nogil=True, cache=True, error_model="numpy", boundscheck=False)


def jit(function):
    """A kernel: no GIL, cached on disk, no fastmath (it would change results between paths)."""
    return njit(**OPTIONS)(function)


def inline(function):
    """A piece of a kernel that is always inlined into its caller."""
    return njit(forceinline=True, **OPTIONS)(function)


def inline_once(function):
    """A piece with one caller: copied into it before compiling, which costs the least time."""
    return njit(inline="always", **{k: v for k, v in OPTIONS.items() if k != "cache"})(function)


class Vec(types.Type):
    """A vector of n elements (i8, i16, i32, f32) in registers."""

    def __init__(self, elem: str, n: int):
        self.elem, self.n = elem, n
        super().__init__(name=f"Vec({elem}x{n})")

    @property
    def ir(self):
        return ir.VectorType(ELEMENTS[self.elem], self.n)


class Vecs(types.Type):
    """`count` vectors of n elements each, in registers (LLVM splits the array)."""

    def __init__(self, elem: str, n: int, count: int):
        self.elem, self.n, self.count = elem, n, count
        super().__init__(name=f"Vecs({elem}x{n}, {count})")

    @property
    def ir(self):
        return ir.ArrayType(ir.VectorType(ELEMENTS[self.elem], self.n), self.count)


@register_model(Vec)
@register_model(Vecs)
class _VecModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, fe_type.ir)


# ---- building blocks for intrinsics: functions of an IR builder -------------------------------


def const(elem: str, values) -> ir.Constant:
    values = list(values)
    return ir.Constant(ir.VectorType(ELEMENTS[elem], len(values)), values)


def call(b, name: str, result, args):
    fn = b.module.globals.get(name)
    if fn is None:
        fn = ir.Function(b.module, ir.FunctionType(result, [a.type for a in args]), name)
    return b.call(fn, args)


def shuffle(b, v, index, w=None):
    w = ir.Constant(v.type, ir.Undefined) if w is None else w
    return b.shuffle_vector(v, w, const("i32", index))


def splat_ir(b, scalar, n: int):
    undefined = ir.Constant(ir.VectorType(scalar.type, n), ir.Undefined)
    v = b.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return b.shuffle_vector(v, undefined, const("i32", [0] * n))


def add_ir(b, address, amount: int):
    """The address some bytes on."""
    return b.add(address, ir.Constant(address.type, amount)) if amount else address


def load_ir(b, address, ty, align: int = 1):
    value = b.load(b.inttoptr(address, ty.as_pointer()))
    value.align = align
    return value


def store_ir(b, value, address, align: int = 1):
    b.store(value, b.inttoptr(address, value.type.as_pointer())).align = align


def half_to_float_ir(b, bits):
    """float32 of IEEE half bits (i16 scalar or vector)."""
    n = bits.type.count if isinstance(bits.type, ir.VectorType) else 0
    as_type = (lambda t: ir.VectorType(t, n)) if n else (lambda t: t)
    number = (lambda v: const("i32", [v] * n)) if n else (lambda v: ir.Constant(I32, v))
    if isa.HALF:
        return b.fpext(b.bitcast(bits, as_type(F16)), as_type(F32))
    x = b.zext(bits, as_type(I32))
    sign = b.shl(b.and_(x, number(0x8000)), number(16))
    body = b.shl(b.and_(x, number(0x7FFF)), number(13))
    # times 2^112 moves the exponent's bias and makes subnormals right; infinity is put back after
    scale = b.bitcast(number(0x77800000), as_type(F32))
    value = b.bitcast(b.fmul(b.bitcast(body, as_type(F32)), scale), as_type(I32))
    special = b.icmp_unsigned(">=", body, number(0x0F800000))
    value = b.select(special, b.or_(value, number(0x7F800000)), value)
    return b.bitcast(b.or_(value, sign), as_type(F32))


# ---- memory -----------------------------------------------------------------------------------


def _load_vector(elem, n):
    vec = Vec(elem, n)

    @intrinsic
    def load(typing, address):
        def gen(context, b, sig, args):
            return load_ir(b, args[0], vec.ir)

        return vec(types.intp), gen

    return load


def _load_scalar(elem, numba_type, convert=None):
    @intrinsic
    def load(typing, address):
        def gen(context, b, sig, args):
            value = load_ir(b, args[0], ELEMENTS[elem])
            return convert(b, value) if convert else value

        return numba_type(types.intp), gen

    return load


load_i8x8, load_i8x16, load_i8x32, load_i8x64 = (_load_vector("i8", n) for n in (8, 16, 32, 64))
load_i16x8, load_i16x16 = _load_vector("i16", 8), _load_vector("i16", 16)
load_i32x8, load_f32x8 = _load_vector("i32", 8), _load_vector("f32", 8)
load_u8, load_i8 = _load_scalar("i8", types.uint8), _load_scalar("i8", types.int8)
load_i16, load_u16 = _load_scalar("i16", types.int16), _load_scalar("i16", types.uint16)
load_i32, load_u32 = _load_scalar("i32", types.int32), _load_scalar("i32", types.uint32)
load_u64, load_intp = _load_scalar("i64", types.uint64), _load_scalar("i64", types.intp)
load_f32 = _load_scalar("f32", types.float32)
load_f16 = _load_scalar("i16", types.float32, half_to_float_ir)
load_bf16 = _load_scalar(
    "i16", types.float32, lambda b, v: b.bitcast(b.shl(b.zext(v, I32), ir.Constant(I32, 16)), F32)
)


@intrinsic
def load_twice(typing, address):
    """i8x64: the 32 bytes at address, twice."""

    def gen(context, b, sig, args):
        half = load_ir(b, args[0], ir.VectorType(I8, 32))
        return shuffle(b, half, [*range(32)] * 2)

    return Vec("i8", 64)(types.intp), gen


@intrinsic
def store(typing, address, value):
    """Writes a vector, or a scalar of its own Numba type."""

    def gen(context, b, sig, args):
        store_ir(b, args[1], args[0])
        return context.get_dummy_value()

    return types.void(types.intp, value), gen


@intrinsic
def prefetch(typing, address):
    def gen(context, b, sig, args):
        hints = [ir.Constant(I32, v) for v in (0, 3, 1)]
        pointer = b.inttoptr(args[0], I8.as_pointer())
        call(b, "llvm.prefetch.p0", ir.VoidType(), [pointer, *hints])
        return context.get_dummy_value()

    return types.void(types.intp), gen


@intrinsic
def address_of(typing, array):
    """Address of an array's first element."""

    def gen(context, b, sig, args):
        return b.ptrtoint(context.make_array(sig.args[0])(context, b, args[0]).data, I64)

    return types.intp(array), gen


# ---- arithmetic -------------------------------------------------------------------------------


def _elementwise(op):
    @intrinsic
    def f(typing, x, y):
        def gen(context, b, sig, args):
            return getattr(b, op)(args[0], args[1])

        return x(x, y), gen

    return f


v_and, v_or, v_xor = _elementwise("and_"), _elementwise("or_"), _elementwise("xor")
v_add, v_sub, v_mul = _elementwise("add"), _elementwise("sub"), _elementwise("mul")
v_fadd, v_fsub, v_fmul = _elementwise("fadd"), _elementwise("fsub"), _elementwise("fmul")
v_fdiv = _elementwise("fdiv")


def _shift(op):
    @intrinsic
    def f(typing, x, count):
        def gen(context, b, sig, args):
            k = context.cast(b, args[1], sig.args[1], types.int64)
            k = k if x.elem == "i64" else b.trunc(k, ELEMENTS[x.elem])
            return getattr(b, op)(args[0], splat_ir(b, k, x.n))

        return x(x, count), gen

    return f


v_shl, v_shr, v_sar = _shift("shl"), _shift("lshr"), _shift("ashr")


def _float_call(name, count):
    """An LLVM float intrinsic on 1..3 vectors."""

    def gen(context, b, sig, args):
        vec = sig.return_type
        return call(b, f"llvm.{name}.v{vec.n}f32", vec.ir, list(args))

    if count == 1:
        return intrinsic(lambda typing, x: (x(x), gen))
    if count == 2:
        return intrinsic(lambda typing, x, y: (x(x, y), gen))
    return intrinsic(lambda typing, x, y, z: (z(x, y, z), gen))


v_abs, v_round, v_sqrt = (_float_call(n, 1) for n in ("fabs", "nearbyint", "sqrt"))
v_floor = _float_call("floor", 1)
v_min, v_max, v_copysign = (_float_call(n, 2) for n in ("minnum", "maxnum", "copysign"))
v_fma = _float_call("fma", 3)


@intrinsic
def fma(typing, x, y, z):
    """Scalar float32 x * y + z, rounded once."""

    def gen(context, b, sig, args):
        return call(b, "llvm.fma.f32", F32, list(args))

    return types.float32(types.float32, types.float32, types.float32), gen


def _splat(elem, n, numba_type):
    vec = Vec(elem, n)

    @intrinsic
    def f(typing, x):
        def gen(context, b, sig, args):
            return splat_ir(b, args[0], n)

        return vec(numba_type), gen

    return f


splat_f32x8, splat_i32x8 = _splat("f32", 8, types.float32), _splat("i32", 8, types.int32)
splat_i16x16, splat_i8x32 = _splat("i16", 16, types.int16), _splat("i8", 32, types.uint8)
splat_i8x16 = _splat("i8", 16, types.uint8)
