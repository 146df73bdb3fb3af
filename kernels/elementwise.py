"""RMS norm, rotary embedding and SwiGLU: a row at a time, fixed order of sums.

Small arrays are done by the calling thread, large ones are split by rows over the pool; either
way it is the same work function, so the bits are the same.
"""

from functools import cache as once

import numpy as np

from dali_gguf.device import RopeParams
from dali_gguf.errors import InputError
from dali_gguf.kernels.lanes import concat, permutation, zero_f32x8
from dali_gguf.kernels.pool import Pool, call_work, launch, work_function
from dali_gguf.kernels.records import word
from dali_gguf.kernels.simd import (
    address_of, fma, jit, load_f32, load_f32x8, load_i32, splat_f32x8, store, v_fadd, v_fma,
    v_fmul, v_fsub,
)
from dali_gguf.kernels.sums import sum_f32
from dali_gguf.kernels.vmath import silu_f32x8

LARGE = 1 << 16  # elements worth waking the pool for

# job record of the row functions: three addresses, rows, length of a row, one float32
X, Y, OUT, ROWS, SIZE, VALUE, JOB_WORDS = range(7)


@jit
def run_rows(state, work, threads, x, y, out, rows, size, value):
    """Runs a row function on float32 rows at the addresses x and out; y is shared by all."""
    record = np.empty(JOB_WORDS, np.int64)
    job = address_of(record)
    record[X], record[Y], record[OUT] = x, y, out
    record[ROWS], record[SIZE] = rows, size
    store(job + 8 * VALUE, np.float32(value))
    if threads == 1 or rows * size < LARGE:
        call_work(work, job, 0, 1)
    else:
        launch(state, work, job, threads)
    record[X] = 0  # Numba frees an array after its last use: this is it


@jit
def _run(state, work, threads, x, y, out, size, value):
    """Runs a row function on flat float32 arrays: x.size / size rows."""
    run_rows(state, work, threads, address_of(x), address_of(y), address_of(out), x.size // size,
              size, value)


# ---- RMS norm ---------------------------------------------------------------------------------


