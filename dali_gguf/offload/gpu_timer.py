"""How long a layer took on the device: its residents, and everything with the copied experts.

On a GPU the work runs after it was launched, so times come from events, and are known only when the
stream has been waited for; that happens anyway when the next layer's routing is read."""

import time

import torch


class GpuTimer:
    """begin, residents_done and end around one layer's launches; then read, once."""

    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"
        if self.on_gpu:
            self._marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        else:
            self._marks = [0.0] * 3

    def begin(self) -> None:
        self._mark(0)

    def residents_done(self) -> None:
        self._mark(1)

    def end(self) -> None:
        self._mark(2)

    def _mark(self, i: int) -> None:
        if self.on_gpu:
            self._marks[i].record()
        else:
            self._marks[i] = time.perf_counter()

    def read(self) -> tuple[float, float]:
        """Microseconds of (the residents, the whole)."""
        begin, middle, end = self._marks
        if not self.on_gpu:
            return (middle - begin) * 1e6, (end - begin) * 1e6
        end.synchronize()
        return begin.elapsed_time(middle) * 1000, begin.elapsed_time(end) * 1000
