"""How long a layer took on the device: its residents, and everything with the copied experts.

On a GPU the work runs after it was launched, so times come from events, and are known only when the
stream has been waited for; that happens anyway when the next layer's routing is read."""

import time

import torch


class GpuTimer:
    """begin, residents_done and, if there was more, end around one layer's launches; then read,
    once. Two layers take turns: one may be read after the next has begun."""

    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"
        if self.on_gpu:
            turns = [[torch.cuda.Event(enable_timing=True) for _ in range(3)] for _ in range(2)]
            for event in turns[0] + turns[1]:
                event.record()  # from then on it has a handle
        else:
            turns = [[0.0] * 3, [0.0] * 3]
        self._marks, self._before = turns
        self._last, self._last_before = 1, 1  # which mark is the end

    def begin(self) -> None:
        self._turn()
        self._mark(0)

    def begin_event(self) -> int:
        """Instead of begin: handle of the event to be recorded before the first launch, if there is
        one (0: none is needed); then begun."""
        self._soon = time.perf_counter()
        return self._before[0].cuda_event if self.on_gpu else 0

    def begun(self) -> None:
        self._turn()
        if not self.on_gpu:
            self._marks[0] = self._soon

    def _turn(self) -> None:
        self._marks, self._before = self._before, self._marks
        self._last_before, self._last = self._last, 1

    def residents_done(self) -> None:
        self._mark(1)

    def end(self) -> None:
        self._mark(2)
        self._last = 2

    def _mark(self, i: int) -> None:
        if self.on_gpu:
            self._marks[i].record()
        else:
            self._marks[i] = time.perf_counter()

    def read(self, before: bool) -> tuple[float, float]:
        """Microseconds of (the residents, the whole): of the layer that began last, or of the one
        before it."""
        begin, middle, _ = marks = self._before if before else self._marks
        end = marks[self._last_before if before else self._last]
        if not self.on_gpu:
            return (middle - begin) * 1e6, (end - begin) * 1e6
        end.synchronize()
        return begin.elapsed_time(middle) * 1000, begin.elapsed_time(end) * 1000
