"""Placement: hand answers, the exact optimum against brute force and HiGHS, costs of deciding."""

import itertools

import numpy as np
import pytest

from dali_gguf.errors import InputError
from dali_gguf.offload import placement
from dali_gguf.offload.cost import Costs


def costs(c, g, t, r=1.0, h_cpu=0.0, n=70):
    w = np.arange(n, dtype=float)
    tables = [np.array([0.0] + [float(f(x)) for x in w[1:]]) for f in (c, g)]
    return Costs(*tables, t, h_cpu, r)


FLAT = costs(lambda w: 10, lambda w: 1, 6)
SLOWED = costs(lambda w: 10, lambda w: 1, 6, r=0.5)
STEEP = costs(lambda w: 0.2 + w, lambda w: 0.2 + w, 10)


def span(miss, res, c, policy):
    return placement.plan(miss, res, c, policy=policy)[2]


@pytest.mark.parametrize(
    ("miss", "res", "c", "answers"),
    [
        ([1] * 4, [], FLAT, {"threshold": 19, "all-cpu": 40, "all-gpu": 25, "optimal": 19}),
        ([1] * 4, [], SLOWED, {"threshold": 19, "greedy": 26, "optimal": 19}),
        ([8, 1, 1], [], costs(lambda w: 2 * w, lambda w: 1, 5), {"threshold": 6, "optimal": 6}),
        ([1, 1], [1] * 3, costs(lambda w: 8, lambda w: 1, 2), {"threshold": 5, "greedy": 8}),
        ([], [1] * 6, costs(lambda w: 6, lambda w: 4, 50), {"threshold": 16, "all-gpu": 24}),
        ([21, 8, 1], [], STEEP, {"threshold": 30.6, "optimal": 21.2}),
    ],
    ids=[
        "four misses",
        "slowed by the link",
        "one large miss",
        "residents and misses",
        "too many residents",
        "where threshold is not optimal",
    ],
)
def test_hand_answers(miss, res, c, answers):
    assert {p: span(miss, res, c, p) for p in answers} == pytest.approx(answers)


def test_plan_names_the_experts():
    copy, to_cpu, predicted = placement.plan([1, 8, 1], [], costs(lambda w: 2 * w, lambda w: 1, 5))
    assert copy.tolist() == [1] and to_cpu.size == 0 and predicted == 6
    copy, to_cpu, _ = placement.plan([], [3, 1, 2], costs(lambda w: w, lambda w: w, 9), margin=0.0)
    assert sorted(to_cpu.tolist()) == [1, 2]  # 3 | 1 + 2


def test_residents_move_only_for_a_gain():
    c = costs(lambda w: 50, lambda w: 5.5, 50)
    residents = [1] * 10
    assert placement.plan([], residents, c, margin=0.1)[1].size == 0  # 55 stays: 50 gains 9 %
    assert placement.plan([], residents, c, margin=0.05)[1].size == 1


def brute(miss, res, c, link_busy=0.0):
    """Smallest makespan over all assignments, copies in descending order."""
    best, n = np.inf, len(miss) + len(res)
    for bits in itertools.product((0, 1), repeat=n):
        copies = sorted((w for w, b in zip(miss, bits) if b), reverse=True)
        gpu = sum(c.g[w] for w, b in zip(res, bits[len(miss) :]) if b)
        work = sum(c.c[w] for w, b in zip([*miss, *res], bits) if not b)
        link = link_busy
        for w in copies:
            link += c.t
            gpu = max(gpu, link) + c.g[w]
        cpu = 0.0 if work == 0 else c.h_cpu + min(work / c.r, work + link * (1 - c.r))
        best = min(best, max(cpu, gpu))
    return best


