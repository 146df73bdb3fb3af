"""What a MoE layer's routing, decisions and launches cost besides its arithmetic, in decode.

    python tests/benchmarks/layer_overhead.py [-n 48] [--share 0.4] [--thread] [--profile OUT]

A made-up model of 48 layers, 128 experts, 8 of them used, with narrow matrices runs on cpu-torch,
scheduled as on a GPU (--thread: as on cpu-torch, the CPU's part always in its own thread).
Stubs stand in for the arithmetic of both sides, so that what is timed is the engine's own work; the
CPU's stub sleeps as long as the cost model says. Medians over the layers of all steps:
    route     router logits to experts, weights and workload
    plan      who computes what: arrived copies settled, guesses judged, placement
    start     copies ordered, the CPU's thread started if need be, the GPU's table of experts built
    account   cache, prediction of the next layer; not the CPU's part
    finish    the CPU's output added, guesses and fills started; not the wait for the CPU
What a Triton launch costs can only be seen on a GPU, and is not in here.
"""

import argparse
import cProfile
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as Q

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch  # noqa: E402

from dali_gguf.engine import Engine  # noqa: E402
from dali_gguf.offload import cost, gpu_measure, torch_moe, vram  # noqa: E402
from dali_gguf.offload.cost import CostModel  # noqa: E402
from tests.benchmarks.disk_model import STICKY, Shape, write_model  # noqa: E402

SHAPE = Shape(n_embd=64, n_layer=48, n_head=2, n_head_kv=1, k_size=32, n_ff=32, n_vocab=2048,
              kind=Q.Q8_0)  # fmt: skip
WARM = 24  # steps before timing: compiled kernels, settled caches
PHASES = ("route", "plan", "start", "account", "finish")


class StubCpu:
    """The CPU's share of a layer without its arithmetic: `us` an expert."""

    def __init__(self, us: float):
        self.us = us

    def moe_begin(self, x, routing, experts):
        return np.zeros_like(x)

    def moe_run(self, step, ids):
        time.sleep(1e-6 * self.us * len(ids))

    def moe_end(self, step):
        return step

    def close(self) -> None: ...


class Watch:
    """Notes when the phases of a layer end. samples: phase -> microseconds, a layer each."""

    def __init__(self, scheduler, device):
        self.samples: dict[str, list[float]] = {phase: [] for phase in PHASES}
        self._ends: dict[str, float] = {}
        self._waited = {"start": 0.0, "account": 0.0, "finish": 0.0}
        self._route(device)
        self._end_of(scheduler, "_plan", "plan")
        self._end_of(scheduler, "_gpu_part", "start")
        self._end_of(scheduler, "_account", "account")
        self._wait_of(scheduler.traffic.link, "wait", "start")
        self._wait_of(scheduler.cpu, "result", "finish")
        self._wait_of(scheduler.cpu, "run", "account")
        self._moe(scheduler)

    def _route(self, device) -> None:
        inner = device.route_host

        def route(*args):
            started = time.perf_counter()
            result = inner(*args)
            self.samples["route"].append(1e6 * (time.perf_counter() - started))
            return result

        device.route_host = route

    def _end_of(self, owner, name: str, phase: str) -> None:
        inner = getattr(owner, name)

        def ended(*args, **named):
            result = inner(*args, **named)
            self._ends[phase] = time.perf_counter()
            return result

        setattr(owner, name, ended)

    def _wait_of(self, owner, name: str, phase: str) -> None:
        inner = getattr(owner, name)

        def waited(*args):
            started = time.perf_counter()
            result = inner(*args)
            self._waited[phase] += time.perf_counter() - started
            return result

        setattr(owner, name, waited)

    def _moe(self, scheduler) -> None:
        inner = scheduler.moe

        def moe(*args):
            before = time.perf_counter()
            self._waited = dict.fromkeys(self._waited, 0.0)
            result = inner(*args)
            self._ends["finish"] = time.perf_counter()
            for phase in PHASES[1:]:
                took = self._ends[phase] - before - self._waited.get(phase, 0.0)
                self.samples[phase].append(1e6 * took)
                before = self._ends[phase]
            return result

        scheduler.moe = moe


def stub_arithmetic(engine: Engine, cpu_us: float) -> None:
    """The GPU's part still builds its table of experts, as for real kernels."""
    part, nothing = engine.scheduler.cpu, torch.zeros(1, SHAPE.n_embd)

    def compute(kernels, x, base, e, table, routing, experts, at):
        table.build(routing, experts, at)
        return nothing

    torch_moe.compute = compute
    part.cpu.close()
    part.cpu = StubCpu(cpu_us)


def open_engine(path: Path, share: float, thread: bool = False) -> Engine:
    """A part `share` of the experts resident; all features always on; costs that stay as they are,
    so that both sides and the link have work in most layers."""
    cost.GAIN = 0.0
    costs = CostModel([1, 2, 4], [60, 100, 180], [15, 20, 30], copy_us=120, r=0.8)
    plan_model = vram.plan_model

    def plan(tensors, config, room, *rest):
        everything = plan_model(tensors, config, 1 << 40, *rest)
        fixed = everything.dense + everything.kv + everything.scratch
        return plan_model(tensors, config, fixed + int(share * everything.wanted), *rest)

    vram.plan_model = plan
    gpu_measure.known = lambda *_: costs
    engine = Engine(path, device="cpu-torch", threads=1, n_ctx=1024)
    scheduler = engine.scheduler
    scheduler.launches = not thread
    scheduler.choices = replace(scheduler.choices, adapt=False)
    stub_arithmetic(engine, float(costs.costs.c[1]))
    return engine


def decode(engine: Engine, n: int, first: int) -> list[float]:
    """Seconds of each step."""
    times = []
    for position in range(first, first + n):
        started = time.perf_counter()
        engine.forward([300 + position], [position])
        times.append(time.perf_counter() - started)
    return times


def measure(path: Path, n: int, share: float, thread: bool, profile: str | None) -> None:
    with open_engine(path, share, thread) as engine:
        decode(engine, WARM, 0)
        if profile:
            with cProfile.Profile() as profiler:
                decode(engine, n, WARM)
            profiler.dump_stats(profile)
            return
        watch = Watch(engine.scheduler, engine.device)
        counters, before = engine.scheduler.counters, engine.scheduler.counters.figures.sum(1)
        step = statistics.median(decode(engine, n, WARM))
        layers = n * SHAPE.n_layer
        done = dict(zip(counters.as_dict()["total"], (counters.figures.sum(1) - before) / layers))
    medians = {phase: statistics.median(watch.samples[phase]) for phase in PHASES}
    for phase, us in medians.items():
        print(f"{phase:>10} {us:7.1f} us, mean {statistics.fmean(watch.samples[phase]):7.1f}")
    launch = sum(medians[phase] for phase in PHASES[:3])
    print(f"route + plan + start {launch:.1f} us a layer; all {sum(medians.values()):.1f} us; "
          f"a step {1e3 * step:.1f} ms")  # fmt: skip
    names = ("hits", "misses", "on_cpu", "on_gpu", "copied", "prefetched", "fills", "adopted")
    print("a layer: " + ", ".join(f"{name} {done[name]:.2f}" for name in names))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", type=int, default=48)
    parser.add_argument("--share", type=float, default=0.4)
    parser.add_argument("--thread", action="store_true")
    parser.add_argument("--profile")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "layers.gguf"
        write_model(path, SHAPE, STICKY)
        measure(path, args.n, args.share, args.thread, args.profile)


if __name__ == "__main__":
    main()
