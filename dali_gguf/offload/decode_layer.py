"""A layer of a decode step of one token: routed, planned and launched in one compiled call.

Between the router's answer and the first expert that the GPU computes it has nothing to do, so
what lies between is not left to Python. Everything else (copies, the CPU's part, the cache) follows
from what was decided, while the GPU works.
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from torch import Tensor

from dali_gguf.kernels.route import NO_BIAS, SCORING, route_rows
from dali_gguf.offload.cost import Costs
from dali_gguf.offload.cuda_launch import check, is_plain
from dali_gguf.offload.expert_launch import OneToken, launch_one_token
from dali_gguf.offload.pair_table import PairTable
from dali_gguf.offload.placement import LayerPlan, Planner
from dali_gguf.offload.placement_rules import OPTIMAL, plan_layer
from dali_gguf.offload.torch_device import TorchDevice
from dali_gguf.router import Router, RouterRule
from dali_gguf.routing import LayerExperts, Routing

TURNS = 4  # layers after which a Routing's arrays are written again


@njit(cache=True)
def _decide(product, add, scoring, normalize, scale, bias, ids, weights, workload,
            code, copies, here, c, g, t, busy, r, h_cpu, margin, scratch,
            fixed, event, up, down, total, stream, x, base, table, out, offsets, job_of, buffer):
    """route_rows, plan_layer, launch_one_token for the residents among the experts. product
    [1, E or more]: logits first; add [E] to them, or empty. Returns what plan_layer returns and the
    driver's answer."""
    logits = product[:, : workload.size]
    if add.size:
        logits = logits + add
    route_rows(logits, scoring, normalize, scale, bias, ids, weights, workload)
    plan = plan_layer(code, copies, workload, here, c, g, t, busy, r, h_cpu, margin, scratch)
    answer = np.int32(0)
    if plan[1]:
        experts = scratch[1, : plan[1]]
        answer = launch_one_token(fixed, event, up, down, total, stream, x, base, table, out, ids,
                                  weights, experts, offsets, job_of, buffer)  # fmt: skip
    return *plan, answer


class Decided(NamedTuple):
    """y [1, D]: what the residents of plan.gpu add, under way on the device; None without any."""

    routing: Routing
    plan: LayerPlan
    y: Tensor | None


class Situation(NamedTuple):
    """What a plan depends on besides the routing: as Planner.plan's arguments."""

    here: np.ndarray
    costs: Costs
    busy_us: float
    margin: float
    copies: bool


class Routings:
    """Memory for decisions of one token: a Routing is valid while the next layers are decided."""

    def __init__(self, n_expert: int, n_used: int):
        shapes = ((1, n_used), np.int32), ((1, n_used), np.float32), (n_expert, np.int64)
        self._all = [Routing(*(np.empty(*shape) for shape in shapes)) for _ in range(TURNS)]
        self._turn = 0

    def next(self) -> Routing:
        self._turn = (self._turn + 1) % TURNS
        return self._all[self._turn]


class DecodeLayer:
    """add float32 [E] or None: to the router's products. routings: of all layers."""

    def __init__(self, rule: RouterRule, add: np.ndarray | None, launch: OneToken,
                 planner: Planner, routings: Routings):
        bias = NO_BIAS if rule.bias is None else rule.bias
        add = NO_BIAS if add is None else add
        self._rule = add, SCORING[rule.scoring], rule.normalize, rule.scale, bias
        self._launch, self._planner, self._routings = launch, planner, routings

    def __call__(self, product: np.ndarray, x: Tensor, now: Situation, base: Tensor,
                 offsets: np.ndarray, table: PairTable, event: int) -> Decided:
        """product float32 [1, E or more]: the router's for x [1, D], which is contiguous and
        aligned. base: the device's slots; offsets int64 [E]: of this layer's experts in it. event:
        recorded before the first kernel; 0: none."""
        routing, launch, planner = self._routings.next(), self._launch, self._planner
        out, costs = launch.result(x), now.costs
        a, b, k, span, answer = _decide(
            product, *self._rule, *routing,
            planner.code, now.copies, now.here, costs.c, costs.g, costs.t, now.busy_us, costs.r,
            costs.h_cpu, now.margin, planner.scratch,
            launch.fixed, event, *launch.launches, launch.stream(), x.data_ptr(), base.data_ptr(),
            table.address, out.data_ptr(), offsets, table.job_of, table.next_buffer(),
        )  # fmt: skip
        check(answer)
        ids = planner.scratch
        plan = LayerPlan(ids[0, :a], ids[1, :b], ids[2, :k], span)
        return Decided(routing, plan, out if b else None)


class DecodeLayers:
    """Those layers that can be decided in one call. biases: layer -> float32 [E] or None, of
    routers whose products are read back without it (PairedRouters)."""

    def __init__(self, device: TorchDevice, experts: dict[int, LayerExperts], planner: Planner,
                 biases: dict[int, np.ndarray | None]):
        self.device, self.experts, self.planner, self.biases = device, experts, planner, biases
        self._routings: Routings | None = None
        self._layers: dict[tuple[int, bool], DecodeLayer] = {}

    def find(self, layer: int, x: Tensor, router: Router, paired: bool) -> DecodeLayer | None:
        """For x [1, D]. None: not compiled, or not launched yet. paired: the product will be that
        of PairedRouters."""
        found = self._layers.get((layer, paired))
        if found is None:
            found = self._make(layer, router, paired)
        return found if found is not None and is_plain(x) else None

    def _make(self, layer: int, router: Router, paired: bool) -> DecodeLayer | None:
        kept, rule = self.device.experts(self.experts[layer]).one_token, router.rule
        launch = kept.get(router.n_used)
        if launch is None or rule.n_group > 1 or self.planner.code == OPTIMAL:
            return None
        if self._routings is None:
            self._routings = Routings(self.experts[layer].n_expert, router.n_used)
        add = self.biases[layer] if paired else None
        made = DecodeLayer(rule, add, launch, self.planner, self._routings)
        self._layers[layer, paired] = made
        return made
