"""Experts of a layer on CPU and GPU side by side: the scheduler seam for a device with slots.

One layer: plan who computes what; copies start first; the GPU is given its residents, then the
copied ones as they arrive; the CPU's experts run meanwhile: in a thread of their own where copies
are waited for or the device computes in the calling thread, else in the calling thread, since a
launch returns at once and waking a thread costs more than it hides. The outputs add up. Afterwards
the cache is told what was used, and guesses for the next layer go on the link while it idles. A
model larger than main memory has its other experts in an arena and on disk (ram_tier.py).
"""

import sys
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from dali_gguf.closing import close_all
from dali_gguf.device import Array, Device
from dali_gguf.offload.arena_stats import ArenaStats
from dali_gguf.offload.cache import ExpertCache
from dali_gguf.offload.choices import FEATURES, Choices
from dali_gguf.offload.cost import CostModel
from dali_gguf.offload.cpu_part import CpuPart
from dali_gguf.offload.gpu_slots import GpuSlots
from dali_gguf.offload.gpu_timer import GpuTimer
from dali_gguf.offload.gpu_traffic import Traffic
from dali_gguf.offload.guesser import Gap, Guesser
from dali_gguf.offload.hybrid_counters import HybridCounters
from dali_gguf.offload.paired_routers import PairedRouters
from dali_gguf.offload.pays import RECENT, Pays
from dali_gguf.offload.placement import LayerPlan, Planner
from dali_gguf.offload.prefetch import Predictor
from dali_gguf.offload.ram_tier import RamTier
from dali_gguf.offload.run_counts import RunCounts
from dali_gguf.offload.scheduler import Scheduler
from dali_gguf.offload.torch_device import TorchDevice
from dali_gguf.offload.transfer import Copy
from dali_gguf.offload.verify import Verifier
from dali_gguf.router import Router
from dali_gguf.routing import LayerExperts, Routing

PREFILL = 32  # steps of so many tokens count as prefill: the cache is frozen, a ring streams
NEVER = 1.0  # a margin that no move of a resident can reach
FREE_LINK = 0.95  # CPU speed while copying above which guesses start without waiting for the CPU


