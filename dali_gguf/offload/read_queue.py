"""Reader threads with two queues: what a step waits for goes first, guesses fill the idle disk.

Four threads with one whole range each keep an SSD at its ceiling (measured; more gain nothing). The
threads sleep in C while there is nothing to do, and in the kernel while they read: they take no
time from compute.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from dali_gguf.errors import DaliError
from dali_gguf.offload.direct_io import ModelFile

THREADS = 4
MOST_GUESSES = 4  # in flight at once: 2 leave 10 % of the disk, and measured 2 % slower steps


@dataclass(slots=True, eq=False)
class Read:
    """One range to be read to the start of view (direct_io rounds it to pages). owner: for the
    caller to know it again."""

    file: ModelFile
    offset: int
    nbytes: int
    view: memoryview
    name: str
    owner: object
    taken: bool = False  # by a thread, or cancelled
    error: DaliError | None = None


class ReadQueue:
    """Runs Reads; done(read) is called on the reader's thread when one has ended, with or without
    error."""

    def __init__(self, done: Callable[[Read], None], threads: int = THREADS):
        self._done = done
        self._demand: deque[Read] = deque()
        self._guesses: deque[Read] = deque()
        self._lock = threading.Lock()
        self._tickets: SimpleQueue[bool] = SimpleQueue()
        self._running = self._guesses_running = 0
        self._busy_since = 0.0
        self.bytes_read = 0
        self.busy_seconds = 0.0  # time in which at least one read was under way
        self._threads = [
            threading.Thread(target=self._serve, name=f"disk-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def demand(self, reads: list[Read]) -> None:
        """Queues reads that a step waits for. Reads queued as guesses before are promoted."""
        self._demand.extend(reads)
        for _ in reads:
            self._tickets.put(True)

    def guess(self, reads: list[Read]) -> None:
        """Queues reads for idle disk time."""
        self._guesses.extend(reads)
        for _ in reads:
            self._tickets.put(True)

    def cancel(self, reads: list[Read]) -> bool:
        """Takes the reads out of the queues; False, and nothing done, if a thread has begun one of
        them."""
        with self._lock:
            if any(read.taken for read in reads):
                return False
            for read in reads:
                read.taken = True
        return True

    @property
    def idle(self) -> bool:
        """No demanded read is waiting or under way."""
        return not self._demand and self._running == self._guesses_running

    def _serve(self) -> None:
        while self._tickets.get():
            taken = self._take()
            while taken is not None:
                read, is_guess = taken
                try:
                    got = read.file.read(read.view, read.offset, read.nbytes, read.name)
                except DaliError as error:
                    read.error, got = error, 0
                self._end(got, is_guess)
                self._done(read)
                taken = self._take()

    def _take(self) -> tuple[Read, bool] | None:
        with self._lock:
            read, is_guess = self._next(self._demand), False
            if read is None and self._guesses_running < MOST_GUESSES:
                read, is_guess = self._next(self._guesses), True
            if read is None:
                return None
            if self._running == 0:
                self._busy_since = time.perf_counter()
            self._running += 1
            self._guesses_running += is_guess
        return read, is_guess

    @staticmethod
    def _next(queue: deque[Read]) -> Read | None:
        """The first read of a queue that is not taken; promoted and cancelled ones are dropped
        here."""
        while queue:
            read = queue.popleft()
            if not read.taken:
                read.taken = True
                return read
        return None

    def _end(self, got: int, is_guess: bool) -> None:
        with self._lock:
            self._running -= 1
            self._guesses_running -= is_guess
            self.bytes_read += got
            if self._running == 0:
                self.busy_seconds += time.perf_counter() - self._busy_since

    def close(self) -> None:
        """Drops what is queued, lets reads under way end, and joins the threads."""
        with self._lock:
            self._demand.clear()
            self._guesses.clear()
        for _ in self._threads:
            self._tickets.put(False)
        for thread in self._threads:
            thread.join()
        self._threads = []
