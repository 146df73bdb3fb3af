"""Where the link finds an expert when the model is larger than RAM: the arena, or the disk.

Everything here runs in the link's thread, while another thread owns the arena. Bytes that were
copied from an arena slot count only if the expert kept the slot meanwhile (a sequence lock: no
waiting on either side). What is not in the arena is read by the arena's own reader threads, whole
ranges past the page cache, straight into page-locked buffers that the GPU copies from.
"""

import ctypes
from collections import deque
from collections.abc import Iterable

import numpy as np

from dali_gguf.errors import DaliError
from dali_gguf.offload.arena import RESIDENT, ExpertArena
from dali_gguf.offload.direct_io import Memory, page_ceil

PIECE = 1 << 20  # of the pinned ring that bytes in RAM go through
PIECES = 8
BUFFERS = 4  # experts on their way from disk: one expert's ranges already keep the disk busy
MOST_BYTES = 64 << 20  # of the buffers, if two experts do not take more


def buffers_for(slot: int) -> int:
    return max(2, min(BUFFERS, MOST_BYTES // max(slot, 1)))


def staging_bytes(slot: int) -> int:
    """Bytes of RAM that copies to the GPU take at most, for experts of at most `slot` bytes."""
    slot = page_ceil(slot)
    return PIECES * PIECE + min(BUFFERS * slot, max(MOST_BYTES, 2 * slot))


class Staging:
    """Keys are the arena's. memory: the buffers, page-aligned, each for the largest expert."""

    def __init__(self, arena: ExpertArena):
        self.arena = arena
        slot = page_ceil(int(arena.row_sizes.max()))
        count = buffers_for(slot)
        self.memory = Memory(count * slot)
        self.loads = arena.loads.beside(self.memory)
        self._free: deque = deque((i * slot, None) for i in range(count))  # (place, last use)
        self._place: dict[int, int] = {}  # of keys that are being read, or have been
        self._ended: dict[int, DaliError | None] = {}

    def in_ram(self, key: int) -> tuple[list[int], int] | None:
        """(addresses of gate, up and down, mark for `unchanged`); None if it is not there,
        or being read already."""
        mark = int(self.arena.evicted[key])
        if key in self._place or self.arena.state[key] != RESIDENT:
            return None
        row, expert = divmod(key, self.arena.n_expert)
        return self.arena.address[row, :, expert].tolist(), mark

    def unchanged(self, key: int, mark: int) -> bool:
        """The expert has been in its slot all the time since in_ram gave the mark."""
        return self.arena.state[key] == RESIDENT and self.arena.evicted[key] == mark

    def read_ahead(self, keys: Iterable[int]) -> None:
        """Starts reads of the first of these that are on disk, as far as there are buffers; the
        last one is left for what is wanted now."""
        for key in keys:
            if len(self._free) < 2 or not _unused(self._free[0][1]):
                return
            if key not in self._place and self.arena.state[key] != RESIDENT:
                self.begin(key, True)

    def begin(self, key: int, wanted: bool) -> None:
        """Starts the read of an expert, unless it was started before. wanted: a step waits for it
        (else the read waits for idle disk time)."""
        if key in self._place:
            return
        place, last_use = self._free.popleft()
        if last_use is not None:
            last_use.synchronize()
        self._place[key] = place
        self.loads.start(np.array([key]), np.array([place]), wanted)

    def from_disk(self, key: int) -> list[int]:
        """Waits for the read begun before: addresses of gate, up and down in the buffer. Then
        `give`. Raises ModelFileError if the file cannot be read."""
        while key not in self._ended:
            for load in self.loads.wait():
                self._ended[load.key] = load.error
        error = self._ended.pop(key)
        if error is not None:
            self.give(key, None)
            raise error
        starts = self.arena.starts[key]
        return (self.memory.address + self._place[key] + starts).tolist()

    def give(self, key: int, last_use) -> None:
        """The buffer may be read into again after the event last_use (None: at once)."""
        self._free.append((self._place.pop(key), last_use))

    def close(self) -> None:
        """After the link's thread has ended, before the arena is closed."""
        while len(self.loads):
            self.loads.wait()
        self.memory.close()


def _unused(last_use) -> bool:
    return last_use is None or last_use.query()


def bytes_at(address: int, nbytes: int) -> np.ndarray:
    """uint8 [nbytes]: a view that does not keep the memory alive."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
