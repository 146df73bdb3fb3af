"""Each layer's times are told once, as its own, whether the next one uses the device or not."""

import time
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from dali_gguf.offload.layer_times import SAMPLE, LayerTimes  # noqa: E402


class Told:
    """Stands for the cost model and the counters."""

    def __init__(self):
        self.gpu, self.waits_of = [], {}

    def observe(self, kind, workload, us):
        self.gpu.append((kind, workload.tolist(), us))

    def waits(self, row, cpu_us, gpu_us):
        assert row not in self.waits_of, "told twice"
        self.waits_of[row] = gpu_us


def times_of(told: Told) -> LayerTimes:
    return LayerTimes(torch.device("cpu"), told, SimpleNamespace(waits=told.waits))


@pytest.mark.parametrize("asked", [False, True], ids=["plain", "event asked for"])
def test_the_layer_before_is_told_whatever_the_next_one_does(asked):
    told = Told()
    times = times_of(told)
    takes = {0: 0.004, 1: None, 2: 0.001, 3: 0.006}  # seconds of the device; None: not used
    for row, seconds in takes.items():
        times.begin(row, prefill=True)
        if asked:
            assert times.begin_event() == 0, "on the CPU there is no event"
        if seconds is not None:
            times.gpu_has_begun() if asked else times.gpu_begins()
            time.sleep(seconds)
            times.gpu_begins()  # as later launches of the layer do
            times.residents_done(np.array([row + 1]))
        times.tell_last()
    times.tell_all()
    for row, seconds in takes.items():
        us = 1e6 * (seconds or 0)
        assert us <= told.waits_of[row] < us + 2500, row
    assert [(kind, w) for kind, w, _ in told.gpu] == [("gpu", [row + 1]) for row in (0, 2, 3)]


def test_in_decoding_each_layer_is_learned_from_in_its_turn():
    told, seen = Told(), {row: 0 for row in range(6)}
    times = times_of(told)
    for _ in range(3 * SAMPLE):
        for row in seen:
            times.begin(row, prefill=False)
            seen[row] += times.sampled
    assert set(seen.values()) == {3}
    times.begin(0, prefill=True)
    assert times.sampled
