"""The GPU tier of a model: what of it lies in GPU memory, its costs, and the scheduler."""

import gc
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from dali_gguf.config import ModelConfig
from dali_gguf.device import Device
from dali_gguf.errors import InputError, MemoryBudgetError
from dali_gguf.gguf_file import GGUFFile
from dali_gguf.offload import budget, prefetch, vram
from dali_gguf.offload.budget import Room
from dali_gguf.offload.cache import ExpertCache, settings
from dali_gguf.offload.cost import CostModel
from dali_gguf.offload.memory_plan import MemoryPlan
from dali_gguf.offload.pays import NEEDED, RECENT
from dali_gguf.offload.placement import policy_code
from dali_gguf.offload.prefetch import Predictor
from dali_gguf.offload.ram_tier import RamTier
from dali_gguf.offload.run_counts import RunCounts
from dali_gguf.offload.scheduler import Scheduler
from dali_gguf.tensor import Tensor

DEFAULT = "threshold"  # placement, if none is named
STATIC = {"static-layers": "whole layers", "static-hot": "hot experts", "all-cpu": "no experts"}
SHRINK = 0.75  # of the expert slots are kept when memory runs out


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """--vram and the names of the policies. placement None: DEFAULT, and a static one where nothing
    dynamic pays; one that is named stays. Raises InputError for unknown names, whatever the
    device."""

    vram: int | str | None = None
    placement: str | None = None
    prefetch: str = "residual"
    expert_cache: str = "decayed"
    verify: bool = False

    def __post_init__(self):
        policy_code(self.placement or DEFAULT)
        settings(self.expert_cache)
        if self.prefetch not in prefetch.PREDICTORS:
            known = ", ".join(prefetch.PREDICTORS)
            raise InputError(f"prefetch {self.prefetch!r} is unknown: choose one of {known}")
        if self.vram is not None:
            vram.parse(self.vram)


@dataclass(frozen=True, slots=True)
class Load:
    """How the model will be used, for the memory plan."""

    n_ctx: int
    n_seq: int
    n_batch: int
    kv_type: str


def cpu_device(threads: int | None) -> Device:
    from dali_gguf.kernels.cpu import CpuDevice  # compiles, so only when it is used

    return CpuDevice(threads)


def say(text: str) -> None:
    print(f"dali-gguf: {text}", file=sys.stderr)


