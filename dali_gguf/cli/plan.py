"""`dali-gguf plan`: what of a model goes where, how fast it should be, whether it caches well."""

import argparse
import re
from pathlib import Path

import numpy as np

from dali_gguf import models
from dali_gguf.cli.arguments import add_model, model_path, size, whole
from dali_gguf.config import ModelConfig
from dali_gguf.errors import InputError
from dali_gguf.gguf_file import GGUFFile
from dali_gguf.kernels.pool import physical_cores
from dali_gguf.offload import (
    cacheability,
    cost_store,
    counts_file,
    disk_forecast,
    disk_tier,
    forecast,
    vram,
)
from dali_gguf.offload import trace as traces
from dali_gguf.offload.budget import show_size
from dali_gguf.offload.memory_plan import MemoryPlan
from dali_gguf.offload.record import router_matrices
from dali_gguf.offload.vram import VramPlan

HELP = "what goes where, before loading"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add = parser.add_argument
    add("--vram", type=size, metavar="SIZE", help="GPU memory to plan for, like 6G; default: none")
    add("--ram", type=size, metavar="SIZE", help="main memory, like 16G; default: what is free")
    add("-c", "--ctx-size", type=whole(1), default=4096, metavar="N", help="context (4096)")
    add(
        "-b",
        "--batch-size",
        type=whole(1),
        default=512,
        metavar="N",
        help="tokens of a prefill step",
    )
    add("--kv-type", choices=("f16", "q8_0", "f32"), default="f16", help="f16")
    add("-t", "--threads", type=whole(1), metavar="N", help="of the stored profile; default: all")
    add("--trace", metavar="FILE", help="routing trace of the model, for how well it caches")


def run(args: argparse.Namespace) -> int:
    path = model_path(args)
    with GGUFFile.open(path) as file:
        config = models.read_config(file)
        models.check_model(file, config)
        card = gpu_plan(args, file, config)
        sizes = args.ctx_size, 1, args.batch_size, args.kv_type
        memory = disk_tier.plan_model(file, config, disk_tier.room_for(args.ram), *sizes, card)
        trace = read_trace(args, file, config)
        placed(path, config, card, memory)  # everything that can be refused has been
        if not config.experts.n_expert:
            print("no experts: nothing to place")
            return 0
        counts = known_counts(path, file, config, trace)
        slots = None if card is None else int(card.slots.sum())
        caching(config, trace, counts, slots)
        speed(args, file, config, card, memory, trace, counts)
    return 0


def placed(path: Path, config: ModelConfig, card: VramPlan | None, memory: MemoryPlan) -> None:
    """Prints what goes where."""
    n_expert, kv = config.experts.n_expert, ""
    print(f"{path.name}: {config.n_layer} layers, {n_expert} experts, {config.experts.n_used} used")
    if card is None:
        print("GPU: none planned (--vram 6G plans for one)")
        kv = f"KV cache {show_size(memory.demand.kv)}, "
    else:
        print(card.line(n_expert))
    print(
        f"main memory {memory.line()}; {kv}weights outside the experts "
        f"{show_size(memory.demand.dense)}"
    )


def gpu_plan(args: argparse.Namespace, file: GGUFFile, config: ModelConfig) -> VramPlan | None:
    if args.vram is None:
        return None
    card = vram.plan_model(
        file.tensors, config, args.vram, args.ctx_size, 1, args.batch_size, args.kv_type
    )
    if not card.fits:
        need = show_size(card.dense + card.kv + card.scratch)
        raise InputError(
            f"--vram {show_size(args.vram)} is too small: weights outside the experts, "
            f"KV cache and scratch need {need}; give more, or less -c"
        )
    return card


def read_trace(
    args: argparse.Namespace, file: GGUFFile, config: ModelConfig
) -> traces.Trace | None:
    if args.trace is None or not config.experts.n_expert:
        return None
    trace = traces.load(Path(args.trace))
    trace.check_model(
        len(expert_layers(file)), config.experts.n_expert, config.experts.n_used, "the model"
    )
    return trace


def expert_layers(file: GGUFFile) -> list[int]:
    names = (re.fullmatch(r"blk\.(\d+)\.ffn_gate_inp\.weight", name) for name in file.tensors)
    return sorted(int(found[1]) for found in names if found)


def known_counts(path: Path, file: GGUFFile, config: ModelConfig, trace) -> np.ndarray | None:
    """Tokens per expert [L, E]: of the trace, else stored beside the model, else None."""
    if trace is not None:
        return trace.counts()
    layers = expert_layers(file)
    mark = counts_file.fingerprint(router_matrices(file.tensors, layers))
    stored = counts_file.load(path, mark, (len(layers), config.experts.n_expert))
    return None if stored is None else stored.counts


def caching(config: ModelConfig, trace, counts, slots: int | None) -> None:
    if counts is None:
        print("caching: not known; record a trace: dali-gguf trace MODEL -o t.npz --counts")
        return
    part = cacheability.concentration(counts)
    print(f"caching: 95 % of the traffic is in {part:.0%} of the experts", end="")
    if trace is None:
        print(" (stored counts)")
        return
    print(
        f"; an expert is used again by the next token {cacheability.reuse(trace):.1f} times as "
        "often as "
        "by chance"
    )
    slots = slots or round(0.4 * counts.size)
    rates = cacheability.hits(trace, slots)
    print(
        f"hits with {slots / counts.size:.0%} resident, batch 1: "
        + ", ".join(f"{name} {rate:.3f}" for name, rate in rates.items())
    )


def speed(args, file, config, card, memory, trace, counts) -> None:
    """Predicted tokens per second from the stored profile."""
    ids = trace.ids[:1024] if trace is not None else None
    if memory.streams:
        known = disk_forecast.forecast(
            memory, file.tensors, config.experts.n_expert, config.experts.n_used, counts, ids
        )
        print("\n".join(known.lines()))
        return
    shape = cost_store.shape_of_file(file.tensors, expert_layers(file)[0], config.experts.n_expert)
    threads = args.threads or physical_cores()
    profile = cost_store.stored(shape, threads, gpu=card is not None)
    if profile is None:
        print("speed: no profile of this machine and model yet; dali-gguf calibrate makes one")
        return
    if card is not None and not profile.gpu_us:
        print("speed on the GPU: not measured on this machine")
    print(forecast.line(profile, config, card, ids, counts))
