"""Experts on their way to the device: who gets a slot, what a copy was for, what became of it.

A copy takes a spare slot. A demanded one is used in its layer and then adopted by the cache or
dropped; a guess waits for the next layer's routing; a fill becomes resident when it arrives.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from dali_gguf.errors import DaliError
from dali_gguf.offload.cache import ExpertCache, Swap
from dali_gguf.offload.cost import CostModel
from dali_gguf.offload.gpu_slots import NOWHERE, GpuSlots
from dali_gguf.offload.hybrid_counters import HybridCounters
from dali_gguf.offload.ram_tier import RamTier
from dali_gguf.offload.torch_device import TorchDevice
from dali_gguf.offload.transfer import DEMAND, DROPPED, FILL, PREFETCH, Copy, Link
from dali_gguf.routing import LayerExperts

KEEP_FREE = 1  # spare slots that guesses and fills leave for demanded copies


class Traffic:
    """Rows are layers with experts, in order. All methods run in the thread that calls moe."""

    def __init__(self, device: TorchDevice, slots: GpuSlots, cache: ExpertCache,
                 experts: dict[int, LayerExperts], layers: list[int], counters: HybridCounters,
                 ram: RamTier | None = None):
        """ram: where experts come from that are in neither slots nor the mapped file."""
        self.device, self.slots, self.cache, self.counters = device, slots, cache, counters
        self.experts, self.layers, self.ram = experts, layers, ram
        self.link = Link(device.device, None if ram is None else ram.staging)
        self.coming: list[dict[int, Copy]] = [{} for _ in layers]  # by expert, not yet resident
        self._expert_bytes = [experts[layer].expert_bytes() for layer in layers]
        self._on_gpu = device.device.type == "cuda"
        self._fills: list[tuple[Copy, Swap]] = []  # under way
        self._done: list[list[Copy]] = [[] for _ in layers]  # for this step, there, in spare slots
        self.here = cache.resident[0]  # uint8 [E]: what the layer may compute without a new copy
        self.behind: list[Copy] = []  # that the layer needs and that had not arrived
        self._arrived: list[Copy] = []  # for the layer, not yet judged
        self.pending: list[Copy] = []  # for the layer, under way when it was prepared
        self._dropped: list[Copy] = []  # guesses for the layer that never began
        self._unused: list[Copy] = []  # demanded for this layer, not yet given work
        self._orphans: list[Copy] = []  # begun, but no longer wanted
        self._timed: list[Copy] = []
        self.last_use = None  # event after the last launch that read slots

    def copy_of(self, row: int, expert: int, offset: int, kind: str, free) -> Copy:
        tensors = self.experts[self.layers[row]].matrices(expert)
        parts = [(t.data, place) for t, place in zip(tensors, self.slots.parts(row, offset))]
        key = -1 if self.ram is None else self.ram.key(self.layers[row], expert)
        return Copy(row, expert, offset, kind, parts, free, key, self._expert_bytes[row])

    def _start(self, row: int, experts: Sequence[int], kind: str, leave: int) -> list[Copy]:
        """Copies for as many of these experts as there are slots, less `leave`."""
        copies: list[Copy] = []
        for expert in experts:
            if self.slots.spare(row) <= leave:
                break
            offset, free = self.slots.take(row)
            copies.append(self.copy_of(row, expert, offset, kind, free))
            self.counters.add(row, "bytes", copies[-1].nbytes)
        if copies:
            self.link.offer(copies)
            self._timed += copies
        return copies

    # ---- planning --------------------------------------------------------------------------

    def near(self, row: int) -> np.ndarray:
        """uint8 [E]: resident or on its way."""
        here = self.cache.resident[row].copy()  # a third of what `|` costs on so few bytes
        for expert in self.coming[row]:
            here[expert] = 1
        return here

    def out_of_reach(self, row: int) -> np.ndarray:
        """uint8 [E]: no experts for guesses: near, or on disk. Guesses and fills are copied from
        RAM only, and never take disk time from the steps: what is used often comes to RAM, or to
        the GPU by a demanded copy, anyway."""
        near = self.near(row)
        return near if self.ram is None else near | ~self.ram.holds(self.layers[row])

    def prepare(self, row: int) -> None:
        """Before the layer's routing is known: fills that have arrived become resident, guesses
        that have not begun are dropped, and `here` is made."""
        self.settle()
        self.behind, self._arrived, self.pending, self._dropped = [], [], [], []
        coming = self.coming[row]
        if not coming:
            self.here = self.cache.resident[row]
            return
        if self.link.waiting():
            self._dropped = self.link.drop([c for c in coming.values() if c.kind == PREFETCH])
            for copy in self._dropped:
                self.counters.add(row, "bytes", -copy.nbytes)
                self.give(coming.pop(copy.expert), copy.free)
        for copy in coming.values():
            self._look(copy)
        self.here = self.near(row)

    def _look(self, copy: Copy) -> bool:
        """Whether the copy has arrived; if so, its expert can be computed."""
        arrived = self.link.arrived(copy) and copy.error is None
        if arrived:
            self._receive(copy)
        (self._arrived if arrived else self.pending).append(copy)
        return arrived

    def _receive(self, copy: Copy) -> None:
        """Its bytes, waited for, are its expert's."""
        self.link.wait(copy)
        self.slots.place[copy.row, copy.expert] = copy.offset

    def _computed(self, copy: Copy) -> None:
        """The layer has used it: the cache may adopt it. A fill's slot is settled later."""
        if copy.kind != FILL:
            self._done[copy.row].append(copy)

    def expect(self, row: int, workload: np.ndarray) -> None:
        """Of the copies that were under way, those that this step needs."""
        pending, self.pending = self.pending, []
        for copy in pending:
            if not workload.item(copy.expert):
                if copy.kind == PREFETCH:
                    self._waste(row, copy)
            elif not self._look(copy):  # one that failed is raised when it is waited for
                self.behind.append(copy)
                if copy.kind == PREFETCH:
                    self.counters.add(row, "late")
                    copy.kind = DEMAND  # judged: from here on as any copy for this step

    def judge(self, row: int, workload: np.ndarray) -> None:
        """Once the layer's work has begun: what became of the other guesses."""
        for copy in self._dropped:
            self.counters.add(row, "late" if workload.item(copy.expert) else "wasted")
        for copy in self._arrived:
            if workload.item(copy.expert):
                if copy.kind == PREFETCH:
                    self.counters.add(row, "useful")
                    copy.kind = DEMAND
                self._computed(copy)
            elif copy.kind == PREFETCH:
                self._waste(row, copy)
        self._arrived = []

    def _waste(self, row: int, copy: Copy) -> None:
        self.counters.add(row, "wasted")
        self._orphans.append(self.coming[row].pop(copy.expert))

    def busy_us(self, model: CostModel) -> float:
        """Until the link is free: half a copy for one under way, a whole one for each waiting."""
        return model.costs.t * (self.link.waiting() + 0.5 * self.link.copying)

    def late(self, ids: np.ndarray) -> list[Copy]:
        """Those of the experts' copies that have not arrived."""
        return [c for c in self.behind if c.expert in ids] if self.behind else []

    # ---- copies for this step --------------------------------------------------------------

    def demand(self, row: int, waiting: deque[int]) -> deque[Copy]:
        """Starts copies of the first experts of `waiting`, as many as there are slots."""
        copies = deque(self._start(row, list(waiting), DEMAND, 0))
        for _ in copies:
            waiting.popleft()
        self._unused += copies
        return copies

    def next_group(self, coming: deque[Copy]) -> list[Copy]:
        """The next copy, waited for, and those behind it that have arrived as well."""
        group = [coming.popleft()]
        while coming and self.link.arrived(coming[0]):
            group.append(coming.popleft())
        for copy in group:
            self._receive(copy)
        return group

    def used(self, row: int, group: list[Copy], reuse: bool) -> None:
        """The device was given work with these. reuse: others wait for their slots."""
        event = self._event()
        self._unused = [copy for copy in self._unused if copy not in group]
        for copy in group:
            if reuse and copy.kind == DEMAND:
                if self.coming[row].get(copy.expert) is copy:  # a late guess
                    del self.coming[row][copy.expert]
                self.give(copy, event)
            else:
                self._computed(copy)

    def _event(self):
        if self._on_gpu:
            self.last_use = torch.cuda.Event()
            self.last_use.record()
        return self.last_use

    # ---- after the step --------------------------------------------------------------------

    def arrived_for(self, row: int) -> list[int]:
        return [copy.expert for copy in self._done[row]]

    def adopt(self, row: int, swaps: list[Swap]) -> None:
        """Copied experts that the cache made resident; the other copies give their slots back."""
        event, coming = self._event(), self.coming[row]
        if not (self._done[row] or coming):
            return
        done = {c.expert: c for c in self._done[row]}
        for swap in swaps:
            copy = done.pop(swap.load)
            self.slots.swap(row, swap.load, swap.evict, copy.offset, event)
            self.counters.add(row, "adopted")
        for copy in done.values():
            self.give(copy, event)
        for copy in self._done[row]:
            coming.pop(copy.expert, None)
        self._done[row] = []
        for copy in list(coming.values()):
            if copy.kind == DEMAND:  # the CPU computed it
                self._orphans.append(coming.pop(copy.expert))

    def abandon(self, row: int) -> None:
        """The layer ended with an error: its copies give their slots back when they have ended."""
        kept = set(self.coming[row].values())
        self._orphans += [c for c in self._unused if c not in kept]
        self._unused = []
        self.adopt(row, [])

    def prefetch(self, row: int, experts: list[int]) -> None:
        for copy in self._start(row, experts, PREFETCH, KEEP_FREE):
            self.coming[row][copy.expert] = copy
            self.counters.add(row, "prefetched")

    def fill(self, row: int, swaps: list[Swap]) -> None:
        swaps = [s for s in swaps if s.load not in self.coming[row]]
        if self.ram is not None:
            in_ram = self.ram.holds(self.layers[row])
            swaps = [s for s in swaps if in_ram[s.load]]
        for swap, copy in zip(swaps, self._start(row, [s.load for s in swaps], FILL, KEEP_FREE)):
            self.coming[row][copy.expert] = copy
            self._fills.append((copy, swap))
            self.counters.add(row, "fills")

    def settle(self) -> None:
        """Fills that have arrived become resident; slots of unwanted copies come back."""
        if self._orphans:
            for copy in [c for c in self._orphans if self.link.arrived(c)]:
                self._orphans.remove(copy)
                self.give(copy, None)
        if not self._fills:
            return
        for copy, swap in [f for f in self._fills if self.link.arrived(f[0])]:
            self._fills.remove((copy, swap))
            row = copy.row
            del self.coming[row][copy.expert]
            if copy.error is not None:
                self.give(copy, None)
                if isinstance(copy.error, DaliError):  # raised when the expert is needed
                    continue
            self.link.wait(copy)
            if self.cache.started(row, swap):
                self.cache.finished(row, swap)
                self.slots.swap(row, swap.load, swap.evict, copy.offset, self.last_use)
            else:
                self.give(copy, None)

    def new_copy_times(self) -> list[float]:
        """Microseconds of the copies from RAM that ended since the last call."""
        if not self._timed:
            return []
        ended, waiting = [], []
        for copy in self._timed:
            if self.link.arrived(copy):
                self.counters.add(copy.row, "link_us", copy.us)
                self.counters.add(copy.row, "from_disk" if copy.from_disk else "from_ram")
                if copy.us > 0 and not copy.from_disk:
                    ended.append(copy.us)
            elif copy.state != DROPPED:
                waiting.append(copy)
        self._timed = waiting
        return ended

    def give(self, copy: Copy, event) -> None:
        """Its slot is spare again."""
        if self.slots.place[copy.row, copy.expert] == copy.offset:
            self.slots.place[copy.row, copy.expert] = NOWHERE
        self.slots.give(copy.row, copy.offset, event)

    def close(self) -> None:
        try:
            self.link.close()
        finally:
            if self.ram is not None:
                self.ram.close()
