"""Who computes each expert of a layer: the CPU, the GPU from its memory, or the GPU after a copy.

`plan` answers one problem given as workloads; a `Planner` answers a layer's step in a few
microseconds. threshold (default): a scan over how many misses are copied and how many residents go
to the CPU. greedy: the paper's. optimal: exact, slow. balance: misses split by bandwidth.
static-layers, static-hot: residents on the GPU, the rest on the CPU (they differ in what is made
resident, see `resident_layers` and `resident_hot`). all-cpu, all-gpu: everything on one side.
"""

from typing import NamedTuple

import numpy as np

from dali_gguf.errors import InputError
from dali_gguf.offload import optimal, placement_disk
from dali_gguf.offload import placement_rules as rules
from dali_gguf.offload.cost import Costs

POLICIES = (
    "threshold",
    "greedy",
    "optimal",
    "balance",
    "static-layers",
    "static-hot",
    "all-cpu",
    "all-gpu",
)
MARGIN = 0.1


def policy_code(name: str) -> int:
    """Number of a policy in placement_rules. InputError for an unknown name."""
    if name not in POLICIES:
        raise InputError(f"placement {name!r} is unknown: choose one of {', '.join(POLICIES)}")
    return POLICIES.index(name)


def plan(
    w_miss,
    w_res,
    costs: Costs,
    link_busy: float = 0.0,
    policy: str = "threshold",
    margin: float = MARGIN,
) -> tuple[np.ndarray, np.ndarray, float]:
    """(copy, res_to_cpu, predicted_us) for the workloads w_miss [n], w_res [m] of one layer.

    copy: indices into w_miss in the order of copying; the other misses go to the CPU. res_to_cpu:
    indices into w_res; the other residents stay on the GPU. link_busy: us until the link is free.
    margin: threshold moves residents only for a predicted gain above this share."""
    code, top = policy_code(policy), costs.c.size - 1
    order = [np.argsort(-np.asarray(w, np.int64), kind="stable") for w in (w_miss, w_res)]
    miss = np.minimum(np.asarray(w_miss, np.int64)[order[0]], top)
    res = np.minimum(np.asarray(w_res, np.int64)[order[1]], top)
    if code == rules.OPTIMAL:
        to_gpu, span = optimal.solve(miss, res, costs, link_busy)
    else:
        to_gpu = np.empty(miss.size + res.size, np.int64)
        span = rules.assign(
            code,
            miss,
            miss.size,
            res,
            res.size,
            costs.c,
            costs.g,
            costs.t,
            link_busy,
            costs.r,
            costs.h_cpu,
            margin,
            to_gpu,
        )
    to_gpu = to_gpu.astype(bool)
    return order[0][to_gpu[: miss.size]], order[1][~to_gpu[miss.size :]], float(span)


class LayerPlan(NamedTuple):  # a dataclass would take a microsecond more to make
    """Expert ids of one layer's step (int64, largest workload first) and the predicted makespan.
    copy is in the order of copying. The arrays are the planner's own, valid until its next plan."""

    cpu: np.ndarray
    gpu: np.ndarray
    copy: np.ndarray
    predicted_us: float


class Planner:
    """Plans a layer's step from its workload and the residents, without allocating."""

    def __init__(self, policy: str, n_expert: int):
        self.code = policy_code(policy)
        self.scratch = np.empty((9, n_expert), np.int64)  # of placement_rules.plan_layer

    def plan(
        self,
        workload: np.ndarray,
        resident: np.ndarray,
        costs: Costs,
        link_busy: float = 0.0,
        margin: float = MARGIN,
        in_ram: np.ndarray | None = None,
        copies: bool = True,
    ) -> LayerPlan:
        """workload int64 [E] tokens per expert, resident uint8 [E]. in_ram bool [E]: misses that
        are not in RAM are read from disk first (None: all are; `optimal` plans as if). copies
        False: what is missing is computed by the CPU, as static-hot does."""
        if self.code == rules.OPTIMAL and (copies or not (workload > 0)[resident == 0].any()):
            return self._optimal(workload, resident, costs, link_busy)
        ids, fixed = self.scratch, (link_busy, costs.r, costs.h_cpu, margin, self.scratch)
        if in_ram is None:
            a, b, k, span = rules.plan_layer(
                self.code, copies, workload, resident, costs.c, costs.g, costs.t, *fixed
            )
        else:
            here = workload, resident, in_ram
            a, b, k, span = placement_disk.plan_layer(
                self.code, copies, *here, costs.c, costs.g, costs.t, costs.t_disk, *fixed
            )
        return LayerPlan(ids[0, :a], ids[1, :b], ids[2, :k], span)

    def _optimal(self, workload, resident, costs, link_busy) -> LayerPlan:
        active, here = np.flatnonzero(workload), resident.astype(bool)
        miss, res = active[~here[active]], active[here[active]]
        copy, away, span = plan(workload[miss], workload[res], costs, link_busy, "optimal")
        cpu = np.concatenate([np.delete(miss, copy), res[away]])
        return LayerPlan(cpu, np.delete(res, away), miss[copy], span)


def resident_layers(n_layer: int, n_expert: int, slots: int) -> np.ndarray:
    """uint8 [L, E]: whole layers resident, the last ones (llama.cpp's --n-cpu-moe keeps the first
    on the CPU), as many as `slots` experts hold."""
    resident = np.zeros((n_layer, n_expert), np.uint8)
    whole = min(slots // n_expert, n_layer)
    resident[n_layer - whole :] = 1
    return resident


def resident_hot(counts: np.ndarray, slots: int) -> np.ndarray:
    """uint8 [L, E]: the most used experts of each layer by counts [L, E]. The same number of slots
    a layer (the remainder goes to the first layers); ties by id."""
    n_layer, n_expert = counts.shape
    resident = np.zeros((n_layer, n_expert), np.uint8)
    for layer in range(n_layer):
        share = min(slots // n_layer + (layer < slots % n_layer), n_expert)
        resident[layer, np.argsort(-counts[layer], kind="stable")[:share]] = 1
    return resident
