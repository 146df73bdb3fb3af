"""How far apart the CPU and the GPU with its link finish in layers where both are used, for each
hardware profile, and how far apart the optimum leaves them. Simulated.

Balance of a layer = finish of the earlier side / finish of the later one. Experts are not divided,
so with few of them in a layer even the placement with the shortest makespan leaves a gap: that
placement's balance is the bound to compare with.
"""

from collections.abc import Callable, Iterable

import numpy as np

from dali_gguf.offload import hardware_profile, placement
from dali_gguf.offload import placement_rules as rules
from dali_gguf.offload.cost import Costs
from dali_gguf.offload.hardware_profile import Hardware, Shape
from dali_gguf.offload.simulate import Result

GOAL = 0.9
Instance = tuple[np.ndarray, np.ndarray]  # workload int64 [E], resident uint8 [E]


def of_plan(miss: np.ndarray, res: np.ndarray, costs: Costs, policy: str) -> float | None:
    """Balance of a policy's placement of misses and residents, workloads int64 [n], [m], on a free
    link. None: one side alone is used."""
    copy, away, _ = placement.plan(miss, res, costs, policy=policy, margin=0.0)
    top, stay = costs.c.size - 1, np.delete(res, away)
    on_cpu = np.concatenate([np.delete(miss, copy), res[away]])
    if not on_cpu.size or not copy.size + stay.size:
        return None
    work = float(costs.c[np.minimum(on_cpu, top)].sum())
    cpu = rules.cpu_finish(work, copy.size * costs.t, costs.r, costs.h_cpu)
    kept = float(costs.g[np.minimum(stay, top)].sum())
    copied = np.minimum(miss[copy], top)
    gpu = rules.gpu_finish(kept, copied, copied.size, costs.g, costs.t, 0.0)
    return min(cpu, gpu) / max(cpu, gpu)


def of_policy(instances: Iterable[Instance], costs: Costs, policy: str) -> float:
    """Mean balance over the instances in which both sides are used; 1 if there is none."""
    found = []
    for workload, resident in instances:
        active = np.flatnonzero(workload)
        here = resident[active] != 0
        balance = of_plan(workload[active[~here]], workload[active[here]], costs, policy)
        if balance is not None:
            found.append(balance)
    return float(np.mean(found)) if found else 1.0


def figures(
    machine: Hardware,
    model: Shape,
    instances: list[Instance],
    decode: Callable[[Hardware], Result],
    prefill: Callable[[Hardware], Result],
) -> dict:
    """For machine, and under `balance_profiles` for every profile. instances: decode steps with
    the residents they find; decode, prefill: simulated runs of the default policies."""
    machines = {name: hardware_profile.hardware(name) for name in hardware_profile.names()}
    machines[machine.name] = machine
    rows = [_row(m, model, instances, decode(m), prefill(m)) for m in machines.values()]
    (own,) = (row for row in rows if row["profile"] == machine.name)
    return {k: v for k, v in own.items() if k != "profile"} | {"balance_profiles": rows}


def _row(
    machine: Hardware, model: Shape, instances: list[Instance], decode: Result, prefill: Result
) -> dict:
    costs = hardware_profile.costs(machine, model, 512)
    return {
        "profile": machine.name,
        "balance_decode": 1 - decode.imbalance,
        "balance_prefill": 1 - prefill.imbalance,
        "balance_decode_plans": of_policy(instances, costs, "threshold"),
        "balance_decode_plans_optimal": of_policy(instances, costs, "optimal"),
    }


def lines(found: dict) -> list[str]:
    """What a reader needs to judge the two figures."""
    out = [
        "balance, decode / prefill by profile: "
        + ", ".join(
            f"{r['profile']} {r['balance_decode']:.2f} / {r['balance_prefill']:.2f}"
            for r in found["balance_profiles"]
        ),
        "balance of single decode steps, threshold's plan / the plan with the shortest makespan: "
        + ", ".join(
            f"{r['profile']} {r['balance_decode_plans']:.2f} / "
            f"{r['balance_decode_plans_optimal']:.2f}"
            for r in found["balance_profiles"]
        ),
    ]
    if found["balance_decode"] < GOAL:
        out.append(
            "decode is below the goal because whole experts are placed: one copy or one expert on "
            "the CPU more would end later than the side that waits now"
        )
    return out
