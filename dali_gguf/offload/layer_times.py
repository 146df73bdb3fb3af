"""What a layer took on both sides, told to the counters and the cost model.

The device's share is known only when its work has been waited for, which happens when the next
layer's routing is read: so a layer's times are told while the next one runs.
"""

import numpy as np
import torch

from dali_gguf.offload.cost import CostModel
from dali_gguf.offload.gpu_timer import GpuTimer
from dali_gguf.offload.hybrid_counters import HybridCounters

SAMPLE = 4  # a correction of the costs takes time: each layer makes one in every so many steps


class _Layer:
    """workload int64 [n] of the device's residents; None: the device had nothing to do. begun: its
    timer has been started."""

    __slots__ = ("row", "workload", "cpu_us", "begun")

    def __init__(self, row: int):
        self.row, self.workload, self.cpu_us, self.begun = row, None, 0.0, False


class LayerTimes:
    """begin for every layer; on the device's side gpu_begins, residents_done and, if there was
    more, gpu_ends; tell_last once its work is launched; cpu with the result of the other side."""

    def __init__(self, device: torch.device, model: CostModel, counters: HybridCounters):
        self.timer, self.model, self.counters = GpuTimer(device), model, counters
        self._now: _Layer | None = None
        self._last: _Layer | None = None
        self._step = 0
        self.sampled = True  # whether the cost model learns from this layer

    def begin(self, row: int, prefill: bool) -> None:
        self._step += row == 0
        self.sampled = prefill or (row + self._step) % SAMPLE == 0
        self._last, self._now = self._now, _Layer(row)

    def gpu_begins(self) -> None:
        """The first launch follows, unless it was made already."""
        if not self._now.begun:
            self._now.begun = True
            self.timer.begin()

    def begin_event(self) -> int:
        """For a first launch that records the time itself: as GpuTimer.begin_event."""
        return self.timer.begin_event()

    def gpu_has_begun(self) -> None:
        """It has recorded the time."""
        self._now.begun = True
        self.timer.begun()

    def residents_done(self, workload: np.ndarray) -> None:
        """workload int64 [n]: of the residents that were computed."""
        self.timer.residents_done()
        self._now.workload = workload

    def gpu_ends(self) -> None:
        self.timer.end()

    def cpu(self, workload: np.ndarray, us: float, waited_us: float) -> None:
        """workload int64 [n]: of its experts. waited_us: the part of us that the disk took."""
        self._now.cpu_us = us
        if self.sampled:
            self.model.observe("cpu", workload, us - waited_us)

    def tell_last(self) -> None:
        """Of the layer before this one."""
        self._tell(self._last, self._now.begun)
        self._last = None

    def tell_all(self) -> None:
        """At the end of a run."""
        self._tell(self._now, False)
        self._now = None

    def drop(self) -> None:
        """The layer ended with an error."""
        self._now = self._last = None

    def _tell(self, layer: _Layer | None, before: bool) -> None:
        """before: the timer has begun with another layer since."""
        if layer is None:
            return
        gpu_us = 0.0
        if layer.workload is not None:
            residents_us, gpu_us = self.timer.read(before)
            if self.sampled and layer.workload.size:
                self.model.observe("gpu", layer.workload, residents_us)
        self.counters.waits(layer.row, layer.cpu_us, gpu_us)
