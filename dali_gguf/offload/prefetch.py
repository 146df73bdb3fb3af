"""Which experts will the next layer need? Predictors of its workload, and what a prefetch is worth.

h_l [T, D] is the router's input of layer l (after the norm), W_l [E, D] its router.
residual (the paper's): top-A of W_{l+1} (h_l + r_l), r_l = mean over tokens of h_{l+1} - h_l,
learned while the model runs. linear: a ridge map, fitted to a trace, from h_l and what the token
before left (its h_l and h_{l+1}) to the next layer's logits; in decoding only, else residual.
next-router: residual with r_l = 0. frequency: the layer's stored counts. none.
"""

from dataclasses import dataclass

import numpy as np
from numba import njit

from dali_gguf.errors import InputError
from dali_gguf.offload.cost import Costs

PREDICTORS = ("residual", "linear", "next-router", "frequency", "none")
START_TOKENS = 4096  # weight of a stored mean against what is seen now
MOST_DECODED = 64  # a larger step is a prefill: its rows are one sequence


@dataclass(frozen=True, slots=True, eq=False)
class RouterMap:
    """What a layer's router does before choosing: weight float32 [E, D], bias float32 [E] or None
    added to the logits; sigmoid and correction [E] (DeepSeek's choice bias) change the ranking."""

    weight: np.ndarray
    n_used: int
    bias: np.ndarray | None = None
    sigmoid: bool = False
    correction: np.ndarray | None = None

    @property
    def adjusts(self) -> bool:
        """Whether the choice is made on anything but the products themselves."""
        return self.bias is not None or self.correction is not None

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


@njit(cache=True)
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


@njit(cache=True)
def _rank(predicted, resident, c, g, ids, value):
    """Fills ids and value [E] as `rank` says; returns how many."""
    n, top = 0, c.size - 1
    for e in range(predicted.size):
        w = min(predicted[e], top)
        if w <= 0 or resident[e] or c[w] - g[w] <= 0:
            continue
        i = n
        while i > 0 and min(predicted[ids[i - 1]], top) < w:
            ids[i], value[i] = ids[i - 1], value[i - 1]
            i -= 1
        ids[i], value[i] = e, c[w] - g[w]
        n += 1
    return n


def rank(predicted: np.ndarray, resident: np.ndarray, costs: Costs) -> list[tuple[int, float]]:
    """Absent experts worth fetching: [(expert, us saved if the prediction holds)], the best first.
    By predicted workload int64 [E], not by probability: that loses 7-10 points."""
    ids, value = np.empty(predicted.size, np.int64), np.empty(predicted.size)
    n = _rank(predicted, resident, costs.c, costs.g, ids, value)
    return list(zip(ids[:n].tolist(), value[:n].tolist()))


@njit(cache=True)
def _rank_products(ahead, shift, n_used, resident, c, g, ids, value):
    """count_top of ahead [T, E] + shift [E], then _rank: in one call."""
    counts, ranking = np.zeros(ahead.shape[1], np.int64), np.empty_like(ahead)
    for t in range(ahead.shape[0]):
        for e in range(ahead.shape[1]):
            ranking[t, e] = ahead[t, e] + shift[e]
    count_top(ranking, n_used, counts)
    return _rank(counts, resident, c, g, ids, value)


@njit(cache=True)
def _move_mean(mean, below, above, seen):
    """mean float32 [D], over `seen` tokens, the rows of above - below [T, D] among them."""
    n = np.float32(above.shape[0])
    for d in range(mean.size):
        total = np.float32(0)
        for t in range(above.shape[0]):
            total += above[t, d] - below[t, d]
        mean[d] += (total - n * mean[d]) / np.float32(seen)


