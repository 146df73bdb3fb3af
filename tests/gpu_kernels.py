"""The parts of gpu_check.py without a model: kernels, copies, pinned memory."""

import statistics
import sys
import time

import numpy as np
import torch
from gguf import GGMLQuantizationType as Q
from gguf import quants

DRY = "--dry-run" in sys.argv
KINDS = (Q.Q4_K, Q.Q6_K, Q.Q8_0, Q.Q4_0, Q.MXFP4)
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
            matrices = triton_matmul.Matrices(kind, 70, cols)
            given = torch.from_numpy(x).to(device)
            launched = triton_matmul.matmul(given, (data, matrices))[0]  # by Triton
            ours = triton_matmul.matmul(given, (data, matrices))[0]  # as it was kept
            dense = quants.dequantize(weight.data.reshape(70, -1), kind)
            exact = x.astype(np.float64) @ dense.astype(np.float64).T
            error = np.abs(ours.cpu().numpy() - exact).max() / np.abs(exact).max()
            limit = 2e-5 if n_token <= triton_matmul.VECTOR_ROWS else 3e-3  # half precision
            same = bool((ours == launched).all())
            what = f"kernel {kind.name:5s} {n_token:2d} tokens: error {error:.1e}"
            check(error < limit and same, what + ("" if same else ", launches DIFFER"))


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
    from dali_gguf.offload.pair_table import PairTable
    from dali_gguf.routing import Routing

    block, nbytes = tm.GGML_QUANT_SIZES[kind]
    matrix = rows * cols // block * nbytes
    size = 2 * matrix
    ids = np.arange(n, dtype=np.int32)[None]
    routing = Routing(ids, np.ones((1, n), np.float32), np.ones(n, np.int64))
    table, turn, fits = PairTable(device, n, device.type == "cuda"), [0], big.numel() // (size * n)
    kept, tm.TILES = tm.TILES, tiles
    matrices = tm.Matrices(kind, rows, cols, 0, matrix, "silu")

    def work():
        turn[0] = (turn[0] + 1) % max(fits, 1)
        at = (turn[0] * n + np.arange(n, dtype=np.int64)) * size
        pairs = table.build(routing, np.arange(n), at)
        tm.grouped(x, big, matrices, table.jobs(pairs))

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


def refused_pin(device) -> None:
    """Memory that is pinned already is refused, and the refusal is no error of a later launch."""
    if DRY:
        return
    from dali_gguf.offload.direct_io import Memory
    from dali_gguf.offload.transfer import pin, unpin

    memory = Memory(1 << 20)
    answers = pin(memory, device), pin(memory, device)
    ones = torch.ones(8, device=device)
    unpin(memory, device)
    check(answers == (True, False) and ones.sum().item() == 8, f"pinning twice gives {answers}")
