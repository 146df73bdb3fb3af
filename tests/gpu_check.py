"""Checks DALI on a real GPU: python tests/gpu_check.py [--dry-run]

Needs torch, triton, numpy, numba, gguf and this checkout. Under 8 minutes. Without a CUDA device it
prints "skipped" and exits 0. --dry-run goes the same way on the CPU with tiny sizes (the kernels
through Triton's interpreter): it shows that the script works, its figures mean nothing.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
DRY = "--dry-run" in sys.argv
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import numpy as np  # noqa: E402
import torch  # noqa: E402
from gguf import GGMLQuantizationType as Q  # noqa: E402
from gguf import quants  # noqa: E402

PLACEMENTS = ("threshold", "greedy", "balance", "static-layers", "static-hot", "all-gpu")
KINDS = (Q.Q4_K, Q.Q6_K, Q.Q8_0, Q.Q4_0, Q.MXFP4)
SHARES = (0.25, 0.4, 0.6)
DALI = {}
RUNS = {"static-layers": {"placement": "static-layers"}, "static-hot": {"placement": "static-hot"},
        "dali": DALI}  # fmt: skip
failures: list[str] = []


def check(good: bool, what: str) -> None:
    print(f"{'ok    ' if good else 'FAILED'} {what}", flush=True)
    if not good:
        failures.append(what)


def device_us(work, repeats: int = 20) -> float:
    """Median time of work() on the device."""
    work()
    times = []
    for _ in range(repeats if not DRY else 2):
        if not DRY:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1000)
        else:
            began = time.perf_counter()
            work()
            times.append((time.perf_counter() - began) * 1e6)
    return statistics.median(times)


def kernels_are_right(device) -> None:
    """Each type's fused product against gguf-py's dequantization in float64."""
    from dali_gguf.offload import triton_matmul
    from tests.quant_blocks import random_tensor

    cols = 512 if DRY else 2048
    for kind in KINDS:
        for n_token in (1, 3, 40):
            weight = random_tensor(kind, (70, cols), seed=int(kind))
            x = np.random.default_rng(1).normal(size=(n_token, cols)).astype(np.float32)
            data = torch.from_numpy(weight.data.copy()).to(device)
            ours = triton_matmul.matmul(torch.from_numpy(x).to(device), data, kind, 70)
            dense = quants.dequantize(weight.data.reshape(70, -1), kind)
            exact = x.astype(np.float64) @ dense.astype(np.float64).T
            error = np.abs(ours.cpu().numpy() - exact).max() / np.abs(exact).max()
            limit = 2e-5 if n_token <= triton_matmul.VECTOR_ROWS else 3e-3  # half precision
            check(error < limit, f"kernel {kind.name:5s} {n_token:2d} tokens: error {error:.1e}")


def bandwidth(device) -> None:
    """GB/s of the decode kernel on the matrices of 8 experts, as share of a copy's."""
    from dali_gguf.offload import triton_matmul as tm

    rows, cols, n = (64, 512, 2) if DRY else (768, 2048, 8)
    big = torch.empty((1 << 16) if DRY else (1 << 29), dtype=torch.uint8, device=device)
    half = big.numel() // 2
    peak = 2 * half / device_us(lambda: big[:half].copy_(big[half:])) / 1e3
    print(f"       device memory copies {peak:.0f} GB/s (read and written)")
    x = torch.randn(1, cols, device=device)
    for kind in KINDS:
        for tiles in (
            tm.Tiles(8, 4),
            tm.Tiles(4, 4),
            tm.Tiles(8, 2),
            tm.Tiles(16, 4),
            tm.Tiles(4, 2),
        ):
            used, us = experts_us(tm, device, big, x, kind, rows, cols, n, tiles)
            speed = used / us / 1e3
            print(
                f"       {kind.name:5s} gate and up of {n} experts, {tiles.vector_rows:2d} rows "
                f"{tiles.vector_warps} warps: {us:6.1f} us {speed:6.0f} GB/s, {speed / peak:4.0%}"
            )
            if DRY:
                break


def experts_us(tm, device, big, x, kind, rows, cols, n, tiles) -> tuple[int, float]:
    """(bytes, us) of one grouped launch; every call takes other bytes, not the device's cache."""
    from dali_gguf.offload.torch_moe import PairTable
    from dali_gguf.routing import Routing

    block, nbytes = tm.GGML_QUANT_SIZES[kind]
    matrix = rows * cols // block * nbytes
    size = 2 * matrix
    ids = np.arange(n, dtype=np.int32)[None]
    routing = Routing(ids, np.ones((1, n), np.float32), np.ones(n, np.int64))
    table, turn, fits = PairTable(device, n), [0], big.numel() // (size * n)
    kept, tm.TILES = tm.TILES, tiles
    matrices = tm.Matrices(big, kind, rows, cols, 0, matrix, "silu")

    def work():
        turn[0] = (turn[0] + 1) % max(fits, 1)
        at = (turn[0] * n + np.arange(n, dtype=np.int64)) * size
        pairs = table.build(routing, np.arange(n), at)
        tm.grouped(x, matrices, tm.Jobs(pairs, table.table, table.floats))

    try:
        return size * n, device_us(work)
    finally:
        tm.TILES = kept


def overlap(device) -> None:
    """Copies run beside compute: together they take less than one after the other."""
    from dali_gguf.offload.transfer import DEMAND, Copy, Link

    size = (1 << 20) if DRY else (64 << 20)
    source = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    target = torch.empty(size, dtype=torch.uint8, device=device)
    a = torch.randn(256 if DRY else 4096, 256 if DRY else 4096, device=device)
    link = Link(device)

    def compute():
        for _ in range(10):
            a @ a

    def sync():
        if not DRY:
            torch.cuda.synchronize()

    def took(with_copy: bool, with_compute: bool) -> float:
        sync()
        began = time.perf_counter()
        copy = Copy(0, 0, 0, DEMAND, [(source, target)])
        if with_copy:
            link.offer([copy])
        if with_compute:
            compute()
        if with_copy:
            link.wait(copy)
        sync()
        return time.perf_counter() - began

    took(True, True)
    alone = [min(took(*which) for _ in range(5)) for which in ((True, False), (False, True))]
    both = min(took(True, True) for _ in range(5))
    link.close()
    hidden = (sum(alone) - both) / min(alone)
    print(
        f"       copy {alone[0] * 1e3:.1f} ms ({size / alone[0] / 1e9:.1f} GB/s), compute "
        f"{alone[1] * 1e3:.1f} ms, together {both * 1e3:.1f} ms"
    )
    check(hidden > 0.5 or DRY, f"copies and compute overlap: {hidden:.0%} of the shorter is hidden")
    check(torch.equal(target.cpu(), torch.from_numpy(source)), "the copied bytes are right")


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
    return (
        f"prefill {prefill:7.1f}, decode {decode:6.1f} tokens/s, {hits:4.0%} hits, "
        f"plan {plan:5.1f} us a layer; {r.scheduler.pays.line()}"
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
        for part in (kernels_are_right, bandwidth, overlap):
            part(device)
        for part in (same_tokens, rates):
            part(Path(folder), spec)
    print(f"{len(failures)} checks failed" if failures else "all checks passed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
