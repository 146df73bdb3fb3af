"""Compiling on all cores: the kernels a model needs, in processes that share the cache folder.

Numba compiles one function at a time in a process. Before a model's first run ever, its kernels are
shared out: each process compiles its part into the cache, then this one loads all of them from
there.
`python -m dali_gguf.kernels.ahead TASK...` is what a helper process runs.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as Q

import dali_gguf
from dali_gguf import kernels
from dali_gguf.kernels.formats import (
    FORMATS, Format, expand_address, matmat_address, matvec_address,
)
from dali_gguf.kernels.pool import physical_cores
from dali_gguf.kernels.quantize import FLOAT, QK

PRODUCTS = {"expand": expand_address, "matvec": matvec_address, "matmat": matmat_address}
# relative compile times, measured
SECONDS = {"attention": 16.0, "layer": 7.0, "moe": 9.0, "expand": 0.6, "matvec": 1.6, "matmat": 2.1}
QK_FACTOR = 2.0


def compile_attention() -> None:
    """A step of three tokens, and one of one token."""
    from dali_gguf.kernels.cpu import CpuDevice

    device = CpuDevice(1)
    cache = device.new_kv_cache(1, 1, 64, 1, 32, 32, "f16")
    for positions in ([0, 1, 2], [3]):
        step = _step(positions)
        x = np.zeros((len(positions), 1, 32), np.float32)
        device.attention(x, x, x, cache, 0, step, 1.0)


def compile_layer() -> None:
    """Norms, rotary positions, activations, embedding, products with F32 weights."""
    from dali_gguf.device import RopeParams
    from dali_gguf.kernels.cpu import CpuDevice

    device, x = CpuDevice(1), np.ones((3, 32), np.float32)
    device.rms_norm(x, x[0], 1e-6)
    device.rms_norm(x.reshape(3, 2, 16), x[0, :16], 1e-6)
    rope = RopeParams(16, False, np.ones(8, np.float32))
    device.rope(x.reshape(3, 2, 16).copy(), np.arange(3, dtype=np.int32), rope)
    device.swiglu(x, x)
    device.matmul(x, device.weight(_weights(8)))
    device.vector(_weights(8))


def compile_moe() -> None:
    from dali_gguf.kernels.cpu import CpuDevice
    from dali_gguf.router import RouterRule
    from dali_gguf.routing import LayerExperts

    device, matrix = CpuDevice(1), _weights(32)
    routing = device.route(np.zeros((1, 2), np.float32), 1, RouterRule())
    experts = LayerExperts(0, (matrix,) * 2, (matrix,) * 2, (matrix,) * 2)
    device.moe(np.ones((1, 32), np.float32), routing, experts)


def _step(positions: list[int]):
    from dali_gguf.device import Step

    n = len(positions)
    return Step(np.zeros(n, np.int32), np.array(positions, np.int32), np.zeros(n, np.int32))


def _weights(rows: int):
    from dali_gguf.tensor import Tensor

    return Tensor("w", Q.F32, (rows, 32), np.ones((rows, 32), np.float32).view(np.uint8).ravel())


def compile_program() -> None:
    from dali_gguf.kernels import lines

    lines.run_lines(0, 0, 0, 1)


WHOLE: dict[str, Callable[[], None]] = {
    "attention": compile_attention, "layer": compile_layer, "moe": compile_moe,
    "program": compile_program,
}
_helpers: dict[str, subprocess.Popen] = {}  # that compile for later


def ready(task: str) -> bool:
    """Whether a task is in the cache. If not, a helper process is started that puts it there."""
    if _mark(task).exists():
        return True
    if task not in _helpers:
        _helpers[task] = _start([task])
    return False


def tasks_of(types: Iterable[Q]) -> list[str]:
    """What a model with weights of these types needs for a first token, dearest first."""
    names = ["attention", "moe", "layer"]
    for fmt in (FORMATS[t] for t in types if t in FORMATS):
        names += [f"{product}:{fmt.type.name}" for product in PRODUCTS if _needed(product, fmt)]
    return sorted(names, key=_cost, reverse=True)


def _needed(product: str, fmt: Format) -> bool:
    return product != "matmat" or fmt.kind != FLOAT  # the float types have one function for both


def _cost(task: str) -> float:
    product, _, name = task.partition(":")
    heavy = name and FORMATS[Q[name]].kind == QK
    return SECONDS[product] * (QK_FACTOR if heavy else 1.0)


def do(task: str) -> None:
    """Compiles one task, or loads it from the cache, and leaves a mark that it is there."""
    product, _, name = task.partition(":")
    if name:
        PRODUCTS[product](FORMATS[Q[name]])
    else:
        WHOLE[task]()
    _mark(task).parent.mkdir(parents=True, exist_ok=True)
    _mark(task).touch()


def _mark(task: str) -> Path:
    return kernels.CACHE_DIR / f"{task.replace(':', '-')}.done"


def missing(types: Iterable[Q]) -> list[str]:
    return [task for task in tasks_of(types) if not _mark(task).exists()]


def share(tasks: list[str], n: int) -> list[list[str]]:
    """Tasks, dearest first, to n processes: each goes where least is to do."""
    parts: list[list[str]] = [[] for _ in range(n)]
    for task in tasks:
        min(parts, key=lambda part: sum(map(_cost, part))).append(task)
    return [part for part in parts if part]


def compile_all(types: Iterable[Q], progress: Callable[[str], None] = lambda task: None) -> None:
    """Makes sure that the kernels are in the cache. progress is called after each task here."""
    tasks = missing(types)
    if not tasks:
        return
    mine, *others = share(tasks, min(physical_cores(), 8))
    helpers = [(part, _start(part)) for part in others]
    for task in mine:
        do(task)
        progress(task)
    for part, helper in helpers:
        helper.wait()  # what it did not manage, the engine compiles when it gets there
        for task in part:
            progress(task)


def _start(tasks: list[str]) -> subprocess.Popen:
    return start_python(["-m", "dali_gguf.kernels.ahead", *tasks])


def start_python(arguments: list[str], stdout: int = subprocess.DEVNULL) -> subprocess.Popen:
    """A Python process that finds this package, whatever folder we are in."""
    root = str(Path(dali_gguf.__file__).parents[1])  # site-packages, or the checkout
    path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH")) if p)
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=root,  # python -m looks there first: a checkout around us must not come before
        env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.DEVNULL,
        stdout=stdout, stderr=subprocess.DEVNULL,
    )


if __name__ == "__main__":
    for name in sys.argv[1:]:
        do(name)
