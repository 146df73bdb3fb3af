"""Experts on their way from disk into a slot: their ranges, who waits for them, when they are
whole."""

import threading
import time
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np

from dali_gguf.errors import DaliError
from dali_gguf.offload.direct_io import Memory, ModelFile
from dali_gguf.offload.layout import ExpertLayout
from dali_gguf.offload.read_queue import THREADS, Read, ReadQueue


@dataclass(frozen=True, slots=True)
class Ended:
    """An expert whose read has ended. wanted: a step waits for it (else it was a guess or a
    fill)."""

    key: int
    wanted: bool
    error: DaliError | None


@dataclass(slots=True, eq=False)
class Load:
    """left: ranges not yet read."""

    key: int
    reads: list[Read]
    left: int
    wanted: bool

    def ended(self) -> Ended:
        error = next((read.error for read in self.reads if read.error is not None), None)
        return Ended(self.key, self.wanted, error)


class Loads:
    """Everything here is called by one thread; the readers only report that a load is whole."""

    def __init__(self, memory: Memory, files: dict[str, ModelFile], layouts: list[ExpertLayout],
                 threads: int = THREADS, readers: ReadQueue | None = None):
        """layouts: of every key. readers None: own ones."""
        self.files, self.wait_seconds = files, 0.0
        self._memory, self._layouts = memory, layouts
        self._under_way: dict[int, Load] = {}
        self._whole: SimpleQueue[Load] = SimpleQueue()
        self._count_down = threading.Lock()
        self.readers = readers or ReadQueue(_tell_owner, threads)

    def beside(self, memory: Memory) -> "Loads":
        """The same experts and readers, for another memory and another calling thread."""
        return Loads(memory, self.files, self._layouts, readers=self.readers)

    @property
    def bytes_read(self) -> int:
        return self.readers.bytes_read

    @property
    def busy_seconds(self) -> float:
        """Time in which at least one read was under way."""
        return self.readers.busy_seconds

    def __len__(self) -> int:
        return len(self._under_way)

    def start(self, keys: np.ndarray, places: np.ndarray, wanted: bool) -> None:
        """Queues the ranges of experts keys int64 [n]; places [n]: of their slots in the memory."""
        for key, place in zip(keys.tolist(), places.tolist()):
            self._start(key, self._layouts[key], place, wanted)

    def _start(self, key: int, layout: ExpertLayout, place: int, wanted: bool) -> None:
        view = self._memory.view[place : place + layout.nbytes]
        owner = self, key
        reads = [
            Read(self.files[x.path], x.offset, x.nbytes, view[x.at :], x.name, owner)
            for x in layout.extents
        ]
        self._under_way[key] = Load(key, reads, len(reads), wanted)
        if wanted:
            self.readers.demand(reads)
        else:
            self.readers.guess(reads)

    def promote(self, key: int) -> None:
        """A step waits for it now: its ranges pass all guesses."""
        load = self._under_way[key]
        if not load.wanted:
            load.wanted = True
            self.readers.demand([read for read in load.reads if not read.taken])

    def cancel(self, key: int) -> bool:
        """Takes it back, unless it is wanted, whole, or a thread has begun to read it."""
        load = self._under_way.get(key)
        if load is None or load.wanted or not self.readers.cancel(load.reads):
            return False
        del self._under_way[key]
        return True

    def ended(self) -> list[Ended]:
        """Loads that have become whole, or failed, since the last look."""
        loads = []
        while not self._whole.empty():
            loads.append(self._whole.get().ended())
            del self._under_way[loads[-1].key]
        return loads

    def wait(self) -> list[Ended]:
        """Blocks, without taking time from anybody, until one has ended (or a signal came); all
        that have."""
        assert self._under_way, "waiting for an expert that nobody reads"
        start = time.perf_counter()
        load = self._whole.get()
        self.wait_seconds += time.perf_counter() - start
        del self._under_way[load.key]
        return [load.ended(), *self.ended()]

    def on_read(self, key: int) -> None:
        """On a reader's thread: one range less."""
        load = self._under_way[key]
        with self._count_down:
            load.left -= 1
            last = load.left == 0
        if last:
            self._whole.put(load)

    def close(self) -> None:
        """Ends the readers, for all that share them."""
        self.readers.close()
        for file in self.files.values():
            file.close()


def _tell_owner(read: Read) -> None:
    loads, key = read.owner
    loads.on_read(key)
