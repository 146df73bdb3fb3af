"""--device and --vram: which device a model runs on, and what of it goes into GPU memory."""

import os
import re
import sys

from dali_gguf.config import ModelConfig
from dali_gguf.device import Device
from dali_gguf.errors import InputError
from dali_gguf.gguf_file import GGUFFile
from dali_gguf.offload import disk_tier
from dali_gguf.offload.gpu_tier import GpuOptions, GpuTier, Load, cpu_device, say
from dali_gguf.offload.memory_plan import MemoryPlan
from dali_gguf.tensor import Tensor

NAMES = "auto, cpu, cuda, cuda:0.., cpu-torch"


def plan_gpu(
    spec: str | Device,
    threads: int | None,
    options: GpuOptions,
    tensors: dict[str, Tensor],
    config: ModelConfig,
    load: Load,
) -> GpuTier | None:
    """What of a model goes into GPU memory, and who makes its scheduler. None: the CPU alone.

    No GPU, no torch, or too little GPU memory: says so in one line. InputError for a device that is
    not known or a card that is not there."""
    device = find(spec) if isinstance(spec, str) else None
    if spec == "cpu" and options.vram is not None:
        say("--vram is for a GPU, and the device is cpu: add --device cuda, or auto")
    if device is None:
        return None
    return GpuTier.plan(device, threads, options, tensors, config, load)


def open_device(spec: str | Device, threads: int | None, tier: GpuTier | None) -> Device:
    """The tier's device, else the one that was handed in, else the CPU."""
    if tier is not None:
        return tier.device
    return cpu_device(threads) if isinstance(spec, str) else spec


def plan_memory(
    tier: GpuTier | None, ram: int | str | None, file: GGUFFile, config: ModelConfig, load: Load
) -> MemoryPlan:
    """What of a model lies in main memory, beside what the tier has on the GPU. ram: the budget.
    MemoryBudgetError, with the smallest budget that works."""
    room, on_gpu = disk_tier.room_for(ram), None
    if tier is not None:
        room, on_gpu = tier.room_beside(room), tier.plan_of
    sizes = load.n_ctx, load.n_seq, load.n_batch, load.kv_type
    return disk_tier.plan_model(file, config, room, *sizes, on_gpu)


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
    torch.cuda.set_device(index)  # events and Triton's launches go to the current device
    return torch.device("cuda", index)


def gpu_driver() -> bool:
    """Whether a CUDA driver seems to be installed, without loading anything large."""
    if sys.platform == "win32":
        return os.path.exists(os.path.join(os.environ.get("SystemRoot", ""), "System32/nvcuda.dll"))
    return any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-gpu"))
