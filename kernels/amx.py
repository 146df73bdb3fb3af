"""The tiles of AMX: the products of 16 tokens and 16 rows of a panel, a sub-block at a time.

Tile A is a sub-block's q of 16 tokens (bytes with sign), tile B its lines in the panel (four bytes
of each of 16 rows, without sign), tile C becomes their products, int32 [16 tokens][16 rows].
A group is 16 tokens whose parts of the records lie side by side, SLOT bytes a token:
    q int8 [<= 1024] | from D_IN_SLOT on: d float32 | from SUMS_IN_SLOT on: sums, as in the record
The products pass through memory, RING of them one after the other, and are then added up in one
vector a token. The same integers as in panel.py, and the same floats in the same order.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from dali_gguf.kernels.dots import madd_ir
from dali_gguf.kernels.panel import LINE, add_scaled_ir
from dali_gguf.kernels.simd import (
    F32, I8, I16, I32, I64, Vecs, add_ir, call, const, load_ir, splat_ir, store_ir,
)

GROUP = 16  # tokens, and rows
D_IN_SLOT, SUMS_IN_SLOT, SLOT = 1024, 1152, 1280
PRODUCT, RING, EARLY = 1024, 4, 2  # bytes of a product; how many before it is used one is started
CONFIGURATION = RING * PRODUCT  # where it lies behind the ring
SLOTS = CONFIGURATION + 64
ROOM = SLOTS + GROUP * SLOT  # bytes of scratch
A, B, C = 0, 1, 2
VOID = ir.VoidType()
INTS, FLOATS, SHORTS = (ir.VectorType(I32, 16), ir.VectorType(F32, 16), ir.VectorType(I16, 32))


INT, FLT = (Vecs(elem, 16, GROUP) for elem in ("i32", "f32"))  # 16 rows for each of 16 tokens


def configuration(sub: int) -> list[int]:
    """The 64 bytes that describe the tiles: palette 1, bytes of a row of each, rows of each."""
    data = [0] * 64
    data[0] = 1
    for tile, rows, row_bytes in ((A, GROUP, sub), (B, sub // 4, LINE), (C, GROUP, LINE)):
        data[16 + 2 * tile], data[48 + tile] = row_bytes, rows
    return data


def configure(sub: int):
    """An intrinsic: this thread's tiles get the shapes for sub-blocks of `sub`. address: 64 bytes
    of scratch."""

    @intrinsic
    def amx_configure(typing, address):
        def gen(context, b, sig, args):
            store_ir(b, const("i8", configuration(sub)), args[0])
            call(b, "llvm.x86.ldtilecfg", VOID, [_pointer(b, args[0])])
            return context.get_dummy_value()

        return types.void(types.intp), gen

    return amx_configure


@intrinsic
def amx_release(typing):
    """No tiles any more: a thread's state is as before."""

    def gen(context, b, sig, args):
        call(b, "llvm.x86.tilerelease", VOID, [])
        return context.get_dummy_value()

    return types.void(), gen


@intrinsic
def amx_multiply(typing, q, w, target):
    """A sub-block's products to target: q in slots of a group, w its lines in the panel."""

    def gen(context, b, sig, args):
        q, w, target = (_pointer(b, a) for a in args)
        a, w_tile, c = (ir.Constant(I8, tile) for tile in (A, B, C))
        slot, line = ir.Constant(I64, SLOT), ir.Constant(I64, LINE)
        call(b, "llvm.x86.tilezero", VOID, [c])
        call(b, "llvm.x86.tileloadd64", VOID, [a, q, slot])
        call(b, "llvm.x86.tileloadd64", VOID, [w_tile, w, line])
        call(b, "llvm.x86.tdpbsud", VOID, [c, a, w_tile])
        call(b, "llvm.x86.tilestored64", VOID, [c, target, line])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), gen


def _pointer(b, address):
    return b.inttoptr(address, I8.as_pointer())


def _splat(b, slots, t: int, ty):
    """A vector full of the 4 bytes at a place in token t's slot."""
    return b.bitcast(splat_ir(b, load_ir(b, add_ir(b, slots, SLOT * t), I32), 16), ty)


def _map(b, group, change):
    """The group with change(t, vector) in place of each vector."""
    for t in range(GROUP):
        group = b.insert_value(group, change(t, b.extract_value(group, t)), t)
    return group


