"""--verify: every layer's experts again, all on the CPU, and every used slot against the file.

The two sides round differently (the CPU multiplies 8-bit activations), so their outputs may differ
by a few percent of the largest value; bytes in a slot may not differ at all.
"""

import numpy as np

from dali_gguf.offload.cpu_part import CpuPart
from dali_gguf.offload.gpu_slots import NOWHERE
from dali_gguf.offload.resident import read_experts
from dali_gguf.routing import LayerExperts, Routing
from dali_gguf.tensor import Tensor

TOLERANCE = 0.05  # of the largest output of the layer


class Verifier:
    """largest: the largest difference so far, relative to the layer's largest output."""

    def __init__(self, cpu: CpuPart, traffic):
        self.cpu, self.traffic, self.ram = cpu, traffic, traffic.ram
        self.largest, self.where = 0.0, -1
        self.damaged: set[tuple[int, int]] = set()  # (layer, expert) whose slot differs

    def check(
        self,
        layer: int,
        row: int,
        host: np.ndarray,
        routing: Routing,
        experts: LayerExperts,
        y: np.ndarray,
    ) -> None:
        """host [T, D] the layer's input, y [T, D] what the scheduler made of it."""
        arriving = None
        if self.ram is not None:
            used = np.flatnonzero(routing.workload)
            arriving = self.ram.need(layer, routing, used, used[:0])
        exact = self.cpu.whole(host, routing, experts, arriving)
        difference = float(np.abs(y - exact).max() / max(float(np.abs(exact).max()), 1e-30))
        if not difference <= self.largest:  # NaN counts as well
            self.largest, self.where = difference, layer
        for expert in np.flatnonzero(routing.workload).tolist():
            if not self._same_bytes(row, expert, experts):
                self.damaged.add((layer, expert))

    def _same_bytes(self, row: int, expert: int, experts: LayerExperts) -> bool:
        slots = self.traffic.slots
        offset = int(slots.place[row, expert])
        if offset == NOWHERE:
            return True
        held = [part.cpu().numpy() for part in slots.parts(row, offset)]
        if self.ram is None:
            return _same(held, experts.matrices(expert))
        with read_experts(experts, [expert]) as one:
            return _same(held, one.matrices(0))

    @property
    def failed(self) -> bool:
        return bool(self.damaged) or not self.largest <= TOLERANCE

    def line(self) -> str:
        text = f"verify: largest difference {self.largest:.2%} (layer {self.where})"
        if self.damaged:
            layer, expert = min(self.damaged)
            return (
                text + f", {len(self.damaged)} DAMAGED slots, first layer {layer} expert {expert}"
            )
        return text + (", MORE THAN EXPECTED" if self.failed else ", slots as in the file")

    def as_dict(self) -> dict:
        return {
            "largest_difference": self.largest,
            "layer": self.where,
            "ok": not self.failed,
            "damaged_slots": sorted(map(list, self.damaged)),
        }


def _same(held: list[np.ndarray], matrices: tuple[Tensor, ...]) -> bool:
    return all(np.array_equal(a, t.data) for a, t in zip(held, matrices))