def _norm_work(job, thread, threads):
    """Sum of squares in four vectors side by side, their lanes last, then what is left over."""
    rows, size, weight = word(job, ROWS), word(job, SIZE), word(job, Y)
    eps = load_f32(job + 8 * VALUE)
    for row in range(rows * thread // threads, rows * (thread + 1) // threads):
        x, out = word(job, X) + 4 * size * row, word(job, OUT) + 4 * size * row
        a, b, c, d = zero_f32x8(), zero_f32x8(), zero_f32x8(), zero_f32x8()
        i = 0
        while i + 32 <= size:
            v0, v1 = load_f32x8(x + 4 * i), load_f32x8(x + 4 * i + 32)
            v2, v3 = load_f32x8(x + 4 * i + 64), load_f32x8(x + 4 * i + 96)
            a, b, c, d = v_fma(v0, v0, a), v_fma(v1, v1, b), v_fma(v2, v2, c), v_fma(v3, v3, d)
            i += 32
        while i + 8 <= size:
            v0 = load_f32x8(x + 4 * i)
            a = v_fma(v0, v0, a)
            i += 8
        total = sum_f32(v_fadd(v_fadd(a, b), v_fadd(c, d)))
        while i < size:
            total = fma(load_f32(x + 4 * i), load_f32(x + 4 * i), total)
            i += 1
        scale = np.float32(1) / np.sqrt(total / np.float32(size) + eps)
        factor = splat_f32x8(scale)
        i = 0
        while i + 8 <= size:
            v0 = v_fmul(load_f32x8(x + 4 * i), factor)
            store(out + 4 * i, v_fmul(v0, load_f32x8(weight + 4 * i)))
            i += 8
        while i < size:
            store(out + 4 * i, load_f32(x + 4 * i) * scale * load_f32(weight + 4 * i))
            i += 1


norm_address = once(lambda: work_function(_norm_work))


def rms_norm(pool: Pool, x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; x float32 [.., N], weight [N]."""
    if not x.flags.c_contiguous:
        x = np.ascontiguousarray(x)
    shape, size = x.shape, weight.size
    assert shape[-1] == size and x.dtype == weight.dtype, f"norm weight {weight.shape} for {shape}"
    flat = np.empty(x.size, np.float32)
    if flat.size:
        _run(pool.state, norm_address(), pool.threads, x.reshape(-1), weight, flat, size, eps)
    return flat.reshape(shape)


# ---- SwiGLU -----------------------------------------------------------------------------------


def _swiglu_work(job, thread, threads):
    """A row is 8 elements here, one vector."""
    groups = word(job, ROWS)
    gate, up, out = word(job, X), word(job, Y), word(job, OUT)
    for i in range(groups * thread // threads, groups * (thread + 1) // threads):
        v = silu_f32x8(load_f32x8(gate + 32 * i))
        store(out + 32 * i, v_fmul(v, load_f32x8(up + 32 * i)))


swiglu_address = once(lambda: work_function(_swiglu_work))


def swiglu(pool: Pool, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """silu(gate) * up, float32 of one shape."""
    assert gate.shape == up.shape
    size = gate.size
    if size % 8:  # the vector kernel needs whole vectors
        flat = [np.zeros(size + 8 - size % 8, np.float32) for _ in range(2)]
        flat[0][:size], flat[1][:size] = gate.reshape(-1), up.reshape(-1)
        return swiglu(pool, *flat)[:size].reshape(gate.shape)
    out = np.empty(gate.shape, np.float32)
    if size:
        gate, up = np.ascontiguousarray(gate), np.ascontiguousarray(up)
        _run(pool.state, swiglu_address(), pool.threads, gate.reshape(-1), up.reshape(-1),
             out.reshape(-1), 8, 0.0)
    return out


# ---- rotary embedding -------------------------------------------------------------------------

# job record: addresses of x [T, H, K], positions int32 [T], table float32 [n_pos, 2, n_rot/2]
R_X, R_POSITIONS, R_TABLE, R_TOKENS, R_HEADS, R_K, R_HALF, R_INTERLEAVED, R_WORDS = range(9)

_even, _odd = permutation(range(0, 16, 2)), permutation(range(1, 16, 2))
_zip = permutation([i // 2 + 8 * (i % 2) for i in range(16)])


def _rope_work(job, thread, threads):
    """(a, b) -> (a cos - b sin, a sin + b cos) for each pair of each head."""
    tokens, heads, half = word(job, R_TOKENS), word(job, R_HEADS), word(job, R_HALF)
    interleaved, row = word(job, R_INTERLEAVED), 4 * word(job, R_K)
    step, apart = (8, 4) if interleaved else (4, 4 * half)  # bytes between pairs, within a pair
    for t in range(tokens * thread // threads, tokens * (thread + 1) // threads):
        cosines = word(job, R_TABLE) + 8 * half * load_i32(word(job, R_POSITIONS) + 4 * t)
        sines = cosines + 4 * half
        for head in range(heads):
            x, i = word(job, R_X) + (t * heads + head) * row, 0
            while i + 8 <= half:
                cos, sin = load_f32x8(cosines + 4 * i), load_f32x8(sines + 4 * i)
                first = load_f32x8(x + step * i)
                second = load_f32x8(x + (8 * i + 32 if interleaved else apart + 4 * i))
                if interleaved:
                    both = concat(first, second)
                    first, second = _even(both), _odd(both)
                a = v_fsub(v_fmul(first, cos), v_fmul(second, sin))
                b = v_fadd(v_fmul(first, sin), v_fmul(second, cos))
                if interleaved:
                    store(x + 8 * i, _zip(concat(a, b)))
                else:
                    store(x + 4 * i, a)
                    store(x + apart + 4 * i, b)
                i += 8
            while i < half:
                cos, sin = load_f32(cosines + 4 * i), load_f32(sines + 4 * i)
                a, b = load_f32(x + step * i), load_f32(x + step * i + apart)
                store(x + step * i, a * cos - b * sin)
                store(x + step * i + apart, a * sin + b * cos)
                i += 1


rope_address = once(lambda: work_function(_rope_work))


@jit
def rope_rows(state, work, threads, x, positions, table, half, interleaved, norm_work, weight, eps):
    """False when a position lies beyond the table. weight of an RMS norm of each head, or empty."""
    reach = table.size // max(2 * half, 1)
    for p in positions:
        if p < 0 or p >= reach:
            return False
    if weight.size:
        at, rows = address_of(x), x.shape[0] * x.shape[1]
        run_rows(state, norm_work, threads, at, address_of(weight), at, rows, x.shape[2], eps)
    record = np.empty(R_WORDS, np.int64)
    record[R_X], record[R_POSITIONS] = address_of(x), address_of(positions)
    record[R_TABLE], record[R_TOKENS], record[R_HEADS] = address_of(table), x.shape[0], x.shape[1]
    record[R_K], record[R_HALF], record[R_INTERLEAVED] = x.shape[2], half, interleaved
    if threads == 1 or x.size < LARGE:
        call_work(work, address_of(record), 0, 1)
    else:
        launch(state, work, address_of(record), threads)
    record[R_X] = 0
    return True


NO_NORM = np.empty(0, np.float32), 0.0


def rope_table(params: RopeParams, n: int) -> np.ndarray:
    """float32 [n * 2 * n_rot/2]: for each position its cosines, then its sines, times magnitude."""
    angles = np.arange(n)[:, None] * params.inv_freq.astype(np.float64)
    both = np.stack([np.cos(angles), np.sin(angles)], axis=1) * params.magnitude
    return both.astype(np.float32).reshape(-1)


class RopeTables:
    """The tables of a model's rotary embeddings, grown to the positions that were asked for."""

    def __init__(self):
        self._tables: dict[int, tuple[RopeParams, np.ndarray]] = {}  # by id: params hold an array

    def rope(self, pool: Pool, x: np.ndarray, positions: np.ndarray, params: RopeParams,
             norm: tuple[np.ndarray, float] | None = None) -> np.ndarray:
        """Rotates the first n_rot of the last axis of x float32 [T, H, K], after norm (weight [K],
        eps): in place where x is contiguous, else in a copy."""
        if not x.flags.c_contiguous:
            x = np.ascontiguousarray(x)
        table = self.table(params, positions)
        weight, eps = norm or NO_NORM
        run = pool.state, rope_address(), pool.threads, x, positions
        rest = params.n_rot // 2, params.interleaved, norm_address(), weight, eps
        if not rope_rows(*run, table, *rest):
            rope_rows(*run, self._grow(params, positions), *rest)
        return x

    def table(self, params: RopeParams, positions: np.ndarray) -> np.ndarray:
        """As it is: it may end before the positions."""
        known = self._tables.get(id(params))
        return known[1] if known else self._grow(params, positions)

    def _grow(self, params: RopeParams, positions: np.ndarray) -> np.ndarray:
        if positions.min() < 0:
            raise InputError(f"position {positions.min()} is negative")
        n = max(512, 1 << int(positions.max()).bit_length())
        self._tables[id(params)] = (params, rope_table(params, n))
        return self._tables[id(params)][1]
