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

import numpy as np

from dali_gguf.closing import close_all
from dali_gguf.device import Array, Device
from dali_gguf.offload import hybrid_report
from dali_gguf.offload.arena_stats import ArenaStats
from dali_gguf.offload.between_layers import BetweenLayers
from dali_gguf.offload.cache import ExpertCache
from dali_gguf.offload.choices import Choices
from dali_gguf.offload.cost import CostModel
from dali_gguf.offload.cpu_part import CpuPart
from dali_gguf.offload.decode_layer import Decided, DecodeLayer, DecodeLayers, Situation
from dali_gguf.offload.gpu_slots import GpuSlots
from dali_gguf.offload.gpu_traffic import Traffic
from dali_gguf.offload.guesser import Guesser
from dali_gguf.offload.hybrid_counters import HybridCounters
from dali_gguf.offload.layer_times import LayerTimes
from dali_gguf.offload.paired_routers import PairedRouters
from dali_gguf.offload.placement import LayerPlan, Planner
from dali_gguf.offload.prefetch import Predictor
from dali_gguf.offload.ram_tier import RamTier
from dali_gguf.offload.run_counts import RunCounts
from dali_gguf.offload.scheduler import Scheduler
from dali_gguf.offload.seating import reseat
from dali_gguf.offload.step_features import StepFeatures
from dali_gguf.offload.torch_device import TorchDevice
from dali_gguf.offload.transfer import Copy
from dali_gguf.offload.verify import Verifier
from dali_gguf.router import Router
from dali_gguf.routing import LayerExperts, Routing