class Predictor:
    """Predicts the workload of the next MoE layer from h_l; learns from what the model shows.

    routers: {layer: RouterMap} of the MoE layers. counts [L, E] (frequency), means {layer: [D]}
    (residual, a start) and maps {layer: [3D + 1, E]} (linear) come from a counts file or a trace.
    In each step and layer call predict, then learn (or learn first: the step before is kept apart).

    Both take the router products of h_l where they are known from one stacked product: own [T, E] =
    W_l h_l and ahead [T, E] = W_{l+1} h_l. Since W_{l+1} r_l is the mean of W_{l+1} h_{l+1} -
    W_{l+1} h_l, it is learned from these products, and no prediction multiplies anything.
    """

    def __init__(
        self,
        kind: str,
        routers: dict[int, RouterMap],
        counts: np.ndarray | None = None,
        maps: dict[int, np.ndarray] | None = None,
        means: dict[int, np.ndarray] | None = None,
    ):
        if kind not in PREDICTORS:
            raise InputError(f"prefetch {kind!r} is unknown: choose one of {', '.join(PREDICTORS)}")
        if kind == "linear" and maps is None:
            raise InputError(
                "prefetch 'linear' needs a fitted map, and there is no counts file "
                "with one: run dali-gguf trace on the model, or choose residual"
            )
        self.kind, self.routers, self.counts, self.maps = kind, routers, counts, maps or {}
        layers = sorted(routers)
        self.following = dict(zip(layers, layers[1:]))  # layer -> the next layer with experts
        self._preceding = dict(zip(layers[1:], layers))
        self.row = {layer: i for i, layer in enumerate(layers)}
        means = means or {}
        self.mean = {
            i: means.get(i, np.zeros(routers[i].weight.shape[1], np.float32)).copy()
            for i in self.following
        }
        self.seen = {i: START_TOKENS if i in means else 0 for i in self.following}
        n_expert = routers[layers[0]].weight.shape[0] if layers else 0
        self._ids, self._value = np.empty(n_expert, np.int64), np.empty(n_expert)
        self._shift: dict[int, np.ndarray] = {}  # W_{l+1} r_l [E], where it is up to date
        self._ahead: dict[int, np.ndarray] = {}  # W_{l+1} h_l of each layer in this step so far
        self._now: dict[int, np.ndarray] = {}  # h of each layer in this step so far
        self._before: dict[int, np.ndarray] = {}  # and in the step before

    @property
    def stacks(self) -> bool:
        """Whether predictions are made of router products alone."""
        return self.kind in ("residual", "next-router")

    def predict(
        self, layer: int, h: np.ndarray, ahead: np.ndarray | None = None
    ) -> np.ndarray | None:
        """Predicted workload int64 [E] of the MoE layer after `layer`; None: nothing to predict."""
        following = self.following.get(layer)
        if following is None or self.kind == "none":
            return None
        router = self.routers[following]
        counts = np.zeros(router.weight.shape[0], np.int64)
        if self.kind != "frequency":
            count_top(self.ranking(layer, h, ahead), router.n_used, counts)
            return counts
        if self.counts is None:
            return None
        known = self.counts[None, self.row[following]].astype(np.float32)
        count_top(known, router.n_used, counts)
        return counts * len(h)

    def worth(self, layer: int, h: np.ndarray, ahead: np.ndarray | None, resident: np.ndarray,
              costs: Costs, most: int) -> list[int]:
        """The experts of the MoE layer after `layer` that are worth fetching, at most so many:
        `rank` of what `predict` says, in one compiled call where products are known."""
        router = self.routers[self.following[layer]]
        if ahead is None or not self.stacks or router.adjusts:
            predicted = self.predict(layer, h, ahead)
            found = [] if predicted is None else rank(predicted, resident, costs)
            return [expert for expert, _ in found[:most]]
        shift = self._moved(layer) if self.kind == "residual" else np.zeros_like(ahead[0])
        ids, value = self._ids, self._value
        n = _rank_products(ahead, shift, router.n_used, resident, costs.c, costs.g, ids, value)
        return ids[: min(n, most)].tolist()

    def ranking(self, layer: int, h: np.ndarray, ahead: np.ndarray | None = None) -> np.ndarray:
        """[T, E]: predicted ranking values of the layer after `layer`."""
        following = self.following[layer]
        router = self.routers[following]
        if self.kind == "linear":
            before = self._step_before(layer, h)
            own, after = before.get(layer), before.get(following)
            if own is not None and after is not None and len(own) == len(h) <= MOST_DECODED:
                return router.adjust(linear_features(h, own, after) @ self.maps[layer])
        if ahead is None:
            return router.ranking(h if self.kind == "next-router" else h + self.mean[layer])
        return router.adjust(ahead if self.kind == "next-router" else ahead + self._moved(layer))

    def _moved(self, layer: int) -> np.ndarray:
        """float32 [E]: W_{l+1} r_l."""
        if layer not in self._shift:
            router = self.routers[self.following[layer]]
            self._shift[layer] = router.weight @ self.mean[layer]
        return self._shift[layer]

    def learn(
        self,
        layer: int,
        h: np.ndarray,
        own: np.ndarray | None = None,
        ahead: np.ndarray | None = None,
    ) -> None:
        """Shows h_l [T, D] of a step, layer by layer: updates the running means of h_l+1 - h_l."""
        if self.kind not in ("residual", "linear"):
            return
        if layer in self._now:  # a new step
            self._before, self._now, self._ahead = self._now, {}, {}
        i = self._preceding.get(layer)
        below = self._now.get(i)
        if below is not None and len(below) == len(h):
            self.seen[i] += len(h)
            _move_mean(self.mean[i], below, h, self.seen[i])
            if own is not None and i in self._shift and i in self._ahead:
                _move_mean(self._shift[i], self._ahead[i], own, self.seen[i])
            else:
                self._shift.pop(i, None)
        self._now[layer] = np.array(h, np.float32)
        if ahead is not None:
            self._ahead[layer] = ahead

    def _step_before(self, layer: int, h: np.ndarray) -> dict[int, np.ndarray]:
        """h of every layer for the tokens before these, whether h was learned already or not."""
        last = self._now.get(layer)
        return self._before if last is None or np.array_equal(last, h) else self._now


def linear_features(h: np.ndarray, before: np.ndarray, after_before: np.ndarray) -> np.ndarray:
    """[T, 3D + 1]: h_l, the previous token's h_l and h_l+1, and 1."""
    return np.concatenate([h, before, after_before, np.ones((len(h), 1), np.float32)], 1)


def fit_linear(x: np.ndarray, target: np.ndarray, ridge: float = 100.0) -> np.ndarray:
    """M [N, E] minimising |x M - target|^2 + ridge |M|^2; x [T, N], target logits [T, E]."""
    x = x.astype(np.float64)
    gram = x.T @ x + ridge * np.eye(x.shape[1])
    return np.linalg.solve(gram, x.T @ target.astype(np.float64)).astype(np.float32)