@intrinsic
def zero_group(typing):
    def gen(context, b, sig, args):
        return ir.Constant(INT.ir, [const("i32", [0] * 16)] * GROUP)

    return INT(), gen


def add_product(small: bool):
    """An intrinsic: total + scale * product. scales: a line of i16 pairs; small: products fit i16.
    """

    @intrinsic
    def amx_add_product(typing, total, product, scales):
        def gen(context, b, sig, args):
            total, product, scales = args
            scale = load_ir(b, scales, INTS)
            if small:
                scale = b.bitcast(b.and_(scale, const("i32", [0xFFFF] * 16)), SHORTS)
            else:
                scale = b.ashr(scale, const("i32", [16] * 16))

            def change(t, v):
                part = load_ir(b, add_ir(b, product, LINE * t), INTS)
                if small:
                    return b.add(v, madd_ir(b, b.bitcast(part, SHORTS), scale))
                return b.add(v, b.mul(part, scale))

            return _map(b, total, change)

        return INT(INT, types.intp, types.intp), gen

    return amx_add_product


def _add_mins(op: str):
    @intrinsic
    def f(typing, total, mins, sums):
        """total +- min . sum: a line of min pairs, 2 i16 sums in each slot."""

        def gen(context, b, sig, args):
            total, mins, sums = args
            line = load_ir(b, mins, SHORTS)
            low = lambda t: madd_ir(b, line, _splat(b, sums, t, SHORTS))
            return _map(b, total, lambda t, v: getattr(b, op)(v, low(t)))

        return INT(INT, types.intp, types.intp), gen

    return f


add_mins, subtract_mins = _add_mins("add"), _add_mins("sub")


def _add_scaled(b, acc, whole, scale, ds, t: int, negate: bool = False):
    """acc +- (scale * d of token t) * whole."""
    return add_scaled_ir(b, acc, whole, scale, _splat(b, ds, t, FLOATS), negate)


def _scale_into(negate: bool):
    @intrinsic
    def f(typing, stage, total, scales, ds):
        """stage [16 tokens][16 rows] += +-(scale * d) * total. scales: f32, a line."""

        def gen(context, b, sig, args):
            stage, total, scales, ds = args
            scale = load_ir(b, scales, FLOATS)
            for t in range(GROUP):
                at = add_ir(b, stage, LINE * t)
                whole, acc = b.extract_value(total, t), load_ir(b, at, FLOATS)
                store_ir(b, _add_scaled(b, acc, whole, scale, ds, t, negate), at)
            return context.get_dummy_value()

        return types.void(types.intp, INT, types.intp, types.intp), gen

    return f


add_to_stage, subtract_from_stage = _scale_into(False), _scale_into(True)


def add_block32(offset: bool, mins: bool):
    """An intrinsic: acc + (scale * d) * product + (min * d) * sum, the last where there are mins.
    scales: a line of f32, that of mins behind it; offset: sums in slots are added to the product.
    """
    assert not (offset and mins)  # the sums would be of two kinds

    @intrinsic
    def amx_add_block32(typing, acc, product, sums, scales, ds):
        def gen(context, b, sig, args):
            acc, product, sums, scales, ds = args
            scale = load_ir(b, scales, FLOATS)
            low = load_ir(b, add_ir(b, scales, LINE), FLOATS) if mins else None

            def change(t, v):
                whole = load_ir(b, add_ir(b, product, LINE * t), INTS)
                if offset:
                    whole = b.add(whole, _splat(b, sums, t, INTS))
                v = _add_scaled(b, v, whole, scale, ds, t)
                return _add_scaled(b, v, _splat(b, sums, t, INTS), low, ds, t) if mins else v

            return _map(b, acc, change)

        return FLT(FLT, *(types.intp,) * 4), gen

    return amx_add_block32


@intrinsic
def load_group(typing, stage):
    """A group from [16 tokens][16] float32."""

    def gen(context, b, sig, args):
        empty = ir.Constant(FLT.ir, ir.Undefined)
        return _map(b, empty, lambda t, v: load_ir(b, add_ir(b, args[0], LINE * t), FLOATS))

    return FLT(types.intp), gen


@intrinsic
def store_group(typing, acc, stage):
    def gen(context, b, sig, args):
        for t in range(GROUP):
            store_ir(b, b.extract_value(args[0], t), add_ir(b, args[1], LINE * t))
        return context.get_dummy_value()

    return types.void(FLT, types.intp), gen
