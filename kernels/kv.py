"""The cache of keys and values: one array each, positions of one head and sequence side by side."""

import mmap
import sys
from dataclasses import dataclass, field

import numpy as np

from dali_gguf.errors import InputError
from dali_gguf.kernels.kv_rows import F16_ROWS, F32_ROWS, Q8_0_ROWS
from dali_gguf.kernels.plan import ITEM_WORDS, rows_that_fit, scratch_bytes

KINDS = {"f32": F32_ROWS, "f16": F16_ROWS, "q8_0": Q8_0_ROWS}


def row_bytes(size: int, kv_type: str) -> int:
    """Bytes of one key or value of `size` numbers."""
    if kv_type not in KINDS:
        raise InputError(f"kv type {kv_type!r} is not known: choose one of {', '.join(KINDS)}")
    if kv_type == "q8_0":
        if size % 32:
            raise InputError(f"kv type q8_0 needs heads of a multiple of 32, this model has {size}:"
                             " use --kv-type f16")
        return size // 32 * 34
    return size * (2 if kv_type == "f16" else 4)


def cache_bytes(n_layer: int, n_seq: int, n_ctx: int, n_head_kv: int, k_size: int, v_size: int,
                kv_type: str) -> int:
    """Memory of a full cache; what is not yet used of it costs nothing."""
    row = row_bytes(k_size, kv_type) + (row_bytes(v_size, kv_type) if v_size else 0)
    return n_layer * n_seq * n_head_kv * n_ctx * row


def lazy_zeros(shape: tuple[int, ...]) -> np.ndarray:
    """uint8 zeros whose pages take memory only when written.

    Asks for small pages: with huge ones the first token of each head would touch 2 MiB.
    """
    size = int(np.prod(shape, dtype=np.int64))
    if sys.platform == "win32" or size < 1 << 20:
        return np.zeros(shape, np.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        try:
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        except OSError:
            pass  # a kernel built without huge pages
    return np.frombuffer(memory, np.uint8).reshape(shape)


@dataclass(slots=True, eq=False)
class Workspace:
    """Scratch memory of the attention kernel, grown when a step needs more."""

    threads: np.ndarray  # uint8, one stretch a thread
    items: np.ndarray  # int64 [n, ITEM_WORDS]: the pieces of work
    partials: np.ndarray  # float32: results of spans when a long context is split
    needs: np.ndarray  # int64 [3]: lengths of the three that the last step asked for

    @classmethod
    def empty(cls) -> "Workspace":
        return cls(np.zeros(0, np.uint8), np.zeros((0, ITEM_WORDS), np.int64),
                   np.zeros(0, np.float32), np.zeros(3, np.int64))

    def grow(self) -> None:
        size, n_items, n_partials = (int(n) for n in self.needs)
        if size > self.threads.size:
            self.threads = np.zeros(size, np.uint8)
        if n_items > len(self.items):
            self.items = np.zeros((n_items + n_items // 2, ITEM_WORDS), np.int64)
        if n_partials > self.partials.size:
            self.partials = np.zeros(n_partials + n_partials // 2, np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class KVCache:
    """keys uint8 [n_layer, n_seq, G, n_ctx, bytes of a key]; values the same, or empty when values
    are the first columns of the keys (v_size 0, MLA's compressed cache)."""

    kv_type: str
    k_size: int
    v_size: int
    keys: np.ndarray
    values: np.ndarray
    geometry: np.ndarray = field(repr=False)  # int64 [8], what the kernel needs of this
    workspace: Workspace = field(repr=False)

    @classmethod
    def empty(cls, n_layer: int, n_seq: int, n_ctx: int, n_head_kv: int, k_size: int, v_size: int,
              kv_type: str = "f16") -> "KVCache":
        lead = (n_layer, n_seq, n_head_kv, n_ctx)
        k_bytes = row_bytes(k_size, kv_type)
        v_bytes = row_bytes(v_size, kv_type) if v_size else 0
        values = lazy_zeros((*lead, v_bytes)) if v_size else np.zeros((*lead, 0), np.uint8)
        # without values of its own (MLA) a cache may serve values as long as its keys
        fixed, per_row = scratch_bytes(k_size, v_size or k_size)
        rows = rows_that_fit(k_size, v_size or k_size)
        geometry = [KINDS[kv_type], n_seq, n_head_kv, n_ctx, 0, fixed, per_row, rows]
        return cls(
            kv_type, k_size, v_size, lazy_zeros((*lead, k_bytes)), values,
            np.array(geometry, np.int64), Workspace.empty(),
        )

    @property
    def n_layer(self) -> int:
        return self.keys.shape[0]

    @property
    def n_seq(self) -> int:
        return self.keys.shape[1]

    @property
    def n_ctx(self) -> int:
        return self.keys.shape[3]

    @property
    def bytes(self) -> int:
        """Memory when every position is filled."""
        return self.keys.size + self.values.size

    @property
    def bytes_per_position(self) -> int:
        """Memory that one more token of one sequence takes, over all layers."""
        return self.bytes // (self.n_ctx * self.n_seq)

    def copy_sequence(self, source: int, target: int, positions: int) -> None:
        """The first `positions` positions of one sequence, all layers, into another."""
        for array in (self.keys, self.values):
            array[:, target, :, :positions] = array[:, source, :, :positions]
