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
from dali_gguf.kernels.kv import KVCache
from dali_gguf.kernels.kv_rows import store_row
from dali_gguf.kernels.plan import (
    GROUPS, HEADS, ITEMS, JOB_WORDS, K_ROW, K_SIZE, KEYS, KIND, MOST_ROWS, N_CTX, N_ITEMS, NEXT,
    NOTHING, OUT, PARTIALS, PER_GROUP, POSITIONS, QUERIES, ROWS, SCALE, SCRATCH, SCRATCH_BYTES,
    SEQUENCES, SINKS, TOKENS, V_ROW, V_SIZE, VALUES, WINDOW, cut, position, sequence, state_bytes,
    survey,
)
from dali_gguf.kernels.pool import Pool, call_work, launch, work_function
from dali_gguf.kernels.products import PANEL
from dali_gguf.kernels.records import padded, word
from dali_gguf.kernels.simd import address_of, jit, store
from dali_gguf.kernels.vmath import LOG2E

SMALL = 200_000  # multiply-adds that one thread does before another would have woken up

OK, GROW, BAD_POSITION, BAD_SEQUENCE, BAD_ORDER = range(5)

_work_address = once(lambda: work_function(attention_work))


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
def _attend(state, work, threads, geometry, keys, values, layer, space, items, partials, needs,
            q, k, v, positions, sequences, sinks, out, scale, window):
    """Fills the job record, stores k and v, runs the pieces. Returns a status; on GROW, needs
    [3] holds the sizes that space, items and partials must have."""
    n_seq, n_ctx = geometry[1], geometry[3]
    status = _check(positions, sequences, n_seq, n_ctx)
    if status != OK:
        return status
    record = np.empty(JOB_WORDS, np.int64)
    job = address_of(record)
    record[QUERIES], record[OUT] = address_of(q), address_of(out)
    record[POSITIONS], record[SEQUENCES] = address_of(positions), address_of(sequences)
    record[KIND], record[N_CTX], record[WINDOW] = geometry[0], n_ctx, window
    record[TOKENS], record[HEADS], record[GROUPS] = q.shape[0], q.shape[1], k.shape[1]
    record[K_SIZE], record[V_SIZE] = q.shape[2], out.shape[2]
    record[PER_GROUP], record[MOST_ROWS] = q.shape[1] // k.shape[1], geometry[7]
    record[NOTHING] = 0
    record[SINKS] = address_of(sinks) if len(sinks) else 0
    record[K_ROW], record[V_ROW] = keys.shape[4], values.shape[4] if v.size else keys.shape[4]
    layer_rows = layer * n_seq * geometry[2] * n_ctx
    record[KEYS] = address_of(keys) + layer_rows * record[K_ROW]
    record[VALUES] = record[KEYS]
    if v.size:
        record[VALUES] = address_of(values) + layer_rows * record[V_ROW]
    store(job + 8 * SCALE, np.float32(scale * LOG2E))
    tile, parts, tiles, spans, multiply_adds = survey(job, threads)
    if multiply_adds < SMALL:
        threads = 1
    record[ROWS] = padded(tile, 8)
    record[SCRATCH_BYTES] = padded(geometry[5] + record[ROWS] * geometry[6], 64)
    needs[0], needs[1] = threads * record[SCRATCH_BYTES] + 64, tiles * parts
    needs[2] = 0
    if parts > 1:
        needs[2] = tiles * spans * state_bytes(record[ROWS], padded(out.shape[2], PANEL)) // 4 + 16
    if space.size < needs[0] or len(items) < needs[1] or partials.size < needs[2]:
        return GROW
    record[SCRATCH], record[ITEMS] = padded(address_of(space), 64), address_of(items)
    record[PARTIALS] = padded(address_of(partials), 64)
    record[NEXT] = 0
    record[N_ITEMS] = cut(job, tile, parts, spans)
    _store_rows(job, address_of(k), record[KEYS], record[K_ROW], q.shape[2])
    if v.size:
        _store_rows(job, address_of(v), record[VALUES], record[V_ROW], out.shape[2])
    if threads == 1:
        call_work(work, job, 0, 1)
    else:
        launch(state, work, job, threads)
    record[NEXT] = 0  # Numba frees an array after its last use: this is it
    return OK


_NO_VALUES, _NO_SINKS = np.zeros((0, 0, 0), np.float32), np.zeros(0, np.float32)


def attention(pool: Pool, q: np.ndarray, k: np.ndarray, v: np.ndarray | None, cache: KVCache,
              layer: int, step: Step, scale: float, window: int = 0,
              sinks: np.ndarray | None = None, v_size: int = 0) -> np.ndarray:
    """Stores k [T, G, K] and v [T, G, V], then attention of q [T, H, K]: [T, H, V].

    float32 all. window > 0: a token sees itself and window - 1 before it. sinks [H]: a logit a
    head that only takes part in the softmax's sum. v None: V is the first v_size columns of k.
    InputError when a position or sequence lies outside the cache.
    """
    v = _NO_VALUES if v is None else v
    width = v.shape[2] or v_size
    out = np.empty((q.shape[0], q.shape[1], width), np.float32)
    _assert_shapes(q, k, v, cache, layer, width)
    space = cache.workspace
    while True:
        status = _attend(
            pool.state, _work_address(), pool.threads, cache.geometry, cache.keys, cache.values,
            layer, space.threads, space.items, space.partials, space.needs, contiguous(q),
            contiguous(k), contiguous(v), step.positions, step.sequences,
            _NO_SINKS if sinks is None else sinks, out, scale, window,
        )
        if status == OK:
            return out
        if status != GROW:
            raise InputError(_describe(status, step, cache))
        space.grow()


def contiguous(x: np.ndarray) -> np.ndarray:
    return x if x.flags.c_contiguous else np.ascontiguousarray(x)


def _assert_shapes(q, k, v, cache, layer, width) -> None:
    groups, n = cache.keys.shape[2], q.shape[0]
    assert k.shape == (n, groups, cache.k_size) and q.shape[2] == cache.k_size
    assert q.shape[1] % groups == 0 and 0 <= layer < cache.keys.shape[0]
    assert v.shape == (n, groups, cache.v_size) if v.size else width <= cache.k_size


def _describe(status: int, step: Step, cache: KVCache) -> str:
    if status == BAD_POSITION:
        return (f"position {step.positions.max()} lies outside the context of {cache.n_ctx} tokens:"
                " use a larger --ctx-size or a shorter prompt")
    if status == BAD_SEQUENCE:
        return f"sequence {step.sequences.max()} of a cache for {cache.n_seq} sequences"
    return "a step's positions must ascend within each sequence"
