"""The CPU's share of a layer: some of its experts, in a thread of its own, beside the GPU.

Only this thread enters the kernels' parallel region while it works.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from dali_gguf.device import Device
from dali_gguf.routing import LayerExperts, Routing


@dataclass(frozen=True, slots=True, eq=False)
class CpuResult:
    """y float32 [T, D]: weighted sum over the CPU's experts. us: how long it took; ended: when, as
    perf_counter tells."""

    y: np.ndarray
    us: float
    ended: float


class CpuPart:
    """cpu: a device with moe_begin, moe_run and moe_end."""

    def __init__(self, cpu: Device):
        self.cpu = cpu
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dali-cpu")

    def start(
        self, h: np.ndarray, routing: Routing, experts: LayerExperts, ids: np.ndarray
    ) -> "Future[CpuResult]":
        """h float32 [T, D] and ids int64 [n] must not change until the result is there."""
        return self._thread.submit(self._run, h, routing, experts, ids)

    def _run(self, h, routing, experts, ids) -> CpuResult:
        started = time.perf_counter()
        step = self.cpu.moe_begin(h, routing, experts)
        self.cpu.moe_run(step, ids)
        y = self.cpu.moe_end(step)
        ended = time.perf_counter()
        return CpuResult(y, (ended - started) * 1e6, ended)

    def whole(self, h: np.ndarray, routing: Routing, experts: LayerExperts) -> np.ndarray:
        """All experts of the step, all on the CPU, for --verify: [T, D]."""
        ids = np.flatnonzero(routing.workload)
        return self._thread.submit(self._run, h, routing, experts, ids).result().y

    def close(self) -> None:
        self._thread.shutdown()
        self.cpu.close()
