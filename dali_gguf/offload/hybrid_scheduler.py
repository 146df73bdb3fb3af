"""Experts of a layer on CPU and GPU side by side: the scheduler seam for a device with slots.

One layer: plan who computes what; copies start first; the CPU's experts run in their thread while
the GPU computes its residents, then the copied ones as they arrive; the outputs add up. Afterwards
the cache is told what was used, and guesses for the next layer go on the link while it idles.
"""

import sys
import time
from collections import deque
from dataclasses import dataclass

import numpy as np

from dali_gguf.device import Array, Device
from dali_gguf.offload.cache import ExpertCache
from dali_gguf.offload.cost import CostModel
from dali_gguf.offload.cpu_part import CpuPart
from dali_gguf.offload.gpu_slots import GpuSlots
from dali_gguf.offload.gpu_timer import GpuTimer
from dali_gguf.offload.gpu_traffic import Traffic
from dali_gguf.offload.hybrid_counters import HybridCounters
from dali_gguf.offload.pays import Pays
from dali_gguf.offload.placement import Planner
from dali_gguf.offload.prefetch import Predictor, rank
from dali_gguf.offload.run_counts import RunCounts
from dali_gguf.offload.scheduler import Scheduler
from dali_gguf.offload.torch_device import TorchDevice
from dali_gguf.offload.transfer import Copy
from dali_gguf.offload.verify import Verifier
from dali_gguf.routing import LayerExperts, Routing

PREFILL = 32  # steps of so many tokens count as prefill: the cache is frozen, a ring streams
NEVER = 1.0  # a margin that no move of a resident can reach
ROOM = 0.8  # a guess is copied only if this share of its copy fits the gap
FREE_LINK = 0.95  # CPU speed while copying above which guesses start at routing
SAMPLE = 64  # tokens of a prefill that predictions look at
GUESSES, GUESSES_PREFILL = 2, 16


@dataclass(frozen=True, slots=True)
class Choices:
    """Names of the policies; verify: recompute everything on the CPU; adapt: only if it pays."""

    placement: str = "threshold"
    prefetch: str = "residual"
    expert_cache: str = "decayed"
    verify: bool = False
    adapt: bool = True


