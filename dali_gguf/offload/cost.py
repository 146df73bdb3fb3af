"""What one expert costs: c[w] on the CPU, g[w] on the GPU for w tokens, t to copy it. Microseconds.

Policies read a frozen `Costs`; a `CostModel` owns the measured anchors, makes the dense tables from
them, and corrects them by what steps really took.
"""

from dataclasses import dataclass

import numpy as np
from numba import njit

KINDS = ("cpu", "gpu", "copy", "disk")
GAIN = 0.1  # weight of one observation in the running correction
LARGEST_STEP = 2.0  # an observation moves a correction as if it were off by 2x at most (outliers)


@dataclass(frozen=True, slots=True, eq=False)
class Costs:
    """Costs of an expert of one layer, microseconds.

    c, g: float64 [W], by tokens; index 0 is 0, tokens >= W cost as W - 1. t: one copy to the GPU.
    h_cpu: fixed cost of using the CPU in a layer at all (activations over, result back, add).
    r: speed of the CPU kernels while the link copies, 1 = not slowed. t_disk: one read from disk.
    """

    c: np.ndarray
    g: np.ndarray
    t: float
    h_cpu: float = 0.0
    r: float = 1.0
    t_disk: float = 0.0


@njit(cache=True)
def _correct(factors, tables, side, w, us, gain):
    """Moves the corrections factors [2, P] of the anchors that the workloads w [n] touch.

    One time for several experts says only that their sum was off by a ratio: every anchor takes
    its share of the correction by its share of the predicted time. Returns that ratio."""
    table, top = tables[side], tables.shape[1] - 1
    predicted = 0.0
    for x in w:
        predicted += table[min(x, top)]
    if predicted <= 0 or us <= 0:
        return 1.0
    ratio = us / predicted
    bounded = min(max(ratio, 1 / LARGEST_STEP), LARGEST_STEP)
    for x in w:
        anchor = min(int(np.log2(x) + 0.5), factors.shape[1] - 1) if x > 0 else 0
        factors[side, anchor] *= bounded ** (gain * table[min(x, top)] / predicted)
    return ratio


@njit(cache=True)
def _dense(tokens, us, table):
    """table [W]: us float64 [P] at tokens int64 [P], linear between anchors and beyond the last
    one; 0 at w = 0, the first anchor below it."""
    last, i = tokens.size - 1, 0
    table[0] = 0.0
    for w in range(1, table.size):
        while i < last - 1 and w >= tokens[i + 1]:
            i += 1
        if w <= tokens[0] or last == 0:
            table[w] = us[0]
        else:
            slope = (us[i + 1] - us[i]) / (tokens[i + 1] - tokens[i])
            table[w] = us[i] + slope * (w - tokens[i])


class CostModel:
    """Measured costs of one model shape on one machine, corrected while the model runs.

    tokens: int64 [P], the anchors 1, 2, 4, 8, ...; cpu_us, gpu_us: float64 [P] (gpu_us None: no
    GPU); copy_us, h_cpu, r, t_disk as in Costs. max_tokens: largest step the tables must cover.
    """

    def __init__(
        self,
        tokens,
        cpu_us,
        gpu_us=None,
        copy_us=0.0,
        h_cpu=0.0,
        r=1.0,
        t_disk=0.0,
        max_tokens=4096,
    ):
        self.tokens = np.asarray(tokens, np.int64)
        assert (self.tokens == 1 << np.arange(self.tokens.size)).all(), "anchors are powers of two"
        gpu_us = np.full(self.tokens.size, 1e9) if gpu_us is None else gpu_us
        self.anchors = np.array([cpu_us, gpu_us], np.float64)
        self.factors = np.ones_like(self.anchors)
        self.copy_us, self.h_cpu, self.r, self.t_disk = copy_us, h_cpu, r, t_disk
        self.max_tokens = max_tokens
        self.error = 0.1  # running mean of |measured / predicted - 1|
        self.observed = 0
        self._rebuild()

    def observe(self, kind: str, w, us: float) -> None:
        """One measured time. cpu, gpu: w int64 [n] = tokens of each expert computed, us = time of
        the whole part (the fixed cost included for cpu). copy, disk: w = number of copies, of
        experts read. The first time of the disk is taken as it is, if nothing is known."""
        if kind == "disk" and self.t_disk == 0:
            self.t_disk, ratio = us / w, 1.0
            self._rebuild()
        elif kind in ("copy", "disk"):
            name = "copy_us" if kind == "copy" else "t_disk"
            ratio = us / (getattr(self, name) * w)
            bounded = min(max(ratio, 1 / LARGEST_STEP), LARGEST_STEP)
            setattr(self, name, getattr(self, name) * bounded**GAIN)
        else:
            side = KINDS.index(kind)
            net = us - self.h_cpu if kind == "cpu" else us
            ratio = _correct(self.factors, self.tables, side, np.asarray(w, np.int64), net, GAIN)
        self.error += GAIN * (min(abs(ratio - 1), 1.0) - self.error)
        self.observed += 1
        if self.observed % 32 == 0:
            self._rebuild()

    def margin(self) -> float:
        """Predicted gain below which residents are not sent to the CPU: the model's own error, at
        most 10 % (a GPU cost overestimated 2x would otherwise send most residents away)."""
        return min(max(self.error, 0.01), 0.1)

    def _rebuild(self) -> None:
        self.tables = np.empty((2, self.max_tokens + 1))
        for table, anchors in zip(self.tables, self.anchors * self.factors):
            _dense(self.tokens, anchors, table)
        self.costs = Costs(
            self.tables[0], self.tables[1], self.copy_us, self.h_cpu, self.r, self.t_disk
        )
