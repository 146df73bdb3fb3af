"""`dali-gguf calibrate`: measure this machine for DALI's cost model, on a model's own experts."""

import argparse
import sys

from dali_gguf.cli.arguments import add_model, model_path, whole
from dali_gguf.cli.run import compile_kernels
from dali_gguf.engine import Engine
from dali_gguf.offload import cost_store, devices
from dali_gguf.offload.calibrate import calibrate

HELP = "measure this machine for DALI's cost model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add = parser.add_argument
    add("-t", "--threads", type=whole(1), metavar="N", help="default: all cores")
    add("--device", default="auto", help="auto (default), cpu, cuda[:i]")
    add("--force", action="store_true", help="measure again even if a profile is stored")


def run(args: argparse.Namespace) -> int:
    found = devices.find(args.device)
    gpu, name = open_gpu(found)
    path = model_path(args)
    compile_kernels(path)
    with Engine(path, threads=args.threads, n_ctx=64) as engine:
        threads = engine.device.threads
        if engine.scheduler.experts and not args.force:
            shape = cost_store.shape_name(engine.scheduler.experts[min(engine.scheduler.experts)])
            stored = cost_store.load(cost_store.machine_name(threads, name), shape)
            if stored is not None:
                show(stored, "stored")
                return 0
        profile = calibrate(
            engine, threads, gpu, name, lambda text: print(f"calibrate: {text} ..", file=sys.stderr)
        )
    show(profile, f"kept in {cost_store.save(profile)}")
    return 0


def open_gpu(device):
    """(TorchDevice, its name), or (None, "") for the CPU alone."""
    if device is None:
        return None, ""
    from dali_gguf.offload.gpu_measure import gpu_name
    from dali_gguf.offload.torch_device import TorchDevice

    return TorchDevice(device), gpu_name(device)


def show(p: cost_store.Profile, where: str) -> None:
    print(f"{p.machine}\n{p.shape}\n")
    print("tokens of an expert " + "".join(f"{w:>9}" for w in p.tokens))
    print("on the CPU, us      " + "".join(f"{x:9.1f}" for x in p.cpu_us))
    if p.gpu_us:
        print("on the GPU, us      " + "".join(f"{x:9.1f}" for x in p.gpu_us))
        print(f"one copy {p.copy_us:.0f} us; the CPU keeps {p.r:.0%} of its speed meanwhile")
    print(
        f"the CPU's part of a layer {p.h_cpu:.1f} us; a token without experts {p.dense_us:.0f} us"
    )
    if p.disk_bandwidth:
        print(f"disk {p.disk_bandwidth / 1e9:.2f} GB/s (direct reads)")
    print(where)
