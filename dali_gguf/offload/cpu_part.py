"""The CPU's share of a layer: some of its experts, beside the GPU, in a thread of its own or, where
nothing else is to be done meanwhile, in the calling thread.

Only one thread enters the kernels' parallel region at a time.
"""

import threading
import time
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np

from dali_gguf.device import Device
from dali_gguf.offload.ram_tier import Arriving
from dali_gguf.routing import LayerExperts, Routing

MARK = object()  # goes through both queues: everything before it is done


@dataclass(frozen=True, slots=True, eq=False)
class CpuResult:
    """y float32 [T, D]: weighted sum over the CPU's experts. us: how long it took; waited_us: part
    of it that was spent waiting for the disk."""

    y: np.ndarray
    us: float
    waited_us: float = 0.0


class CpuPart:
    """cpu: a device with moe_begin, moe_run and moe_end. One share at a time: start or run, then
    result."""

    def __init__(self, cpu: Device):
        self.cpu = cpu
        self._asked: SimpleQueue = SimpleQueue()  # a fifth of what an executor costs a layer
        self._ended: SimpleQueue = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="dali-cpu", daemon=True)
        self._thread.start()

    def start(
        self,
        h: np.ndarray,
        routing: Routing,
        experts: LayerExperts,
        ids: np.ndarray,
        arriving: Arriving | None = None,
    ) -> None:
        """h float32 [T, D] and ids int64 [n] must not change until the result is there. arriving:
        where ids come from, if not from the experts' own bytes."""
        self._asked.put((h, routing, experts, ids, arriving))

    def run(
        self, h: np.ndarray, routing: Routing, experts: LayerExperts, ids: np.ndarray
    ) -> None:
        """As start, in the calling thread: when it returns, the result is there."""
        self._ended.put(self._run(h, routing, experts, ids, None))

    def result(self) -> CpuResult:
        """Of what was started; raises what went wrong there."""
        result = self._ended.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def abandon(self) -> None:
        """Waits for the end of what was started, and drops it: its result will not be fetched."""
        self._asked.put(MARK)
        while self._ended.get() is not MARK:
            pass

    def _work(self) -> None:
        while (job := self._asked.get()) is not None:
            try:
                self._ended.put(job if job is MARK else self._run(*job))
            except BaseException as error:  # raised by result(), in the thread that needs it
                self._ended.put(error)

    def _run(self, h, routing, experts, ids, arriving) -> CpuResult:
        started, waited = time.perf_counter(), 0.0
        step = self.cpu.moe_begin(h, routing, experts)
        if arriving is None:
            self.cpu.moe_run(step, ids)
        else:
            before = arriving.waited_us
            for here in arriving.groups:
                self.cpu.moe_run(step, here, arriving.addresses)
            waited = arriving.waited_us - before
        y = self.cpu.moe_end(step)
        return CpuResult(y, (time.perf_counter() - started) * 1e6, waited)

    def whole(
        self,
        h: np.ndarray,
        routing: Routing,
        experts: LayerExperts,
        arriving: Arriving | None = None,
    ) -> np.ndarray:
        """All experts of the step, all on the CPU, for --verify: [T, D]."""
        self.start(h, routing, experts, np.flatnonzero(routing.workload), arriving)
        return self.result().y

    def close(self) -> None:
        self._asked.put(None)
        self._thread.join()
        self.cpu.close()
