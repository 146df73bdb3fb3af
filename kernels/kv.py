"""The cache of keys and values: one array each, positions of one head and sequence side by side."""

import mmap
import sys
from dataclasses import dataclass, field

import numpy as np

from dali_gguf.errors import InputError
from dali_gguf.kernels.kv_rows import F16_ROWS, F32_ROWS, Q8_0_ROWS
from dali_gguf.kernels.plan import rows_that_fit, scratch_bytes

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


# the control record of a cache: int64 words, all that the attention kernel reads of it.
# HAVE and NEED: bytes of the workspace's three parts, as they are and as the last step wants them
(C_KIND, C_LAYERS, C_SEQUENCES, C_GROUPS, C_CONTEXT, C_K_SIZE, C_V_SIZE, C_K_ROW, C_V_ROW, C_KEYS,
 C_VALUES, C_FIXED_BYTES, C_BYTES_PER_ROW, C_MOST_ROWS, C_SCRATCH, C_ITEMS, C_PARTIALS,
 HAVE_SCRATCH, HAVE_ITEMS, HAVE_PARTIALS, NEED_SCRATCH, NEED_ITEMS, NEED_PARTIALS,
 CONTROL_WORDS) = range(24)


class Workspace:
    """Memory of the attention kernel: scratch of the threads, pieces of work, partial states."""

    def __init__(self):
        self._parts = [np.zeros(0, np.uint8) for _ in range(3)]

    def grow(self, control: np.ndarray) -> None:
        for i in range(3):
            need = int(control[NEED_SCRATCH + i])
            if need > control[HAVE_SCRATCH + i]:
                size = need + need // 2 if i else need  # contexts grow, threads do not
                self._parts[i] = np.zeros(size + 64, np.uint8)
                control[C_SCRATCH + i] = -(-self._parts[i].ctypes.data // 64) * 64
                control[HAVE_SCRATCH + i] = size


@dataclass(frozen=True, slots=True, eq=False)
class KVCache:
    """keys uint8 [n_layer, n_seq, G, n_ctx, bytes of a key]; values the same, or empty when values
    are the first columns of the keys (v_size 0, MLA's compressed cache)."""

    kv_type: str
    k_size: int
    v_size: int
    keys: np.ndarray = field(repr=False)
    values: np.ndarray = field(repr=False)
    control: np.ndarray = field(repr=False)  # int64 [CONTROL_WORDS]
    workspace: Workspace = field(repr=False)

    @classmethod
    def empty(cls, n_layer: int, n_seq: int, n_ctx: int, n_head_kv: int, k_size: int, v_size: int,
              kv_type: str = "f16") -> "KVCache":
        lead = (n_layer, n_seq, n_head_kv, n_ctx)
        k_bytes = row_bytes(k_size, kv_type)
        v_bytes = row_bytes(v_size, kv_type) if v_size else 0
        keys = lazy_zeros((*lead, k_bytes))
        values = lazy_zeros((*lead, v_bytes)) if v_size else np.zeros((*lead, 0), np.uint8)
        # without values of its own (MLA) a cache may serve values as long as its keys
        widest = v_size or k_size
        control = np.zeros(CONTROL_WORDS, np.int64)
        control[: C_SCRATCH] = [
            KINDS[kv_type], *(n_layer, n_seq, n_head_kv, n_ctx), k_size, v_size, k_bytes, v_bytes,
            keys.ctypes.data, values.ctypes.data, *scratch_bytes(k_size, widest),
            rows_that_fit(k_size, widest),
        ]
        return cls(kv_type, k_size, v_size, keys, values, control, Workspace())

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
