"""Fixed slots for experts in device memory: one allocation, a place for each resident expert.

Layers whose experts have the same size share a size class, so that a spare slot can take the place
of a resident one: an expert copied for one step is adopted by exchanging two numbers.
"""

from collections import deque
from collections.abc import Callable

import numpy as np
import torch

from dali_gguf.offload.torch_moe import ExpertLayout
from dali_gguf.offload.vram import out_of_memory

NOWHERE = -1


class GpuSlots:
    """memory: uint8 on the device. place int64 [L, E]: byte offset of an expert's slot, or -1.

    Rows are layers with experts, in order. An event that belongs to a spare slot says when the
    device has read its old bytes for the last time (None: it has)."""

    def __init__(
        self,
        device: torch.device,
        layouts: list[ExpertLayout],
        n_expert: int,
        slots: np.ndarray,
        spare: int,
    ):
        """slots int64 [L]: how many experts of each layer get a slot. spare: for each size."""
        self.layouts = layouts
        self.place = np.full((len(layouts), n_expert), NOWHERE, np.int64)
        self.free: dict[int, deque] = {}
        start = 0
        for size in sorted({e.nbytes for e in layouts}):
            count = spare + sum(int(n) for e, n in zip(layouts, slots) if e.nbytes == size)
            self.free[size] = deque((start + i * size, None) for i in range(count))
            start += count * size
        self.memory = torch.empty(max(start, 1), dtype=torch.uint8, device=device)
        self._kind = [layouts.index(e) for e in layouts]  # rows of equal layouts have the same
        self._parts: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}  # by kind and offset

    def release(self) -> None:
        """Gives the memory back, whoever still knows views of it (copies do, and the frames of an
        error); nothing can be taken or computed after."""
        self._parts = {}
        storage = self.memory.untyped_storage()
        if storage.resizable():  # not where numpy shares it, on a stand-in for a GPU
            storage.resize_(0)
        self.memory = self.memory[:0].clone()

    def spare(self, row: int) -> int:
        """Slots that a copy for this layer could take now."""
        return len(self.free[self.layouts[row].nbytes])

    def take(self, row: int) -> tuple[int, object] | None:
        """(offset, event) of the slot that is free for the longest time, or None."""
        queue = self.free[self.layouts[row].nbytes]
        return queue.popleft() if queue else None

    def give(self, row: int, offset: int, event=None) -> None:
        self.free[self.layouts[row].nbytes].append((offset, event))

    def swap(self, row: int, load: int, evict: int, offset: int, event=None) -> None:
        """Expert `load`, whose bytes lie at `offset`, becomes resident instead of `evict`."""
        self.give(row, int(self.place[row, evict]), event)
        self.place[row, evict], self.place[row, load] = NOWHERE, offset

    def parts(self, row: int, offset: int) -> tuple[torch.Tensor, ...]:
        """Views uint8 of the gate, up and down bytes of the slot at offset, made once."""
        key = (self._kind[row], offset)
        parts = self._parts.get(key)
        if parts is None:
            parts = self._parts[key] = tuple(
                self.memory[offset + m.at : offset + m.at + m.nbytes]
                for m in self.layouts[row].matrices
            )
        return parts


def allocate(
    device: torch.device,
    layouts: list[ExpertLayout],
    n_expert: int,
    wanted: np.ndarray,
    spare: int,
    say: Callable[[str], None],
) -> tuple[GpuSlots, np.ndarray]:
    """The slots, and how many int64 [L] each layer has: as many as `wanted` [L], fewer if the
    device does not have the memory; say tells it."""
    share = 1.0
    while True:
        slots = (wanted * share).astype(np.int64)
        try:
            return GpuSlots(device, layouts, n_expert, slots, spare), slots
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            if not out_of_memory(error) or share < 0.1:
                raise
            share *= 0.75
            say(f"GPU memory ran out: planning with {share:.0%} of the expert slots")
