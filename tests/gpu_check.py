"""Checks DALI on a real GPU: python tests/gpu_check.py [--dry-run]

Needs torch, triton, numpy, numba, gguf and this checkout. Under 8 minutes. Without a CUDA device it
prints "skipped" and exits 0. --dry-run goes the same way on the CPU with tiny sizes (the kernels
through Triton's interpreter): it shows that the script works, its figures mean nothing.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
DRY = "--dry-run" in sys.argv
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import numpy as np  # noqa: E402
import torch  # noqa: E402

from tests.gpu_kernels import (  # noqa: E402
    bandwidth, check, failures, kernels_are_right, overlap, refused_pin,
)  # fmt: skip

PLACEMENTS = ("threshold", "greedy", "balance", "static-layers", "static-hot", "all-gpu")
SHARES = (0.25, 0.4, 0.6)
DALI = {}
RUNS = {"static-layers": {"placement": "static-layers"}, "static-hot": {"placement": "static-hot"},
        "dali": DALI}  # fmt: skip


def same_tokens(folder: Path, spec: str) -> None:
    """Every placement against the CPU's own path, on a small model with half of its experts on the
    device. Both sides round: logits may differ a little, and a token only where two are tied."""
    from tests.gpu_model import SMALL, Runner, made_up_costs, write_model

    path = write_model(folder / "small.gguf", SMALL)
    prompt = np.random.default_rng(3).integers(0, SMALL.n_vocab, 40).tolist()
    with Runner(path, "cpu") as cpu:
        tokens, _, _ = cpu.greedy(prompt, 16)
        exact = cpu.follow(prompt, tokens)
    top = np.sort(exact, axis=1)
    runs = {name: {"placement": name} for name in PLACEMENTS}
    runs["from disk"] = {"placement": "all-gpu", "arena": 3 << 20}  # less than the GPU lacks
    for name, how in runs.items():
        room = vram_for(path, 0.5)
        with Runner(path, spec, vram=room, verify=True, costs=made_up_costs(), **how) as gpu:
            ours = gpu.follow(prompt, tokens)
            verified = not gpu.scheduler.verifier.failed
            verified &= ("arena" in how) == (gpu.scheduler.counters.total("from_disk") > 0)
            line = gpu.scheduler.verifier.line()
        difference = np.abs(ours - exact).max(axis=1)
        clear = top[:, -1] - top[:, -2] > 2 * difference
        same = (ours.argmax(1) == exact.argmax(1)) | ~clear
        share = difference.max() / np.abs(exact).max()
        text = f"{int(clear.sum())} of {len(clear)} tokens clear and the same, logits within"
        check(bool(same.all()) and share < 0.15 and verified, f"{name}: {text} {share:.1%}; {line}")


def vram_for(path: Path, share: float, n_batch: int = 256) -> int:
    """--vram with which about this share of the experts is resident."""
    from dali_gguf import models
    from dali_gguf.gguf_file import GGUFFile
    from dali_gguf.offload import vram

    file = GGUFFile.open(path)
    config = models.read_config(file)
    plan = vram.plan_model(file.tensors, config, 1 << 50, 1024, 1, n_batch)
    spare = vram.SPARE * sum(set(vram.slot_bytes(file.tensors, config.experts.n_expert).values()))
    file.close()
    return (
        plan.dense
        + plan.kv
        + plan.scratch
        + int(plan.wanted * share)
        + min(spare, plan.wanted // 8)
    )


def rates(folder: Path, spec: str) -> None:
    """Measured costs, and tokens/s of the static splits and of DALI at three budgets."""
    from tests.gpu_model import LARGE, SMALL, Runner, write_model

    sizes = SMALL if DRY else LARGE
    path = write_model(folder / "large.gguf", sizes)
    prompt = np.random.default_rng(4).integers(0, sizes.n_vocab, 64 if DRY else 256).tolist()
    measured = None
    for share in SHARES:
        for name, policies in RUNS.items():
            costs = copied(measured) if measured else None
            with Runner(path, spec, vram=vram_for(path, share), costs=costs, **policies) as r:
                if measured is None:
                    measured = r.scheduler.model
                    show_costs(measured)
                r.greedy(prompt[:40], 2)  # compiles
                _, prefill, decode = r.greedy(prompt, 4 if DRY else 128)
                print(f"       {share:4.0%} of the experts, {name:13s}: {told(r, prefill, decode)}")


def told(r, prefill: float, decode: float) -> str:
    """A run's figures."""
    c = r.scheduler.counters
    hits, plan = c.total("hits") / c.total("uses"), c.total("plan_us") / c.total("steps")
    kept = sum(bool(e.one_token) for e in map(r.device.experts, r.scheduler.experts.values()))
    return (
        f"prefill {prefill:7.1f}, decode {decode:6.1f} tokens/s, {hits:4.0%} hits, "
        f"route, plan and launch {plan:5.1f} us a layer ({kept} of {len(r.scheduler.experts)} in "
        f"one call); {r.scheduler.pays.line()}"
    )


def copied(model):
    """The same costs again, without what a run has corrected."""
    from dali_gguf.offload.cost import CostModel

    fixed = model.copy_us, model.h_cpu, model.r
    return CostModel(model.tokens, *model.anchors, *fixed, max_tokens=model.max_tokens)


def show_costs(model) -> None:
    sides = [", ".join(f"{us:.0f}" for us in side) for side in model.anchors]
    print(
        f"       an expert's us at {', '.join(map(str, model.tokens))} tokens: CPU {sides[0]}; "
        f"GPU {sides[1]}; copy {model.copy_us:.0f}, CPU's fixed {model.h_cpu:.0f}, CPU speed while "
        f"copying {model.r:.2f}"
    )
    check(
        model.anchors[1][0] < model.anchors[0][0] or DRY, "a resident expert is faster on the GPU"
    )


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_known_args()
    if not DRY and not torch.cuda.is_available():
        print("skipped: no CUDA device")
        return 0
    device, spec = (torch.device("cpu"), "cpu-torch") if DRY else (torch.device("cuda:0"), "cuda")
    print(
        f"       {'dry run' if DRY else torch.cuda.get_device_name(0)}, torch {torch.__version__}"
    )
    with tempfile.TemporaryDirectory() as folder:
        for part in (kernels_are_right, bandwidth, overlap, refused_pin):
            part(device)
        for part in (same_tokens, rates):
            part(Path(folder), spec)
    print(f"{len(failures)} checks failed" if failures else "all checks passed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
