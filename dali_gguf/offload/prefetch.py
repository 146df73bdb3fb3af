"""Which experts will the next layer need? Predictors of its workload, and what a prefetch is worth.

h_l [T, D] is the router's input of layer l (after the norm), W_l [E, D] its router.
residual (the paper's): top-A of W_{l+1} (h_l + r_l), r_l = mean over tokens of h_{l+1} - h_l, learned
while the model runs. linear: a ridge map from h_l to the next layer's logits, fitted to a trace.
next-router: the same with r_l = 0. frequency: the layer's stored counts. none.
"""

from dataclasses import dataclass

import numpy as np
from numba import njit

from dali_gguf.errors import InputError
from dali_gguf.offload.cost import Costs

PREDICTORS = ("residual", "linear", "next-router", "frequency", "none")


@dataclass(frozen=True, slots=True, eq=False)
class RouterMap:
    """What a layer's router does before choosing: weight float32 [E, D], bias float32 [E] or None
    added to the logits; sigmoid and correction [E] (DeepSeek's choice bias) change the ranking."""

    weight: np.ndarray
    n_used: int
    bias: np.ndarray | None = None
    sigmoid: bool = False
    correction: np.ndarray | None = None

    def ranking(self, h: np.ndarray) -> np.ndarray:
        """float32 [T, E]: the values whose A largest are chosen."""
        return self.adjust(h @ self.weight.T)

    def adjust(self, logits: np.ndarray) -> np.ndarray:
        """Raw products W h [T, E] to what the choice is made on."""
        if self.bias is not None:
            logits = logits + self.bias
        if self.correction is None:
            return logits
        if self.sigmoid:
            return 1 / (1 + np.exp(-logits)) + self.correction
        z = np.exp(logits - logits.max(-1, keepdims=True))
        return z / z.sum(-1, keepdims=True) + self.correction


@njit(cache=True, nogil=True)
def count_top(ranking, n_used, counts):
    """Adds to counts int64 [E] the n_used largest of each row of ranking [T, E]; ties: lower id."""
    n_expert = ranking.shape[1]
    taken = np.zeros(n_expert, np.bool_)
    for t in range(ranking.shape[0]):
        taken[:] = False
        for _ in range(n_used):
            best = -1
            for e in range(n_expert):
                if not taken[e] and (best < 0 or ranking[t, e] > ranking[t, best]):
                    best = e
            taken[best] = True
            counts[best] += 1


def rank(predicted: np.ndarray, resident: np.ndarray, costs: Costs) -> list[tuple[int, float]]:
    """Absent experts worth fetching, by predicted workload int64 [E] (not by probability: that loses
    7-10 points): [(expert, us saved if the prediction holds)], the best first."""
    ids = np.flatnonzero((predicted > 0) & (resident == 0))
    w = np.minimum(predicted[ids], costs.c.size - 1)
    value = costs.c[w] - costs.g[w]
    order = np.argsort(-w, kind="stable")
    return [(int(ids[i]), float(value[i])) for i in order if value[i] > 0]


class Predictor:
    """Predicts the workload of layer l + 1 from h_l; learns from what the model shows.

    routers: {layer: RouterMap} of the MoE layers, ascending. counts [L, E] (frequency) and maps
    {layer: [D + 1, E]} (linear, last row constant) come from a counts file or a trace.
    """

    def __init__(self, kind: str, routers: dict[int, RouterMap], counts: np.ndarray | None = None,
                 maps: dict[int, np.ndarray] | None = None):
        if kind not in PREDICTORS:
            raise InputError(f"prefetch {kind!r} is unknown: choose one of {', '.join(PREDICTORS)}")
        if kind == "linear" and maps is None:
            raise InputError("prefetch 'linear' needs a fitted map: run dali-gguf calibrate, or "
                             "choose residual")
        self.kind, self.routers, self.counts, self.maps = kind, routers, counts, maps or {}
        layers = sorted(routers)
        self.following = dict(zip(layers, layers[1:]))  # layer -> the next layer with experts
        self.row = {layer: i for i, layer in enumerate(layers)}
        self.mean = {i: np.zeros(routers[i].weight.shape[1], np.float32) for i in self.following}
        self.seen = dict.fromkeys(self.following, 0)  # tokens behind each mean
        self._before: tuple[int, np.ndarray] | None = None

    def predict(self, layer: int, h: np.ndarray) -> np.ndarray | None:
        """Predicted workload int64 [E] of the MoE layer after `layer`; None: nothing to predict."""
        following = self.following.get(layer)
        if following is None or self.kind == "none":
            return None
        router = self.routers[following]
        counts = np.zeros(router.weight.shape[0], np.int64)
        if self.kind == "frequency":
            if self.counts is None:
                return None
            count_top(self.counts[None, self.row[following]].astype(np.float32), router.n_used, counts)
            return counts * len(h)
        count_top(self.ranking(layer, h), router.n_used, counts)
        return counts

    def ranking(self, layer: int, h: np.ndarray) -> np.ndarray:
        """[T, E]: predicted ranking values of the layer after `layer`."""
        router = self.routers[self.following[layer]]
        if self.kind == "linear":
            m = self.maps[layer]
            return router.adjust(h @ m[:-1] + m[-1])
        if self.kind == "residual":
            h = h + self.mean[layer]
        return router.ranking(h)

    def stacked(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """[2E, D] and [2E]: layer's own router and the prediction as one product, so that it costs
        no launch and no read-back of its own: [W_l; W_l+1] h + [0; W_l+1 r_l]."""
        own, router = self.routers[layer], self.routers[self.following[layer]]
        if self.kind == "linear":
            second, bias = self.maps[layer][:-1].T, self.maps[layer][-1]
        else:
            second, bias = router.weight, router.weight @ self.mean[layer]
        weight = np.concatenate([own.weight, second]).astype(np.float32)
        return weight, np.concatenate([np.zeros(len(own.weight)), bias]).astype(np.float32)

    def learn(self, layer: int, h: np.ndarray) -> None:
        """Shows h_l [T, D] of a step, layer by layer: updates the running mean of h_l - h_before."""
        if self.kind != "residual":
            return
        if self._before is not None and self.following.get(self._before[0]) == layer:
            i, before = self._before
            if len(before) == len(h):
                self.seen[i] += len(h)
                self.mean[i] += ((h - before).sum(0) - len(h) * self.mean[i]) / self.seen[i]
        self._before = (layer, np.array(h, np.float32))


def fit_linear(h: np.ndarray, target: np.ndarray, ridge: float = 10.0) -> np.ndarray:
    """[D + 1, E] minimising |[h, 1] M - target|^2 + ridge |M|^2; h [T, D], target logits [T, E]."""
    x = np.concatenate([h, np.ones((len(h), 1))], 1).astype(np.float64)
    gram = x.T @ x + ridge * np.eye(x.shape[1])
    return np.linalg.solve(gram, x.T @ target.astype(np.float64)).astype(np.float32)
