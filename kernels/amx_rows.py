"""Rows of a quantized matrix times records, 16 tokens at a time by the tiles of AMX.

Templates beside those of rows.py: the same panels, the same stage, the same bits. formats.py makes
their copies; gather_scales and group_blocks are in the template of the type's kind.
"""

from dali_gguf.kernels.amx import (
    CONFIGURATION, GROUP, PRODUCT, RING, SLOT, SLOTS, amx_multiply, amx_release,
)
from dali_gguf.kernels.lanes import zero_f32x8
from dali_gguf.kernels.panel import LINE, TOKENS
from dali_gguf.kernels.rows import PANEL, SMALL, STAGE
from dali_gguf.kernels.simd import load_i8x64, load_i32, load_intp, store


def copy(source, target, size):
    """A multiple of 4 bytes."""
    whole = size // 64 * 64
    for i in range(0, whole, 64):
        store(target + i, load_i8x64(source + i))
    for i in range(whole, size, 4):
        store(target + i, load_i32(source + i))


def gather(first, last, n, records, tokens, slots):
    """Blocks [first, last) of up to 16 records (after the last token, it is repeated) to slots."""
    for t in range(GROUP):
        record = load_intp(records + 8 * min(t, tokens - 1))
        slot = slots + SLOT * t
        copy(record + WEIGHTS * first, slot, WEIGHTS * (last - first))
        gather_scales(record, first, last, n, slot)


def start_product(s, panel, slots, ring):
    """The s-th sub-block's product of the panel and the group, on its way to the ring."""
    w = panel + s // PARTS * PANEL_BLOCK + s % PARTS * (SUB // 4 * LINE)
    amx_multiply(slots + SUB * s, w, ring + PRODUCT * (s % RING))


def tile_tokens_amx(panel, first, last, n, records, tokens, stage):
    """rows.tile_tokens, with whole groups of tokens by AMX. 13 tokens count as whole: those cost
    tile_tokens as much as 16."""
    ring = stage + STAGE + PANEL
    slots, groups = ring + SLOTS, (tokens + TOKENS - 1) // GROUP
    for t in range(0, GROUP * groups, GROUP):
        for i in range(64 * (tokens - t), 64 * GROUP, 32):
            store(stage + 64 * t + i, zero_f32x8())
        gather(first, last, n, records + 8 * t, tokens - t, slots)
        group_blocks(panel, last - first, slots, ring, stage + 64 * t)
    done = GROUP * groups
    if done < tokens:
        tile_tokens(panel, first, last, n, records + 8 * done, tokens - done, stage + 64 * done)


def matmat_amx(w, stride, r0, r1, n, records, tokens, out, out_stride, scratch):
    """rows.matmat, whose tile_tokens is the above: tiles are set up here and let go in the end."""
    tiles = tokens + TOKENS > GROUP
    if tiles:
        amx_configure(scratch + SMALL + STAGE + PANEL + CONFIGURATION)
    matmat_tiles(w, stride, r0, r1, n, records, tokens, out, out_stride, scratch)
    if tiles:
        amx_release()


INLINE = (copy,)
ONCE = (gather, start_product)
PIECES = (tile_tokens_amx,)
