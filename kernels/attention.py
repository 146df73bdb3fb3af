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
from dali_gguf.kernels.kv import KVCache
from dali_gguf.kernels.lanes import constant, sum_f32, zero_f32x8
from dali_gguf.kernels.kv_rows import BLOCK, load_keys, load_values, store_row
from dali_gguf.kernels.plan import (
    FIRST_ROW, GROUP, GROUPS, HEADS, ITEM_BYTES, ITEMS, JOB_WORDS, K_ROW, K_SIZE, KEYS,
    KIND, LAST_ROW, N_CTX, N_ITEMS, NEXT, OUT, PARTIAL, PARTIALS, PARTS, PARTS_DONE, POSITIONS,
    QUERIES, ROWS, SCALE, SCRATCH, SCRATCH_BYTES, SEQUENCES, SINKS, SPAN, SPAN_FIRST, SPAN_LAST,
    TILE_FIRST, TILE_LAST, TOKEN, TOKENS, V_ROW, V_SIZE, VALUES, WINDOW, cut, first_position,
    last_position, scratch_bytes, state_bytes, survey,
)
from dali_gguf.kernels.pool import Pool, call_work, fetch_add, launch, work_function
from dali_gguf.kernels.products import PANEL, multiply_panels
from dali_gguf.kernels.records import merged, padded, word
from dali_gguf.kernels.simd import (
    address_of, jit, load_f32, load_f32x8, load_i32, splat_f32x8, store, v_fadd,
    v_fdiv, v_fma, v_fmul, v_fsub,
)
from dali_gguf.kernels.vmath import exp2_softmax, largest_lane, v_larger, zero_below

LOG2E = 1.4426950408889634
SMALL = 200_000  # multiply-adds that one thread does before another would have woken up

_lowest = constant("f32", [-3e38] * 8)
_minus_infinity = constant("f32", [-np.inf] * 8)


# ---- one state a row: maximum, sum of powers, sum of power * value ----------------------------
# a state of `cap` rows is m [cap] | l [cap] | acc [cap, V rounded up to a panel], float32


@merged
def _reset(state, cap, width):
    for i in range(0, 4 * cap, 32):
        store(state + i, _minus_infinity())
    for i in range(4 * cap, 4 * cap * (2 + width), 32):
        store(state + i, zero_f32x8())


@merged
def _merge_sums(state, cap, rows, largest, sums, keep, add):
    """Takes (largest, sums) of a part into the state's m and l; keep, add: each side's factor."""
    for i in range(0, 4 * rows, 32):
        old, part = load_f32x8(state + i), load_f32x8(largest + i)
        new = v_larger(old, part)
        store(state + i, new)
        new = zero_below(new, new, _lowest())  # -infinity - -infinity would be NaN
        kept, added = exp2_softmax(v_fsub(old, new)), exp2_softmax(v_fsub(part, new))
        store(keep + i, kept)
        store(add + i, added)
        at = state + 4 * cap + i
        store(at, v_fma(load_f32x8(sums + i), added, v_fmul(load_f32x8(at), kept)))


@merged
def _merge_states(total, part, cap, rows, width, factors):
    keep, add = factors, factors + 4 * cap
    _merge_sums(total, cap, rows, part, part + 4 * cap, keep, add)
    at, source = total + 8 * cap, part + 8 * cap
    for i in range(rows):
        kept, added = splat_f32x8(load_f32(keep + 4 * i)), splat_f32x8(load_f32(add + 4 * i))
        for _ in range(0, width, 8):
            store(at, v_fma(load_f32x8(source), added, v_fmul(load_f32x8(at), kept)))
            at += 32
            source += 32


# ---- a tile -----------------------------------------------------------------------------------


@merged
def _copy_queries(job, item, target):
    """q rows of the tile times scale, [rows, K]."""
    size, per_group = word(job, K_SIZE), word(job, HEADS) // word(job, GROUPS)
    scale = load_f32(job + 8 * SCALE)
    for row in range(word(item, FIRST_ROW), word(item, LAST_ROW)):
        token = word(item, TOKEN) + row // per_group
        head = word(item, GROUP) * per_group + row % per_group
        source = word(job, QUERIES) + 4 * size * (token * word(job, HEADS) + head)
        for k in range(0, 4 * size, 4):
            store(target + k, load_f32(source + k) * scale)
        target += 4 * size


@merged
def _mask(job, item, block, columns, scores):
    """-infinity where a row must not see a key: later ones, and those before its window."""
    per_group, window = word(job, HEADS) // word(job, GROUPS), word(job, WINDOW)
    for row in range(word(item, FIRST_ROW), word(item, LAST_ROW)):
        token = word(item, TOKEN) + row // per_group
        here = load_i32(word(job, POSITIONS) + 4 * token) - block * BLOCK
        for key in range(max(here + 1, 0), columns):
            store(scores + 4 * key, np.float32(-np.inf))
        if window:
            for key in range(0, min(here - window + 1, columns)):
                store(scores + 4 * key, np.float32(-np.inf))
        scores += 4 * BLOCK


