"""Hand-built layers and a slow CPU device for tests of the hybrid scheduler."""

from dataclasses import dataclass, field

import numpy as np
from gguf import GGMLQuantizationType as Q

from dali_gguf.router import RouterRule, route
from dali_gguf.routing import LayerExperts, Routing
from tests.numpy_device import NumpyDevice
from tests.quant_blocks import random_tensor

D = 256


@dataclass
class NumpyStep:
    x: np.ndarray
    routing: Routing
    experts: LayerExperts
    y: np.ndarray
    done: list[int] = field(default_factory=list)


class NumpyCpu(NumpyDevice):
    """The three-part form of moe that schedulers use."""

    def moe_begin(self, x, routing, experts):
        return NumpyStep(x, routing, experts, np.zeros_like(x))

    def moe_run(self, step, ids, addresses=None):
        for e in ids.tolist():
            t, slot = np.nonzero(step.routing.expert_ids == e)
            y = self.expert(step.x[t], step.experts, e)
            step.y[t] += step.routing.weights[t, slot, None] * y
            step.done.append(e)

    def moe_end(self, step):
        return step.y


def layers_of(n_layer=3, n_expert=8, kinds=(Q.Q4_0, Q.Q4_0, Q.Q8_0)) -> dict[int, LayerExperts]:
    """Layers 1, 2, ..: the first is dense in many models. The last one has larger experts."""
    out = {}
    for i in range(n_layer):
        types = kinds if i < n_layer - 1 else (Q.Q8_0,) * 3
        stacks = [
            tuple(
                random_tensor(k, (D, D), seed=100 * i + 10 * e + r, size=0.05)
                for e in range(n_expert)
            )
            for r, k in enumerate(types)
        ]
        out[i + 1] = LayerExperts(i + 1, *stacks)
    return out


def router_weights(n_layer=3, n_expert=8) -> dict[int, np.ndarray]:
    rng = np.random.default_rng(5)
    return {i + 1: rng.normal(size=(n_expert, D)).astype(np.float32) for i in range(n_layer)}


def routing_for(h: np.ndarray, weight: np.ndarray, n_used=2) -> Routing:
    return route(h @ weight.T, n_used, RouterRule(normalize=True))
