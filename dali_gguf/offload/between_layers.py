"""While both sides work on a layer: the cache learns what was used, the next layer is predicted."""

from collections.abc import Callable

import numpy as np

from dali_gguf.offload.cache import ExpertCache
from dali_gguf.offload.cost import CostModel
from dali_gguf.offload.gpu_traffic import Traffic
from dali_gguf.offload.guesser import Gap, Guesser
from dali_gguf.offload.paired_routers import PairedRouters
from dali_gguf.offload.step_features import StepFeatures

FREE_LINK = 0.95  # CPU speed while copying above which copies start without waiting for the CPU


class BetweenLayers:
    """step: which of prefetch and fills are used. paired: where routing and predictions are one
    product."""

    def __init__(self, cache: ExpertCache, traffic: Traffic, model: CostModel, guesser: Guesser,
                 step: StepFeatures, paired: PairedRouters | None):
        self.cache, self.traffic, self.model, self.guesser = cache, traffic, model, guesser
        self.step, self.paired, self.gap = step, paired, Gap()

    def account(self, row: int, host: np.ndarray, workload: np.ndarray, prefill: bool,
                sampled: bool) -> list[Callable[[], None]]:
        """host [T, D]: the router's input. sampled: the cost model learns from this layer. Returns
        what is to be started once the CPU is done; nothing if the link is free of charge, since it
        was started then."""
        costs, traffic = self.model.costs, self.traffic
        traffic.judge(row, workload)
        swaps = self.cache.step(row, workload, traffic.arrived_for(row), costs)
        traffic.adopt(row, [s for s in swaps if s.adopted])
        if sampled and (copies := traffic.new_copy_times()):
            self.model.observe("copy", len(copies), sum(copies))
        room = self.gap.room(prefill, costs) - traffic.link.waiting()
        later, guesses = [], self._guesses(row, host, workload.size, prefill, room)
        if guesses:
            later.append(lambda: traffic.prefetch(row + 1, guesses))
        fills = [s for s in swaps if not s.adopted]
        if fills and "fills" in self.step.on and room > len(guesses):
            later.append(lambda: traffic.fill(row, fills))
        if self.model.costs.r <= FREE_LINK:
            return later
        for start in later:
            start()
        return []

    def _guesses(self, row: int, host: np.ndarray, n_expert: int, prefill: bool,
                 room: int) -> list[int]:
        """Experts of the next layer that are worth copying; room: copies that fit."""
        if not (prefill or "prefetch" in self.step.on):
            return []
        layer, near = self.guesser.layers[row], self.traffic.out_of_reach
        products = None if self.paired is None else self.paired.take(layer, n_expert)
        return self.guesser.guess(row, host, prefill, room, near, self.model.costs, products)
