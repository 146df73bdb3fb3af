"""Who computes a layer's experts, and where their bytes lie. The plain way: all on one device.

Schedulers with more than one place for an expert have the same `moe` and take its place.
"""

from collections.abc import Sequence

from dali_gguf.device import Array, Device
from dali_gguf.offload.arena_stats import ArenaStats
from dali_gguf.router import Router, RouterRule
from dali_gguf.routing import LayerExperts, Routing


class Scheduler:
    """experts and routers by layer number (dense layers have none).

    routers: layer -> (handle of the router matrix [E, D], its rule), for predictions.
    """

    recordable = True  # moe is made of the device's operations: a program may repeat a step
    recent_us: Sequence[float] = ()  # of the last decode steps, where another split may be faster

    def __init__(self, device: Device, experts: dict[int, LayerExperts], routers: dict[int, tuple]):
        self.device = device
        self.experts = experts
        self.routers = routers

    def route(self, layer: int, h: Array, router: Router) -> Routing:
        """Which experts of the layer h [T, D] needs."""
        return self.device.route(self.logits(h, router), router.n_used, router.rule)

    def logits(self, h: Array, router: Router) -> Array:
        """[T, E]: what experts are chosen by."""
        (logits,) = self.device.matmul(h, router.weight)
        return logits if router.bias is None else self.device.add(logits, router.bias)

    def moe(self, layer: int, h: Array, routing: Routing) -> Array:
        """The experts' part of a layer. h [T, D] is the router's input too. Returns [T, D]."""
        return self.device.moe(h, routing, self.experts[layer])

    def disk_stats(self) -> ArenaStats | None:
        """What was read from disk so far; None: all experts are in memory."""
        return None

    def line(self) -> str:
        """More for a run's closing line; empty: nothing to tell."""
        return ""

    def figures(self) -> dict:
        """More for --stats-json."""
        return {}

    def table(self) -> str:
        """More for --stats, lines by layer."""
        return ""

    def rule(self, layer: int) -> RouterRule:
        return self.routers[layer][1]

    def close(self) -> None:
        """Nothing is held beyond the device's own memory."""
