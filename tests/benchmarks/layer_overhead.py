"""What a MoE layer's routing, decisions and launches cost besides its arithmetic, in decode.

    python tests/benchmarks/layer_overhead.py [-n 48] [--share 0.4] [--thread] [--no-triton]
                                              [--profile OUT]

A made-up model of 48 layers, 128 experts, 8 of them used, with narrow matrices runs on cpu-torch,
scheduled as on a GPU (--thread: as on cpu-torch, the CPU's part always in its own thread).
Stubs stand in for the arithmetic of both sides, so that what is timed is the engine's own work; the
CPU's stub sleeps as long as the cost model says. Medians over the layers of all steps:
    prepare   arrived copies settled, guesses not begun dropped: while the GPU works on the logits
    launch    from the router's logits in main memory to the launch of the layer's residents:
              routing, who computes what, the table of experts, and Triton's three kernels, on a
              driver that does nothing (needs gcc; --no-triton: without them)
    start     copies ordered, the CPU's thread started if need be
    account   guesses judged, cache, prediction of the next layer; not the CPU's part
    finish    the CPU's output added, guesses and fills started; not the wait for the CPU
What CUDA's driver itself takes for a launch can only be seen on a GPU, and is not in here.
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
from dali_gguf.offload import cost, expert_launch, gpu_measure, torch_moe, vram  # noqa: E402
from dali_gguf.offload.cost import CostModel  # noqa: E402
from tests.benchmarks.disk_model import STICKY, Shape, write_model  # noqa: E402

SHAPE = Shape(n_embd=64, n_layer=48, n_head=2, n_head_kv=1, k_size=32, n_ff=64, n_vocab=2048,
              kind=Q.Q8_0)  # fmt: skip
WARM = 24  # steps before timing: compiled kernels, settled caches
PHASES = ("prepare", "launch", "start", "account", "finish")


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
        self._prepare(scheduler)
        self._end_of(device, "read_back", "logits")
        self._end_of(scheduler, "_decide", "launch")
        self._end_of(scheduler, "_compute", "launch", first=True)
        self._end_of(scheduler, "_gpu_part", "start")
        self._end_of(scheduler.between, "account", "account")
        self._wait_of(scheduler.traffic.link, "wait", "start")
        self._wait_of(scheduler.cpu, "result", "finish")
        self._wait_of(scheduler.cpu, "run", "account")
        self._moe(scheduler)

    def _prepare(self, scheduler) -> None:
        inner = scheduler.traffic.prepare

        def prepare(row):
            self._ends.clear()
            started = time.perf_counter()
            inner(row)
            self.samples["prepare"].append(1e6 * (time.perf_counter() - started))

        scheduler.traffic.prepare = prepare

    def _end_of(self, owner, name: str, phase: str, first: bool = False) -> None:
        """first: unless the phase has ended already."""
        inner = getattr(owner, name)

        def ended(*args, **named):
            result = inner(*args, **named)
            if not (first and phase in self._ends):
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
            self._waited = dict.fromkeys(self._waited, 0.0)
            result = inner(*args)
            self._ends["finish"] = time.perf_counter()
            before = self._ends["logits"]
            for phase in PHASES[1:]:
                end = self._ends.get(phase, before)  # nothing to launch
                self.samples[phase].append(1e6 * (end - before - self._waited.get(phase, 0.0)))
                before = end
            return result

        scheduler.moe = moe


def stub_arithmetic(engine: Engine, cpu_us: float, kernels) -> None:
    """The GPU's part still builds its table of experts, and launches them if there are kernels
    (triton_matmul)."""
    part, nothing = engine.scheduler.cpu, torch.zeros(1, SHAPE.n_embd)
    compute = torch_moe.compute

    def launched(_, x, base, e, table, *what):
        if kernels is None:
            table.build(*what)
        else:
            compute(kernels, x, base, e, table, *what)
        return nothing

    torch_moe.compute, result = launched, expert_launch.OneToken.result
    expert_launch.OneToken.result = lambda *args: (result(*args), nothing)[1]
    part.cpu.close()
    part.cpu = StubCpu(cpu_us)


def open_engine(path: Path, share: float, thread: bool = False, kernels=None) -> Engine:
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
    scheduler.step.choices = replace(scheduler.choices, adapt=False)
    stub_arithmetic(engine, float(costs.costs.c[1]), kernels)
    return engine


def decode(engine: Engine, n: int, first: int) -> list[float]:
    """Seconds of each step."""
    times = []
    for position in range(first, first + n):
        started = time.perf_counter()
        engine.forward([300 + position], [position])
        times.append(time.perf_counter() - started)
    return times


def launching(folder: Path):
    """The module of kernels, with a driver that does nothing."""
    from dali_gguf.offload import triton_matmul
    from tests import null_driver

    null_driver.Notes(folder, noting=False)
    return triton_matmul


def measure(path: Path, n: int, share: float, thread: bool, triton: bool,
            profile: str | None) -> None:
    kernels = launching(path.parent) if triton else None
    with open_engine(path, share, thread, kernels) as engine:
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
    print(f"all {sum(medians.values()):.1f} us a layer; a step {1e3 * step:.1f} ms")
    names = ("hits", "misses", "on_cpu", "on_gpu", "copied", "prefetched", "fills", "adopted")
    print("a layer: " + ", ".join(f"{name} {done[name]:.2f}" for name in names))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", type=int, default=48)
    parser.add_argument("--share", type=float, default=0.4)
    parser.add_argument("--thread", action="store_true")
    parser.add_argument("--no-triton", action="store_true")
    parser.add_argument("--profile")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "layers.gguf"
        write_model(path, SHAPE, STICKY)
        measure(path, args.n, args.share, args.thread, not args.no_triton, args.profile)


if __name__ == "__main__":
    main()
