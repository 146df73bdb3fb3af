"""What will the next layers need? The paper's residual predictor, one and two layers ahead, with a
measured confidence for each place in the ranking.

The router's input h changes slowly from layer to layer: layer l + d is predicted to choose the best
of W_{l+d} (h_l + r), r being the running mean of h_{l+d} - h_l. A guess costs disk time, so it is
given only where guesses of its layer, distance and rank have come true often enough.
"""

from dataclasses import dataclass, field

import numpy as np

from dali_gguf.device import Array, Device
from dali_gguf.router import RouterRule

DEPTH = 1  # layers ahead; a second one costs a product and gained nothing (measured)
CONFIDENCE = 0.8  # guesses below cost more disk time than they save (measured)
ENOUGH = 12  # outcomes before a rank is trusted
MEMORY = 64  # outcomes that a confidence looks back on
REFRESH = 32  # steps between two updates of W r


@dataclass(slots=True, eq=False)
class Link:
    """From layer `source` to layer `target`. mean: of their inputs' difference, [D]; shift: W mean
    [E].

    right, tried: float64 [A] by rank; guessed: ids [T, A] of the step under way.
    """

    source: int
    target: int
    mean: np.ndarray
    right: np.ndarray
    tried: np.ndarray
    shift: Array = 0.0
    seen: int = 0
    guessed: np.ndarray | None = field(default=None)

    def confident(self) -> np.ndarray:
        """bool [A]: ranks that can be trusted."""
        return (self.tried >= ENOUGH) & (self.right >= CONFIDENCE * self.tried)

    def judge(self, expert_ids: np.ndarray) -> None:
        """The target's experts [T, A] are known: were the guesses right, token by token?"""
        if self.guessed is None or len(self.guessed) != len(expert_ids):
            return
        came_true = (self.guessed[:, :, None] == expert_ids[:, None, :]).any(2)  # [T, A]
        keep = np.minimum(1.0, MEMORY / np.maximum(self.tried, 1))
        self.right = self.right * keep + came_true.sum(0)
        self.tried = self.tried * keep + len(came_true)
        self.guessed = None

    def learn(self, before: np.ndarray, after: np.ndarray) -> None:
        """Inputs [T, D] of the two layers for the same tokens."""
        self.seen += len(after)
        self.mean += ((after - before).sum(0) - len(after) * self.mean) / min(self.seen, 4096)


class LookAhead:
    """routers: layer -> (handle of the router on the device, its rule)."""

    def __init__(self, device: Device, routers: dict[int, tuple], n_used: int, n_embd: int,
                 depth: int = DEPTH):
        self.device, self.routers, self.n_used = device, routers, n_used
        layers = sorted(routers)
        self.links: dict[int, list[Link]] = {layer: [] for layer in layers}
        self._to: dict[int, list[Link]] = {layer: [] for layer in layers}
        for i, layer in enumerate(layers):
            for target in layers[i + 1 : i + 1 + depth]:
                mean = np.zeros(n_embd, np.float32)
                link = Link(layer, target, mean, np.zeros(n_used), np.zeros(n_used))
                self.links[layer].append(link)
                self._to[target].append(link)
        self._inputs: dict[int, np.ndarray] = {}
        self._step = 0

    def start_from(self, means: np.ndarray, weight: int = 256) -> None:
        """Means [L - 1, D] of earlier runs, worth `weight` tokens."""
        steps = np.concatenate([np.zeros_like(means[:1]), np.cumsum(means, axis=0)])
        row = {layer: i for i, layer in enumerate(sorted(self.links))}
        for link in (link for links in self.links.values() for link in links):
            link.mean, link.seen = steps[row[link.target]] - steps[row[link.source]], weight

    def means(self) -> np.ndarray:
        """[L - 1, D]: of each layer to the next."""
        return np.stack([self.links[layer][0].mean for layer in sorted(self.links)[:-1]])

    def targets(self, layer: int) -> list:
        """Routers of the layers within reach, the nearest first."""
        return [self.routers[link.target][0] for link in self.links[layer]]

    def guess(
        self, layer: int, h: Array, products: tuple[Array, ...] | None = None
    ) -> list[tuple[int, np.ndarray]]:
        """(layer, ids to fetch) for the layers within reach, the nearest first. h [T, D];
        products: of h with each of targets(layer), [T, E], if they are known."""
        links = self.links[layer]
        if not links:
            return []
        if products is None:
            products = self.device.matmul(h, *self.targets(layer))
        for link, logits in zip(links, products):
            if self._step % REFRESH == 0 and link.seen:
                link.shift = self.device.matmul(link.mean[None], self.routers[link.target][0])[0]
            link.guessed = self._chosen(logits + link.shift, self.routers[link.target][1])
        sure = [(k.target, np.unique(k.guessed[:, k.confident()])) for k in links]
        return [(target, ids) for target, ids in sure if len(ids)]

    def _chosen(self, logits: np.ndarray, rule: RouterRule) -> np.ndarray:
        """[T, A], the best first. Scoring does not change the order, so the usual rules need
        none."""
        if rule.n_group > 1 or rule.bias is not None:
            return self.device.route(logits, self.n_used, rule).expert_ids
        return np.argsort(-logits, axis=1)[:, : self.n_used]

    def observe(self, layer: int, h: np.ndarray, expert_ids: np.ndarray) -> None:
        """Shows each layer's input [T, D] and choice [T, A], in order, before guess() of that
        layer."""
        if not self._to[layer]:  # the first layer: a new step
            self._inputs.clear()
            self._step += 1
        for link in self._to[layer]:
            link.judge(expert_ids)
            before = self._inputs.get(link.source)
            if before is not None and len(before) == len(h):
                link.learn(before, h)
        self._inputs[layer] = h
