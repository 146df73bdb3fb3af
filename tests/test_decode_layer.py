"""A layer of a decode step, decided and launched at once, is what its parts would make of it."""

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.test_cuda_launch import (  # noqa: E402
    COMBINE,
    N_EXPERT,
    USED,
    VECTOR,
    WIDTH,
    launched,
    layer_experts,
    notes,  # noqa: F401  called in the process of a check
    routing_of,
    run_apart,
)


@pytest.mark.parametrize("check", ["decided_at_once", "the_same_tokens"])
def test_decisions(check, tmp_path):
    run_apart("test_decode_layer", check, tmp_path)


def decided_at_once(notes):
    """Routing, plan, table and launches are those of the parts that are there for any step."""
    from dali_gguf.kernels.route import route
    from dali_gguf.offload.cost import CostModel
    from dali_gguf.offload.decode_layer import DecodeLayer, Routings, Situation
    from dali_gguf.offload.placement import Planner
    from dali_gguf.offload.torch_device import TorchDevice
    from dali_gguf.router import RouterRule

    experts, rng = layer_experts(1), np.random.default_rng(0)
    device = TorchDevice(torch.device("cpu"), fused=True)
    e, table = device.experts(experts), device.pair_table(N_EXPERT)
    memory, x = torch.zeros(1 << 16, dtype=torch.uint8), torch.ones(1, WIDTH)
    offsets = rng.permutation(N_EXPERT) * 4096
    device.compute(x, memory, e, routing_of(1), np.flatnonzero(routing_of(1).workload), offsets)
    costs = CostModel([1, 2], [50, 90], [20, 30], copy_us=70, r=0.7).costs
    routings, seen = Routings(N_EXPERT, USED), set()
    for i in range(60):
        scoring = ("softmax", "sigmoid", "softmax_after")[i % 3]
        correction = rng.normal(size=N_EXPERT).astype(np.float32) if i % 2 else None
        rule = RouterRule(scoring=scoring, normalize=i % 4 > 1, scale=1.5, bias=correction)
        add = rng.normal(size=N_EXPERT).astype(np.float32) if i % 5 == 0 else None
        planner = Planner(("threshold", "greedy", "all-cpu", "static-hot")[i // 2 % 4], N_EXPERT)
        here = (rng.random(N_EXPERT) < rng.choice([0.0, 0.5, 1.0])).astype(np.uint8)
        now = Situation(here, costs, float(i), 0.05, copies=i % 7 > 0)
        product = rng.normal(size=(1, N_EXPERT * (1 + i % 2))).astype(np.float32)
        layer = DecodeLayer(rule, add, e.one_token[USED], planner, routings)
        notes.take()
        routing, plan, y = layer(product, x, now, memory, offsets, table, event=i % 3)
        ours, numbers = notes.take(), table.table.numpy().copy()
        if ours and i % 3:
            assert (ours[0].function, ours.pop(0).stream) == (-(i % 3), 7), "before all kernels"
        logits = product[:, :N_EXPERT] + (0 if add is None else add)
        expected = route(np.ascontiguousarray(logits), USED, rule)
        assert all(np.array_equal(a, b) for a, b in zip(routing, expected))
        its = Planner(planner_name(planner), N_EXPERT).plan(
            expected.workload, here, costs, now.busy_us, now.margin, None, now.copies
        )
        assert all(np.array_equal(a, b) for a, b in zip(plan, its))
        seen |= {("gpu", plan.gpu.size > 0), ("cpu", plan.cpu.size > 0), ("copy", plan.copy.size)}
        assert (y is not None) == (plan.gpu.size > 0) == (len(ours) == 3)
        if y is not None:
            device.compute(x, memory, e, expected, plan.gpu, offsets)
            used = 3 * plan.gpu.size + 1 + plan.gpu.size + USED
            assert (numbers[:used] == table.table.numpy()[:used]).all()
            for one, other, kinds in zip(ours, notes.take(), (VECTOR, VECTOR, COMBINE)):
                one, other = launched(one, kinds), launched(other, kinds)
                if kinds is COMBINE:  # new memory each time
                    one[-1][5] = other[-1][5] = y.data_ptr()
                assert one == other
    assert {("gpu", True), ("gpu", False), ("cpu", True), ("cpu", False), ("copy", 0)} < seen


def planner_name(planner) -> str:
    from dali_gguf.offload.placement import POLICIES

    return POLICIES[planner.code]


def the_same_tokens(notes):
    """As on the CPU, when numpy does what the kernels that are launched would do."""
    import tempfile

    from dali_gguf.engine import Engine
    from dali_gguf.offload import gpu_measure, torch_device, triton_matmul
    from dali_gguf.offload.cost import CostModel
    from dali_gguf.sampler import SamplingParams
    from tests import computed_kernels
    from tests.benchmarks.disk_model import STICKY, TINY, write_model
    from tests.test_ram_tier import room_on_the_card

    sizes, prompt = dict(n_ctx=128, n_batch=64, threads=1), [300, 301, 17, 350, 400]
    path = Path(tempfile.mkdtemp()) / "tiny.gguf"
    write_model(path, TINY, STICKY)

    def tokens(engine):
        return list(engine.tokens(prompt, SamplingParams(temperature=0, max_tokens=24)))

    with Engine(path, device="cpu", **sizes) as engine:
        expected = tokens(engine)
    notes.compute(computed_kernels.run)
    torch_device._triton = lambda *_: triton_matmul
    gpu_measure.known = lambda *_: CostModel([1, 2, 4], [60, 100, 180], [15, 20, 30], 120, r=0.8)
    for beside, apart in ((False, False), (True, False), (False, True)):
        vram = room_on_the_card(path, 0.4, 64)
        with Engine(path, device="cpu-torch", vram=vram, verify=beside, **sizes) as engine:
            scheduler, decided, engine.device.apart = engine.scheduler, [], apart
            scheduler.launches, decide = not beside, scheduler._decide
            scheduler._decide = lambda *args: decided.append(decide(*args)) or decided[-1]
            assert tokens(engine) == expected
            total = scheduler.counters.total
            assert len(decided) > 2 * TINY.n_layer and total("on_gpu") > 0 < total("on_cpu")
            assert not (beside and scheduler.verifier.failed)
            assert {key[0] for key in engine.device._kept} == {"rope", "norm"}
