"""Runs the lines of a program (program.py): operations with the addresses of their arrays.

A line is LINE_WORDS int64 words: the kind, then the operands that program.py writes for it.
"""

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from dali_gguf.kernels.attention import OK, attend
from dali_gguf.kernels.elementwise import rope_rows, run_rows
from dali_gguf.kernels.moe import whole
from dali_gguf.kernels.pool import CHUNK, launch
from dali_gguf.kernels.records import word
from dali_gguf.kernels.route import route_rows
from dali_gguf.kernels.rows import call_expand
from dali_gguf.kernels.simd import jit, load_f32, load_i32, store

LINE_WORDS = 24
EMBED, LAUNCH, ROWS, ADD, ROPE, ATTEND, ROUTE, MOE = range(8)


def _array_at(dtype):
    """An intrinsic: pointer to elements of a Numba type, for carray."""

    @intrinsic
    def f(typing, address):
        def gen(context, b, sig, args):
            return b.inttoptr(args[0], context.get_value_type(sig.return_type))

        return types.CPointer(dtype)(types.intp), gen

    return f


_f32, _i32, _u8 = _array_at(types.float32), _array_at(types.int32), _array_at(types.uint8)
_i64 = _array_at(types.int64)


@intrinsic
def _double(typing, bits):
    """The float64 whose bits a word holds."""

    def gen(context, b, sig, args):
        return b.bitcast(args[0], ir.DoubleType())

    return types.float64(types.intp), gen


@jit
def _embed(a):
    for t in range(word(a, 6)):
        row = word(a, 2) + word(a, 3) * np.intp(load_i32(word(a, 1) + 4 * t))
        call_expand(word(a, 0), row, word(a, 4), word(a, 5) + 4 * word(a, 4) * t, word(a, 7))


@jit
def _add(a):
    """x [rows, n] += y, of x's shape or one row for all."""
    n, apart = word(a, 3), word(a, 4)
    for row in range(word(a, 2)):
        x, y = word(a, 0) + 4 * n * row, word(a, 1) + apart * row
        for i in range(n):
            store(x + 4 * i, load_f32(x + 4 * i) + load_f32(y + 4 * i))


@jit
def _rope(a, state, threads):
    x = carray(_f32(word(a, 1)), (word(a, 2), word(a, 3), word(a, 4)))
    positions = carray(_i32(word(a, 5)), (word(a, 2),))
    weight = carray(_f32(word(a, 11)), (word(a, 12),))
    table = carray(_f32(word(a, 6)), (word(a, 7),))
    return rope_rows(state, word(a, 0), threads, x, positions, table, word(a, 8), word(a, 9) != 0,
                     word(a, 10), weight, _double(word(a, 13)))


@jit
def _attend(a, state, threads):
    tokens, heads, groups = word(a, 8), word(a, 9), word(a, 10)
    k_size, v_size = word(a, 11), word(a, 12)
    return attend(
        state, word(a, 0), threads, carray(_i64(word(a, 1)), (word(a, 13),)), word(a, 2),
        carray(_f32(word(a, 3)), (tokens, heads, k_size)),
        carray(_f32(word(a, 4)), (tokens, groups, k_size)),
        carray(_f32(word(a, 5)), (tokens, groups, v_size)), carray(_i32(word(a, 6)), (tokens,)),
        carray(_i32(word(a, 7)), (tokens,)), carray(_f32(word(a, 14)), (word(a, 15),)),
        carray(_f32(word(a, 16)), (tokens, heads, v_size)), _double(word(a, 17)), word(a, 18),
    )


@jit
def _route(a):
    tokens, n_expert, n_used = word(a, 1), word(a, 2), word(a, 3)
    route_rows(
        carray(_f32(word(a, 0)), (tokens, n_expert)), word(a, 4), word(a, 5) != 0,
        _double(word(a, 6)), carray(_f32(word(a, 7)), (word(a, 8),)),
        carray(_i32(word(a, 9)), (tokens, n_used)),
        carray(_f32(word(a, 10)), (tokens, n_used)), carray(_i64(word(a, 11)), (n_expert,)),
    )


@jit
def _moe(a, state, threads):
    tokens, n_used, n_expert, n = word(a, 2), word(a, 3), word(a, 4), word(a, 5)
    pairs = tokens * n_used
    whole(
        word(a, 0), carray(_i64(word(a, 1)), (word(a, 6),)), carray(_f32(word(a, 7)), (tokens, n)),
        carray(_i32(word(a, 8)), (tokens, n_used)), carray(_f32(word(a, 9)), (tokens, n_used)),
        carray(_i64(word(a, 10)), (n_expert,)), carray(_i64(word(a, 11)), (n_expert + 1,)),
        carray(_i32(word(a, 12)), (pairs,)), carray(_i32(word(a, 13)), (pairs,)),
        carray(_u8(word(a, 14)), (n_expert,)), carray(_i32(word(a, 15)), (n_expert,)),
        carray(_i64(word(a, 16)), (3, n_expert)), carray(_f32(word(a, 17)), (tokens, n)), state,
        threads,
    )


@jit
def run_lines(lines, n, state, threads):
    """False when something has to grow first (a rope table, the attention's memory)."""
    for i in range(n):
        line = lines + 8 * LINE_WORDS * i
        kind, a = word(line, 0), line + 8
        if kind == LAUNCH:
            store(state + 8 * CHUNK, 0)
            launch(state, word(a, 0), word(a, 1), threads)
        elif kind == ROWS:
            run_rows(state, word(a, 0), threads, word(a, 1), word(a, 2), word(a, 3), word(a, 4),
                     word(a, 5), _double(word(a, 6)))
        elif kind == ADD:
            _add(a)
        elif kind == ROPE:
            if not _rope(a, state, threads):
                return False
        elif kind == ATTEND:
            if _attend(a, state, threads) != OK:
                return False
        elif kind == ROUTE:
            _route(a)
        elif kind == MOE:
            _moe(a, state, threads)
        else:
            _embed(a)
    return True
