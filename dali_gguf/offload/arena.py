"""Experts in RAM: slots of one anonymous memory, filled by direct reads, emptied by the policy.

A slot belongs to an expert from the moment its read is queued; the expert counts as resident only
when the read has ended. All tables are changed by the one thread that calls need(), hint() and
fill(); the reader threads only count down an expert's ranges and report it.
"""

from collections.abc import Callable, Iterator

import numpy as np

from dali_gguf.offload.arena_stats import ArenaStats, Counters, snapshot
from dali_gguf.offload.layout import layer_layouts, slot_sizes
from dali_gguf.offload.loads import Ended
from dali_gguf.offload.native_loads import open_loads
from dali_gguf.offload.read_queue import THREADS
from dali_gguf.offload.slot_pool import HALF_LIFE
from dali_gguf.offload.slots import RING, SlotClass, Slots
from dali_gguf.routing import LayerExperts

ABSENT, QUEUED, RESIDENT = range(3)
GROUP = RING // 4


class ExpertArena:
    """need(layer, ids) yields experts as they arrive; addresses(layer): where their bytes lie."""

    def __init__(self, layers: dict[int, LayerExperts], nbytes: int,
                 half_life: float = HALF_LIFE, threads: int = THREADS, direct: bool = True,
                 growth: float = 0.0):
        """nbytes: of all slots; growth: part of it that resize() may add."""
        layouts_of = {layer: layer_layouts(experts) for layer, experts in layers.items()}
        size = slot_sizes(layers, layouts_of)
        order = sorted(layers, key=lambda layer: (size[layer], layer))
        self.n_expert = max(experts.n_expert for experts in layers.values())
        self.row = {layer: row for row, layer in enumerate(order)}
        self._first_layer = min(layers)
        layouts = [layout for layer in order for layout in layouts_of[layer]]
        self.starts = np.array([layout.starts for layout in layouts], np.int64)  # [keys, 3]
        self.row_sizes = np.array([size[layer] for layer in order])
        self.slots = Slots(self.row_sizes, self.n_expert, nbytes, half_life, growth)
        self.loads = open_loads(self.slots.memory, layouts, direct, threads)
        n = len(layers) * self.n_expert
        self.state = np.zeros(n, np.int8)
        self._place = np.full(n, -1, np.int64)  # byte offset in the memory, -1: has no slot
        self.evicted = np.zeros(n, np.int64)  # how often the key has lost a slot
        self.address = np.zeros((len(layers), 3, self.n_expert), np.int64)
        self._hinted: list[set[int]] = [set() for _ in layers]
        self._counters = Counters()
        self.rest: Callable[[bool], None] = lambda resting: None  # called around each wait

    def addresses(self, layer: int) -> np.ndarray:
        """int64 [3, E]: where gate, up and down of each expert of the layer lie, once it is
        there."""
        return self.address[self.row[layer]]

    def resident(self, layer: int) -> np.ndarray:
        """bool [E]: experts of the layer that are in memory."""
        self._settle()
        return self.holds(layer)

    def holds(self, layer: int) -> np.ndarray:
        """The same as it was last noted; may be asked by any thread."""
        first = self.row[layer] * self.n_expert
        return self.state[first : first + self.n_expert] == RESIDENT

    def need(self, layer: int, ids: np.ndarray, workload: np.ndarray,
             frozen: bool = False) -> Iterator[np.ndarray]:
        """Starts the reads of the missing experts at once; the iterator yields arrays of ids,
        residents first, then the others as they arrive. Their bytes stay until the next array is
        asked for.

        ids int [n]; workload int [n], tokens of each. frozen (prefill): scores are left alone, and
        missing experts pass through a few slots of their own instead of driving out the others.
        """
        row = self.row[layer]
        slot_class = self.slots.of(row)
        self._settle()
        self._next_step(layer, frozen)
        keys = row * self.n_expert + np.asarray(ids, np.int64)
        slot_class.protect(keys)
        slot_class.pool.touch(0, keys - slot_class.first_key, workload)
        self._close_hints(row, keys)
        state = self.state[keys]
        here, missing = keys[state == RESIDENT], keys[state == ABSENT].tolist()
        coming = set(keys[state == QUEUED].tolist())
        self._counters.count(len(keys), len(here), len(missing))
        for key in coming:
            self.loads.promote(key)
        started = self._start(row, missing, wanted=True, frozen=frozen)
        pending = missing[len(started):]
        return self._arrivals(row, here, coming.union(started), pending, frozen)

    def _arrivals(self, row: int, here: np.ndarray, coming: set[int], pending: list[int],
                  frozen: bool) -> Iterator[np.ndarray]:
        slot_class, first = self.slots.of(row), row * self.n_expert
        if len(here):
            yield here - first
            slot_class.release(here)
        arrived: list[int] = []
        while coming or pending or arrived:
            if pending:
                started = self._start(row, pending, wanted=True, frozen=frozen)
                if not started and not coming and not arrived:
                    started = self._start(row, pending[:RING], wanted=True, frozen=False)
                coming.update(started)
                del pending[: len(started)]
                if not coming and not arrived:
                    self._drop_guesses(slot_class)
                    continue
            self._settle()
            new = [key for key in coming if self.state[key] == RESIDENT]
            if not arrived and not new:
                self._wait()
                continue
            arrived += new
            coming.difference_update(new)
            # few at a time in a long prefill, so that their slots are soon read into
            now = np.array(arrived[:GROUP] if frozen else arrived, np.int64)
            del arrived[: len(now)]
            yield now - first
            slot_class.release(now)

    def count_use(self, layer: int, ids: np.ndarray, workload: np.ndarray) -> None:
        """Scores experts that are computed without need(): their bytes were copied elsewhere."""
        row, slot_class = self.row[layer], self.slots.of(self.row[layer])
        slot_class.pool.touch(0, row * self.n_expert + ids - slot_class.first_key, workload)

    def hint(self, layer: int, ids: np.ndarray, next_step: bool = False,
             frozen: bool = False) -> int:
        """Queues reads of experts that the layer will probably need; they run when the disk is
        idle. next_step: the layer comes in the next step, not in this one. Returns how many were
        started."""
        self._settle()
        row = self.row[layer]
        keys = row * self.n_expert + np.asarray(ids, np.int64)
        self.slots.of(row).protect(keys, int(next_step))
        absent = keys[self.state[keys] == ABSENT].tolist()
        started = self._start(row, absent, wanted=False, frozen=frozen)
        self._hinted[row].update(started)
        self._counters.hinted += len(started)
        return len(started)

    def fill(self, counts: np.ndarray | None = None, n_used: int = 1) -> int:
        """Queues reads into all free slots for idle disk time: the most used experts by counts
        [layers, E] (layers ascending), else the first ones of every layer. Returns how many."""
        rows = np.argsort([self.row[layer] for layer in sorted(self.row)])
        counts = np.zeros((len(rows), self.n_expert)) if counts is None else counts[rows]
        before = self._counters.filled
        for slot_class in self.slots.classes:
            for key in slot_class.most_used(counts, n_used):
                if self.state[key] == ABSENT and slot_class.free:
                    self._load([key], [slot_class.free.pop()], wanted=False)
                    slot_class.fills.append(key)
                    self._counters.filled += 1
        return self._counters.filled - before

    def resize(self, nbytes: int) -> None:
        """Makes it about that large: adds free slots, or gives back free ones and those of the
        least used experts. What cannot be evicted now stays."""
        self.slots.grow(max(0, nbytes - self.slots.nbytes))
        keep = min(1.0, nbytes / max(self.slots.nbytes, 1))
        for c in self.slots.classes:
            gone = c.count - int(c.count * keep)
            for key in c.victims(gone - len(c.free)):
                self._evict(c, key)
            for _ in range(min(gone, len(c.free))):
                self.slots.give_back(c)

    def wait_idle(self) -> None:
        """Waits until everything queued has been read (for tests, benchmarks and a warm start)."""
        while len(self.loads):
            self._wait()

    def stats(self) -> ArenaStats:
        self._settle()
        return snapshot(self._counters, self.loads, self.slots)

    def close(self) -> None:
        self.loads.close()
        self.slots.memory.close()

    def _next_step(self, layer: int, frozen: bool) -> None:
        """The first layer begins a step: scores decay, and what was protected for the last one is
        not."""
        for c in self.slots.classes:
            c.pool.frozen = frozen
            if layer == self._first_layer:
                c.pool.tick()
            if not frozen:
                c.ring.clear()

    def _close_hints(self, row: int, keys: np.ndarray) -> None:
        """The hinted layer is here: count what the hints were worth, and cancel those not asked
        for."""
        hinted, self._hinted[row] = self._hinted[row], set()
        used = hinted.intersection(keys.tolist())
        self._counters.hints_used += len(used)
        for key in hinted - used:
            self.slots.of(row).release(np.array([key]))
            if self._cancel(key):
                self._counters.hints_cancelled += 1
            else:
                self._counters.hints_wasted += 1

    def _drop_guesses(self, slot_class: SlotClass) -> None:
        """All slots of the class hold guesses: protects them no longer, or waits for one to end."""
        slot_class.pool.protected[:] = -1
        if not slot_class.pool.resident.any():
            self._wait()

    def _start(self, row: int, keys: list[int], wanted: bool, frozen: bool) -> list[int]:
        """Queues reads for as many of the keys, in order, as there is room for; returns those."""
        slot_class = self.slots.of(row)
        places = self._make_room(slot_class, len(keys), frozen)
        started = keys[: len(places)]
        if started:
            self._load(started, places, wanted)
        if frozen:
            slot_class.ring.update(dict.fromkeys(started))
        return started

    def _load(self, keys: list[int], places: list[int], wanted: bool) -> None:
        at, where = np.array(keys, np.int64), np.array(places, np.int64)
        self.state[at], self._place[at] = QUEUED, where
        row, e = np.divmod(at, self.n_expert)
        self.address[row, :, e] = (self.slots.memory.address + where)[:, None] + self.starts[at]
        self.loads.start(at, where, wanted)

    def _make_room(self, slot_class: SlotClass, count: int, frozen: bool) -> list[int]:
        """Places of up to count slots: free ones, cancelled fills, the ring's (frozen), then
        victims."""
        while len(slot_class.free) < count and self._cancel_fill(slot_class):
            pass
        short = count - len(slot_class.free)
        if short > 0 and frozen:
            gone = slot_class.from_ring(short)
            growth = RING - len(slot_class.ring)
            gone = gone or slot_class.victims(min(short, growth))
        else:
            gone = slot_class.victims(short)
        for key in gone:
            self._evict(slot_class, key)
        return [slot_class.free.pop() for _ in range(min(count, len(slot_class.free)))]

    def _evict(self, slot_class: SlotClass, key: int) -> None:
        slot_class.pool.resident[key - slot_class.first_key] = 0
        self._counters.evictions += 1
        self._vacate(slot_class, key)

    def _vacate(self, slot_class: SlotClass, key: int) -> None:
        slot_class.ring.pop(key, None)
        slot_class.free.append(int(self._place[key]))
        self.state[key], self._place[key] = ABSENT, -1
        self.evicted[key] += 1

    def _cancel_fill(self, slot_class: SlotClass) -> bool:
        """Gives up the least wanted fill that no thread has begun."""
        while slot_class.fills:
            if self._cancel(slot_class.fills.pop()):
                self._counters.filled -= 1
                return True
        return False

    def _cancel(self, key: int) -> bool:
        if not self.loads.cancel(key):
            return False
        self._vacate(self.slots.of(key // self.n_expert), key)
        return True

    def _settle(self) -> None:
        """Takes note of what has arrived meanwhile."""
        ended = self.loads.ended()
        if ended:
            self._take_note(ended)

    def _wait(self) -> list[int]:
        """Blocks until an expert arrives; returns it and those that came with it."""
        self.rest(True)
        try:
            ended = self.loads.wait()
        finally:
            self.rest(False)
        return self._take_note(ended)

    def _take_note(self, ended: list[Ended]) -> list[int]:
        """Their experts are resident now, or, if a range failed, absent again."""
        failed = [load for load in ended if load.error is not None]
        for load in failed:
            self._vacate(self.slots.of(load.key // self.n_expert), load.key)
        here = [load.key for load in ended if load.error is None]
        for key in here:
            slot_class = self.slots.of(key // self.n_expert)
            slot_class.pool.resident[key - slot_class.first_key] = 1
            self.state[key] = RESIDENT
        self._counters.failed_guesses += sum(not load.wanted for load in failed)
        for load in failed:
            if load.wanted:  # a guess that failed is read, and reported, again when it is needed
                raise load.error
        return here
