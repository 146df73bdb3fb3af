"""How a step's attention is cut into pieces of work, and the records that carry it to the threads.

A segment is the run of tokens of one sequence; its rows are (token, head of the group) pairs.
A tile is a stretch of these rows for one key/value head. With fewer tiles than the threads need,
a tile's spans of keys are shared out, and their results kept apart until the last part is done.
How the work is cut never changes a result.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from dali_gguf.kernels.kv_rows import BLOCK, VALUE_PANEL
from dali_gguf.kernels.products import PANEL
from dali_gguf.kernels.records import padded, word
from dali_gguf.kernels.simd import I32, I64, jit, load_ir, store

SPAN = 8  # blocks of a span: part of the order of summation
TILE_BYTES = 448 << 10  # scratch of a tile: stays in a 512 KiB second-level cache

# the job record: int64 words; addresses, sizes, and bytes of a cache row
(QUERIES, OUT, POSITIONS, SEQUENCES, KEYS, VALUES, KIND, K_ROW, V_ROW, HEADS, GROUPS, K_SIZE,
 V_SIZE, N_CTX, WINDOW, SINKS, SCALE, ITEMS, N_ITEMS, NEXT, SCRATCH, SCRATCH_BYTES, ROWS,
 TOKENS, PARTIALS, MOST_ROWS, PER_GROUP, NOTHING, JOB_WORDS) = range(29)

# a piece of work: rows [FIRST_ROW, LAST_ROW) of the segment at TOKEN see keys FIRST_KEY..LAST_KEY;
# the piece takes spans SPAN_FIRST..SPAN_LAST (both included) of the tile's TILE_FIRST..TILE_LAST.
# PARTIAL: address of the tile's partial states, 0 when the piece is the whole tile. PARTS_DONE:
# address of a COUNT that ends at PARTS.
(TOKEN, FIRST_ROW, LAST_ROW, GROUP, FIRST_KEY, LAST_KEY, SPAN_FIRST, SPAN_LAST, TILE_FIRST,
 TILE_LAST, PARTIAL, PARTS, PARTS_DONE, COUNT) = range(14)
ITEM_WORDS = 16
ITEM_BYTES = 8 * ITEM_WORDS


@intrinsic
def state_bytes(typing, rows, width):
    """A state (attention.py) of `rows` rows and `width` value columns."""

    def gen(context, b, sig, args):
        floats = b.mul(args[0], b.add(args[1], ir.Constant(I64, 2)))
        return b.mul(floats, ir.Constant(I64, 4))

    return types.intp(types.intp, types.intp), gen


def scratch_bytes(k_size: int, v_size: int) -> tuple[int, int]:
    """Scratch of a thread, (bytes, bytes a row): queries, scores, four factors and two states a
    row, a block of keys and of values, and eight rows of the cache."""
    width, depth = -(-v_size // 32) * 32, -(-k_size // 32) * 32
    fixed = 4 * BLOCK * depth + VALUE_PANEL * width // PANEL + 32 * depth + 256
    return fixed, 4 * (k_size + BLOCK + 4 + 2 * (2 + width))


def rows_that_fit(k_size: int, v_size: int) -> int:
    """Rows of a tile whose scratch stays within TILE_BYTES: a multiple of 24."""
    fixed, per_row = scratch_bytes(k_size, v_size)
    return min(max((TILE_BYTES - fixed) // per_row // 24 * 24, 24), 120)


def _int32_of(array):
    @intrinsic
    def f(typing, job, token):
        """An element of one of the job's int32 arrays."""

        def gen(context, b, sig, args):
            base = load_ir(b, b.add(args[0], ir.Constant(I64, 8 * array)), I64)
            value = load_ir(b, b.add(base, b.mul(args[1], ir.Constant(I64, 4))), I32)
            return b.sext(value, I64)

        return types.intp(types.intp, types.intp), gen

    return f


position, sequence = _int32_of(POSITIONS), _int32_of(SEQUENCES)


@jit
def survey(job, threads):
    """How to cut a step: (rows of a tile, parts of a tile, tiles at most, spans at most of a
    tile, multiply-adds in all)."""
    groups, per_group = word(job, GROUPS), word(job, PER_GROUP)
    window, tokens = word(job, WINDOW), word(job, TOKENS)
    segments, most_rows, spans, pairs, start = 0, 0, 1, 0, 0
    for end in range(1, tokens + 1):
        if end < tokens and sequence(job, end) == sequence(job, start):
            continue
        last = position(job, end - 1)
        first = max(position(job, start) - window + 1, 0) if window else 0
        segments += 1
        most_rows = max(most_rows, (end - start) * per_group)
        spans = max(spans, last // (BLOCK * SPAN) - first // (BLOCK * SPAN) + 1)
        pairs += (end - start) * (last - first + 1)
        start = end
    rows = tokens * per_group
    tile = min(most_rows, word(job, MOST_ROWS))
    tiles = groups * max(segments, (rows + tile - 1) // tile)
    parts = 1
    if tiles < 4 * threads and tiles % threads:
        parts = min(spans, (4 * threads + tiles - 1) // tiles)
    if tiles * parts < threads and tile > 4:
        share = (threads + tiles * parts - 1) // (tiles * parts)
        tile = padded(max((tile + share - 1) // share, 4), 4)
    multiply_adds = pairs * word(job, HEADS) * (word(job, K_SIZE) + word(job, V_SIZE))
    return tile, parts, groups * (segments + rows // tile), spans, multiply_adds


@jit
def cut(job, tile, parts, spans):
    """Writes the pieces of work to ITEMS and returns their number. spans: partial states a tile."""
    per_group, window = word(job, PER_GROUP), word(job, WINDOW)
    size = state_bytes(word(job, ROWS), padded(word(job, V_SIZE), PANEL))
    item, partial, token = word(job, ITEMS), word(job, PARTIALS), 0
    while token < word(job, TOKENS):
        end = token + 1
        while end < word(job, TOKENS) and sequence(job, end) == sequence(job, token):
            end += 1
        rows = (end - token) * per_group
        for first_row in range(0, rows, tile):
            last_row = min(first_row + tile, rows)
            first_key = position(job, token + first_row // per_group) - window + 1
            first_key = max(first_key, 0) if window else 0
            last_key = position(job, token + (last_row - 1) // per_group)
            first, last = first_key // (BLOCK * SPAN), last_key // (BLOCK * SPAN)
            n = min(parts, last - first + 1)
            for group in range(word(job, GROUPS)):
                counter = item + 8 * COUNT
                for part in range(n):
                    store(item + 8 * TOKEN, token)
                    store(item + 8 * FIRST_ROW, first_row)
                    store(item + 8 * LAST_ROW, last_row)
                    store(item + 8 * GROUP, group)
                    store(item + 8 * FIRST_KEY, first_key)
                    store(item + 8 * LAST_KEY, last_key)
                    store(item + 8 * SPAN_FIRST, first + (last - first + 1) * part // n)
                    store(item + 8 * SPAN_LAST, first + (last - first + 1) * (part + 1) // n - 1)
                    store(item + 8 * TILE_FIRST, first)
                    store(item + 8 * TILE_LAST, last)
                    store(item + 8 * PARTIAL, partial if n > 1 else 0)
                    store(item + 8 * PARTS, n)
                    store(item + 8 * PARTS_DONE, counter)
                    store(item + 8 * COUNT, 0)
                    item += ITEM_BYTES
                if n > 1:
                    partial += spans * size
        token = end
    return (item - word(job, ITEMS)) // ITEM_BYTES