@merged
def _powers(scores, rows, columns, largest, sums):
    """Scores become 2^(score - the row's largest); largest, sums [rows] are written."""
    for i in range(rows):
        big = load_f32x8(scores)
        for c in range(32, 4 * columns, 32):
            big = v_larger(big, load_f32x8(scores + c))
        top = largest_lane(big)
        store(largest + 4 * i, top)
        base = splat_f32x8(top if top > np.float32(-np.inf) else np.float32(0))
        total = zero_f32x8()
        for c in range(0, 4 * columns, 32):
            p = exp2_softmax(v_fsub(load_f32x8(scores + c), base))
            store(scores + c, p)
            total = v_fadd(total, p)
        store(sums + 4 * i, sum_f32(total))
        scores += 4 * BLOCK


@merged
def _attend_block(job, item, block, scratch, state):
    """One block of keys for all rows of a tile, merged into state."""
    size, width, cap = word(job, K_SIZE), padded(word(job, V_SIZE), PANEL), word(job, ROWS)
    rows = word(item, LAST_ROW) - word(item, FIRST_ROW)
    queries = scratch
    scores = queries + 4 * cap * size
    factors = scores + 4 * cap * BLOCK
    keys = factors + 4 * cap * 4 + 2 * state_bytes(cap, width)
    values = keys + 4 * BLOCK * padded(size, 8)
    row = values + 4 * BLOCK * width

    kind, n_ctx = word(job, KIND), word(job, N_CTX)
    sequence = load_i32(word(job, SEQUENCES) + 4 * word(item, TOKEN))
    first = (sequence * word(job, GROUPS) + word(item, GROUP)) * n_ctx + block * BLOCK
    count = min(last_position(job, item) + 1 - block * BLOCK, BLOCK)
    stride = word(job, K_ROW)
    load_keys(kind, word(job, KEYS) + first * stride, stride, count, size, row, keys)
    panels = padded(count, PANEL) // PANEL
    multiply_panels(queries, 4 * size, rows, keys, 64 * padded(size, 8), panels, size,
                    scores, 4 * BLOCK, 0, 0)
    _mask(job, item, block, panels * PANEL, scores)
    largest, sums = factors + 8 * cap, factors + 12 * cap
    _powers(scores, rows, panels * PANEL, largest, sums)
    _merge_sums(state, cap, rows, largest, sums, factors, factors + 4 * cap)
    stride = word(job, V_ROW)
    load_values(kind, word(job, VALUES) + first * stride, stride, count, word(job, V_SIZE), row,
                values)
    multiply_panels(scores, 4 * BLOCK, rows, values, 64 * BLOCK, width // PANEL, count,
                    state + 8 * cap, 4 * width, factors, factors + 4 * cap)


