"""RAM between disk and GPU: the arena as the hybrid scheduler uses it, when experts lie in three
places.

Experts that the CPU computes come through the arena. Experts that the GPU computes after a copy
come from the arena if they are there, else past it (staging.py). Experts in GPU slots are not
scored here, so they leave the arena first.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dali_gguf.offload.arena import ExpertArena
from dali_gguf.offload.cache import ExpertCache
from dali_gguf.offload.cost import CostModel
from dali_gguf.offload.disk_scheduler import SCAN
from dali_gguf.offload.slots import check_arena
from dali_gguf.offload.staging import Staging
from dali_gguf.routing import LayerExperts, Routing


@dataclass(frozen=True, slots=True, eq=False)
class Arriving:
    """A layer's experts for the CPU: arrays of ids, those in RAM first, the others as they come.
    addresses int64 [3, E]: of gate, up and down, once an expert was yielded."""

    groups: Iterator[np.ndarray]
    addresses: np.ndarray
    arena: ExpertArena

    @property
    def waited_us(self) -> float:
        """Time spent waiting for the disk, of all layers so far."""
        return 1e6 * self.arena.loads.wait_seconds


class RamTier:
    """nbytes: of the arena, which keeps that size. Its methods run in the thread that calls moe,
    and not between `need` and the end of what it gave, except `holds` and `key`. Raises
    MemoryBudgetError if nbytes gives a layer fewer than n_used experts."""

    def __init__(self, experts: dict[int, LayerExperts], nbytes: int, n_used: int):
        self.arena = ExpertArena(experts, nbytes)
        try:
            check_arena(self.arena.row_sizes, self.arena.n_expert, n_used, self.arena.slots.nbytes)
            self.staging = Staging(self.arena)
        except BaseException:
            self.arena.close()
            raise
        self.n_used, self._filled = n_used, False
        self._read = 0, 0.0  # bytes and seconds when the costs were last corrected

    def key(self, layer: int, expert: int) -> int:
        return self.arena.row[layer] * self.arena.n_expert + expert

    def holds(self, layer: int) -> np.ndarray:
        """bool [E]: experts in RAM."""
        return self.arena.holds(layer)

    def need(self, layer: int, routing: Routing, on_cpu: np.ndarray,
             copied: np.ndarray) -> Arriving:
        """Starts the reads of experts on_cpu [n]. copied [m]: those that go to the GPU count as
        used too, since their bytes are wanted."""
        workload, scan = routing.workload, routing.expert_ids.size >= SCAN * len(routing.workload)
        groups = self.arena.need(layer, on_cpu, workload[on_cpu], frozen=scan)
        self.arena.count_use(layer, copied, workload[copied])
        return Arriving(groups, self.arena.addresses(layer), self.arena)

    def before_step(self, costs: CostModel, cache: ExpertCache | None) -> None:
        """Corrects the cost of a read. cache: the GPU's, as soon as it is known what is used: once,
        the experts it scores highest and does not hold are read into free slots, in idle disk
        time."""
        self._observe(costs)
        if cache is not None and not self._filled:
            self._filled = True
            self.arena.fill(np.where(cache.resident, 0.0, cache.score), self.n_used)

    def _observe(self, costs: CostModel) -> None:
        """By what was read since the last call."""
        loads, (nbytes, seconds) = self.arena.loads, self._read
        self._read = loads.bytes_read, loads.busy_seconds
        experts = (self._read[0] - nbytes) / float(self.arena.row_sizes.mean())
        if experts >= 1:
            costs.observe("disk", experts, 1e6 * (self._read[1] - seconds))

    def close(self) -> None:
        """After the link has ended."""
        self.staging.close()
        self.arena.close()
