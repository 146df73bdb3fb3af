"""The experts of one layer: gate, up, activation, down, the weighted sum, no Python between.

A step's (token, slot) pairs are sorted by expert, so the tokens of an expert are neighbours:
    gate, up [P, F] -> act(gate) * up -> quantized -> down [P, D] -> y[t] = sum of w * down[pair]
P = T * A pairs. Any subset of experts can be run, in any order and at any time: each fills its own
pairs' rows, and the sum at the end goes by slot. So the bits of y do not depend on the order in
which experts arrived, nor on the threads.
"""

import numpy as np

from dali_gguf.kernels import rows
from dali_gguf.kernels.lanes import zero_f32x8
from dali_gguf.kernels.matmul import MATMAT_FROM
from dali_gguf.kernels.pool import barrier, fetch_add, launch
from dali_gguf.kernels.quantize import FLOAT, quantize_row
from dali_gguf.kernels.records import word
from dali_gguf.kernels.simd import (
    address_of, inline, jit, load_f32, load_f32x8, load_i32, load_intp, load_u8, splat_f32x8, store,
    v_fadd, v_fdiv, v_fma, v_fmul,
)
from dali_gguf.kernels.vmath import exp_f32x8, silu_f32x8, v_larger, v_smaller

# words of the job record; *_KIND, *_BYTES and *_RECORDS are of the quantized x and h
(STATE, PHASES, X, TOKENS, USED, D, F, F_STRIDE, X_KIND, H_KIND, X_BYTES, H_BYTES, X_RECORDS,
 H_RECORDS, X_POINTERS, H_POINTERS, GATE, UP, DOWN, Y, FIRST, TOKEN, PLACE, WEIGHTS, ACTIVE,
 N_ACTIVE, ADDRESSES, N_EXPERT, GATE_STRIDE, UP_STRIDE, DOWN_STRIDE, ACTIVATION, GATE_BIAS, UP_BIAS,
 DOWN_BIAS, SCRATCH, F_CHUNK, D_CHUNK, NEXT_F, NEXT_D, IDS, RUN) = range(42)
FUNCTIONS = 42  # gate, up, down for few tokens, then for many
JOB_WORDS = 48
QUANTIZE, GATE_UP, DOWN_PHASE, SUM = 1, 2, 4, 8  # bits of PHASES
SILU, SWIGLU_OAI = 0, 1
GATE_ROLE, UP_ROLE, DOWN_ROLE = 0, 1, 2


@jit
def sort_pairs(ids, first, token, place):
    """Pairs by expert, in token order: first [E+1], token [P] of each pair, place [P] by slot."""
    n_token, n_used = ids.shape
    first[:] = 0
    for t in range(n_token):
        for a in range(n_used):
            first[ids[t, a] + 1] += 1
    for e in range(1, len(first)):
        first[e] += first[e - 1]
    for t in range(n_token):
        for a in range(n_used):
            pair = first[ids[t, a]]
            first[ids[t, a]] += 1
            token[pair], place[t * n_used + a] = t, pair
    for e in range(len(first) - 1, 0, -1):  # every entry has moved to the next expert's start
        first[e] = first[e - 1]
    first[0] = 0


@jit
def quantize_x(job, thread, threads):
    """Records of the tokens, and the record of each pair."""
    n, kind, size = word(job, D), word(job, X_KIND), word(job, X_BYTES)
    base = word(job, X) if kind == FLOAT else word(job, X_RECORDS)
    if kind != FLOAT:
        for t in range(thread, word(job, TOKENS), threads):
            quantize_row(kind, word(job, X) + 4 * n * t, n, base + size * t)
    for pair in range(thread, word(job, TOKENS) * word(job, USED), threads):
        record = base + size * np.intp(load_i32(word(job, TOKEN) + 4 * pair))
        store(word(job, X_POINTERS) + 8 * pair, record)


@jit
def product(job, role, e, r0, r1, n, stride, pointers, out, out_stride, scratch):
    """Rows r0..r1 of one matrix of expert e with its pairs."""
    start, end = load_intp(word(job, FIRST) + 8 * e), load_intp(word(job, FIRST) + 8 * e + 8)
    w = load_intp(word(job, ADDRESSES) + 8 * (role * word(job, N_EXPERT) + e))
    function = word(job, FUNCTIONS + role + (3 if end - start >= MATMAT_FROM else 0))
    for t in range(start, end, rows.MAX_TOKENS):
        rows.call_rows(function, w, stride, r0, r1, n, pointers + 8 * t,
                       min(end - t, rows.MAX_TOKENS), out + t * out_stride, out_stride, scratch)