PREFILL = 32  # steps of so many tokens count as prefill: the cache is frozen, a ring streams


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
        n_expert = slots.place.shape[1]
        self.planner = Planner(choices.placement, n_expert)
        self.counters = HybridCounters(self.layers, n_expert)
        if known is not None:
            known.run = self.counters.routed
        self.ram, self.paired = ram, paired
        self.traffic = Traffic(device, slots, cache, experts, self.layers, self.counters, ram)
        biases = {} if paired is None else paired.biases
        self.decoders = DecodeLayers(device, experts, self.planner, biases)
        self.cpu = CpuPart(cpu)
        self.launches = device.device.type == "cuda"  # the device computes on its own
        self.times = LayerTimes(device.device, costs, self.counters)
        self.step = StepFeatures(choices, predictor is not None, costs)
        self.pays, self.recent_us = self.step.pays, self.step.recent_us
        self.guesser = Guesser(predictor, self.layers)
        self.between = BetweenLayers(
            cache, self.traffic, costs, self.guesser, self.step, self.paired
        )
        self.gap = self.between.gap
        self.verifier = Verifier(self.cpu, self.traffic) if choices.verify else None
        self._entered: tuple | None = None  # from route on: (row, h on the host, Decided or None)
        self._plan_us = 0.0
        self._left = time.perf_counter()
        self._prompted = False
        self.cold = False  # nothing was known about this model: the prompt decides the residents

    # ---- one layer -------------------------------------------------------------------------

    def route(self, layer: int, h: Array, router: Router) -> Routing:
        """As Scheduler.route. Where guesses are wanted, the next layer's router takes part. What
        needs no answer is done while the device makes it."""
        row, tokens, quick, decided = self.row[layer], len(h), None, None
        try:
            self._begin(row, tokens)
            ahead = tokens >= PREFILL or "prefetch" in self.step.on
            paired = self.paired if ahead else None
            product = self.logits(h, router) if paired is None else paired.product(layer, h)
            self.traffic.prepare(row)
            if tokens == 1 and self.ram is None and not self.traffic.pending:
                quick = self.decoders.find(layer, h, router, paired is not None)
            host, product = self.device.read_back(h, product)
            if quick is not None:
                decided = self._decide(row, quick, h, product)
        except BaseException:
            self._abandon(row)
            raise
        self._entered = row, host, decided
        if self.paired is not None:
            self.paired.keep(layer, product if paired is not None else None)
        if decided is not None:
            return decided.routing
        if paired is not None:
            return paired.route(layer, product, router)
        return self.device.route_host(product, router.n_used, router.rule)

    def _decide(self, row: int, quick: DecodeLayer, h: Array, product: np.ndarray) -> Decided:
        """Everything up to the launch at once."""
        began, traffic, now = time.perf_counter(), self.traffic, self._situation(row, prefill=False)
        slots, table = traffic.slots, self.device.pair_table(traffic.here.size)
        event = self.times.begin_event()
        decided = quick(product, h, now, slots.memory, slots.place[row], table, event)
        if decided.y is not None:
            self.times.gpu_has_begun()
        self._plan_us = (time.perf_counter() - began) * 1e6
        return decided

    def moe(self, layer: int, h: Array, routing: Routing) -> Array:
        """The experts' part of a layer. h [T, D] is the router's input too. Returns [T, D]."""
        row = self.row[layer]
        try:
            return self._moe(layer, row, h, routing)
        except BaseException:
            self._abandon(row)
            raise

    def _abandon(self, row: int) -> None:
        """The layer ended with an error: the next step must find nothing of this one."""
        self._entered = None
        self.times.drop()
        self.cpu.abandon()
        self.traffic.abandon(row)

    def _moe(self, layer: int, row: int, h: Array, routing: Routing) -> Array:
        began, workload = time.perf_counter(), routing.workload
        prefill, (host, decided) = len(routing.expert_ids) >= PREFILL, self._host(row, h)
        here = self.traffic.here
        if decided is None:
            self.traffic.expect(row, workload)
            plan = self._plan(row, workload, prefill)
            self._plan_us = (time.perf_counter() - began) * 1e6
        else:
            plan = decided.plan
        on_cpu, copy, coming = plan.cpu, deque(), deque()
        if plan.copy.size:
            copy.extend(plan.copy.tolist())
            coming = self.traffic.demand(row, copy)
        arriving = None if self.ram is None else self.ram.need(layer, routing, on_cpu, plan.copy)
        others = not self.launches or bool(coming) or arriving is not None  # to wait for meanwhile
        beside = on_cpu.size > 0 and (others or bool(self.traffic.behind))  # in its own thread
        if beside:
            self.cpu.start(host, routing, self.experts[layer], on_cpu, arriving)
        y = decided and decided.y
        y = self._gpu_part(row, h, routing, plan.gpu, coming, copy, y)
        if on_cpu.size and not beside:
            self.cpu.run(host, routing, self.experts[layer], on_cpu)
        self.counters.planned(row, workload, here, plan, self._plan_us)
        self.times.tell_last()
        if row:
            self.gap.observe((began - self._left) * 1e6, prefill)
        later = self.between.account(row, host, workload, prefill, self.times.sampled)
        if on_cpu.size:
            y = self._cpu_part(y, workload[on_cpu])
        for start in later:
            start()
        if self.verifier is not None:
            experts, result = self.experts[layer], self.device.to_host(y)
            self.verifier.check(layer, row, host, routing, experts, result)
        self._left = time.perf_counter()
        self.counters.add(row, "real_us", (self._left - began) * 1e6)
        return y

    def _host(self, row: int, h: Array) -> tuple[np.ndarray, Decided | None]:
        """(h [T, D] in main memory, what was decided) as route has left them; if it was not called,
        from here."""
        entered, self._entered = self._entered, None
        if entered is not None and entered[0] == row:
            return entered[1:]
        self._begin(row, len(h))
        self.traffic.prepare(row)
        return self.device.to_host(h), None

    def _cpu_part(self, y: Array | None, workload: np.ndarray) -> Array:
        """Waits for the CPU and adds its output. workload [n]: of its experts."""
        result = self.cpu.result()
        self.times.cpu(workload, result.us, result.waited_us)
        y_cpu = self.device.from_host(result.y)
        return y_cpu if y is None else y.add_(y_cpu)

    def _begin(self, row: int, tokens: int) -> None:
        """At the first layer, what the step uses is decided."""
        prefill = tokens >= PREFILL
        if row == 0:
            self._begin_step(tokens, prefill)
        self.cache.frozen = prefill
        self.times.begin(row, prefill)

    def _begin_step(self, tokens: int, prefill: bool) -> None:
        first, self._prompted = self.step.tokens == 0, self._prompted or prefill
        self.step.begin(tokens, prefill)
        if self.cold and self._prompted and not prefill:
            self.cold = False
            reseat(self.traffic)
        if self.ram is not None:
            known = not self.cold or not (first or prefill)
            self.ram.before_step(self.model, self.cache if known else None)

    def _situation(self, row: int, prefill: bool) -> Situation:
        traffic, model = self.traffic, self.model
        copies = traffic.slots.spare(row) > 0 and (prefill or "copies" in self.step.on)
        busy, margin = traffic.busy_us(model), self.step.margin
        return Situation(traffic.here, model.costs, busy, margin, copies)

    def _plan(self, row: int, workload: np.ndarray, prefill: bool) -> LayerPlan:
        """Who computes what."""
        here, costs, busy, margin, copies = self._situation(row, prefill)
        in_ram = None if self.ram is None else self.ram.arena.resident(self.layers[row])
        return self.planner.plan(workload, here, costs, busy, margin, in_ram, copies)

    def _gpu_part(self, row: int, h: Array, routing: Routing, residents: np.ndarray,
                  coming: deque[Copy], waiting: deque[int], y: Array | None) -> Array | None:
        """Residents at once, then what arrives. y: what the residents add, if it is under way."""
        if not (residents.size or coming):
            return None
        if y is None:
            self.times.gpu_begins()
            late = self.traffic.late(residents)
            if late:
                residents = np.setdiff1d(residents, [copy.expert for copy in late])
                coming.extendleft(late)
            y = self._compute(row, h, routing, residents)
        self.times.residents_done(routing.workload[residents])
        if not coming:
            return y
        while coming:
            group = self.traffic.next_group(coming)
            part = self._compute(row, h, routing, np.array([copy.expert for copy in group]))
            y = part if y is None else y + part
            self.traffic.used(row, group, reuse=bool(waiting))
            if waiting:
                coming.extend(self.traffic.demand(row, waiting))
        self.times.gpu_ends()
        return y

    def _compute(self, row: int, h: Array, routing: Routing, ids: np.ndarray) -> Array | None:
        """What the experts ids, whose bytes are in slots, add."""
        if not ids.size:
            return None
        slots, e = self.traffic.slots, self.device.experts(self.experts[self.layers[row]])
        return self.device.compute(h, slots.memory, e, routing, ids, slots.place[row])

    # ---- the rest of the seam --------------------------------------------------------------

    def line(self) -> str:
        self.traffic.new_copy_times()  # those that were not asked for yet are counted
        return hybrid_report.line(self)

    def figures(self) -> dict:
        self.times.tell_all()
        self.traffic.new_copy_times()
        return hybrid_report.figures(self)

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
