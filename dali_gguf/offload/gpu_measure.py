"""What one expert costs on this machine: the CPU's and the device's time by tokens, a copy, and how
fast the CPU stays while the link copies. A second or two, on the model's own experts."""

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from dali_gguf.device import Device
from dali_gguf.offload import cost_store, disk_forecast
from dali_gguf.offload.cost import CostModel
from dali_gguf.offload.resident import read_experts
from dali_gguf.offload.torch_device import TorchDevice
from dali_gguf.offload.transfer import FILL, Copy, Link
from dali_gguf.routing import LayerExperts, Routing
from dali_gguf.tensor import Tensor

ANCHORS = (1, 2, 4, 8, 16, 32, 64)
TOGETHER = 4  # experts of a timed call: their number tells the fixed cost from an expert's own
REPEATS = 3
SAMPLE_BYTES = 64 << 20  # of experts read to be measured
SECONDS = 2.0  # of one side; anchors beyond are extrapolated


def known(
    device: TorchDevice,
    cpu: Device,
    experts: LayerExperts,
    streamed: dict[str, Tensor] | None = None,
) -> CostModel:
    """What `calibrate` stored for this machine and one layer's experts, else measured now.
    streamed: the file's tensors, if the model is larger than RAM: then some of the experts are read
    into memory to be measured, and the disk is measured too."""
    machine = cost_store.machine_name(cpu.threads, gpu_name(device.device))
    profile = cost_store.load(machine, cost_store.shape_name(experts))
    if profile is not None and profile.gpu_us:
        costs = profile.model()
    elif streamed is None:
        costs = measure(device, cpu, experts)
    else:
        few = max(TOGETHER, SAMPLE_BYTES // experts.expert_bytes())
        with read_experts(experts, range(min(experts.n_expert, few))) as some:
            costs = measure(device, cpu, some)
    if streamed is not None and not costs.t_disk:
        speed = disk_forecast.measure_bandwidth(streamed)
        costs.observe("disk", 1, 1e6 * experts.expert_bytes() / speed)
    return costs


def measure(
    device: TorchDevice, cpu: Device, experts: LayerExperts, max_tokens: int = 4096
) -> CostModel:
    """The cost model of one layer's experts. Nothing of the device's slots is touched."""
    probe = Probe(device, cpu, experts)
    cpu_us, h_cpu = probe.anchors(probe.cpu_us)
    gpu_us, _ = probe.anchors(probe.gpu_us)
    copy_us, r = probe.copy_us(cpu_us[0])
    return CostModel(ANCHORS, cpu_us, gpu_us, copy_us, h_cpu, r, max_tokens=max_tokens)


class Probe:
    """Times made-up steps of one layer in which `n` experts get w tokens each."""

    def __init__(self, device: TorchDevice, cpu: Device, experts: LayerExperts):
        self.device, self.cpu, self.experts = device, cpu, experts
        self.together = min(TOGETHER, experts.n_expert)
        self.e = device.experts(experts)
        size = self.e.layout.nbytes
        self.memory = torch.zeros(self.together * size, dtype=torch.uint8, device=device.device)
        for i in range(self.together):
            for source, target in self._parts(i, i * size):
                target.copy_(torch.from_numpy(np.array(source)))
        self.offsets = np.full(experts.n_expert, -1, np.int64)
        self.offsets[: self.together] = np.arange(self.together) * size
        self._first = 0  # turns, so that the CPU reads other experts each time, not its cache

    def _parts(self, expert: int, start: int) -> list[tuple[np.ndarray, torch.Tensor]]:
        matrices = zip(self.e.layout.matrices, self.experts.matrices(expert))
        return [(t.data, self.memory[start + m.at : start + m.at + m.nbytes]) for m, t in matrices]

    def step(self, n: int, w: int, first: int) -> tuple[np.ndarray, Routing]:
        """w tokens that all use the same n experts."""
        n_expert = self.experts.n_expert
        ids = ((first + np.arange(n)) % n_expert).astype(np.int32)
        ids = np.broadcast_to(ids, (w, n)).copy()
        h = np.random.default_rng(w).normal(size=(w, self.experts.gate[0].cols)).astype(np.float32)
        weights = np.full((w, n), 1 / n, np.float32)
        return h, Routing(ids, weights, np.bincount(ids.ravel(), minlength=n_expert))

    def cpu_us(self, n: int, w: int) -> float:
        """n experts on the CPU, as the scheduler runs them."""
        self._first += n
        h, routing = self.step(n, w, self._first)
        ids = np.flatnonzero(routing.workload)
        started = time.perf_counter()
        step = self.cpu.moe_begin(h, routing, self.experts)
        self.cpu.moe_run(step, ids)
        self.cpu.moe_end(step)
        return (time.perf_counter() - started) * 1e6

    def gpu_us(self, n: int, w: int) -> float:
        h, routing = self.step(n, w, 0)
        x = self.device.from_host(h)
        self._finish()
        started = time.perf_counter()
        self.device.compute(x, self.memory, self.e, routing, np.arange(n), self.offsets)
        self._finish()
        return (time.perf_counter() - started) * 1e6

    def _finish(self) -> None:
        if self.device.device.type == "cuda":
            torch.cuda.synchronize(self.device.device)

    def anchors(self, timed: Callable[[int, int], float]) -> tuple[list[float], float]:
        """(us of an expert at each anchor, fixed us of a call): a call of n experts takes
        fixed + n * cost."""
        timed(self.together, 1)  # compiles
        started, costs, fixed = time.perf_counter(), [], 0.0
        for w in ANCHORS:
            if time.perf_counter() - started > SECONDS:
                costs.append(costs[-1] * w / ANCHORS[len(costs) - 1])
                continue
            many = _median(timed, self.together, w)
            if w == 1 and self.together > 1:
                one = _median(timed, 1, w)
                own = max((many - one) / (self.together - 1), 0.25 * many / self.together)
                fixed = max(0.0, one - own)
            costs.append(max((many - fixed) / self.together, 0.25 * many / self.together))
        return costs, fixed

    def copy_us(self, alone: float) -> tuple[float, float]:
        """(us of a copy, CPU speed while the link copies, at most 1)."""
        link = Link(self.device.device)
        try:
            copies = [self._copy(i) for i in range(2 * REPEATS)]
            link.offer(copies)
            busy = self.cpu_us(self.together, 1)
            before = _median(self.cpu_us, self.together, 1)
            for copy in copies:
                link.wait(copy)
            self._finish()
            while not all(link.arrived(copy) for copy in copies):
                time.sleep(0.0005)
            times = [copy.us for copy in copies[1:]]
        finally:
            link.close()
        return max(statistics.median(times), 1.0), min(1.0, max(0.1, before / max(busy, 1e-3)))

    def _copy(self, i: int) -> Copy:
        expert, place = i % self.experts.n_expert, i % self.together
        return Copy(0, expert, 0, FILL, self._parts(expert, place * self.e.layout.nbytes))


def gpu_name(device: torch.device) -> str:
    """How it is called in cost profiles."""
    return "torch on the CPU" if device.type != "cuda" else torch.cuda.get_device_name(device)


def _median(timed: Callable[[int, int], float], n: int, w: int) -> float:
    return statistics.median(timed(n, w) for _ in range(REPEATS))
