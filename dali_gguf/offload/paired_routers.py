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
        self._known: tuple[int, np.ndarray] | None = None

    def product(self, layer: int, h: Array) -> Array:
        """[T, 2E] of both routers, on the device; [T, E] in the last layer."""
        return self.device.matmul(h, self.pairs[layer])[0]

    def keep(self, layer: int, product: np.ndarray | None) -> None:
        """The product, read back, is what take will return; None: the layer has none."""
        self._known = None if product is None else (layer, product)

    def route(self, layer: int, product: np.ndarray, router: Router) -> Routing:
        """As Scheduler.route, from the product."""
        n, bias = router.weight.tensor.rows, self.biases[layer]
        logits = product[:, :n] if bias is None else product[:, :n] + bias
        return self.device.route_host(logits, router.n_used, router.rule)

    def take(self, layer: int, n_expert: int) -> Products | None:
        """Of the layer that was routed last; None if that was another one, or they are taken."""
        known, self._known = self._known, None
        if known is None or known[0] != layer:
            return None
        product = known[1]
        ahead = product[:, n_expert:] if product.shape[1] > n_expert else None
        return Products(product[:, :n_expert], ahead)