class HybridScheduler(Scheduler):
    """moe(layer, h, routing) -> y. experts, routers: by layer number, as in scheduler.Scheduler."""

    def __init__(
        self,
        device: TorchDevice,
        cpu: Device,
        experts: dict[int, LayerExperts],
        routers: dict[int, tuple],
        slots: GpuSlots,
        cache: ExpertCache,
        predictor: Predictor | None,
        costs: CostModel,
        choices: Choices = Choices(),
        known: RunCounts | None = None,
    ):
        super().__init__(device, experts, routers)
        self.layers = sorted(experts)
        self.row = {layer: row for row, layer in enumerate(self.layers)}
        self.cache, self.predictor, self.model, self.choices = cache, predictor, costs, choices
        self.known = known  # counts of earlier runs, that this one's are added to
        n_expert = slots.place.shape[1]
        self.planner = Planner(choices.placement, n_expert)
        self.still = Planner("static-hot", n_expert)  # residents on the GPU, nothing is copied
        self.counters = HybridCounters(self.layers)
        self.traffic = Traffic(device, slots, cache, experts, self.layers, self.counters)
        self.cpu = CpuPart(cpu)
        self.timer, self._untimed = GpuTimer(device.device), None
        self.pays = Pays(self._candidates() if choices.adapt else ())
        self.verifier = Verifier(self.cpu, self.traffic) if choices.verify else None
        self._gap = {False: 0.0, True: 0.0}  # us between two layers' experts, by "is prefill"
        self._left = self._step_began = time.perf_counter()
        self._step_tokens = 0
        self._n_used, self._prompted = 1, False
        self.cold = False  # nothing was known about this model: the prompt decides the residents

    def _candidates(self) -> tuple[str, ...]:
        """Features that may be switched off, given the policies."""
        c = self.choices
        dynamic = c.placement in ("threshold", "greedy", "optimal", "balance")
        names = {
            "prefetch": self.predictor is not None,
            "fills": c.expert_cache != "static",
            "moves": c.placement == "threshold",
            "copies": dynamic,
        }
        return tuple(name for name, possible in names.items() if possible)

    def _uses(self, feature: str) -> bool:
        return self.pays.enabled(feature) if self.choices.adapt else True

    # ---- one layer -------------------------------------------------------------------------

    def moe(self, layer: int, h: Array, routing: Routing) -> Array:
        """The experts' part of a layer. h [T, D] is the router's input too. Returns [T, D]."""
        row, began = self.row[layer], time.perf_counter()
        prefill = len(routing.expert_ids) >= PREFILL
        self._n_used = routing.expert_ids.shape[1]
        self._enter(row, len(routing.expert_ids), prefill, began)
        host = self.device.to_host(h)
        self._read_times()
        plan = self._plan(row, routing.workload, prefill)
        used = len(plan.cpu) + len(plan.gpu) + len(plan.copy)
        on_cpu, on_gpu, copy = plan.cpu.copy(), plan.gpu.copy(), deque(plan.copy.tolist())
        self.counters.add(row, "plan_us", (time.perf_counter() - began) * 1e6)
        coming = self.traffic.demand(row, copy)
        future = None
        if on_cpu.size:
            future = self.cpu.start(host, routing, self.experts[layer], on_cpu)
        if self.model.costs.r > FREE_LINK:
            self._guess(row, host, prefill)
        y, ready = self._gpu_part(row, h, routing, on_gpu, coming, copy)
        cpu_us = 0.0
        if future is not None:
            result = future.result()
            cpu_us = result.us
            y_cpu = self.device.from_host(result.y)
            y = y_cpu if y is None else y + y_cpu
            self.model.observe("cpu", routing.workload[on_cpu], cpu_us)
        self._untimed = (row, routing.workload[ready], cpu_us, on_cpu.size < used)
        self.counters.add(row, "real_us", (time.perf_counter() - began) * 1e6)
        self._after(row, host, routing, prefill)
        if self.verifier is not None:
            self.verifier.check(
                layer, row, host, routing, self.experts[layer], self.device.to_host(y)
            )
        self._left = time.perf_counter()
        return y

    def _enter(self, row: int, tokens: int, prefill: bool, now: float) -> None:
        """Measures the gap since the last layer and, at the first layer, the last step."""
        self.cache.frozen = prefill
        if row == 0:
            if tokens == self._step_tokens and not prefill:
                self.pays.record((now - self._step_began) * 1e6, tokens)
            self._prompted |= prefill
            if self.cold and self._prompted and not prefill:
                self.cold = False
                self.traffic.reseat()
            self._step_began, self._step_tokens = now, tokens
        elif tokens == self._step_tokens:
            gap = (now - self._left) * 1e6
            self._gap[prefill] += 0.1 * (
                min(gap, 10 * self._gap[prefill] + 50) - self._gap[prefill]
            )
        self.traffic.settle()

    def _plan(self, row: int, workload: np.ndarray, prefill: bool):
        """Who computes what. Guesses that have not begun are dropped first."""
        here = self.traffic.here(row, workload)
        self.counters.uses(row, workload, here.astype(bool))
        missing = ((workload > 0) & (here == 0)).any()
        copies = self.traffic.slots.spare(row) > 0 and (prefill or self._uses("copies"))
        margin = self.model.margin() if self._uses("moves") else NEVER
        planner = self.planner if copies or not missing else self.still
        plan = planner.plan(
            workload, here, self.model.costs, self.traffic.busy_us(self.model), margin
        )
        for name, ids in (("on_cpu", plan.cpu), ("on_gpu", plan.gpu), ("copied", plan.copy)):
            self.counters.add(row, name, len(ids))
        self.counters.add(row, "predicted_us", plan.predicted_us)
        return plan

    def _gpu_part(
        self,
        row: int,
        h: Array,
        routing: Routing,
        residents: np.ndarray,
        coming: deque[Copy],
        waiting: deque[int],
    ) -> tuple[Array | None, np.ndarray]:
        """Residents at once, then what arrives. Returns (y or None, experts that were there)."""
        self.timer.begin()
        ready, late = self.traffic.split(row, residents)
        y = self._compute(row, h, routing, ready, self.traffic.offsets(row, ready))
        self.timer.residents_done()
        coming.extendleft(late)
        while coming:
            group = self.traffic.next_group(coming)
            ids = np.array([copy.expert for copy in group])
            at = np.array([copy.offset for copy in group])
            part = self._compute(row, h, routing, ids, at)
            y = part if y is None else y + part
            self.traffic.used(row, group, reuse=bool(waiting))
            coming.extend(self.traffic.demand(row, waiting))
        self.timer.end()
        return y, ready

    def _read_times(self) -> None:
        """What the layer before took on the device."""
        if self._untimed is None:
            return
        (row, workload, cpu_us, used_gpu), self._untimed = self._untimed, None
        residents_us, gpu_us = self.timer.read()
        if len(workload):
            self.model.observe("gpu", workload, residents_us)
        self.counters.waits(row, cpu_us, gpu_us if used_gpu else 0.0)

    def _compute(
        self, row: int, h: Array, routing: Routing, ids: np.ndarray, at: np.ndarray
    ) -> Array | None:
        if not len(ids):
            return None
        e = self.device.experts(self.experts[self.layers[row]])
        return self.device.compute(h, self.traffic.slots.memory, e, routing, ids, at)

    # ---- between layers --------------------------------------------------------------------

    def _after(self, row: int, host: np.ndarray, routing: Routing, prefill: bool) -> None:
        """The cache learns what was used; guesses and fills go where the link would idle."""
        costs = self.model.costs
        if self.known is not None:
            self.known.add(row, routing.workload)
        swaps = self.cache.step(row, routing.workload, self.traffic.arrived_for(row), costs)
        self.traffic.adopt(row, [s for s in swaps if s.adopted])
        if costs.r <= FREE_LINK:
            self._guess(row, host, prefill)
        fills = [s for s in swaps if not s.adopted]
        if fills and self._uses("fills") and self._room(prefill) >= 1:
            self.traffic.fill(row, fills)
        for us in self.traffic.new_copy_times():
            self.model.observe("copy", 1, us)

    def _means(self) -> np.ndarray:
        """float32 [L - 1, D]: the predictor's residual means, or those of earlier runs."""
        if self.predictor is not None and self.choices.prefetch in ("residual", "linear"):
            return np.stack([self.predictor.mean[layer] for layer in self.layers[:-1]])
        if self.known.means is not None:
            return self.known.means
        width = self.experts[self.layers[0]].gate[0].cols
        return np.zeros((len(self.layers) - 1, width), np.float32)

    def _room(self, prefill: bool) -> int:
        """Copies that fit the gap before the next layer, less those already on the link."""
        t = max(self.model.costs.t, 1e-3)
        return int(self._gap[prefill] / (ROOM * t)) - self.traffic.link.waiting()

    def _guess(self, row: int, host: np.ndarray, prefill: bool) -> None:
        """Predicts the next layer's workload and starts the most valuable copies that fit."""
        if self.predictor is None or not (prefill or self._uses("prefetch")):
            return
        layer, sample = self.layers[row], host[-SAMPLE:]
        self.predictor.learn(layer, sample)
        most = min(GUESSES_PREFILL if prefill else GUESSES, self._room(prefill))
        if row + 1 == len(self.layers) or most < 1:
            return
        predicted = self.predictor.predict(layer, sample)
        if predicted is not None:
            best = rank(predicted, self.traffic.near(row + 1), self.model.costs)
            self.traffic.prefetch(row + 1, [expert for expert, _ in best[:most]])

    # ---- the rest of the seam --------------------------------------------------------------

    def line(self) -> str:
        """For the closing line of a run."""
        parts = [self.counters.line(), self.pays.line()]
        if self.verifier is not None:
            parts.append(self.verifier.line())
        return " | ".join(part for part in parts if part)

    def figures(self) -> dict:
        """For --stats-json."""
        self._read_times()
        out = self.counters.as_dict()
        out["kept"] = {name: self.pays.on[name] for name in self.pays.on}
        out["link"] = {
            "bytes": self.traffic.link.bytes,
            "busy_us": round(self.traffic.link.busy_us),
        }
        if self.verifier is not None:
            out["verify"] = self.verifier.as_dict()
        return out

    def table(self) -> str:
        return self.counters.table()

    def close(self) -> None:
        self.traffic.close()
        self.cpu.close()
        if self.known is not None:
            self.known.save(self._means(), self._n_used)
        if self.verifier is not None and self.verifier.failed:
            print(f"dali-gguf: {self.verifier.line()}", file=sys.stderr)