SHAPES = {
    "flat": (lambda w: 1 + w, lambda w: 0.3),
    "affine": (lambda w: 1 + w, lambda w: 0.3 + 0.15 * w),
    "convex": (lambda w: max(4, w), lambda w: max(1, 0.2 * w)),
    "steep": (lambda w: 0.2 + w, lambda w: 0.2 + w),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_optimal_is_the_best_of_all_assignments(shape):
    rng = np.random.default_rng(1)
    ratios = []
    for _ in range(60):
        v = rng.choice([1, 1, 2, 3, 5, 8, 13, 34], int(rng.integers(1, 9))).tolist()
        cut, r = int(rng.integers(0, len(v) + 1)), float(rng.choice([1.0, 0.5]))
        c = costs(*SHAPES[shape], float(rng.choice([0.3, 1, 3, 10])), r, float(rng.choice([0, 2])))
        busy = float(rng.choice([0, 4]))
        best = brute(v[:cut], v[cut:], c, busy)
        found = placement.plan(v[:cut], v[cut:], c, busy, "optimal")[2]
        assert found == pytest.approx(best)
        ratios.append(best / placement.plan(v[:cut], v[cut:], c, busy, margin=0.0)[2])
    assert max(ratios) <= 1 + 1e-9
    if shape == "flat":  # proved: exact when g does not depend on w and the CPU is not slowed
        assert np.mean(ratios) > 0.99


def test_optimal_against_highs():
    milp = pytest.importorskip("scipy.optimize").milp
    from scipy.optimize import Bounds, LinearConstraint

    rng = np.random.default_rng(5)
    c = costs(lambda w: max(78, 25 * w), lambda w: 13 + 0.7 * w, 124, n=300)
    for _ in range(6):
        miss = np.sort(rng.integers(1, 40, 12))[::-1]
        res = np.sort(rng.integers(1, 40, 10))[::-1]
        w, n, m = np.r_[miss, res], 22, 12
        rows, low = [np.r_[c.c[w], 1], np.r_[-c.g[w], 1]], [c.c[w].sum(), 0]
        for i in range(m):  # every path of the flow shop bounds the makespan
            row = np.zeros(n + 1)
            row[: i + 1] -= c.t
            row[i:m] -= c.g[miss[i:]]
            row[n] = 1
            rows.append(row)
            low.append(0)
        answer = milp(
            np.r_[np.zeros(n), 1],
            integrality=np.r_[np.ones(n), 0],
            constraints=LinearConstraint(np.array(rows), low, np.inf),
            bounds=Bounds(np.zeros(n + 1), np.r_[np.ones(n), np.inf]),
            options={"mip_rel_gap": 1e-7, "time_limit": 20},
        )
        assert span(miss, res, c, "optimal") == pytest.approx(answer.x[-1], rel=1e-5)


def test_threshold_on_realistic_costs():
    """At most 2 % from the optimum on every instance of a slow link and a compute-bound CPU."""
    rng = np.random.default_rng(2)
    c = costs(
        lambda w: max(78, 25 * w), lambda w: max(13, 2 + 0.6 * w), 124, r=0.47, h_cpu=25, n=600
    )
    ratios = {"threshold": [], "greedy": []}
    for _ in range(150):
        tokens = int(2 ** rng.uniform(0, 9))
        workload = np.bincount((rng.random(8 * tokens) ** 2 * 128).astype(int), minlength=128)
        resident = rng.random(128) < 0.4
        miss, res = (workload[(workload > 0) & here] for here in (~resident, resident))
        best = span(miss, res, c, "optimal")
        for policy, found in ratios.items():
            found.append(best / placement.plan(miss, res, c, 0.0, policy, 0.0)[2])
    assert min(ratios["threshold"]) >= 0.98 and np.mean(ratios["threshold"]) >= 0.995
    assert np.mean(ratios["greedy"]) < np.mean(ratios["threshold"])


@pytest.mark.parametrize("policy", placement.POLICIES)
def test_a_plan_uses_every_active_expert_once(policy):
    rng = np.random.default_rng(3)
    planner = placement.Planner(policy, 64)
    for tokens in (1, 3, 40, 600):
        workload = np.bincount(rng.integers(0, 64, 4 * tokens), minlength=64)
        resident = (rng.random(64) < 0.5).astype(np.uint8)
        plan = planner.plan(workload, resident, SLOWED)
        ids = np.concatenate([plan.cpu, plan.gpu, plan.copy])
        assert sorted(ids.tolist()) == np.flatnonzero(workload).tolist()
        assert resident[plan.gpu].all() and not resident[plan.copy].any()
        w = workload[plan.copy]
        assert (np.diff(np.minimum(w, 69)) <= 0).all()  # copied in descending order


def test_planner_equals_plan():
    rng = np.random.default_rng(4)
    planner = placement.Planner("threshold", 32)
    for _ in range(50):
        workload = np.bincount(rng.integers(0, 32, 60), minlength=32)
        resident = (rng.random(32) < 0.4).astype(np.uint8)
        active = np.flatnonzero(workload)
        miss, res = active[resident[active] == 0], active[resident[active] == 1]
        copy, away, predicted = placement.plan(workload[miss], workload[res], SLOWED, 3.0)
        plan = planner.plan(workload, resident, SLOWED, 3.0)
        assert plan.predicted_us == pytest.approx(predicted)
        assert sorted(workload[plan.copy]) == sorted(workload[miss[copy]])
        assert len(plan.gpu) == len(res) - len(away)


def test_starting_residents():
    counts = np.array([[5, 1, 9, 2], [0, 7, 0, 3]])
    assert placement.resident_hot(counts, 3).tolist() == [[1, 0, 1, 0], [0, 1, 0, 0]]
    assert placement.resident_layers(3, 4, 9).tolist() == [[0] * 4, [1] * 4, [1] * 4]
    assert placement.resident_hot(counts, 99).all()


def test_unknown_policy():
    with pytest.raises(InputError, match="'best' is unknown: choose one of threshold"):
        placement.Planner("best", 8)


THREE = Costs(FLAT.c, FLAT.g, 6.0, t_disk=20.0)  # CPU 10, GPU 1, copy 6, read 20
SLOW_COPY = Costs(FLAT.c, FLAT.g, 15.0, t_disk=20.0)
FAST_DISK = Costs(FLAT.c, FLAT.g, 6.0, t_disk=2.0)


@pytest.mark.parametrize(
    ("ram", "disk", "res", "c", "copied", "us"),
    [
        ([], [1], [], THREE, "d0", 27),  # read 20 + copy 6 + 1, on the CPU 30
        ([], [1], [], SLOW_COPY, "", 30),  # read 20 + 10, on the GPU 36
        ([1], [], [], SLOW_COPY, "", 10),
        ([1], [], [], THREE, "r0", 7),
        ([1], [1], [], SLOW_COPY, "", 30),  # the CPU computes the one in RAM during the read
        ([1], [1], [], THREE, "d0", 27),  # the GPU takes what arrives, the CPU what is there
        ([], [1, 1], [], THREE, "d0 d1", 47),  # 2 reads, then 6 + 1; the disk decides
        ([], [1, 1], [], FAST_DISK, "d0", 14),  # CPU: read 4 + 10; GPU: read 2 + 6 + 1
        ([], [1], [1] * 30, THREE, "", 30),  # a busy GPU leaves it to the CPU
    ],
)
def test_hand_answers_with_the_disk_as_third_source(ram, disk, res, c, copied, us):
    workload = np.array([*ram, *disk, *res])
    names = [f"r{i}" for i in range(len(ram))] + [f"d{i}" for i in range(len(disk))]
    at = np.arange(len(workload))
    resident = (at >= len(names)).astype(np.uint8)
    plan = placement.Planner("threshold", len(workload)).plan(
        workload, resident, c, margin=0.9, in_ram=at < len(ram)
    )
    assert " ".join(names[e] for e in plan.copy) == copied and plan.predicted_us == us
    assert len(plan.cpu) + len(plan.copy) == len(names)


def three_places(to_gpu, where, w, c):
    """Finish of a layer, step by step: where is G, R or D of each expert, largest w first."""
    order = sorted(range(len(w)), key=lambda i: ("GRD".index(where[i]), -w[i]))
    reads = [i for i in order if where[i] == "D" and to_gpu[i]]
    reads += [i for i in order if where[i] == "D" and not to_gpu[i]]
    there = {i: c.t_disk * (n + 1) for n, i in enumerate(reads)}
    gpu = link = cpu = 0.0
    for i in order:
        if not to_gpu[i]:
            cpu = max(cpu, there.get(i, 0.0)) + c.c[w[i]]
            continue
        if where[i] != "G":
            link = max(link, there.get(i, 0.0)) + c.t
        gpu = max(gpu, link if where[i] != "G" else 0.0) + c.g[w[i]]
    return max(cpu, gpu)


@pytest.mark.parametrize("policy", ["threshold", "greedy", "balance", "all-gpu", "static-hot"])
def test_makespans_with_the_disk_are_those_of_a_step_by_step_count(policy):
    rng = np.random.default_rng(7)
    ratios = []
    for _ in range(80):
        n = int(rng.integers(1, 8))
        w = rng.choice([1, 1, 2, 3, 5, 8], n)
        where = "".join(rng.choice(list("GRD"), n))
        shape = SHAPES[str(rng.choice(list(SHAPES)))]
        c = costs(*shape, float(rng.choice([0.3, 1, 3])))
        c = Costs(c.c, c.g, c.t, t_disk=float(rng.choice([0.5, 2, 6])))
        here = np.array([at == "G" for at in where], np.uint8)
        in_ram = np.array([at == "R" for at in where])
        plan = placement.Planner(policy, n).plan(w, here, c, margin=0.0, in_ram=in_ram)
        to_gpu = [e not in plan.cpu for e in range(n)]
        assert plan.predicted_us == pytest.approx(three_places(to_gpu, where, w, c))
        assert sorted([*plan.cpu, *plan.gpu, *plan.copy]) == list(range(n))
        best = min(
            three_places(bits, where, w, c) for bits in itertools.product((0, 1), repeat=n)
        )
        ratios.append(best / plan.predicted_us)
    if policy == "threshold":
        assert min(ratios) > 0.8 and np.mean(ratios) > 0.99


def test_without_copies_the_optimum_still_moves_residents():
    c = costs(lambda w: 10, lambda w: 50, 5)
    w, here = np.array([1, 1, 2]), np.ones(3, np.uint8)
    planner = placement.Planner("optimal", 3)
    plans = [planner.plan(w, here, c, copies=copies) for copies in (True, False)]
    assert len(plans[0].cpu) > 0 and plans[0].predicted_us == plans[1].predicted_us
    missing = planner.plan(w, np.array([1, 0, 1], np.uint8), c, copies=False)
    assert missing.cpu.tolist() == [1] and not missing.copy.size
