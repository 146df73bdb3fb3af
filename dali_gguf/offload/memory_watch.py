"""Keeps an arena as large as memory allows while the model runs.

The plan sets aside room for a long prompt's activations, the whole KV cache and what Python and the
compiled kernels may take. What of it is not in use holds experts meanwhile, and is given back
before a long prompt, or when others take memory.
"""

from collections.abc import Callable

from dali_gguf.offload.arena import ExpertArena
from dali_gguf.offload.budget import MACHINE, Room
from dali_gguf.offload.memory_plan import SPARE, SPARE_OWN

EVERY = 16  # decode steps between two looks
GROWTH = 0.5  # part of the planned size that may be added
LEAST_SPARE = 48 << 20


class MemoryWatch:
    """room: what can still be taken now."""

    def __init__(self, arena: ExpertArena, planned: int, room: Callable[[], Room]):
        self.arena, self.planned, self._room = arena, planned, room
        self._steps = 0

    def before_scan(self) -> None:
        """A long prompt needs the room that the plan set aside for it."""
        if self.arena.slots.nbytes > self.planned:
            self.arena.resize(self.planned)
        self._steps = 0

    def after_step(self) -> None:
        """Half of what is left over becomes slots; what is missing is given back at once."""
        self._steps += 1
        if self._steps % EVERY or not self.arena.slots.full:
            return
        room = self._room()
        spare = (SPARE if room.source == MACHINE else SPARE_OWN) * (room.nbytes + self.planned)
        left = room.nbytes - max(LEAST_SPARE, int(spare))
        if left < 0:
            self.arena.resize(self.arena.slots.nbytes + left)
        elif left > 16 << 20:
            self.arena.resize(self.arena.slots.nbytes + left // 2)
