"""Causal attention over the key/value cache: one launch a layer, for prefill and decode alike.

A tile is up to ROWS query rows (token, head) that share a key/value head of one sequence. It walks
over blocks of BLOCK keys at fixed positions; each block is dequantized once for all its rows. A
row's sums are taken within a block, blocks are merged within a span, spans into the result, always
in ascending order: so its bits depend neither on the other tokens of the step nor on the threads.
Scores are kept in units of log2(e), so that the softmax needs powers of two only.
"""

from functools import cache as once

import numpy as np

from dali_gguf.device import Step
from dali_gguf.errors import InputError
from dali_gguf.kernels.attention_tile import attention_work
from dali_gguf.kernels.kv import (
    C_BYTES_PER_ROW, C_CONTEXT, C_FIXED_BYTES, C_GROUPS, C_ITEMS, C_K_ROW, C_K_SIZE, C_KEYS, C_KIND,
    C_LAYERS, C_MOST_ROWS, C_PARTIALS, C_SCRATCH, C_SEQUENCES, C_V_ROW, C_V_SIZE, C_VALUES,
    HAVE_SCRATCH, NEED_ITEMS, NEED_PARTIALS, NEED_SCRATCH, KVCache,
)
from dali_gguf.kernels.kv_rows import store_row
from dali_gguf.kernels.plan import (
    GROUPS, HEADS, ITEM_BYTES, ITEMS, JOB_WORDS, K_ROW, K_SIZE, KEYS, KIND, MOST_ROWS, N_CTX,
    N_ITEMS, NEXT, NOTHING, OUT, PARTIALS, PER_GROUP, POSITIONS, QUERIES, ROWS, SCALE, SCRATCH,
    SCRATCH_BYTES, SEQUENCES, SINKS, TOKENS, V_ROW, V_SIZE, VALUES, WINDOW, cut, position,
    sequence, state_bytes, survey,
)
from dali_gguf.kernels.pool import Pool, call_work, launch, work_function
from dali_gguf.kernels.products import PANEL
from dali_gguf.kernels.records import padded, word
from dali_gguf.kernels.simd import address_of, jit, store
from dali_gguf.kernels.vmath import LOG2E

SMALL = 200_000  # multiply-adds that one thread does before another would have woken up

OK, GROW, BAD_POSITION, BAD_SEQUENCE, BAD_ORDER, BAD_SHAPE = range(6)

work_address = once(lambda: work_function(attention_work))


@jit
def _check(positions, sequences, n_seq, n_ctx):
    for t in range(len(positions)):
        if positions[t] < 0 or positions[t] >= n_ctx:
            return BAD_POSITION
        if sequences[t] < 0 or sequences[t] >= n_seq:
            return BAD_SEQUENCE
        if t and sequences[t] == sequences[t - 1] and positions[t] <= positions[t - 1]:
            return BAD_ORDER
    return OK


@jit
def _store_rows(job, source, base, stride, size):
    """Rows [T, G, size] at source into the cache at the step's positions."""
    groups, n_ctx, kind = word(job, GROUPS), word(job, N_CTX), word(job, KIND)
    for t in range(word(job, TOKENS)):
        for g in range(groups):
            row = (sequence(job, t) * groups + g) * n_ctx + position(job, t)
            store_row(kind, source, size, base + row * stride)
            source += 4 * size


