"""Rows of a quantized matrix times records of activations: the loops, the same for every type.

matvec and matmat(w, stride, r0, r1, n, records, tokens, out, out_stride, scratch):
    out[t, r] = weight row r . activations t, for r in [r0, r1) and t in [0, tokens)
    w, stride: address of row 0 and bytes from row to row; n: columns; records: address of
    intp [tokens], the records' addresses; out: address of float32 out[0, 0], out_stride in bytes;
    scratch: SCRATCH bytes of this thread.
matvec, for few tokens, works straight from the GGUF blocks; matmat unpacks 16 rows once into a
panel for all tokens. Both add in the same order: the choice changes the speed and not one bit.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from dali_gguf.kernels import amx, isa
from dali_gguf.kernels.lanes import first_lane, zero_f32x8
from dali_gguf.kernels.panel import LINE, TOKENS, load_tile, store_tile
from dali_gguf.kernels.simd import I64, jit, load_f32, load_f32x8, load_intp, store

MAX_TOKENS = 512  # of one call: the accumulators of 16 rows stay in the L1/L2 cache
CHUNK_COLUMNS = 1024  # unpacked at a time: 16 rows of them fit the L1 cache
SMALL, STAGE = 8192, 64 * MAX_TOKENS
PANEL = 24 * CHUNK_COLUMNS  # a panel is at most 22.5 bytes a column
SCRATCH = SMALL + STAGE + PANEL + (amx.ROOM if isa.AMX else 0)


def matvec(w, stride, r0, r1, n, records, tokens, out, out_stride, scratch):
    for r in range(r0, r1, 8):
        whole = r + 8 <= r1
        count = 1 if whole else r1 - r  # the last rows, one by one: all 8 lanes compute the same
        step = stride if whole else 0
        for i in range(r, r + count):
            for t in range(tokens):
                record = load_intp(records + 8 * t)
                y = eight_rows(w + i * stride, step, n, record, scratch)
                target = out + t * out_stride + 4 * i
                if whole:
                    store(target, y)
                else:
                    store(target, first_lane(y))


def pack_scales(p, stride, last, target):
    """The float scales of 8 rows, then their mins, to half a line each; rows after `last` repeat
    it."""
    if last == 7:
        store(target, scales8(p, stride))
        if HAS_MIN:
            store(target + LINE, mins8(p, stride))
        return
    for r in range(8):
        row = p + min(r, last) * stride
        store(target + 4 * r, first_lane(scales8(row, 0)))
        if HAS_MIN:
            store(target + LINE + 4 * r, first_lane(mins8(row, 0)))


def pack(w, stride, rows, first, last, panel, scratch):
    """Blocks [first, last) of up to 16 rows at w into a panel, eight rows at a time."""
    for p in range(2):
        start = min(8 * p, rows - 1)
        valid = min(rows - start, 8) - 1
        row, target = w + start * stride, panel + p * (LINE // 2)
        for i in range(first, last):
            pack_block(row + i * BYTES, stride, valid, target, scratch)
            target += PANEL_BLOCK


def tile_tokens(panel, first, last, n, records, tokens, stage):
    """Adds the products of the panel with every record to stage [tokens][16]."""
    for t in range(0, tokens, TOKENS):
        y0 = load_intp(records + 8 * t)
        y1 = load_intp(records + 8 * min(t + 1, tokens - 1))
        y2 = load_intp(records + 8 * min(t + 2, tokens - 1))
        y3 = load_intp(records + 8 * min(t + 3, tokens - 1))
        acc = load_tile(stage + 64 * t)
        w = panel
        for i in range(first, last):
            acc = tile_block(acc, w, i, n, y0, y1, y2, y3)
            w += PANEL_BLOCK
        store_tile(acc, stage + 64 * t)


def matmat(w, stride, r0, r1, n, records, tokens, out, out_stride, scratch):
    stage, panel = scratch + SMALL, scratch + SMALL + STAGE
    blocks, chunk = n // WEIGHTS, CHUNK_COLUMNS // WEIGHTS
    for r in range(r0, r1, 16):
        for i in range(0, 64 * ((tokens + TOKENS - 1) // TOKENS * TOKENS), 32):
            store(stage + i, zero_f32x8())
        for first in range(0, blocks, chunk):
            last = min(first + chunk, blocks)
            pack(w + r * stride, stride, r1 - r, first, last, panel, scratch)
            tile_tokens(panel, first, last, n, records, tokens, stage)
        for t in range(tokens):
            source, target = stage + 64 * t, out + t * out_stride + 4 * r
            if r + 16 <= r1:
                store(target, load_f32x8(source))
                store(target + 32, load_f32x8(source + 32))
            else:
                for i in range(r1 - r):
                    store(target + 4 * i, load_f32(source + 4 * i))


ONCE = (pack_scales,)
PIECES = (pack, tile_tokens)


def _call_by_address(arguments: int):
    """An intrinsic that calls void f(intp, ...) at an address."""

    def gen(context, b, sig, args):
        fn_type = ir.FunctionType(ir.VoidType(), [I64] * arguments)
        b.call(b.inttoptr(args[0], fn_type.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*(types.intp,) * (arguments + 1)), gen


@intrinsic
def call_rows(typing, function, w, stride, r0, r1, n, records, tokens, out, out_stride, scratch):
    """Calls a matvec or matmat."""
    return _call_by_address(10)


@intrinsic
def call_expand(typing, function, p, n, out, scratch):
    return _call_by_address(4)


@jit
def expand_weights(function, p, n, out, scratch):
    """Dequantizes n weights at p to float32 at out, by formats.expand_address's function."""
    call_expand(function, p, n, out, scratch)
