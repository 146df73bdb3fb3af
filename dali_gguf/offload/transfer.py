"""The link: copies of experts into device memory, from the mapped file, or, if the model is larger
than RAM, from the arena or the disk (staging.py), beside everything else.

One thread owns it. Pages of a mapped file cannot be pinned, so on a GPU every piece goes through a
ring of pinned buffers: while one is on the bus the next is filled. Bytes from disk lie in pinned
buffers already, if the driver pins them. The copies run on a stream of their own; who computes with
the bytes makes its stream wait for the copy's event. On the CPU (cpu-torch) the same thread simply
copies.
"""

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from queue import SimpleQueue

import numpy as np
import torch

from dali_gguf.offload.direct_io import Memory
from dali_gguf.offload.staging import BUFFERS, PIECE, PIECES, Staging, bytes_at

DEMAND, PREFETCH, FILL = "demand", "prefetch", "fill"
LOOK_AHEAD = 4 * BUFFERS  # waiting copies whose reads may be started before their turn
WAITING, STARTED, ISSUED, DROPPED = range(4)


class Flag:
    """What is needed of threading.Event, at a fraction of the time to make one."""

    __slots__ = ("_lock", "_on")

    def __init__(self):
        self._on, self._lock = False, threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Once."""
        self._on = True
        self._lock.release()

    def is_set(self) -> bool:
        return self._on

    def wait(self) -> None:
        if not self._on:
            with self._lock:
                pass


@dataclass(slots=True, eq=False)
class Copy:
    """One expert on its way. parts: (source uint8 numpy, target uint8 tensor) of equal sizes.

    free: event after which the target may be written (None: now). us: how long it took, set
    when it is known. error: what went wrong in the thread, raised where the copy is waited for.
    key: of the arena, if there is one: the link then sets the sources. nbytes: of all parts (0:
    added up here). from_disk: they were read for this copy."""

    row: int
    expert: int
    offset: int
    kind: str
    parts: list[tuple[np.ndarray, torch.Tensor]]
    free: object = None
    key: int = -1
    nbytes: int = 0
    from_disk: bool = False
    state: int = WAITING
    issued: Flag = field(default_factory=Flag)
    events: tuple | None = None
    us: float = 0.0
    error: BaseException | None = None

    def __post_init__(self):
        if not self.nbytes:
            self.nbytes = sum(source.size for source, _ in self.parts)


class Link:
    """offer copies, wait for them, drop those that have not begun."""

    def __init__(self, device: torch.device, staging: Staging | None = None):
        """staging: where copies with a key find their bytes."""
        self.device, self.staging = device, staging
        self.bytes, self.copies, self.busy_us = 0, 0, 0.0
        self.copying = False
        self._queue: deque[Copy] = deque()
        self._lock = threading.Lock()  # of the queue
        self._wake: SimpleQueue = SimpleQueue()  # an entry for every offer: cheaper than Condition
        self._closed = self._pinned = False
        self._copy = self._plain
        if device.type == "cuda":
            self._ring = torch.empty((PIECES, PIECE), dtype=torch.uint8, pin_memory=True)
            self._host = self._ring.numpy()
            self._stream = torch.cuda.Stream(device)
            self._used = [torch.cuda.Event() for _ in range(PIECES)]
            self._turn = 0
            self._copy = self._staged
            if staging is not None:
                self._pinned = pin(staging.memory, device)
        self._thread = threading.Thread(target=self._run, name="dali-link", daemon=True)
        self._thread.start()

    def offer(self, copies: list[Copy]) -> None:
        """Demanded copies go before all others; otherwise first come, first served."""
        demanded = [c for c in copies if c.kind == DEMAND]
        with self._lock:
            if demanded:
                others = (i for i, c in enumerate(self._queue) if c.kind != DEMAND)
                first = next(others, len(self._queue))
                for at, copy in enumerate(demanded, first):
                    self._queue.insert(at, copy)
            self._queue.extend(c for c in copies if c.kind != DEMAND)
        self._wake.put(None)

    def drop(self, copies: list[Copy]) -> list[Copy]:
        """Those of copies that had not begun; they never will."""
        with self._lock:
            dropped = [c for c in copies if c.state == WAITING]
            for copy in dropped:
                copy.state = DROPPED
                self._queue.remove(copy)
        return dropped

    def wait(self, copy: Copy) -> None:
        """Until the bytes may be used: on a GPU by what is launched from now on."""
        copy.issued.wait()
        if copy.error is not None:
            raise copy.error
        if copy.events is not None:
            torch.cuda.current_stream(self.device).wait_event(copy.events[1])

    def arrived(self, copy: Copy) -> bool:
        """The bytes are there. Sets us."""
        if not copy.issued.is_set():
            return False
        if copy.events is not None:
            if not copy.events[1].query():
                return False
            if copy.us == 0:
                copy.us = copy.events[0].elapsed_time(copy.events[1]) * 1000
        return True

    def waiting(self) -> int:
        """Copies not yet begun."""
        return len(self._queue)

    @torch.inference_mode()  # as in the steps, where views of the targets are made
    def _run(self) -> None:
        while not self._closed:
            self._wake.get()
            while (copy := self._next()) is not None:
                started = time.perf_counter()
                try:
                    if copy.key < 0:
                        self._copy(copy)
                    else:
                        self._fetch(copy)
                except BaseException as error:  # raised by wait(), in the thread that needs it
                    copy.error = error
                self.busy_us += (time.perf_counter() - started) * 1e6
                self.bytes += copy.nbytes
                self.copies += 1
                copy.state, self.copying = ISSUED, False
                copy.issued.set()

    def _next(self) -> Copy | None:
        with self._lock:
            if self._closed or not self._queue:
                return None
            copy = self._queue.popleft()
            copy.state, self.copying = STARTED, True
        return copy

    def _fetch(self, copy: Copy) -> None:
        """Copies an expert from RAM if it is there, and stays there until it is copied; else from
        disk. Demanded experts that wait behind it are read meanwhile."""
        staging, key = self.staging, copy.key
        found = staging.in_ram(key)
        if found is None:
            staging.begin(key, copy.kind == DEMAND)
        with self._lock:
            ahead = [c.key for c in islice(self._queue, LOOK_AHEAD) if c.kind == DEMAND]
        staging.read_ahead(ahead)
        if found is not None:
            self._copy_from(copy, found[0])
            if staging.unchanged(key, found[1]):
                return
            staging.begin(key, copy.kind == DEMAND)
        copy.from_disk = True
        addresses = staging.from_disk(key)
        try:
            self._copy_from(copy, addresses)
        finally:
            staging.give(key, copy.events and copy.events[1])

    def _copy_from(self, copy: Copy, addresses: list[int]) -> None:
        pairs = zip(addresses, copy.parts)
        copy.parts = [(bytes_at(at, old.size), target) for at, (old, target) in pairs]
        self._copy(copy)

    def _plain(self, copy: Copy) -> None:
        started = time.perf_counter()
        for source, target in copy.parts:
            np.copyto(target.numpy(), source)  # without the interpreter lock
        copy.us = (time.perf_counter() - started) * 1e6

    def _staged(self, copy: Copy) -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            if copy.free is not None:
                self._stream.wait_event(copy.free)
            start.record()
            for source, target in copy.parts:
                if copy.from_disk and self._pinned:
                    target.copy_(torch.from_numpy(source), non_blocking=True)
                    continue
                for at in range(0, source.size, PIECE):
                    self._piece(source[at : at + PIECE], target[at : at + PIECE])
            end.record()
        copy.events = (start, end)

    def _piece(self, source: np.ndarray, target: torch.Tensor) -> None:
        i, n = self._turn, source.size
        self._used[i].synchronize()
        np.copyto(self._host[i, :n], source)
        target.copy_(self._ring[i, :n], non_blocking=True)
        self._used[i].record()
        self._turn = (i + 1) % PIECES

    def close(self) -> None:
        """Drops what has not begun; nothing is written into the targets after. May be called
        twice."""
        self._closed = True
        self._wake.put(None)
        self._thread.join()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self._pinned:
            self._pinned = False
            unpin(self.staging.memory, self.device)


def pin(memory: Memory, device: torch.device) -> bool:
    """Locks its pages, so that the device can copy from them by itself. False where the driver
    refuses, for lack of lockable memory, say."""
    with torch.cuda.device(device):
        code = torch.cuda.cudart().cudaHostRegister(memory.address, memory.nbytes, 0)
    return _accepted(code, device)


def unpin(memory: Memory, device: torch.device) -> None:
    with torch.cuda.device(device):
        code = torch.cuda.cudart().cudaHostUnregister(memory.address)
    _accepted(code, device)


def _accepted(code, device: torch.device) -> bool:
    """Whether a call of the CUDA runtime gave success. If not, its error would be that of the next
    launch, wherever that is: a launch made here takes it away."""
    if int(code) == 0:
        return True
    try:
        torch.ones(1, device=device)
    except RuntimeError:
        pass
    return False
