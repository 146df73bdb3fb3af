"""Panels for matrix-matrix products: 16 rows of weights unpacked once, and the register tile over
them.

A panel holds, block after block of one quant type, lines of 64 bytes: 4 bytes for each of 16 rows.
    blocks of 32:   8 of codes [16 rows][4] | scale f32 [16] | min f32 [16]
    blocks of 256:  64 of codes | 256/SUB of scale pairs i16 [16][2] | 8 of min pairs i16 [16][2],
                    only 4 used where a min stands for 32 weights | d f32 [16] | dmin f32 [16]
The tile multiplies a panel with TOKENS records: per 4 weights one load of the line, one broadcast
of each token's 4 bytes, and one dot product. Without VNNI its sums are i16 and are widened as
seldom as they may.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from dali_gguf.kernels import isa
from dali_gguf.kernels.dots import dot_four_ir, madd_ir, pair_dot_ir
from dali_gguf.kernels.simd import (
    F32, I8, I16, I32, Vecs, add_ir, call, const, load_ir, shuffle, splat_ir, store_ir,
)

LINE, TOKENS = 64, 4
LANES = 16 if isa.WIDE else 8  # rows of a vector
PARTS = 16 // LANES  # vectors of a line
INTS, FLOATS = ir.VectorType(I32, LANES), ir.VectorType(F32, LANES)
SHORTS, BYTES = ir.VectorType(I16, 2 * LANES), ir.VectorType(I8, 4 * LANES)


INT, FLT = (Vecs(elem, LANES, PARTS * TOKENS) for elem in ("i32", "f32"))
CELLS = [(p, t) for p in range(PARTS) for t in range(TOKENS)]


def _cell(p, t):
    return p * TOKENS + t


def _line_ir(b, address, line: int, ty):
    """The vectors of a line, its rows in order."""
    return [load_ir(b, add_ir(b, address, LINE * line + 4 * LANES * p), ty) for p in range(PARTS)]


def _broadcast_ir(b, address, ty):
    """A vector full of the 4 bytes at an address."""
    return b.bitcast(splat_ir(b, load_ir(b, address, I32), LANES), ty)


@intrinsic
def zero_tile(typing):
    def gen(context, b, sig, args):
        return ir.Constant(INT.ir, [const("i32", [0] * LANES)] * len(CELLS))

    return INT(), gen


def _vnni_cells(b, cells, w, factor, ys, sub):
    """cells + factor * (codes . q); factor: i32 vectors of the parts, or None."""
    parts = [const("i32", [0] * LANES)] * len(CELLS) if factor else cells
    for k in range(sub // 4):
        weights = _line_ir(b, w, k, BYTES)
        for t in range(TOKENS):
            y = _broadcast_ir(b, add_ir(b, ys[t], 4 * k), BYTES)
            for p in range(PARTS):
                i = _cell(p, t)
                parts[i] = dot_four_ir(b, parts[i], weights[p], y)
    if not factor:
        return parts
    return [b.add(cells[_cell(p, t)], b.mul(parts[_cell(p, t)], factor[p])) for p, t in CELLS]


def _keep_order(b, value):
    """The value, by way of an empty instruction that stays where it is. Without it LLVM computes
    cell after cell, with the weights of all groups in memory."""
    if not isa.AVX2:
        return value
    nothing = ir.InlineAsm(ir.FunctionType(value.type, [value.type]), "", "=x,0", True)
    return b.call(nothing, [value])


def _pair_cells(b, cells, w, factor, ys, sub, signed, widen_after):
    """The same by i16 sums; factor: i16 pairs of the parts."""
    parts = [None] * len(CELLS)
    for k in range(sub // 4):
        weights = _line_ir(b, w, k, BYTES)
        widen = (k + 1) % widen_after == 0 or k + 1 == sub // 4
        for t in range(TOKENS):
            y = _broadcast_ir(b, add_ir(b, ys[t], 4 * k), BYTES)
            for p in range(PARTS):
                i, v = _cell(p, t), pair_dot_ir(b, weights[p], y, signed)
                v = v if parts[i] is None else b.add(parts[i], v)
                if widen:
                    cells[i] = _keep_order(b, b.add(cells[i], madd_ir(b, v, factor[p])))
                parts[i] = None if widen else _keep_order(b, v)
    return cells


def tile_dot(sub, signed, widen_after, scaled):
    """An intrinsic: tile += scale * (codes . q) over one sub-block of `sub` weights.

    tile(acc, w, scales, y0..y3): w the codes, scales a line of i16 pairs (or 0), y* the tokens'
    int8 values. signed: of the codes; with VNNI they are bytes without sign. widen_after: how many
    groups of 4 products fit an i16 sum.
    """

    @intrinsic
    def tile(typing, acc, w, scales, y0, y1, y2, y3):
        def gen(context, b, sig, args):
            acc, w, scales, *ys = args
            cells = [b.extract_value(acc, i) for i in range(len(CELLS))]
            if isa.VNNI:
                factor = scaled and [b.ashr(pair, const("i32", [16] * LANES))
                                     for pair in _line_ir(b, scales, 0, INTS)]
                cells = _vnni_cells(b, cells, w, factor, ys, sub)
            else:
                factor = [const("i16", [1] * 2 * LANES)] * PARTS
                if scaled:
                    factor = _line_ir(b, scales, 0, SHORTS)
                cells = _pair_cells(b, cells, w, factor, ys, sub, signed, widen_after)
            for i, value in enumerate(cells):
                acc = b.insert_value(acc, value, i)
            return acc

        return INT(INT, *(types.intp,) * 6), gen

    return tile


def tile_sums(lines):
    """An intrinsic: tile += min . sum over a block of 256: lines of min pairs, and as many pairs of
    i16 sums a token."""

    @intrinsic
    def add_sums(typing, acc, mins, s0, s1, s2, s3):
        def gen(context, b, sig, args):
            acc, mins, *sums = args
            cells = [b.extract_value(acc, i) for i in range(len(CELLS))]
            for k in range(lines):
                m = _line_ir(b, mins, k, SHORTS)
                for t in range(TOKENS):
                    pair = _broadcast_ir(b, add_ir(b, sums[t], 4 * k), SHORTS)
                    for p in range(PARTS):
                        i = _cell(p, t)
                        cells[i] = b.add(cells[i], madd_ir(b, m[p], pair))
            for i, value in enumerate(cells):
                acc = b.insert_value(acc, value, i)
            return acc

        return INT(INT, *(types.intp,) * 5), gen

    return add_sums


@intrinsic
def tile_splat(typing, a0, a1, a2, a3, factor):
    """Tile whose cells of token t are factor * int32 at a_t."""

    def gen(context, b, sig, args):
        *sums, factor = args
        by = splat_ir(b, factor, LANES)
        values = [b.mul(_broadcast_ir(b, a, INTS), by) for a in sums]
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


def add_scaled_ir(b, acc, whole, scale, d, negate):
    """fma(float(whole), +-(scale * d), acc), vectors all."""
    product = b.fmul(scale, d)
    if negate:
        product = b.fsub(ir.Constant(product.type, [0.0] * product.type.count), product)
    terms = [b.sitofp(whole, acc.type), product, acc]
    return call(b, f"llvm.fma.v{acc.type.count}f32", acc.type, terms)


def _scale_into(negate):
    @intrinsic
    def f(typing, acc, total, scales, d0, d1, d2, d3):
        """acc = fma(float(total), +-(scale * d), acc): scale f32 [16] a line, d float32 a token."""

        def gen(context, b, sig, args):
            acc, total, scales, *ds = args
            factor = [_broadcast_ir(b, d, FLOATS) for d in ds]
            for p, scale in enumerate(_line_ir(b, scales, 0, FLOATS)):
                for t in range(TOKENS):
                    i = _cell(p, t)
                    cell, whole = b.extract_value(acc, i), b.extract_value(total, i)
                    cell = add_scaled_ir(b, cell, whole, scale, factor[t], negate)
                    acc = b.insert_value(acc, cell, i)
            return acc

        return FLT(FLT, INT, *(types.intp,) * 5), gen

    return f


add_scaled, subtract_scaled = _scale_into(False), _scale_into(True)


@intrinsic
def load_tile(typing, address):
    """Float tile from memory: [TOKENS][16] float32."""

    def gen(context, b, sig, args):
        acc = ir.Constant(FLT.ir, ir.Undefined)
        for t in range(TOKENS):
            for p, value in enumerate(_line_ir(b, args[0], t, FLOATS)):
                acc = b.insert_value(acc, value, _cell(p, t))
        return acc

    return FLT(types.intp), gen


@intrinsic
def store_tile(typing, acc, address):
    def gen(context, b, sig, args):
        for p, t in CELLS:
            at = add_ir(b, args[1], LINE * t + 4 * LANES * p)
            store_ir(b, b.extract_value(args[0], _cell(p, t)), at)
        return context.get_dummy_value()

    return types.void(FLT, types.intp), gen


@intrinsic
def double_pairs(typing, source, target, apart):
    """i16x16 (a0 b0 a1 b1 ..) -> (a0 a0 a1 a1 ..) at target and (b0 b0 ..) `apart` bytes on."""

    def gen(context, b, sig, args):
        v, at = load_ir(b, args[0], ir.VectorType(I16, 16)), args[1]
        for odd in (0, 1):
            store_ir(b, shuffle(b, v, [2 * (i // 2) + odd for i in range(16)]), at)
            at = b.add(at, args[2])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), gen