@jit
def attend(state, work, threads, control, layer, q, k, v, positions, sequences, sinks, out,
            scale, window):
    """Fills the job record, stores k and v, runs the pieces. Returns a status; on GROW, the
    control record's NEED words hold the sizes that the workspace must have."""
    n_seq, n_ctx, groups = control[C_SEQUENCES], control[C_CONTEXT], control[C_GROUPS]
    status = _check(positions, sequences, n_seq, n_ctx)
    if status != OK:
        return status
    tokens, heads, size = q.shape
    good = layer >= 0 and layer < control[C_LAYERS] and size == control[C_K_SIZE]
    good &= k.shape == (tokens, groups, size) and heads % groups == 0 and len(positions) == tokens
    good &= out.shape[2] <= size if v.size == 0 else v.shape == (tokens, groups, control[C_V_SIZE])
    if not good or (len(sinks) and len(sinks) != heads) or len(sequences) != tokens:
        return BAD_SHAPE
    record = np.empty(JOB_WORDS, np.int64)
    job = address_of(record)
    record[QUERIES], record[OUT] = address_of(q), address_of(out)
    record[POSITIONS], record[SEQUENCES] = address_of(positions), address_of(sequences)
    record[KIND], record[N_CTX], record[WINDOW] = control[C_KIND], n_ctx, window
    record[TOKENS], record[HEADS], record[GROUPS] = tokens, heads, groups
    record[K_SIZE], record[V_SIZE] = size, out.shape[2]
    record[PER_GROUP], record[MOST_ROWS] = heads // groups, control[C_MOST_ROWS]
    record[NOTHING] = 0
    record[SINKS] = address_of(sinks) if len(sinks) else 0
    record[K_ROW], layer_rows = control[C_K_ROW], layer * n_seq * groups * n_ctx
    record[KEYS] = control[C_KEYS] + layer_rows * record[K_ROW]
    record[V_ROW], record[VALUES] = record[K_ROW], record[KEYS]
    if v.size:
        record[V_ROW] = control[C_V_ROW]
        record[VALUES] = control[C_VALUES] + layer_rows * record[V_ROW]
    store(job + 8 * SCALE, np.float32(scale * LOG2E))
    tile, parts, tiles, spans, multiply_adds = survey(job, threads)
    if multiply_adds < SMALL:
        threads = 1
    record[ROWS] = padded(tile, 8)
    scratch = control[C_FIXED_BYTES] + record[ROWS] * control[C_BYTES_PER_ROW]
    record[SCRATCH_BYTES] = padded(scratch, 64)
    control[NEED_SCRATCH] = threads * record[SCRATCH_BYTES]
    control[NEED_ITEMS], control[NEED_PARTIALS] = tiles * parts * ITEM_BYTES, 0
    if parts > 1:
        state_size = state_bytes(record[ROWS], padded(out.shape[2], PANEL))
        control[NEED_PARTIALS] = tiles * spans * state_size
    for i in range(3):
        if control[NEED_SCRATCH + i] > control[HAVE_SCRATCH + i]:
            return GROW
    record[SCRATCH], record[ITEMS] = control[C_SCRATCH], control[C_ITEMS]
    record[PARTIALS], record[NEXT] = control[C_PARTIALS], 0
    record[N_ITEMS] = cut(job, tile, parts, spans)
    _store_rows(job, address_of(k), record[KEYS], record[K_ROW], size)
    if v.size:
        _store_rows(job, address_of(v), record[VALUES], record[V_ROW], out.shape[2])
    if threads == 1:
        call_work(work, job, 0, 1)
    else:
        launch(state, work, job, threads)
    record[NEXT] = 0  # Numba frees an array after its last use: this is it
    return OK


NO_VALUES, NO_SINKS = np.zeros((0, 0, 0), np.float32), np.zeros(0, np.float32)


def attention(pool: Pool, q: np.ndarray, k: np.ndarray, v: np.ndarray | None, cache: KVCache,
              layer: int, step: Step, scale: float, window: int = 0,
              sinks: np.ndarray | None = None, v_size: int = 0) -> np.ndarray:
    """Stores k [T, G, K] and v [T, G, V], then attention of q [T, H, K]: [T, H, V].

    float32 all. window > 0: a token sees itself and window - 1 before it. sinks [H]: a logit a
    head that only takes part in the softmax's sum. v None: V is the first v_size columns of k.
    InputError when a position or sequence lies outside the cache.
    """
    v = NO_VALUES if v is None else v
    width = v.shape[2] or v_size
    out = np.empty((q.shape[0], q.shape[1], width), np.float32)
    status = GROW
    while status != OK:
        status = attend(
            pool.state, work_address(), pool.threads, cache.control, layer, contiguous(q),
            contiguous(k), contiguous(v), step.positions, step.sequences,
            NO_SINKS if sinks is None else sinks, out, scale, window,
        )
        if status == GROW:
            cache.workspace.grow(cache.control)
        elif status != OK:
            assert status != BAD_SHAPE, f"{q.shape}, {k.shape}, {v.shape} for {cache}"
            raise InputError(_describe(status, step, cache))
    return out


def contiguous(x: np.ndarray) -> np.ndarray:
    return x if x.flags.c_contiguous else np.ascontiguousarray(x)


def _describe(status: int, step: Step, cache: KVCache) -> str:
    if status == BAD_POSITION:
        return (f"position {step.positions.max()} lies outside the context of {cache.n_ctx} tokens:"
                " use a larger --ctx-size or a shorter prompt")
    if status == BAD_SEQUENCE:
        return f"sequence {step.sequences.max()} of a cache for {cache.n_seq} sequences"
    return "a step's positions must ascend within each sequence"