class HybridScheduler(Scheduler):
    """moe(layer, h, routing) -> y. experts, routers: by layer number, as in scheduler.Scheduler."""

    recordable = False

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
        ram: RamTier | None = None,
        paired: PairedRouters | None = None,
    ):
        """ram: of a model larger than main memory; None: the experts' bytes are mapped. paired:
        where routing and predictions are one product."""
        super().__init__(device, experts, routers)
        self.layers = sorted(experts)
        self.row = {layer: row for row, layer in enumerate(self.layers)}
        self.cache, self.model, self.choices = cache, costs, choices
        self.known = known  # counts of earlier runs, that this one's are added to
        self.gap, self.guesser = Gap(), Guesser(predictor, self.layers)
        n_expert = slots.place.shape[1]
        self.planner = Planner(choices.placement, n_expert)
        self.still = Planner("static-hot", n_expert)  # residents on the GPU, nothing is copied
        self.counters = HybridCounters(self.layers, n_expert)
        if known is not None:
            known.run = self.counters.routed
        self.ram, self.paired = ram, paired
        self.traffic = Traffic(device, slots, cache, experts, self.layers, self.counters, ram)
        self.cpu = CpuPart(cpu)
        self.launches = device.device.type == "cuda"  # the device computes on its own
        self.timer, self._untimed = GpuTimer(device.device), None
        self.pays = Pays(choices.candidates(predictor is not None))
        self.verifier = Verifier(self.cpu, self.traffic) if choices.verify else None
        self._left = self._step_began = time.perf_counter()
        self._step_tokens = 0
        self.recent_us: deque[float] = deque(maxlen=RECENT)  # of decode steps
        self._prompted = False
        self.cold = False  # nothing was known about this model: the prompt decides the residents
        self._on, self._margin = self._features(), NEVER

    def _features(self) -> set[str]:
        """What a decode step uses; decided at its first layer."""
        return {f for f in FEATURES if self.choices.always(f) or self.pays.enabled(f)}

    # ---- one layer -------------------------------------------------------------------------

    def route(self, layer: int, h: Array, router: Router) -> Routing:
        """As Scheduler.route. Where guesses are wanted, the next layer's router takes part."""
        if self.paired is None or not (len(h) >= PREFILL or "prefetch" in self._on):
            return super().route(layer, h, router)
        return self.paired.route(layer, h, router)

    def moe(self, layer: int, h: Array, routing: Routing) -> Array:
        """The experts' part of a layer. h [T, D] is the router's input too. Returns [T, D]."""
        try:
            return self._moe(layer, h, routing)
        except BaseException:  # the next step must find nothing of this one
            self._untimed = None
            self.cpu.abandon()
            self.traffic.abandon(self.row[layer])
            raise

    def _moe(self, layer: int, h: Array, routing: Routing) -> Array:
        row, began = self.row[layer], time.perf_counter()
        prefill = len(routing.expert_ids) >= PREFILL
        self._enter(row, len(routing.expert_ids), prefill, began)
        host = self.device.to_host(h)
        here = self.traffic.here(row, routing.workload)
        plan = self._plan(row, routing.workload, here, prefill)
        on_cpu, copy, coming = plan.cpu, deque(), deque()
        if plan.copy.size:
            copy.extend(plan.copy.tolist())
            coming = self.traffic.demand(row, copy)
        arriving = None if self.ram is None else self.ram.need(layer, routing, on_cpu, plan.copy)
        others = not self.launches or bool(coming) or arriving is not None  # to wait for meanwhile
        beside = on_cpu.size > 0 and (others or bool(self.traffic.behind))  # in its own thread
        if beside:
            self.cpu.start(host, routing, self.experts[layer], on_cpu, arriving)
        plan_us, before = (time.perf_counter() - began) * 1e6, self._untimed
        y = self._gpu_part(row, h, routing, plan.gpu, coming, copy)
        if on_cpu.size and not beside:
            self.cpu.run(host, routing, self.experts[layer], on_cpu)
        self.counters.planned(row, routing.workload, here, plan, plan_us)
        self._read_times(before, y is not None)
        at_once = self.model.costs.r > FREE_LINK
        later = self._account(row, host, routing, prefill, at_once)
        if on_cpu.size:
            y = self._cpu_part(y, routing.workload[on_cpu])
        for start in later:
            start()
        if self.verifier is not None:
            experts, result = self.experts[layer], self.device.to_host(y)
            self.verifier.check(layer, row, host, routing, experts, result)
        self._left = time.perf_counter()
        self.counters.add(row, "real_us", (self._left - began) * 1e6)
        return y

    def _cpu_part(self, y: Array | None, workload: np.ndarray) -> Array:
        """Waits for the CPU and adds its output. workload [n]: of its experts."""
        result = self.cpu.result()
        self._untimed = (*self._untimed[:2], result.us)
        self.model.observe("cpu", workload, result.us - result.waited_us)
        y_cpu = self.device.from_host(result.y)
        return y_cpu if y is None else y.add_(y_cpu)

    def _enter(self, row: int, tokens: int, prefill: bool, now: float) -> None:
        """Measures the gap since the last layer and, at the first layer, the last step."""
        self.cache.frozen = prefill
        if row == 0:
            if tokens == self._step_tokens and not prefill:
                us = (now - self._step_began) * 1e6
                self.pays.record(us, tokens)
                self.recent_us.append(us)
            self._prompted |= prefill
            if self.cold and self._prompted and not prefill:
                self.cold = False
                self.traffic.reseat()
            if self.ram is not None:
                known = not self.cold or (self._step_tokens > 0 and not prefill)
                self.ram.before_step(self.model, self.cache if known else None)
            self._step_began, self._step_tokens = now, tokens
            self._on = self._features()
            self._margin = self.model.margin() if "moves" in self._on else NEVER
        elif tokens == self._step_tokens:
            self.gap.observe((now - self._left) * 1e6, prefill)
        self.traffic.settle()

    def _plan(self, row: int, workload: np.ndarray, here: np.ndarray, prefill: bool) -> LayerPlan:
        """Who computes what. here uint8 [E]: traffic.here."""
        copies = self.traffic.slots.spare(row) > 0 and (prefill or "copies" in self._on)
        missing = not copies and bool(((workload > 0) & (here == 0)).any())
        planner = self.still if missing else self.planner
        busy = self.traffic.busy_us(self.model)
        in_ram = None if self.ram is None else self.ram.arena.resident(self.layers[row])
        return planner.plan(workload, here, self.model.costs, busy, self._margin, in_ram)

    def _gpu_part(self, row: int, h: Array, routing: Routing, residents: np.ndarray,
                  coming: deque[Copy], waiting: deque[int]) -> Array | None:
        """Residents at once, then what arrives."""
        self._untimed = (row, None, 0.0)
        if not (residents.size or coming):
            return None
        self.timer.begin()
        ready, at, late = self.traffic.split(row, residents)
        y = self._compute(row, h, routing, ready, at)
        self.timer.residents_done()
        self._untimed = (row, routing.workload[ready], 0.0)
        coming.extendleft(late)
        if not coming:
            return y
        while coming:
            group = self.traffic.next_group(coming)
            ids = np.array([copy.expert for copy in group])
            at = np.array([copy.offset for copy in group])
            part = self._compute(row, h, routing, ids, at)
            y = part if y is None else y + part
            self.traffic.used(row, group, reuse=bool(waiting))
            if waiting:
                coming.extend(self.traffic.demand(row, waiting))
        self.timer.end()
        return y

    def _read_times(self, layer: tuple | None, before: bool) -> None:
        """What a layer took on both sides: (row, workload on the GPU or None, us of the CPU).
        before: the timer has begun with another one since."""
        if layer is None:
            return
        row, workload, cpu_us = layer
        gpu_us = 0.0
        if workload is not None:
            residents_us, gpu_us = self.timer.read(before)
            if len(workload):
                self.model.observe("gpu", workload, residents_us)
        self.counters.waits(row, cpu_us, gpu_us)

    def _compute(self, row: int, h: Array, routing: Routing, ids: np.ndarray,
                 at: np.ndarray) -> Array | None:
        if not len(ids):
            return None
        e = self.device.experts(self.experts[self.layers[row]])
        return self.device.compute(h, self.traffic.slots.memory, e, routing, ids, at)

    # ---- between layers --------------------------------------------------------------------

    def _account(self, row: int, host: np.ndarray, routing: Routing, prefill: bool,
                 at_once: bool) -> list[Callable[[], None]]:
        """While both sides work: the cache learns what was used, the next layer is predicted.
        Returns what is to be started once the CPU is done (at_once: it was started already)."""
        costs = self.model.costs
        swaps = self.cache.step(row, routing.workload, self.traffic.arrived_for(row), costs)
        self.traffic.adopt(row, [s for s in swaps if s.adopted])
        if copies := self.traffic.new_copy_times():
            self.model.observe("copy", len(copies), sum(copies))
        later: list[Callable[[], None]] = []
        room, guesses = self.gap.room(prefill, costs) - self.traffic.link.waiting(), []
        if prefill or "prefetch" in self._on:
            products = None if self.paired is None else self.paired.take(self.layers[row])
            near = self.traffic.out_of_reach
            guesses = self.guesser.guess(row, host, prefill, room, near, costs, products)
        if guesses:
            later.append(lambda: self.traffic.prefetch(row + 1, guesses))
        fills = [s for s in swaps if not s.adopted]
        if fills and "fills" in self._on and room > len(guesses):
            later.append(lambda: self.traffic.fill(row, fills))
        if not at_once:
            return later
        for start in later:
            start()
        return []

    # ---- the rest of the seam --------------------------------------------------------------

    def line(self) -> str:
        """For the closing line of a run."""
        parts = [self.counters.line(), self.choices.line(), self.pays.line()]
        if self.verifier is not None:
            parts.append(self.verifier.line())
        return " | ".join(part for part in parts if part)

    def figures(self) -> dict:
        """For --stats-json."""
        self._read_times(self._untimed, False)
        self._untimed = None
        out = self.counters.as_dict()
        out["placement"] = self.choices.placement
        out["kept"] = {name: self.pays.on[name] for name in self.pays.on}
        link = self.traffic.link
        out["link"] = {"bytes": link.bytes, "busy_us": round(link.busy_us)}
        if self.verifier is not None:
            out["verify"] = self.verifier.as_dict()
        return out

    def table(self) -> str:
        return self.counters.table()

    def disk_stats(self) -> ArenaStats | None:
        return None if self.ram is None else self.ram.arena.stats()

    def close(self) -> None:
        close_all(self.cpu.close, self.traffic.close)
        if self.known is not None:
            self.known.save(self.guesser.means())
        if self.verifier is not None and self.verifier.failed:
            print(f"dali-gguf: {self.verifier.line()}", file=sys.stderr)
