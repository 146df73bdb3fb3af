"""Panels for matrix-matrix products: 8 rows of weights unpacked once, and the register tile over them.

A panel holds, block after block of one quant type, the codes of 8 rows interleaved so that one
32-byte vector is 4 weights of each row:
    blocks of 32:   codes [8][8 rows][4] | scale f32 [8] | min f32 [8]
    blocks of 256:  codes [64][8 rows][4] | scale pairs i16 [256/SUB][8][2] | min pairs i16 [8][8][2]
                    | d f32 [8] | dmin f32 [8]
The tile multiplies PANELS panels with TOKENS records: per 4 weights one load of each panel, one
broadcast of each token's 4 bytes, and one pair_dot; i16 sums are widened as seldom as they may.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

from dali_gguf.kernels.dots import madd_ir, pair_dot_ir
from dali_gguf.kernels.simd import (
    ELEMENTS, F32, I16, I32, call, const, load_ir, shuffle, splat_ir, store_ir,
)

PANELS, TOKENS = 2, 4
I32X8, F32X8 = ir.VectorType(I32, 8), ir.VectorType(F32, 8)
I16X16, I8X32 = ir.VectorType(I16, 16), ir.VectorType(ir.IntType(8), 32)


class Tile(types.Type):
    """PANELS x TOKENS vectors of 8 rows, held in registers (LLVM splits the array)."""

    def __init__(self, elem: str):
        self.elem = elem
        super().__init__(name=f"Tile({elem})")

    @property
    def ir(self):
        return ir.ArrayType(ir.VectorType(ELEMENTS[self.elem], 8), PANELS * TOKENS)


@register_model(Tile)
class _TileModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, fe_type.ir)


INT, FLT = Tile("i32"), Tile("f32")
CELLS = [(p, t) for p in range(PANELS) for t in range(TOKENS)]


def _cell(p, t):
    return p * TOKENS + t


def _add(b, address, amount: int):
    return b.add(address, ir.Constant(address.type, amount)) if amount else address


@intrinsic
def zero_tile(typing):
    def gen(context, b, sig, args):
        return ir.Constant(INT.ir, [const("i32", [0] * 8)] * len(CELLS))

    return INT(), gen


def tile_dot(sub, signed, widen_after, scaled):
    """An intrinsic: tile += scale * (codes . q) over one sub-block of `sub` weights.

    tile(acc, w, step, scales, y0..y3): w panel codes, step bytes from panel to panel, scales the
    i16 pairs of the first panel (or 0), y* the tokens' int8 values. widen_after: how many groups
    of 4 products fit an i16 sum.
    """

    @intrinsic
    def tile(typing, acc, w, step, scales, y0, y1, y2, y3):
        def gen(context, b, sig, args):
            acc, w, step, scales, *ys = args
            panels = [b.mul(step, ir.Constant(step.type, p)) for p in range(PANELS)]
            cells = [b.extract_value(acc, i) for i in range(len(CELLS))]
            factor = [
                load_ir(b, b.add(scales, panels[p]), I16X16) if scaled else const("i16", [1] * 16)
                for p in range(PANELS)
            ]
            part = [None] * len(CELLS)
            for k in range(sub // 4):
                weights = [load_ir(b, _add(b, b.add(w, panels[p]), 32 * k), I8X32)
                           for p in range(PANELS)]
                for t in range(TOKENS):
                    four = load_ir(b, _add(b, ys[t], 4 * k), I32)
                    y = b.bitcast(splat_ir(b, four, 8), I8X32)
                    for p in range(PANELS):
                        i, v = _cell(p, t), pair_dot_ir(b, weights[p], y, signed)
                        part[i] = v if part[i] is None else b.add(part[i], v)
                if (k + 1) % widen_after == 0 or k + 1 == sub // 4:
                    for p, t in CELLS:
                        i = _cell(p, t)
                        cells[i] = b.add(cells[i], madd_ir(b, part[i], factor[p]))
                        part[i] = None
            for i, value in enumerate(cells):
                acc = b.insert_value(acc, value, i)
            return acc

        return INT(INT, *(types.intp,) * 7), gen

    return tile


@intrinsic
def tile_sums(typing, acc, mins, step, s0, s1, s2, s3):
    """acc += min . sum16 over a block of 256: 8 min pairs a panel, 16 i16 sums a token."""

    def gen(context, b, sig, args):
        acc, mins, step, *sums = args
        panels = [b.mul(step, ir.Constant(step.type, p)) for p in range(PANELS)]
        cells = [b.extract_value(acc, i) for i in range(len(CELLS))]
        for k in range(8):
            m = [load_ir(b, _add(b, b.add(mins, panels[p]), 32 * k), I16X16) for p in range(PANELS)]
            for t in range(TOKENS):
                pair = splat_ir(b, load_ir(b, _add(b, sums[t], 4 * k), I32), 8)
                for p in range(PANELS):
                    i = _cell(p, t)
                    cells[i] = b.add(cells[i], madd_ir(b, m[p], b.bitcast(pair, I16X16)))
        for i, value in enumerate(cells):
            acc = b.insert_value(acc, value, i)
        return acc

    return INT(INT, *(types.intp,) * 6), gen


@intrinsic
def tile_splat(typing, a0, a1, a2, a3, factor):
    """Tile whose cells of token t are factor * int32 at a_t."""

    def gen(context, b, sig, args):
        *sums, factor = args
        values = [splat_ir(b, b.mul(load_ir(b, a, I32), factor), 8) for a in sums]
        acc = ir.Constant(INT.ir, ir.Undefined)
        for p, t in CELLS:
            acc = b.insert_value(acc, values[t], _cell(p, t))
        return acc

    return INT(*(types.intp,) * 4, types.int32), gen


@intrinsic
def tile_subtract(typing, x, y):
    def gen(context, b, sig, args):
        acc = ir.Constant(INT.ir, ir.Undefined)
        for i in range(len(CELLS)):
            difference = b.sub(b.extract_value(args[0], i), b.extract_value(args[1], i))
            acc = b.insert_value(acc, difference, i)
        return acc

    return INT(INT, INT), gen


def _scale_into(negate):
    @intrinsic
    def f(typing, acc, total, scales, step, d0, d1, d2, d3):
        """acc = fma(float(total), +-(scale * d), acc): scale f32 [8] a panel, d float32 a token."""

        def gen(context, b, sig, args):
            acc, total, scales, step, *ds = args
            factor = [splat_ir(b, load_ir(b, d, F32), 8) for d in ds]
            for p in range(PANELS):
                at = b.add(scales, b.mul(step, ir.Constant(step.type, p)))
                scale = load_ir(b, at, F32X8)
                for t in range(TOKENS):
                    i, product = _cell(p, t), b.fmul(scale, factor[t])
                    if negate:
                        product = b.fsub(const("f32", [0.0] * 8), product)
                    number = b.sitofp(b.extract_value(total, i), F32X8)
                    cell = call(b, "llvm.fma.v8f32", F32X8, [number, product, b.extract_value(acc, i)])
                    acc = b.insert_value(acc, cell, i)
            return acc

        return FLT(FLT, INT, *(types.intp,) * 6), gen

    return f


add_scaled, subtract_scaled = _scale_into(False), _scale_into(True)


@intrinsic
def load_tile(typing, address):
    """Float tile from memory: [TOKENS][PANELS * 8] float32."""

    def gen(context, b, sig, args):
        acc = ir.Constant(FLT.ir, ir.Undefined)
        for p, t in CELLS:
            value = load_ir(b, _add(b, args[0], 32 * (t * PANELS + p)), F32X8)
            acc = b.insert_value(acc, value, _cell(p, t))
        return acc

    return FLT(types.intp), gen


@intrinsic
def store_tile(typing, acc, address):
    def gen(context, b, sig, args):
        for p, t in CELLS:
            at = _add(b, args[1], 32 * (t * PANELS + p))
            store_ir(b, b.extract_value(args[0], _cell(p, t)), at)
        return context.get_dummy_value()

    return types.void(FLT, types.intp), gen


@intrinsic
def double_pairs(typing, source, target):
    """i16x16 (a0 b0 a1 b1 ..) -> (a0 a0 a1 a1 ..) at target and (b0 b0 ..) 32 bytes on."""

    def gen(context, b, sig, args):
        v = load_ir(b, args[0], I16X16)
        for odd in (0, 1):
            index = [2 * (i // 2) + odd for i in range(16)]
            store_ir(b, shuffle(b, v, index), _add(b, args[1], 32 * odd))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), gen