@jit
def add_bias(job, bias, e, columns, r0, r1, out, out_stride):
    """Adds bias [E, columns] of expert e to its pairs' rows r0..r1."""
    start, end = load_intp(word(job, FIRST) + 8 * e), load_intp(word(job, FIRST) + 8 * e + 8)
    for pair in range(start, end):
        for r in range(r0, r1):
            at = out + pair * out_stride + 4 * r
            store(at, load_f32(at) + load_f32(bias + 4 * (e * columns + r)))


@inline
def silu_pair(gate, up):
    return v_fmul(silu_f32x8(gate), up)


@inline
def swiglu_oai_pair(gate, up):
    """gpt-oss: both clamped at 7, gate * sigmoid(1.702 gate) * (up + 1)."""
    seven = splat_f32x8(np.float32(7))
    gate = v_smaller(seven, gate)
    up = v_larger(splat_f32x8(np.float32(-7)), v_smaller(seven, up))
    power = exp_f32x8(v_fmul(gate, splat_f32x8(np.float32(-1.702))))
    one = splat_f32x8(np.float32(1))
    return v_fmul(v_fdiv(gate, v_fadd(one, power)), v_fadd(up, one))


@jit
def activate(job, e, r0, r1):
    """act(gate) * up of expert e's pairs, rows r0..r1, in place of gate."""
    start, end = load_intp(word(job, FIRST) + 8 * e), load_intp(word(job, FIRST) + 8 * e + 8)
    offset = word(job, UP) - word(job, GATE)
    for pair in range(start, end):
        row = word(job, GATE) + pair * word(job, F_STRIDE)
        for r in range(r0, r1, 8):  # rows are padded to whole vectors
            at = row + 4 * r
            gate, up = load_f32x8(at), load_f32x8(at + offset)
            if word(job, ACTIVATION) == SILU:
                store(at, silu_pair(gate, up))
            else:
                store(at, swiglu_oai_pair(gate, up))


