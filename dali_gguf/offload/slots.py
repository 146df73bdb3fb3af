"""Slots of equal size in one anonymous memory, one class of them for each size that experts have.

A key is an expert of a layer: row * n_expert + expert. Rows are the layers with experts, ordered so
that those of one class stand together: the class sees its keys from 0.
"""

import numpy as np

from dali_gguf.errors import MemoryBudgetError
from dali_gguf.offload.budget import show_size
from dali_gguf.offload.direct_io import Memory
from dali_gguf.offload.slot_pool import SlotPool

RING = 16  # slots that a long prefill takes for experts it reads, uses and drops


class SlotClass:
    """The free slots of one size, and who gives up a slot when there is none.

    free: places (byte offsets in the memory). ring: keys that a long prefill streamed through,
    oldest first; their slots are taken again before anybody else's. fills: keys whose read nobody
    asked for. spare: places that have no memory now.
    """

    def __init__(self, nbytes: int, first_key: int, pool: SlotPool, places: list[int]):
        self.nbytes, self.first_key, self.pool = nbytes, first_key, pool
        self.count = pool.capacity
        self.free, self.spare = places[: self.count][::-1], places[self.count :]
        self.ring: dict[int, None] = {}  # an ordered set
        self.fills: list[int] = []

    def protect(self, keys: np.ndarray, steps: int = 0) -> None:
        self.pool.protect(keys - self.first_key, steps)

    def release(self, keys: np.ndarray) -> None:
        self.pool.release(keys - self.first_key)

    def victims(self, count: int) -> list[int]:
        return (self.pool.victims(count) + self.first_key).tolist() if count > 0 else []

    def most_used(self, counts: np.ndarray, n_used: int) -> list[int]:
        """As many keys as there are free slots, by share of their layer's counts [rows, E]; equal
        ones go round the layers. The scores start from the counts too."""
        n_expert = counts.shape[1]
        first_row, n_rows = self.first_key // n_expert, self.pool.score.size // n_expert
        mine = counts[first_row : first_row + n_rows]
        if mine.any():
            self.pool.seed(mine, n_used)
        share = mine / np.maximum(mine.sum(1, keepdims=True), 1)
        expert, row = np.divmod(np.argsort(-share.T.ravel(), kind="stable"), n_rows)
        return (self.first_key + row * n_expert + expert)[: len(self.free)].tolist()

    def from_ring(self, count: int) -> list[int]:
        """Up to count keys of a full ring that are resident and not in use, oldest first."""
        pool, old = self.pool, []
        if len(self.ring) >= RING:
            for key in self.ring:
                local = key - self.first_key
                if pool.resident[local] and pool.protected[local] < pool.clock and len(old) < count:
                    old.append(key)
        return old


class Slots:
    """Shares nbytes among the classes so that every layer can hold the same part of its experts."""

    def __init__(self, row_bytes: np.ndarray, n_expert: int, nbytes: int, half_life: float,
                 growth: float = 0.0):
        """row_bytes int64 [rows], ascending: slot size of each layer with experts. growth: part of
        nbytes that may be added later."""
        self.classes: list[SlotClass] = []
        self._of_row: list[SlotClass] = []
        everything = int(row_bytes.sum()) * n_expert
        start = 0
        for size, first_row, rows in _runs(row_bytes):
            n_keys = rows * n_expert
            count = min(n_keys, nbytes * n_keys // everything)
            most = min(n_keys, int(count * (1 + growth)))
            pool = SlotPool(rows, n_expert, count, half_life)
            places = [start + i * size for i in range(most)]
            self.classes.append(SlotClass(size, first_row * n_expert, pool, places))
            self._of_row += [self.classes[-1]] * rows
            start += most * size
        self.memory = Memory(max(start, 1))

    @property
    def full(self) -> bool:
        """No slot is free: all memory is in use."""
        return not any(c.free for c in self.classes)

    def grow(self, nbytes: int) -> None:
        """Adds up to nbytes of free slots, each class its share."""
        for c in self.classes:
            more = min(len(c.spare), int(nbytes * c.count / max(self.count, 1)) // c.nbytes)
            c.free += [c.spare.pop() for _ in range(more)]
            c.count = c.pool.capacity = c.count + more

    def give_back(self, slot_class: SlotClass) -> None:
        """Returns the memory of one free slot to the system."""
        place = slot_class.free.pop()
        self.memory.give_back(place, slot_class.nbytes)
        slot_class.spare.append(place)
        slot_class.count = slot_class.pool.capacity = slot_class.count - 1

    def of(self, row: int) -> SlotClass:
        return self._of_row[row]

    @property
    def count(self) -> int:
        return sum(c.count for c in self.classes)

    @property
    def nbytes(self) -> int:
        return sum(c.count * c.nbytes for c in self.classes)


def _runs(row_bytes: np.ndarray) -> list[tuple[int, int, int]]:
    """(size, first row, rows) of every size."""
    found = np.unique(row_bytes, return_index=True, return_counts=True)
    return list(zip(*(column.tolist() for column in found)))


def smallest_arena(row_bytes: np.ndarray, n_expert: int, per_layer: int) -> int:
    """Least bytes with which every class gets per_layer slots."""
    everything = int(row_bytes.sum()) * n_expert
    rows = np.unique(row_bytes, return_counts=True)[1]
    return min(everything, max(-(-per_layer * everything // (int(n) * n_expert)) for n in rows))


def check_arena(row_bytes: np.ndarray, n_expert: int, per_layer: int, nbytes: int) -> None:
    """A MemoryBudgetError if nbytes gives a layer too few slots to work with."""
    least = smallest_arena(row_bytes, n_expert, per_layer)
    if nbytes < least:
        raise MemoryBudgetError(
            f"experts would get {show_size(max(nbytes, 0))} of memory; a layer works on "
            f"{per_layer} at a time, which needs {show_size(least)}"
        )
