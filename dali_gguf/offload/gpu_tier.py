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
from dali_gguf.offload.ram_tier import RamTier
from dali_gguf.offload.run_counts import RunCounts
from dali_gguf.offload.scheduler import Scheduler
from dali_gguf.tensor import Tensor

STATIC = ("static-layers", "static-hot", "all-cpu")
SHRINK = 0.75  # of the expert slots are kept when memory runs out


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """--vram and the names of the policies. Raises InputError for unknown ones, whatever the
    device."""

    vram: int | str | None = None
    placement: str = "threshold"
    prefetch: str = "residual"
    expert_cache: str = "decayed"
    verify: bool = False

    def __post_init__(self):
        policy_code(self.placement)
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
        self.plan_of = plan(room, options.placement == "static-layers")
        self.costs: CostModel | None = None
        self._model: tuple | None = None  # what make_scheduler was given
        self._memory: MemoryPlan | None = None  # of main memory, if the model is larger
        self._hot_us: float | None = None  # a step of static-hot, while static-layers is on trial
        self._reviewed = False

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

        plan = plan_of(room, options.placement == "static-layers")
        if not plan.fits:
            needed = budget.show_size(plan.dense + plan.kv + plan.scratch)
            say(
                f"GPU memory of {budget.show_size(room)} is too little: weights outside the "
                f"experts, KV cache and scratch take {needed}; running on the CPU"
            )
            return None
        from dali_gguf.offload.torch_device import TorchDevice

        return cls(TorchDevice(device), threads, options, room, plan_of)

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
        lookup_only = None if model.head is model.embedding else model.embedding
        self.device.upload_weights(skip=lookup_only)
        if not model.experts:
            return Scheduler(self.device, model.experts, model.routers)
        self.cpu = cpu_device(self._threads)
        with ExitStack() as undo:  # what is open already is closed if a later step fails
            undo.callback(self.cpu.close)
            self.costs = costs or self.costs or self._known_costs(model, file)
            known = RunCounts(file.paths[0], file, sorted(model.experts))
            scheduler = self._build(model, config, known, self.costs, undo)
            undo.pop_all()
        scheduler.cold = known.counts is None and self.options.placement not in STATIC
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
            left = self._plan(self._room, self.options.placement == "static-layers")
        say(f"GPU memory ran out: going on with {left.slots.sum()} of {before} experts there")
        return self._remade(scheduler, self.options.placement)

    def reviewed(self, scheduler: Scheduler) -> Scheduler:
        """After a decode step. Where nothing dynamic pays, each layer's hottest experts are left on
        the GPU; whole layers there get one trial against that, and the faster split stays."""
        if self._reviewed or len(getattr(scheduler, "recent_us", ())) < RECENT:
            return scheduler
        us = float(np.median(scheduler.recent_us))
        if self._hot_us is None:
            if not scheduler.pays.nothing_pays():
                return scheduler
            self._hot_us = us
            return self._remade(scheduler, "static-layers")
        self._reviewed = True
        if us < NEEDED * self._hot_us:
            say("whole layers on the GPU are the fastest split here: static-layers from now on")
            return scheduler
        return self._remade(scheduler, "static-hot")

    def _remade(self, scheduler: Scheduler, placement: str) -> Scheduler:
        """The old one's memory is given back first."""
        scheduler.close()
        scheduler.traffic.slots.release()
        gc.collect()
        self.device.release()
        self.options = replace(self.options, placement=placement)
        self.plan_of = self._plan(self._room, placement == "static-layers")
        return self.make_scheduler(*self._model)

    # ---- its parts -------------------------------------------------------------------------

    def _build(self, model, config: ModelConfig, known: RunCounts, costs: CostModel,
               undo: ExitStack) -> Scheduler:
        """undo: what is to be closed if something fails on the way."""
        from dali_gguf.offload.hybrid_scheduler import Choices, HybridScheduler

        o = self.options
        cache_name = "static" if o.placement in STATIC else o.expert_cache
        counts = known.counts
        if counts is None:
            counts = np.zeros((len(model.experts), config.experts.n_expert))
        slots, resident = self._slots(model, counts)
        cache = ExpertCache(resident, settings(cache_name))
        cache.seed(counts, config.experts.n_used)
        choices = Choices(o.placement, o.prefetch, cache_name, o.verify)
        predictor = self._predictor(model, config, known)
        ram = None
        if self._memory is not None:
            ram = RamTier(model.experts, self._memory.arena_bytes, config.experts.n_used)
            undo.callback(ram.close)
            ram.arena.rest = self.cpu.rest
        scheduler = HybridScheduler(
            self.device, self.cpu, model.experts, model.routers, slots, cache, predictor, costs,
            choices, known, ram,
        )  # fmt: skip
        undo.callback(scheduler.close)
        scheduler.traffic.fill_all(resident)
        return scheduler

    def _slots(self, model, counts: np.ndarray):
        """The slots, and which experts [L, E] get them; fewer if the memory does not have them."""
        from dali_gguf.offload.gpu_slots import GpuSlots

        layouts = [self.device.experts(model.experts[i]).layout for i in sorted(model.experts)]
        n_expert, wanted, spare = counts.shape[1], self.plan_of.slots, self.plan_of.spare
        share = 1.0
        while True:
            slots = (wanted * share).astype(np.int64)
            try:
                memory = GpuSlots(self.device.device, layouts, n_expert, slots, spare)
                break
            except RuntimeError as error:  # torch.OutOfMemoryError is one
                if "memory" not in str(error).lower() or share < 0.1:
                    raise
                share *= 0.75
                say(f"GPU memory ran out: planning with {share:.0%} of the expert slots")
        if self.options.placement == "static-layers":
            return memory, (slots[:, None] > np.arange(n_expert)).astype(np.uint8)
        resident = np.zeros((len(layouts), n_expert), np.uint8)
        for row, n in enumerate(slots.tolist()):
            resident[row, np.argsort(-counts[row], kind="stable")[:n]] = 1
        return memory, resident

    def _predictor(self, model, config: ModelConfig, known: RunCounts):
        """None where nothing could be prefetched."""
        o = self.options
        if o.prefetch == "none" or o.placement in STATIC or self.plan_of.spare == 0:
            return None
        routers = {}
        for layer, (weight, rule) in model.routers.items():
            bias = model.layers[layer].feed.router_bias
            bias = None if bias is None else self.device.to_host(bias)
            dense = self.device.to_host(weight.dense())
            routers[layer] = prefetch.RouterMap(
                dense, config.experts.n_used, bias, rule.scoring == "sigmoid", rule.bias
            )
        stored, layers = known.stored, sorted(routers)
        means = None if stored is None else dict(zip(layers, stored.means))
        has_maps = stored is not None and stored.maps is not None
        maps = dict(zip(layers, stored.maps)) if has_maps else None
        return prefetch.Predictor(o.prefetch, routers, known.counts, maps, means)


def out_of_memory(error: RuntimeError) -> bool:
    """torch.OutOfMemoryError, and what other libraries raise for the same."""
    return "out of memory" in str(error).lower()


def gpu_name(device) -> str:
    """How the torch.device is called in cost profiles."""
    if device.type != "cuda":
        return "torch on the CPU"
    import torch

    return torch.cuda.get_device_name(device)
