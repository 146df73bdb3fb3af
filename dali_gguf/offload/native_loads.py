"""Loads (see loads.py) whose reader threads run compiled code. Linux, files read directly."""

import os
import sys
import threading
import time
from contextlib import ExitStack, closing

import numpy as np

from dali_gguf.errors import ModelFileError
from dali_gguf.offload import native_readers as native
from dali_gguf.offload.direct_io import Memory, ModelFile, page_floor, page_span
from dali_gguf.offload.layout import ExpertLayout
from dali_gguf.offload.loads import Ended, Loads
from dali_gguf.offload.read_queue import MOST_GUESSES

NATIVE = sys.platform == "linux"  # the threads use eventfd, and glibc's way to errno
AT_ONCE = 256  # experts taken note of


def open_loads(memory: Memory, layouts: list[ExpertLayout], direct: bool,
               threads: int) -> "Loads | NativeLoads":
    """The kind of loads that the system and the files allow. layouts: of every key."""
    paths = {extent.path for layout in layouts for extent in layout.extents}
    files: dict[str, ModelFile] = {}
    with ExitStack() as undo:  # the files that are open already, if one is gone
        for path in sorted(paths):
            files[path] = undo.enter_context(closing(ModelFile(path, direct)))
        if NATIVE and all(file.direct for file in files.values()):
            loads = NativeLoads(memory, NativeReaders(files, layouts, threads))
        else:
            loads = Loads(memory, files, layouts, threads)
        undo.pop_all()
    return loads


class NativeReaders:
    """The threads and what they share with the two channels. layouts: of every key; each stands in
    the tables twice, once for each channel."""

    def __init__(self, files: dict[str, ModelFile], layouts: list[ExpertLayout], threads: int):
        self.files, self.layouts = files, layouts
        self.arrays = _tables(native.CHANNELS * layouts, files)
        self._bells = os.eventfd(0, os.EFD_SEMAPHORE), os.eventfd(0), os.eventfd(0)
        self._scratch = np.zeros((threads + native.CHANNELS, 8), np.int64)
        self.record = np.zeros(native.WORDS, np.int64)
        self._fill_record()
        self.ctl = self.record.ctypes.data
        self._threads = [
            threading.Thread(target=native.serve, args=(self.ctl, self._scratch[i].ctypes.data),
                             name=f"disk-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def _fill_record(self) -> None:
        for name, array in self.arrays.items():
            self.record[getattr(native, name)] = array.ctypes.data
        self.record[native.MASK] = len(self.arrays["DEMAND"]) - 1
        for word, bell in zip((native.WAKE, native.DONE, native.DONE_2), self._bells):
            self.record[word] = bell
        self.record[native.SPLIT] = len(self.layouts)
        self.record[native.MOST_GUESSES] = MOST_GUESSES

    def scratch(self, channel: int) -> int:
        """Address of 16 bytes for the thread that calls for the channel."""
        return self._scratch[len(self._threads) + channel].ctypes.data

    def close(self) -> None:
        """May be called twice."""
        native.stop(self.ctl, len(self._threads), self.scratch(0))
        for thread in self._threads:
            thread.join()
        for file in self.files.values():
            file.close()
        for fd in self._bells:
            os.close(fd)
        self._threads, self._bells = [], ()


class NativeLoads:
    """One channel of the readers: experts that go to one memory."""

    def __init__(self, memory: Memory, readers: NativeReaders, channel: int = 0):
        self.files, self.wait_seconds = readers.files, 0.0
        self._memory, self._readers, self._channel = memory, readers, channel
        self._under_way: dict[int, bool] = {}  # key -> a step waits for it
        self._record, self._ctl = readers.record, readers.ctl
        self._own = readers.scratch(channel)
        self._first = channel * len(readers.layouts)  # the readers' number of key 0
        self._keys = np.zeros(AT_ONCE, np.int64)

    def beside(self, memory: Memory) -> "NativeLoads":
        """The same experts and readers, for another memory and another calling thread."""
        return NativeLoads(memory, self._readers, 1)

    def __len__(self) -> int:
        return len(self._under_way)

    @property
    def bytes_read(self) -> int:
        """By both channels."""
        return int(self._record[native.BYTES])

    @property
    def busy_seconds(self) -> float:
        """Time in which at least one read was under way."""
        return 1e-9 * float(self._record[native.BUSY_NS])

    def start(self, keys: np.ndarray, places: np.ndarray, wanted: bool) -> None:
        self._under_way.update(dict.fromkeys(keys.tolist(), wanted))
        at = self._memory.address + places
        native.start(self._ctl, keys + self._first, at, wanted, self._own)

    def promote(self, key: int) -> None:
        if not self._under_way[key]:
            self._under_way[key] = True
            native.promote(self._ctl, key + self._first, self._own)

    def cancel(self, key: int) -> bool:
        if self._under_way.get(key, True) or not native.cancel(self._ctl, key + self._first):
            return False
        del self._under_way[key]
        return True

    def ended(self) -> list[Ended]:
        c = self._channel
        if self._record[native.ENDED_TAIL + c] == self._record[native.ENDED_HEAD + c]:
            return []
        count = native.take_ended(self._ctl, c, self._keys)
        return [self._ended(key) for key in (self._keys[:count] - self._first).tolist()]

    def wait(self) -> list[Ended]:
        assert self._under_way, "waiting for an expert that nobody reads"
        start = time.perf_counter()
        native.wait_ended(self._ctl, self._channel, self._own)
        self.wait_seconds += time.perf_counter() - start
        return self.ended()

    def _ended(self, key: int) -> Ended:
        bad = self._readers.arrays["BAD"][key + self._first]
        return Ended(key, self._under_way.pop(key), self._read_again(key) if bad else None)

    def _read_again(self, key: int) -> ModelFileError | None:
        """A range came short: once more the careful way, which finds out why."""
        place = int(self._readers.arrays["PLACE"][key + self._first]) - self._memory.address
        layout = self._readers.layouts[key]
        view = self._memory.view[place : place + layout.nbytes]
        try:
            for x in layout.extents:
                self.files[x.path].read(view[x.at :], x.offset, x.nbytes, x.name)
        except ModelFileError as error:
            return error
        return None

    def close(self) -> None:
        """Ends the readers, for both channels."""
        self._readers.close()


def _tables(layouts: list[ExpertLayout], files: dict[str, ModelFile]) -> dict[str, np.ndarray]:
    """The arrays behind the addresses in the control record, by its names."""
    n = len(layouts)
    n_job = n * native.RANGES
    table = np.zeros((n_job, native.JOB_WORDS), np.int64)
    for key, layout in enumerate(layouts):
        for i, x in enumerate(layout.extents):
            start = page_floor(x.offset)
            need = x.offset + x.nbytes - start
            row = (files[x.path].descriptor, start, page_span(x.offset, x.nbytes), need, x.at)
            table[native.RANGES * key + i, : len(row)] = row
    ring = 1 << (4 * n_job).bit_length()
    names = ("DEMAND", "GUESS", "ENDED", "ENDED_2")
    return {
        "TABLE": table, "COUNT": np.array([len(one.extents) for one in layouts], np.int64),
        "STATE": np.zeros(n_job, np.int64), "LEFT": np.zeros(n, np.int64),
        "BAD": np.zeros(n, np.int64), "PLACE": np.zeros(n, np.int64),
    } | {name: np.zeros(ring, np.int64) for name in names}
