"""How a step's attention is cut into pieces of work, and the records that carry it to the threads.

A segment is the run of tokens of one sequence; its rows are (token, head of the group) pairs.
A tile is a stretch of these rows for one key/value head. With fewer tiles than the threads need,
a tile's spans of keys are shared out, and their results kept apart until the last part is done.
How the work is cut never changes a result.
"""

from dali_gguf.kernels.kv_rows import BLOCK
from dali_gguf.kernels.products import PANEL
from dali_gguf.kernels.records import merged, padded, word
from dali_gguf.kernels.simd import jit, load_i32, store

SPAN = 8  # blocks of a span: part of the order of summation
MOST_ROWS = 120  # rows of a tile
TILE_BYTES = 448 << 10  # scratch of a tile: stays in a 512 KiB second-level cache

# the job record: int64 words; addresses, sizes, and bytes of a cache row
(QUERIES, OUT, POSITIONS, SEQUENCES, KEYS, VALUES, KIND, K_ROW, V_ROW, HEADS, GROUPS, K_SIZE,
 V_SIZE, N_CTX, WINDOW, SINKS, SCALE, ITEMS, N_ITEMS, NEXT, SCRATCH, SCRATCH_BYTES, ROWS,
 TOKENS, PARTIALS, JOB_WORDS) = range(26)

# a piece of work: rows [FIRST_ROW, LAST_ROW) of the segment at TOKEN, spans SPAN_FIRST..SPAN_LAST
# (both included) of the tile's TILE_FIRST..TILE_LAST. PARTIAL: address of the tile's partial
# states, 0 when the piece is the whole tile. PARTS_DONE: address of a COUNT, PARTS its aim.
(TOKEN, FIRST_ROW, LAST_ROW, GROUP, SPAN_FIRST, SPAN_LAST, TILE_FIRST, TILE_LAST, PARTIAL, PARTS,
 PARTS_DONE, COUNT) = range(12)
ITEM_WORDS = 16
ITEM_BYTES = 8 * ITEM_WORDS


@merged
def state_bytes(rows, width):
    """A state (attention.py) of `rows` rows and `width` value columns."""
    return 4 * rows * (2 + width)


@merged
def scratch_bytes(rows, k_size, v_size):
    """Scratch of a thread: queries, scores, factors, two states, a block of keys and values."""
    width, depth = padded(v_size, PANEL), padded(k_size, 8)
    per_row = 4 * (k_size + BLOCK + 4)
    block = 4 * BLOCK * (depth + width) + 32 * max(depth, width) + 256
    return padded(rows * per_row + 2 * state_bytes(rows, width) + block, 64)


@merged
def rows_that_fit(k_size, v_size):
    """Rows of a tile whose scratch stays within TILE_BYTES: a multiple of 24, the product's step."""
    fixed = scratch_bytes(0, k_size, v_size)
    per_row = scratch_bytes(64, k_size, v_size) - fixed
    rows = (TILE_BYTES - fixed) * 64 // per_row // 24 * 24
    return min(max(rows, 24), MOST_ROWS)


@merged
def position(job, token):
    return load_i32(word(job, POSITIONS) + 4 * token)


@merged
def sequence(job, token):
    return load_i32(word(job, SEQUENCES) + 4 * token)


@merged
def rows_first_position(job, token, first_row):
    """The first key that these rows may see."""
    here = position(job, token + first_row // (word(job, HEADS) // word(job, GROUPS)))
    window = word(job, WINDOW)
    return max(here - window + 1, 0) if window else 0


@merged
def rows_last_position(job, token, last_row):
    return position(job, token + (last_row - 1) // (word(job, HEADS) // word(job, GROUPS)))


@merged
def first_position(job, item):
    return rows_first_position(job, word(item, TOKEN), word(item, FIRST_ROW))


@merged
def last_position(job, item):
    return rows_last_position(job, word(item, TOKEN), word(item, LAST_ROW))


@jit
def segment_end(job, token):
    end = token + 1
    while end < word(job, TOKENS) and sequence(job, end) == sequence(job, token):
        end += 1
    return end


@jit
def survey(job, threads):
    """(rows of a tile, parts of a tile, tiles, spans at most, multiply-adds) of the step."""
    groups, per_group = word(job, GROUPS), word(job, HEADS) // word(job, GROUPS)
    most_rows, spans, token, work = 0, 1, 0, 0
    while token < word(job, TOKENS):
        end = segment_end(job, token)
        rows = (end - token) * per_group
        first = rows_first_position(job, token, 0)
        last = position(job, end - 1)
        most_rows = max(most_rows, rows)
        spans = max(spans, last // (BLOCK * SPAN) - first // (BLOCK * SPAN) + 1)
        work += rows * groups * (last - first + 1)
        token = end
    work *= word(job, K_SIZE) + word(job, V_SIZE)
    tile = min(most_rows, rows_that_fit(word(job, K_SIZE), word(job, V_SIZE)))
    tiles = count_tiles(job, tile)
    parts = 1
    if tiles < 4 * threads and tiles % threads:
        parts = min(spans, (4 * threads + tiles - 1) // tiles)
    if tiles * parts < threads and tile > 4:
        share = (threads + tiles * parts - 1) // (tiles * parts)
        tile = padded(max((tile + share - 1) // share, 4), 4)
        tiles = count_tiles(job, tile)
    return tile, parts, tiles, spans, work


@jit
def count_tiles(job, tile):
    groups, per_group = word(job, GROUPS), word(job, HEADS) // word(job, GROUPS)
    token, tiles = 0, 0
    while token < word(job, TOKENS):
        end = segment_end(job, token)
        tiles += ((end - token) * per_group + tile - 1) // tile * groups
        token = end
    return tiles


@jit
def cut(job, tile, parts, spans):
    """Writes the pieces of work to ITEMS; returns their number. spans: partial states a tile has."""
    per_group = word(job, HEADS) // word(job, GROUPS)
    size = state_bytes(word(job, ROWS), padded(word(job, V_SIZE), PANEL))
    item, partial, token = word(job, ITEMS), word(job, PARTIALS), 0
    while token < word(job, TOKENS):
        end = segment_end(job, token)
        rows = (end - token) * per_group
        for first_row in range(0, rows, tile):
            last_row = min(first_row + tile, rows)
            first = rows_first_position(job, token, first_row) // (BLOCK * SPAN)
            last = rows_last_position(job, token, last_row) // (BLOCK * SPAN)
            n = min(parts, last - first + 1)
            for group in range(word(job, GROUPS)):
                counter = item + 8 * COUNT
                for part in range(n):
                    store(item + 8 * TOKEN, token)
                    store(item + 8 * FIRST_ROW, first_row)
                    store(item + 8 * LAST_ROW, last_row)
                    store(item + 8 * GROUP, group)
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