class GpuTier:
    """A device with memory of its own, the CPU beside it, and the plan of what lies where."""

    def __init__(
        self,
        device: Device,
        threads: int | None,
        options: GpuOptions,
        room: int,
        plan: Callable[[int, bool], vram.VramPlan],
    ):
        """plan(room, whole layers): what lies where with so many bytes."""
        self.device, self.options = device, options
        self._threads, self._room, self._plan = threads, room, plan
        self.placement = options.placement or DEFAULT
        self.plan_of = plan(room, self.placement == "static-layers")
        self.costs: CostModel | None = None
        self._model: tuple | None = None  # what make_scheduler was given
        self._memory: MemoryPlan | None = None  # of main memory, if the model is larger
        self._hot_us: float | None = None  # a step of static-hot, while static-layers is on trial
        self._settled = options.placement is not None  # no other placement will be tried
        self._pairs: list = []  # torch_weight.pairs_of the routers

    @classmethod
    def plan(
        cls,
        device,
        threads: int | None,
        options: GpuOptions,
        tensors: dict[str, Tensor],
        config: ModelConfig,
        load: Load,
    ) -> "GpuTier | None":
        """None, with a line, if not even the weights outside the experts fit."""
        free, total = vram.memory_of(device)
        room, note = vram.budget(options.vram, free, total)
        if note:
            say(note)

        @lru_cache(maxsize=1)
        def plan_of(room: int, whole_layers: bool) -> vram.VramPlan:
            sizes = load.n_ctx, load.n_seq, load.n_batch, load.kv_type
            return vram.plan_model(tensors, config, room, *sizes, whole_layers)

        plan = plan_of(room, options.placement == "static-layers")  # has the answer ready
        if not plan.fits:
            needed = budget.show_size(plan.dense + plan.kv + plan.scratch)
            say(
                f"GPU memory of {budget.show_size(room)} is too little: weights outside the "
                f"experts, KV cache and scratch take {needed}; running on the CPU"
            )
            return None
        from dali_gguf.offload.torch_device import OLDEST_TRITON, TorchDevice

        opened = TorchDevice(device)
        if device.type == "cuda" and opened.kernels is None:
            least = ".".join(map(str, OLDEST_TRITON))
            say(f"Triton {least} or newer is not there, and without it the GPU computes slowly")
        return cls(opened, threads, options, room, plan_of)

    def room_beside(self, room: Room) -> Room:
        """Of main memory. What stands in for GPU memory on the CPU comes from the same machine; a
        --ram budget is for the rest."""
        if self.device.device.type == "cuda" or room.source.startswith("--ram"):
            return room
        return replace(room, nbytes=max(0, room.nbytes - self.plan_of.taken))

    def make_scheduler(self, model, config: ModelConfig, file: GGUFFile,
                       costs: CostModel | None = None,
                       memory: MemoryPlan | None = None) -> Scheduler:
        """Uploads the weights and the first experts. model: layers.Model. What earlier runs learned
        about the model's routing is kept beside its file. costs None: stored or measured ones.
        memory: the plan of main memory; if it streams, no expert's mapped bytes are touched."""
        self._model = model, config, file
        if memory is not None and memory.streams:
            self._memory = memory
        if not self._pairs and model.experts:
            from dali_gguf.offload.torch_weight import pairs_of

            self._pairs = pairs_of([weight for weight, _ in model.routers.values()])
        lookup_only = None if model.head is model.embedding else model.embedding
        self.device.upload_weights(skip=lookup_only)
        if not model.experts:
            return Scheduler(self.device, model.experts, model.routers)
        self.cpu = cpu_device(self._threads)
        with ExitStack() as undo:  # what is open already is closed if a later step fails
            undo.callback(self.cpu.close)
            self.costs = costs or self.costs or self._known_costs(model, file)
            layers, n_used = sorted(model.experts), config.experts.n_used
            known = RunCounts(file.paths[0], file, layers, n_used)
            scheduler = self._build(model, config, known, self.costs, undo)
            undo.pop_all()
        scheduler.cold = known.counts is None and self.placement not in STATIC
        return scheduler

    def _known_costs(self, model, file: GGUFFile) -> CostModel:
        from dali_gguf.offload import gpu_measure

        streamed = None if self._memory is None else file.tensors
        first = model.experts[min(model.experts)]
        return gpu_measure.known(self.device, self.cpu, first, streamed)

    # ---- while it runs ---------------------------------------------------------------------

    def smaller(self, scheduler: Scheduler) -> Scheduler:
        """The scheduler anew, with fewer slots, because memory ran out in a step. One line; raises
        MemoryBudgetError when there is nothing left to give up."""
        if not self.plan_of.slots.any():
            raise MemoryBudgetError(
                "GPU memory ran out, and no expert is left to leave it: use a shorter context (-c),"
                " smaller prefill steps (-b) or --device cpu"
            )
        before, left = int(self.plan_of.slots.sum()), self.plan_of
        while left.slots.sum() == before:
            self._room -= int((1 - SHRINK) * left.expert_bytes) + 1
            left = self._plan(self._room, self.placement == "static-layers")
        say(f"GPU memory ran out: going on with {left.slots.sum()} of {before} experts there")
        return self._remade(scheduler, self.placement)

    def reviewed(self, scheduler: Scheduler) -> Scheduler:
        """After a decode step. Where nothing dynamic pays, each layer's hottest experts are left on
        the GPU; whole layers there get one trial against that, and the faster split stays."""
        if self._settled or len(scheduler.recent_us) < RECENT:
            return scheduler
        us = float(np.median(scheduler.recent_us))
        if self._hot_us is None:
            if not scheduler.pays.nothing_pays():
                return scheduler
            self._hot_us = us
            return self._remade(scheduler, "static-layers")
        self._settled = True
        if us < NEEDED * self._hot_us:
            self._tell_fallback()
            return scheduler
        scheduler = self._remade(scheduler, "static-hot")
        self._tell_fallback()
        return scheduler

    def _tell_fallback(self) -> None:
        say(
            f"no copies pay here, and {STATIC[self.placement]} on the GPU are the fastest split: "
            f"{self.placement} from now on"
        )

    def _remade(self, scheduler: Scheduler, placement: str) -> Scheduler:
        """The old one's memory is given back first."""
        scheduler.close()
        scheduler.traffic.slots.release()
        gc.collect()
        self.device.release()
        self.placement = placement
        self.plan_of = self._plan(self._room, placement == "static-layers")
        return self.make_scheduler(*self._model)

    # ---- its parts -------------------------------------------------------------------------

    def _build(self, model, config: ModelConfig, known: RunCounts, costs: CostModel,
               undo: ExitStack) -> Scheduler:
        """undo: what is to be closed if something fails on the way."""
        from dali_gguf.offload import gpu_routers, gpu_slots
        from dali_gguf.offload.hybrid_scheduler import Choices, HybridScheduler
        from dali_gguf.offload.seating import fill_all

        o = self.options
        cache_name = "static" if self.placement in STATIC else o.expert_cache
        counts = known.counts
        if counts is None:
            counts = np.zeros((len(model.experts), config.experts.n_expert))
        layouts = [self.device.experts(model.experts[i]).layout for i in sorted(model.experts)]
        wanted, spare = self.plan_of.slots, self.plan_of.spare
        slots, held = gpu_slots.allocate(
            self.device.device, layouts, counts.shape[1], wanted, spare, say
        )
        resident = self._resident(held, counts)
        cache = ExpertCache(resident, settings(cache_name))
        cache.seed(counts, config.experts.n_used)
        named = o.placement is not None
        choices = Choices(self.placement, o.prefetch, cache_name, o.verify, named=named)
        predictor = self._predictor(model, config, known)
        ram = None
        if self._memory is not None:
            ram = RamTier(model.experts, self._memory.arena_bytes, config.experts.n_used)
            undo.callback(ram.close)
            ram.arena.rest = self.cpu.rest
        routers = gpu_routers.paired(self.device, model, self._pairs, predictor)
        scheduler = HybridScheduler(
            self.device, self.cpu, model.experts, model.routers, slots, cache, predictor, costs,
            choices, known, ram, routers,
        )  # fmt: skip
        undo.callback(scheduler.close)
        fill_all(scheduler.traffic, resident)
        return scheduler

    def _resident(self, slots: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """uint8 [L, E]: the experts that get the slots int64 [L]."""
        if self.placement == "static-layers":
            return (slots[:, None] > np.arange(counts.shape[1])).astype(np.uint8)
        resident = np.zeros(counts.shape, np.uint8)
        for row, n in enumerate(slots.tolist()):
            resident[row, np.argsort(-counts[row], kind="stable")[:n]] = 1
        return resident

    def _predictor(self, model, config: ModelConfig, known: RunCounts) -> Predictor | None:
        """None where nothing could be prefetched."""
        kind = self.options.prefetch
        if kind == "none" or self.placement in STATIC or self.plan_of.spare == 0:
            return None
        from dali_gguf.offload import gpu_routers

        return gpu_routers.predictor(kind, self.device, model, config.experts.n_used, known)