@jit
def gate_up(job, scratch):
    """Chunks of rows of active experts, until none is left."""
    chunk, n_ff, stride = word(job, F_CHUNK), word(job, F), word(job, F_STRIDE)
    chunks = (n_ff + chunk - 1) // chunk
    while True:
        item = fetch_add(job + 8 * NEXT_F, 1)
        if item >= chunks * word(job, N_ACTIVE):
            return
        e = np.intp(load_i32(word(job, ACTIVE) + 4 * (item // chunks)))
        r0 = item % chunks * chunk
        r1 = min(r0 + chunk, n_ff)
        n, records = word(job, D), word(job, X_POINTERS)
        product(job, GATE_ROLE, e, r0, r1, n, word(job, GATE_STRIDE), records, word(job, GATE),
                stride, scratch)
        product(job, UP_ROLE, e, r0, r1, n, word(job, UP_STRIDE), records, word(job, UP), stride,
                scratch)
        if word(job, GATE_BIAS):
            add_bias(job, word(job, GATE_BIAS), e, n_ff, r0, r1, word(job, GATE), stride)
            add_bias(job, word(job, UP_BIAS), e, n_ff, r0, r1, word(job, UP), stride)
        activate(job, e, r0, r1)


@jit
def quantize_h(job, thread, threads):
    kind, size, n = word(job, H_KIND), word(job, H_BYTES), word(job, F)
    for i in range(word(job, N_ACTIVE)):
        e = np.intp(load_i32(word(job, ACTIVE) + 4 * i))
        first = word(job, FIRST) + 8 * e
        for pair in range(load_intp(first), load_intp(first + 8)):
            if (pair + i) % threads != thread:
                continue
            row = word(job, GATE) + pair * word(job, F_STRIDE)
            record = row
            if kind != FLOAT:
                record = word(job, H_RECORDS) + size * pair
                quantize_row(kind, row, n, record)
            store(word(job, H_POINTERS) + 8 * pair, record)


@jit
def down(job, scratch):
    chunk, n_embd = word(job, D_CHUNK), word(job, D)
    chunks = (n_embd + chunk - 1) // chunk
    while True:
        item = fetch_add(job + 8 * NEXT_D, 1)
        if item >= chunks * word(job, N_ACTIVE):
            return
        e = np.intp(load_i32(word(job, ACTIVE) + 4 * (item // chunks)))
        r0 = item % chunks * chunk
        r1 = min(r0 + chunk, n_embd)
        product(job, DOWN_ROLE, e, r0, r1, word(job, F), word(job, DOWN_STRIDE),
                word(job, H_POINTERS), word(job, DOWN), 4 * n_embd, scratch)
        if word(job, DOWN_BIAS):
            add_bias(job, word(job, DOWN_BIAS), e, n_embd, r0, r1, word(job, DOWN), 4 * n_embd)


@jit
def weighted_sum(job, thread, threads):
    """y[t] = sum over the slots whose experts were run, in slot order; threads split columns."""
    n, n_used = word(job, D), word(job, USED)
    share = ((n + threads - 1) // threads + 7) // 8 * 8
    for t in range(word(job, TOKENS)):
        for c in range(thread * share, min(n, (thread + 1) * share), 8):
            acc = zero_f32x8()
            for a in range(n_used):
                slot = t * n_used + a
                if not load_u8(word(job, RUN) + np.intp(load_i32(word(job, IDS) + 4 * slot))):
                    continue
                pair = np.intp(load_i32(word(job, PLACE) + 4 * slot))
                w = splat_f32x8(load_f32(word(job, WEIGHTS) + 4 * slot))
                acc = v_fma(load_f32x8(word(job, DOWN) + 4 * (pair * n + c)), w, acc)
            y = word(job, Y) + 4 * (t * n + c)
            if c + 8 <= n:
                store(y, acc)
            else:
                store_part(acc, y, n - c, word(job, SCRATCH) + 64 * thread)


@jit
def store_part(v, address, count, scratch):
    store(scratch, v)
    for i in range(count):
        store(address + 4 * i, load_f32(scratch + 4 * i))


def moe_work(job, thread, threads):
    state, phases = word(job, STATE), word(job, PHASES)
    scratch = word(job, SCRATCH) + thread * rows.SCRATCH
    if phases & QUANTIZE:
        quantize_x(job, thread, threads)
        barrier(state, threads)
    if phases & GATE_UP:
        gate_up(job, scratch)
        barrier(state, threads)
        quantize_h(job, thread, threads)
        barrier(state, threads)
        down(job, scratch)
    if phases & SUM:
        barrier(state, threads)
        weighted_sum(job, thread, threads)


@jit
def begin(job, x, ids, weights, first, token, place, run):
    """Sorts the pairs and writes the words of this step.

    ids int32 [T, A], weights f32 [T, A]; run uint8 [E] will tell which experts were computed.
    """
    sort_pairs(ids, first, token, place)
    run[:] = 0
    job[IDS], job[RUN] = address_of(ids), address_of(run)
    job[X], job[TOKENS], job[USED] = address_of(x), ids.shape[0], ids.shape[1]
    job[WEIGHTS], job[FIRST] = address_of(weights), address_of(first)
    job[TOKEN], job[PLACE] = address_of(token), address_of(place)


@jit
def go(function, job, phases, active, addresses, y, state, threads):
    """Launches phases for the experts in active int32 [n]; addresses int64 [3, E]; y [T, D]."""
    job[PHASES], job[STATE] = phases, state
    job[ACTIVE], job[N_ACTIVE] = address_of(active), len(active)
    job[ADDRESSES], job[Y] = address_of(addresses), address_of(y)
    job[NEXT_F], job[NEXT_D] = 0, 0
    for e in active:
        store(job[RUN] + np.intp(e), np.uint8(1))
    launch(state, function, address_of(job), threads)


@jit
def whole(function, job, x, ids, weights, workload, first, token, place, run, active, addresses, y,
          state, threads):
    """A whole layer in one launch: begin, then every expert with tokens. active int32 [E]: room."""
    begin(job, x, ids, weights, first, token, place, run)
    n = 0
    for e in range(len(workload)):
        if workload[e]:
            active[n] = e
            n += 1
    go(function, job, QUANTIZE | GATE_UP | SUM, active[:n], addresses, y, state, threads)