@merged
def _attend_span(job, item, span, scratch, state):
    _reset(state, word(job, ROWS), padded(word(job, V_SIZE), PANEL))
    first = max(first_position(job, item) // BLOCK, span * SPAN)
    last = min(last_position(job, item) // BLOCK, span * SPAN + SPAN - 1)
    for block in range(first, last + 1):
        _attend_block(job, item, block, scratch, state)


@merged
def _finish(job, item, total, factors):
    """Takes the sinks into the sums and writes acc / l of each row."""
    cap, size = word(job, ROWS), word(job, V_SIZE)
    width, heads, sinks = padded(size, PANEL), word(job, HEADS), word(job, SINKS)
    per_group, first = heads // word(job, GROUPS), word(item, FIRST_ROW)
    rows = word(item, LAST_ROW) - first
    for i in range(rows):
        head = word(item, GROUP) * per_group + (first + i) % per_group
        sink = load_f32(sinks + 4 * head) * np.float32(LOG2E) if sinks else np.float32(-np.inf)
        store(factors + 4 * i, sink)
    for i in range(0, 4 * rows, 32):
        sink, largest = load_f32x8(factors + i), load_f32x8(total + i)
        top = v_larger(sink, largest)
        keep = exp2_softmax(v_fsub(largest, top))
        sum_ = load_f32x8(total + 4 * cap + i)
        sum_ = v_fma(sum_, keep, exp2_softmax(v_fsub(sink, top)))
        store(factors + i, v_fdiv(keep, sum_))
    for i in range(rows):
        token = word(item, TOKEN) + (first + i) // per_group
        head = word(item, GROUP) * per_group + (first + i) % per_group
        out = word(job, OUT) + 4 * size * (token * heads + head)
        factor, at = load_f32(factors + 4 * i), total + 8 * cap + 4 * width * i
        for k in range(0, 4 * size, 4):  # + 0 turns -0 into 0: its sign depends on the tile
            store(out + k, load_f32(at + k) * factor + np.float32(0))


@merged
def _attend_item(job, item, scratch):
    """A tile, or some spans of it; whoever ends a tile's last part merges them all."""
    cap, width = word(job, ROWS), padded(word(job, V_SIZE), PANEL)
    factors = scratch + 4 * cap * (word(job, K_SIZE) + BLOCK)
    total = factors + 4 * cap * 4
    rows = word(item, LAST_ROW) - word(item, FIRST_ROW)
    partial, size = word(item, PARTIAL), state_bytes(cap, width)
    _copy_queries(job, item, scratch)
    if not partial:
        _reset(total, cap, width)
    for span in range(word(item, SPAN_FIRST), word(item, SPAN_LAST) + 1):
        state = partial + (span - word(item, TILE_FIRST)) * size if partial else total + size
        _attend_span(job, item, span, scratch, state)
        if not partial:
            _merge_states(total, state, cap, rows, width, factors)
    if partial:
        if fetch_add(word(item, PARTS_DONE), 1) != word(item, PARTS) - 1:
            return
        _reset(total, cap, width)
        for span in range(word(item, TILE_LAST) + 1 - word(item, TILE_FIRST)):
            _merge_states(total, partial + span * size, cap, rows, width, factors)
    _finish(job, item, total, factors)


def _work(job, thread, threads):
    """Takes pieces of work, the last (with the most keys) first, until there are none."""
    scratch = word(job, SCRATCH) + thread * word(job, SCRATCH_BYTES)
    while True:
        n = word(job, N_ITEMS) - 1 - fetch_add(job + 8 * NEXT, 1)
        if n < 0:
            return
        _attend_item(job, word(job, ITEMS) + n * ITEM_BYTES, scratch)


_work_address = once(lambda: work_function(_work))


# ---- the entry --------------------------------------------------------------------------------

OK, GROW, BAD_POSITION, BAD_SEQUENCE, BAD_ORDER = range(5)


@merged
def _check(positions, sequences, n_seq, n_ctx):
    for t in range(len(positions)):
        if positions[t] < 0 or positions[t] >= n_ctx:
            return BAD_POSITION
        if sequences[t] < 0 or sequences[t] >= n_seq:
            return BAD_SEQUENCE
        if t and sequences[t] == sequences[t - 1] and positions[t] <= positions[t - 1]:
            return BAD_ORDER
    return OK


@merged
def _store_rows(job, x, base, stride, size):
    """Rows x [T, G, size] into the cache at the step's positions."""
    source, n_ctx = address_of(x), word(job, N_CTX)
    for t in range(x.shape[0]):
        sequence = load_i32(word(job, SEQUENCES) + 4 * t)
        position = load_i32(word(job, POSITIONS) + 4 * t)
        for g in range(x.shape[1]):
            at = base + ((sequence * x.shape[1] + g) * n_ctx + position) * stride
            store_row(word(job, KIND), source, size, at)
            source += 4 * size


@jit
def _attend(state, work, threads, geometry, keys, values, layer, space, items, partials, needs,
            q, k, v, positions, sequences, sinks, out, scale, window):
    """Fills the job record, stores k and v, runs the pieces. Returns a status; on GROW, needs
    [3] holds the sizes that space, items and partials must have."""
    n_seq, n_ctx = geometry[2], geometry[4]
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
    record[SINKS] = address_of(sinks) if len(sinks) else 0
    record[K_ROW], record[V_ROW] = keys.shape[4], values.shape[4] if v.size else keys.shape[4]
    layer_rows = layer * n_seq * geometry[3] * n_ctx
    record[KEYS] = address_of(keys) + layer_rows * record[K_ROW]
    record[VALUES] = record[KEYS]
    if v.size:
        record[VALUES] = address_of(values) + layer_rows * record[V_ROW]
    store(job + 8 * SCALE, np.float32(scale * LOG2E))
    tile, parts, tiles, spans, multiply_adds = survey(job, threads)
    if multiply_adds < SMALL:
        threads = 1
    record[ROWS] = padded(tile, 8)
    record[SCRATCH_BYTES] = scratch_bytes(record[ROWS], q.shape[2], out.shape[2])
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
    _store_rows(job, k, record[KEYS], record[K_ROW], q.shape[2])
    if v.size:
        _store_rows(job, v, record[VALUES], record[V_ROW], out.shape[2])
    if threads == 1:
        call_work(work, job, 0, 1)
    else:
        launch(state, work, job, threads)
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
