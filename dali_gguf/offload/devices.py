"""--device and --vram: which device a model runs on, and what of it goes into GPU memory."""

import os
import re
import sys

from dali_gguf.config import ModelConfig
from dali_gguf.device import Device
from dali_gguf.errors import InputError
from dali_gguf.offload.gpu_tier import GpuOptions, GpuTier, Load, cpu_device, say
from dali_gguf.tensor import Tensor

NAMES = "auto, cpu, cuda, cuda:0.., cpu-torch"


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
