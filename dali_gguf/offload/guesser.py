"""Which experts of the next layer are worth copying ahead, and how many copies fit until then."""

from collections.abc import Callable

import numpy as np

from dali_gguf.offload.cost import Costs
from dali_gguf.offload.paired_routers import Products
from dali_gguf.offload.prefetch import Predictor

ROOM = 0.8  # a copy is started only if this share of it fits the gap
SAMPLE = 64  # tokens of a prefill that predictions look at
GUESSES, GUESSES_PREFILL = 2, 16


class Gap:
    """Running means of the time between two layers' experts, in decode and in prefill."""

    def __init__(self):
        self.us = {False: 0.0, True: 0.0}

    def observe(self, us: float, prefill: bool) -> None:
        """An outlier counts as ten times the mean at most."""
        mean = self.us[prefill]
        self.us[prefill] += 0.1 * (min(us, 10 * mean + 50) - mean)

    def room(self, prefill: bool, costs: Costs) -> int:
        """Copies that fit."""
        return int(self.us[prefill] / (ROOM * max(costs.t, 1e-3)))


class Guesser:
    """layers: numbers of those with experts, ascending. predictor None: never guesses."""

    def __init__(self, predictor: Predictor | None, layers: list[int]):
        self.predictor, self.layers = predictor, layers

    def guess(
        self,
        row: int,
        h: np.ndarray,
        prefill: bool,
        room: int,
        near: Callable[[int], np.ndarray],
        costs: Costs,
        products: Products | None = None,
    ) -> list[int]:
        """Experts of the next layer, the most valuable first, at most `room`. h [T, D]: input of
        this layer's router; near(row): uint8 [E], resident or on their way; products: of h, if they
        are known."""
        if self.predictor is None:
            return []
        layer, sample = self.layers[row], h[-SAMPLE:]
        own, ahead = (None, None) if products is None else products.last(SAMPLE)
        self.predictor.learn(layer, sample, own, ahead)
        most = min(GUESSES_PREFILL if prefill else GUESSES, room)
        if row + 1 == len(self.layers) or most < 1:
            return []
        return self.predictor.worth(layer, sample, ahead, near(row + 1), costs, most)

    def means(self) -> np.ndarray | None:
        """float32 [L - 1, D]: what was learned for later runs, if anything."""
        if self.predictor is None or self.predictor.kind not in ("residual", "linear"):
            return None
        return np.stack([self.predictor.mean[layer] for layer in self.layers[:-1]])
