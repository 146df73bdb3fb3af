"""The router of a layer and that of the next one as one product: routing and prediction in one
launch and one read-back.

All routers of a model lie one after another in the device's memory, so that two neighbours are one
weight [2E, D] without being held twice.
"""

from typing import NamedTuple

import numpy as np

from dali_gguf.device import Array
from dali_gguf.offload.torch_device import TorchDevice
from dali_gguf.offload.torch_weight import TorchWeight
from dali_gguf.router import Router
from dali_gguf.routing import Routing


class Products(NamedTuple):
    """float32 on the host: own [T, E], ahead [T, E] of the next layer's router; the last layer has
    no ahead."""

    own: np.ndarray
    ahead: np.ndarray | None

    def last(self, n: int) -> tuple[np.ndarray, np.ndarray | None]:
        """own and ahead of the last n tokens."""
        ahead = None if self.ahead is None else np.ascontiguousarray(self.ahead[-n:])
        return np.ascontiguousarray(self.own[-n:]), ahead


class PairedRouters:
    """pairs: layer -> its router [E, D] and, but for the last layer, the next one's, as one weight.
    biases: layer -> float32 [E] on the host or None."""

    def __init__(
        self,
        device: TorchDevice,
        pairs: dict[int, TorchWeight],
        biases: dict[int, np.ndarray | None],
    ):
        self.device, self.pairs, self.biases = device, pairs, biases
        self._known: tuple[int, Products] | None = None

    def route(self, layer: int, h: Array, router: Router) -> Routing:
        """As Scheduler.route; the products are kept until they are taken."""
        (both,) = self.device.matmul(h, self.pairs[layer])
        both, n = self.device.to_host(both), router.weight.tensor.rows
        own, bias = both[:, :n], self.biases[layer]
        self._known = layer, Products(own, both[:, n:] if both.shape[1] > n else None)
        logits = own if bias is None else own + bias
        return self.device.route_host(logits, router.n_used, router.rule)

    def take(self, layer: int) -> Products | None:
        """Of the layer that was routed last; None if that was another one, or they are taken."""
        known, self._known = self._known, None
        return known[1] if known is not None and known[0] == layer else None
