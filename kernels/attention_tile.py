"""The work function of attention: tiles of query rows against blocks of keys (attention.py)."""

import numpy as np

from dali_gguf.kernels.kv_rows import BLOCK, VALUE_PANEL, load_rows
from dali_gguf.kernels.lanes import constant, zero_f32x8
from dali_gguf.kernels.plan import (
    FIRST_KEY, FIRST_ROW, GROUP, GROUPS, HEADS, ITEM_BYTES, ITEMS, K_ROW, K_SIZE, KEYS, KIND,
    LAST_KEY, LAST_ROW, N_CTX, N_ITEMS, NEXT, NOTHING, OUT, PARTIAL, PARTS, PARTS_DONE, PER_GROUP,
    QUERIES, ROWS, SCALE, SCRATCH, SCRATCH_BYTES, SINKS, SPAN, SPAN_FIRST, SPAN_LAST, TILE_FIRST,
    TILE_LAST, TOKEN, V_ROW, V_SIZE, VALUES, WINDOW, position, sequence, state_bytes,
)
from dali_gguf.kernels.pool import fetch_add
from dali_gguf.kernels.products import PANEL, multiply_panels
from dali_gguf.kernels.records import merged, padded, word
from dali_gguf.kernels.simd import (
    jit, load_f32, load_f32x8, splat_f32x8, store, v_fadd, v_fdiv, v_fma, v_fmul, v_fsub,
)
from dali_gguf.kernels.sums import sum_f32
from dali_gguf.kernels.vmath import LOG2E, exp2_softmax, largest_lane, v_larger, zero_below

_lowest = constant("f32", [-3e38] * 8)
_minus_infinity = constant("f32", [-np.inf] * 8)


# ---- one state a row: maximum, sum of powers, sum of power * value ----------------------------
# a state of `cap` rows is m [cap] | l [cap] | acc [cap, V rounded up to a panel], float32


@jit
def _reset(state, cap, width):
    for i in range(0, 4 * cap, 32):
        store(state + i, _minus_infinity())
    for i in range(4 * cap, 4 * cap * (2 + width), 32):
        store(state + i, zero_f32x8())


@jit
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


@jit
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


@jit
def _copy_queries(job, item, target):
    """q rows of the tile times scale, [rows, K]."""
    size, per_group = word(job, K_SIZE), word(job, PER_GROUP)
    scale = load_f32(job + 8 * SCALE)
    for row in range(word(item, FIRST_ROW), word(item, LAST_ROW)):
        token = word(item, TOKEN) + row // per_group
        head = word(item, GROUP) * per_group + row % per_group
        source = word(job, QUERIES) + 4 * size * (token * word(job, HEADS) + head)
        for k in range(0, 4 * size, 4):
            store(target + k, load_f32(source + k) * scale)
        target += 4 * size


@jit
def _mask(job, item, block, columns, scores):
    """-infinity where a row must not see a key: later ones, and those before its window."""
    per_group, window = word(job, PER_GROUP), word(job, WINDOW)
    for row in range(word(item, FIRST_ROW), word(item, LAST_ROW)):
        token = word(item, TOKEN) + row // per_group
        here = position(job, token) - block * BLOCK
        for key in range(max(here + 1, 0), columns):
            store(scores + 4 * key, np.float32(-np.inf))
        if window:
            for key in range(0, min(here - window + 1, columns)):
                store(scores + 4 * key, np.float32(-np.inf))
        scores += 4 * BLOCK


@jit
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
    scores = scratch + 4 * cap * size
    factors = scores + 4 * cap * BLOCK
    keys = factors + 4 * cap * 4 + 2 * state_bytes(cap, width)
    values = keys + 4 * BLOCK * padded(size, 8)
    row = values + VALUE_PANEL * padded(width, 32) // PANEL
    keep, add, largest, sums = factors, factors + 4 * cap, factors + 8 * cap, factors + 12 * cap

    kind, n_ctx, nothing = word(job, KIND), word(job, N_CTX), word(job, NOTHING)
    transpose = nothing + 1
    head = sequence(job, word(item, TOKEN)) * word(job, GROUPS) + word(item, GROUP)
    first = head * n_ctx + block * BLOCK
    count = min(word(item, LAST_KEY) + 1 - block * BLOCK, BLOCK)
    stride, columns = word(job, K_ROW), padded(count, PANEL)
    load_rows(kind, word(job, KEYS) + first * stride, stride, count, size, row, transpose, keys)
    multiply_panels(scratch, 4 * size, rows, keys, 64 * padded(size, 8), columns // PANEL, size,
                    scores, 4 * BLOCK, nothing, nothing)
    _mask(job, item, block, columns, scores)
    _powers(scores, rows, columns, largest, sums)
    _merge_sums(state, cap, rows, largest, sums, keep, add)
    stride = word(job, V_ROW)
    load_rows(kind, word(job, VALUES) + first * stride, stride, count, word(job, V_SIZE), row,
              nothing, values)
    multiply_panels(scores, 4 * BLOCK, rows, values, VALUE_PANEL, width // PANEL, count,
                    state + 8 * cap, 4 * width, keep, add)


@jit
def _finish(job, item, total, factors):
    """Takes the sinks into the sums and writes acc / l of each row."""
    cap, size = word(job, ROWS), word(job, V_SIZE)
    width, heads, sinks = padded(size, PANEL), word(job, HEADS), word(job, SINKS)
    per_group, first = word(job, PER_GROUP), word(item, FIRST_ROW)
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
    for span in range(word(item, SPAN_FIRST), word(item, SPAN_LAST) + 1):
        state = partial + (span - word(item, TILE_FIRST)) * size if partial else total + size
        first = max(word(item, FIRST_KEY) // BLOCK, span * SPAN)
        last = min(word(item, LAST_KEY) // BLOCK, span * SPAN + SPAN - 1)
        _reset(state, cap, width)
        for block in range(first, last + 1):
            _attend_block(job, item, block, scratch, state)
        if not partial:
            if span == word(item, TILE_FIRST):
                _reset(total, cap, width)
            _merge_states(total, state, cap, rows, width, factors)
    if partial:
        if fetch_add(word(item, PARTS_DONE), 1) != word(item, PARTS) - 1:
            return
        _reset(total, cap, width)
        for span in range(word(item, TILE_LAST) + 1 - word(item, TILE_FIRST)):
            _merge_states(total, partial + span * size, cap, rows, width, factors)
    _finish(job, item, total, factors)


def attention_work(job, thread, threads):
    """Takes pieces of work, the last (with the most keys) first, until there are none."""
    scratch = word(job, SCRATCH) + thread * word(job, SCRATCH_BYTES)
    while True:
        n = word(job, N_ITEMS) - 1 - fetch_add(job + 8 * NEXT, 1)
        if n < 0:
            return
        _attend_item(job, word(job, ITEMS) + n * ITEM_BYTES, scratch)
