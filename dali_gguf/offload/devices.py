"""--device and --vram: which device a model runs on, and what of it goes into GPU memory."""

import os
import re
import sys
from dataclasses import dataclass

import numpy as np

from dali_gguf.config import ModelConfig
from dali_gguf.device import Device
from dali_gguf.errors import InputError
from dali_gguf.gguf_file import GGUFFile
from dali_gguf.offload import budget, prefetch, vram
from dali_gguf.offload.cache import ExpertCache, settings
from dali_gguf.offload.cost import CostModel
from dali_gguf.offload.placement import policy_code
from dali_gguf.offload.run_counts import RunCounts
from dali_gguf.offload.scheduler import Scheduler
from dali_gguf.tensor import Tensor

NAMES = "auto, cpu, cuda, cuda:0.., cpu-torch"
STATIC = ("static-layers", "static-hot", "all-cpu")


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


def open_device(
    spec: str | Device,
    threads: int | None,
    options: GpuOptions,
    tensors: dict[str, Tensor],
    config: ModelConfig,
    load: Load,
) -> "tuple[Device, GpuTier | None]":
    """The device of a model, and the tier that makes its scheduler (None: the CPU alone).

    No GPU, no torch, or too little GPU memory: says so in one line and gives the CPU. InputError
    for a device that is not known or a card that is not there."""
    if not isinstance(spec, str):
        return spec, None
    device = find(spec)
    tier = None if device is None else GpuTier.plan(device, threads, options, tensors, config, load)
    if tier is None:
        return cpu_device(threads), None
    return tier.device, tier


def cpu_device(threads: int | None) -> Device:
    from dali_gguf.kernels.cpu import CpuDevice  # compiles, so only when it is used

    return CpuDevice(threads)


def say(text: str) -> None:
    print(f"dali-gguf: {text}", file=sys.stderr)


def find(spec: str):
    """The torch.device that is meant, or None for the CPU's own kernels."""
    if not re.fullmatch(r"auto|cpu|cpu-torch|cuda(:\d+)?", spec):
        raise InputError(f"device {spec!r} is not known; expected one of {NAMES}")
    index = int(spec.partition(":")[2] or 0)
    if spec == "cpu":
        return None
    if spec == "auto" and not gpu_driver():  # torch takes seconds to import
        say("no GPU found, running on the CPU")
        return None
    try:
        import torch
    except ImportError:
        say(
            f"--device {spec} needs torch, which is not installed (pip install 'dali-gguf[gpu]'); "
            "running on the CPU"
        )
        return None
    if spec == "cpu-torch":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        say("no GPU that torch can use was found, running on the CPU")
        return None
    if index >= count:
        raise InputError(
            f"device {spec!r} is not there; torch sees {count}: cuda:0 to cuda:{count - 1}"
        )
    return torch.device("cuda", index)


def gpu_driver() -> bool:
    """Whether a CUDA driver seems to be installed, without loading anything large."""
    if sys.platform == "win32":
        return os.path.exists(os.path.join(os.environ.get("SystemRoot", ""), "System32/nvcuda.dll"))
    return any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-gpu"))


class GpuTier:
    """A device with memory of its own, the CPU beside it, and the plan of what lies where."""

    def __init__(self, device: Device, cpu: Device, options: GpuOptions, plan: vram.VramPlan):
        self.device, self.cpu, self.options, self.plan_of = device, cpu, options, plan

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
        free, total = memory_of(device)
        room, note = vram.budget(options.vram, free, total)
        if note:
            say(note)
        whole = options.placement == "static-layers"
        plan = vram.plan_model(
            tensors, config, room, load.n_ctx, load.n_seq, load.n_batch, load.kv_type, whole
        )
        if not plan.fits:
            needed = budget.show_size(plan.dense + plan.kv + plan.scratch)
            say(
                f"GPU memory of {budget.show_size(room)} is too little: weights outside the "
                f"experts, KV cache and scratch take {needed}; running on the CPU"
            )
            return None
        from dali_gguf.offload.torch_device import TorchDevice

        return cls(TorchDevice(device), cpu_device(threads), options, plan)

    def make_scheduler(
        self, model, config: ModelConfig, file: GGUFFile, costs: CostModel | None = None
    ) -> Scheduler:
        """Uploads the weights and the first experts. model: layers.Model. What earlier runs learned
        about the model's routing is kept beside its file. costs None: measured now."""
        lookup_only = None if model.head is model.embedding else model.embedding
        self.device.upload_weights(skip=lookup_only)
        if not model.experts:
            self.cpu.close()
            return Scheduler(self.device, model.experts, model.routers)
        from dali_gguf.offload import gpu_measure

        if costs is None:
            first = model.experts[min(model.experts)]
            costs = gpu_measure.measure(self.device, self.cpu, first)
        known = RunCounts(file.paths[0], file, sorted(model.experts))
        scheduler = self._build(model, config, known, costs)
        scheduler.cold = known.counts is None and self.options.placement not in STATIC
        return scheduler

    def _build(self, model, config: ModelConfig, known: RunCounts, costs: CostModel) -> Scheduler:
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
        scheduler = HybridScheduler(
            self.device,
            self.cpu,
            model.experts,
            model.routers,
            slots,
            cache,
            predictor,
            costs,
            choices,
            known,
        )
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


def memory_of(device) -> tuple[int, int]:
    """(free, total) bytes of a torch.device; cpu-torch pretends with half of what is free."""
    if device.type == "cuda":
        import torch

        return torch.cuda.mem_get_info(device)
    free = budget.available().nbytes
    return free // 2, free
