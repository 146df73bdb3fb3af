"""The matrices a GGUF tensor is made of, each read from the checkpoint when its turn comes."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from gguf import GGMLQuantizationType as Type

from dali_gguf.convert.checkpoint import Weight
from dali_gguf.convert.quantize import forget


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One matrix of a tensor. load() gives [rows, cols] float32, float16 or uint16 (bfloat16 bits),
    or uint8 [rows, row bytes] of MXFP4."""

    load: Callable[[], np.ndarray]
    type: Type
    release: Callable[[], None]


def rows_part(weight: Weight, first: int, count: int, transpose: bool = False) -> Part:
    """Rows of a weight, transposed or as they are."""

    def load() -> np.ndarray:
        rows = weight.rows(first, count)
        return rows.T if transpose else rows

    return Part(load, weight.type, lambda: forget(weight.data[first : first + count]))


def expert_part(weight: Weight, e: int, rows: int, turned: bool, taken: slice) -> Part:
    """Expert e of a stack [E, rows, cols]: some rows of it, or of its transpose."""

    def load() -> np.ndarray:
        matrix = weight.rows(e * rows, rows)
        return (matrix.T if turned else matrix)[taken]

    return Part(load, weight.type, lambda: forget(weight.data[e * rows : (e + 1) * rows]))


def permuted_part(weight: Weight, n_head: int) -> Part:
    """Rows of each head from (first half, second half) to alternating: llama rotates (0,1),
    (2,3).."""
    rows = len(weight.data) if len(weight.shape) > 1 else weight.shape[0]
    order = np.arange(rows).reshape(n_head, 2, rows // n_head // 2).swapaxes(1, 2).reshape(-1)

    def load() -> np.ndarray:
        all_rows = weight.rows(0, len(weight.data))
        return all_rows[order] if len(weight.shape) > 1 else all_rows[:, order]

    return Part(load, weight.type, lambda: forget(weight.data))


def mxfp4_part(blocks: Weight, scales: Weight, e: int, taken: slice) -> Part:
    """One expert's MXFP4 blocks as GGUF has them: the scale byte, then weight i beside i + 16.

    The checkpoint has weights 2 i and 2 i + 1 in byte i, low nibble first. No value changes.
    """
    rows = blocks.shape[1]

    def load() -> np.ndarray:
        raw = blocks.data.reshape(*blocks.shape)[e][taken]
        codes = np.stack([raw & 15, raw >> 4], -1).reshape(*raw.shape[:2], 32)
        packed = codes[..., :16] | (codes[..., 16:] << 4)
        scale = scales.data.reshape(scales.shape)[e][taken][..., None]
        return np.concatenate([scale, packed], -1).reshape(len(raw), -1)

    per_expert = len(blocks.data) // blocks.shape[0]
    assert per_expert == rows * blocks.shape[2]
    return Part(
        load, Type.MXFP4, lambda: forget(blocks.data[e * per_expert : (e + 1) * per_expert])
    )


def llama3_factors(rope: dict, n_rot: int) -> np.ndarray:
    """What Llama 3.1's scaling divides the frequencies by, float32 [n_rot / 2].

    Wave lengths below old / high_freq_factor stay, those above old / low_freq_factor are stretched
    by factor, and between the two the inverse is interpolated.
    """
    frequency = rope["rope_theta"] ** (
        -np.arange(0, n_rot, 2, dtype=np.float32) / np.float32(n_rot)
    )
    low, high = rope.get("low_freq_factor", 1.0), rope.get("high_freq_factor", 4.0)
    factor, old = rope.get("factor", 8.0), rope.get("original_max_position_embeddings", 8192)
    smooth = np.clip((old * frequency / (2 * np.pi) - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
