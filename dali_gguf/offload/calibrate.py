"""Measures this machine for the cost model: experts on the CPU, the rest of a step, disk, GPU.

Every part has a time limit; all of it stays under 15 seconds.
"""

import time

import numpy as np

from dali_gguf.device import Array, Device
from dali_gguf.errors import DaliError, InputError
from dali_gguf.offload import cost_store, disk_forecast
from dali_gguf.offload.cost_store import Profile
from dali_gguf.offload.scheduler import Scheduler
from dali_gguf.routing import LayerExperts, Routing

ANCHORS = (1, 2, 4, 8, 16, 32, 64, 128)
SECONDS = 3.0  # for the CPU's experts
TOGETHER = 4  # experts of a timed call
REPEATS = 3
STEPS = 12  # decoded tokens that are timed


class WithoutExperts(Scheduler):
    """What a step does besides its experts: they give back their input."""

    def moe(self, layer: int, h: Array, routing: Routing) -> Array:
        return h


def calibrate(
    engine, threads: int, gpu: Device | None = None, gpu_name: str = "", say=lambda text: None
) -> Profile:
    """The profile of an Engine's model on this machine. engine runs on the CPU; gpu: a TorchDevice
    to measure too."""
    if not engine.scheduler.experts:
        raise InputError(f"{engine.path} has no experts: there is nothing to calibrate")
    experts = engine.scheduler.experts[min(engine.scheduler.experts)]
    say("experts on the CPU")
    cpu_us, h_cpu = cpu_costs(engine.device, experts)
    say("a decode step")
    dense_us, cpu_us[0], h_cpu = step_times(engine, cpu_us[0], h_cpu)
    say("disk")
    bandwidth = disk_bandwidth(engine)
    gpu_us, copy_us, r = [], 0.0, 1.0
    if gpu is not None:
        from dali_gguf.offload import gpu_measure

        say(f"{gpu_name}: experts and copies")
        measured = gpu_measure.measure(gpu, engine.device, experts)
        gpu_us = [float(measured.costs.g[w]) for w in ANCHORS]
        copy_us, r, h_cpu = measured.copy_us, measured.r, measured.h_cpu
    return Profile(
        cost_store.machine_name(threads, gpu_name),
        cost_store.shape_name(experts),
        list(ANCHORS),
        cpu_us,
        gpu_us,
        copy_us,
        h_cpu,
        r,
        dense_us,
        bandwidth,
        experts.expert_bytes(),
    )


def made_up_step(experts: LayerExperts, n: int, w: int, first: int) -> tuple[np.ndarray, Routing]:
    """h [w, D] of w tokens that all use the same n experts, from `first` on."""
    ids = np.broadcast_to((first + np.arange(n)) % experts.n_expert, (w, n)).astype(np.int32)
    h = np.random.default_rng(w).standard_normal((w, experts.gate[0].cols)).astype(np.float32)
    workload = np.bincount(ids.ravel(), minlength=experts.n_expert)
    return h, Routing(ids, np.full((w, n), 1 / n, np.float32), workload)


def cpu_costs(device: Device, experts: LayerExperts) -> tuple[list[float], float]:
    """(microseconds of one expert at each anchor, fixed microseconds of a call). A call of n
    experts takes fixed + n * cost; other experts each time, so that the CPU's cache has none."""
    first = 0

    def timed(n: int, w: int) -> float:
        nonlocal first
        best = []
        for _ in range(REPEATS):
            h, routing = made_up_step(experts, n, w, first)
            first += n
            started = time.perf_counter()
            device.moe(h, routing, experts)
            best.append(1e6 * (time.perf_counter() - started))
        return min(best)  # whatever else runs only adds

    many = min(TOGETHER, experts.n_expert)
    for w in (1, 8):
        timed(many, w)  # compiles
    started, costs, fixed = time.perf_counter(), [], 0.0
    for w in ANCHORS:
        if time.perf_counter() - started > SECONDS and len(costs) > 1:
            costs.append(2 * costs[-1])
            continue
        whole = timed(many, w)
        if w == 1 and many > 1:
            own = max((whole - timed(1, w)) / (many - 1), 0.25 * whole / many)
            fixed = max(0.0, whole - many * own)
        costs.append(max((whole - fixed) / many, 0.25 * whole / many))
    return np.maximum.accumulate(costs).tolist(), fixed


def step_times(engine, cpu_us: float, h_cpu: float) -> tuple[float, float, float]:
    """(dense_us, cpu_us, h_cpu) in microseconds, of decoding as it runs, by recorded programs where
    there are some: a step without its experts, an expert with one token, and the rest of a layer's
    experts. cpu_us, h_cpu: measured apart, taken as they are where experts come from disk."""
    inner = engine.scheduler
    bare = WithoutExperts(inner.device, inner.experts, inner.routers)
    try:
        engine.scheduler = bare
        dense = decode_us(engine)
    finally:
        engine.scheduler = inner
    if not inner.recordable:
        return dense, cpu_us, h_cpu
    layer, n_used = (decode_us(engine) - dense) / len(inner.experts), engine.config.experts.n_used
    if layer <= 0:  # lost in the noise of a step
        return dense, cpu_us, h_cpu
    cpu_us = min(cpu_us, layer / n_used)
    return dense, cpu_us, max(0.0, layer - n_used * cpu_us)


def decode_us(engine) -> float:
    """Microseconds of a decode step, the median of some. The first ones record a program and check
    it."""
    times = []
    for position in range(STEPS + 2):
        token, started = 1 + 37 * position % (engine.n_vocab - 1), time.perf_counter()
        engine.forward([token], [position])
        times.append(1e6 * (time.perf_counter() - started))
    return float(np.median(times[2:]))


def disk_bandwidth(engine) -> float:
    """Bytes/s of direct reads of the model's experts; 0 where that cannot be measured."""
    try:
        return float(disk_forecast.measure_bandwidth(engine.file.tensors))
    except (DaliError, OSError):
        return 0.0
