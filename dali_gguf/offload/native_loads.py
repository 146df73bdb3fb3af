"""Loads (see loads.py) whose reader threads run compiled code. Linux, files read directly."""

import os
import sys
import threading
import time

import numpy as np

from dali_gguf.errors import ModelFileError
from dali_gguf.offload import native_readers as native
from dali_gguf.offload.direct_io import Memory, ModelFile, page_floor, page_span
from dali_gguf.offload.layout import ExpertLayout
from dali_gguf.offload.loads import Ended, Loads
from dali_gguf.offload.read_queue import MOST_GUESSES, THREADS

NATIVE = sys.platform == "linux"  # the threads use eventfd, and glibc's way to errno
AT_ONCE = 256  # experts taken note of


def open_loads(memory: Memory, layouts: list[ExpertLayout], direct: bool,
               threads: int) -> "Loads | NativeLoads":
    """The kind of loads that the system and the files allow. layouts: of every key."""
    paths = {extent.path for layout in layouts for extent in layout.extents}
    files = {path: ModelFile(path, direct) for path in sorted(paths)}
    if NATIVE and all(file.direct for file in files.values()):
        return NativeLoads(memory, files, layouts, threads)
    return Loads(memory, files, layouts, threads)


class NativeLoads:
    """layouts: of every key."""

    def __init__(self, memory: Memory, files: dict[str, ModelFile], layouts: list[ExpertLayout],
                 threads: int = THREADS):
        self.files, self.wait_seconds = files, 0.0
        self._memory, self._layouts = memory, layouts
        self._under_way: dict[int, bool] = {}  # key -> a step waits for it
        self._arrays = _tables(layouts, files)
        self._bell = os.eventfd(0, os.EFD_SEMAPHORE), os.eventfd(0)
        self._scratch = np.zeros((threads + 1, 8), np.int64)
        self._keys = np.zeros(AT_ONCE, np.int64)
        self._record = np.zeros(native.WORDS, np.int64)
        self._fill_record()
        self._ctl = self._record.ctypes.data
        self._own = self._scratch[threads].ctypes.data
        self._threads = [
            threading.Thread(target=native.serve, args=(self._ctl, self._scratch[i].ctypes.data),
                             name=f"disk-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def _fill_record(self) -> None:
        for name, array in self._arrays.items():
            self._record[getattr(native, name)] = array.ctypes.data
        self._record[native.MASK] = len(self._arrays["DEMAND"]) - 1
        self._record[native.WAKE], self._record[native.DONE] = self._bell
        self._record[native.MOST_GUESSES] = MOST_GUESSES

    def __len__(self) -> int:
        return len(self._under_way)

    @property
    def bytes_read(self) -> int:
        return int(self._record[native.BYTES])

    @property
    def busy_seconds(self) -> float:
        """Time in which at least one read was under way."""
        return 1e-9 * float(self._record[native.BUSY_NS])

    def start(self, keys: np.ndarray, places: np.ndarray, wanted: bool) -> None:
        self._under_way.update(dict.fromkeys(keys.tolist(), wanted))
        native.start(self._ctl, keys, self._memory.address + places, wanted, self._own)

    def promote(self, key: int) -> None:
        if not self._under_way[key]:
            self._under_way[key] = True
            native.promote(self._ctl, key, self._own)

    def cancel(self, key: int) -> bool:
        if self._under_way.get(key, True) or not native.cancel(self._ctl, key):
            return False
        del self._under_way[key]
        return True

    def ended(self) -> list[Ended]:
        if self._record[native.ENDED_TAIL] == self._record[native.ENDED_HEAD]:
            return []
        count = native.take_ended(self._ctl, self._keys)
        return [self._ended(key) for key in self._keys[:count].tolist()]

    def wait(self) -> list[Ended]:
        assert self._under_way, "waiting for an expert that nobody reads"
        start = time.perf_counter()
        native.wait_ended(self._ctl, self._own)
        self.wait_seconds += time.perf_counter() - start
        return self.ended()

    def _ended(self, key: int) -> Ended:
        error = self._read_again(key) if self._arrays["BAD"][key] else None
        return Ended(key, self._under_way.pop(key), error)

    def _read_again(self, key: int) -> ModelFileError | None:
        """A range came short: once more the careful way, which finds out why."""
        place = int(self._arrays["PLACE"][key]) - self._memory.address
        layout = self._layouts[key]
        view = self._memory.view[place : place + layout.nbytes]
        try:
            for x in layout.extents:
                self.files[x.path].read(view[x.at :], x.offset, x.nbytes, x.name)
        except ModelFileError as error:
            return error
        return None

    def close(self) -> None:
        native.stop(self._ctl, len(self._threads), self._own)
        for thread in self._threads:
            thread.join()
        for file in self.files.values():
            file.close()
        for fd in self._bell:
            os.close(fd)


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
    return {
        "TABLE": table, "COUNT": np.array([len(one.extents) for one in layouts], np.int64),
        "STATE": np.zeros(n_job, np.int64), "LEFT": np.zeros(n, np.int64),
        "BAD": np.zeros(n, np.int64), "PLACE": np.zeros(n, np.int64),
        "DEMAND": np.zeros(ring, np.int64), "GUESS": np.zeros(ring, np.int64),
        "ENDED": np.zeros(ring, np.int64),
    }
